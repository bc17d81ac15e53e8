"""Metadata of variables: axes, initializer and update rule.

Layers attach metadata where they create a variable (`logical.partitioned` for
parameters, `make_boxed_init` for other collections). The box `Variable` carries
it through linen's lifted transforms. After an abstract init, `get_specs` strips
the boxes into a tree of `VariableSpec`; from then on the state is plain arrays,
and specs are passed as an argument. There is no other registry.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import contextvars
import dataclasses
import enum
import re
from typing import Any

from flax import linen as nn
from flax import struct, traverse_util
from flax.core import meta
import jax
from jax.typing import DTypeLike

from paxon.sharding import axes as axis_names

Initializer = Callable[..., Any]

# Path of one slot of a stack's pattern.
_SLOT = re.compile(r"(?:^|/)layers/blocks_(\d+)(?=/)")

# Key in `metadata_params` for the number of blocks in a stack's pattern.
PERIOD = "period"

# Collection of parameters shared by several modules. Lifted transforms
# broadcast it and add no axis.
SHARED = "shared"

# Collection of the parameters of models that are never trained, such as the
# reference of a preference loss.
FROZEN = "frozen"

# Collection of scalars whose gradient is the squared norm of that of a
# parameter (`layers.ghost_norms`).
GHOST = "ghost"

# Collection of the largest attention logits of heads
# (`layers.attention.max_logits`).
MAX_LOGITS = "max_logits"


class UpdateRule(enum.Enum):
  """The source of a variable's next value."""

  OPTIMIZER = "optimizer"
  # The collection returned by the forward pass.
  REPLACE = "replace"
  # The gradient (scales of fp8 training).
  OVERWRITE_WITH_GRADIENT = "overwrite_with_gradient"


class CombineRule(enum.Enum):
  """The reduction of values over replicas and microbatches."""

  MEAN = "mean"
  SUM = "sum"
  MAX = "max"


class Variable(nn.LogicallyPartitioned):
  """The metadata box around a variable in linen.

  Attributes:
    initializer: `(key, shape, dtype) -> array` for the value of one layer.
    stacked: `(axis, period)` of each leading axis that a lifted transform
      added, outermost first.
    update: Source of the next value.
    combine: Reduction over replicas and microbatches.
    regularized: Whether weight decay applies; None applies it to variables of
      rank 2 or more.
    trainable: Whether a learner may change the variable.
    read_dtype: As of `VariableSpec`.
  """

  initializer: Initializer | None = struct.field(
    default=None, pytree_node=False
  )
  stacked: tuple[tuple[str, int], ...] = struct.field(
    default=(), pytree_node=False
  )
  update: UpdateRule = struct.field(
    default=UpdateRule.OPTIMIZER, pytree_node=False
  )
  combine: CombineRule = struct.field(
    default=CombineRule.MEAN, pytree_node=False
  )
  regularized: bool | None = struct.field(default=None, pytree_node=False)
  trainable: bool = struct.field(default=True, pytree_node=False)
  read_dtype: jax.numpy.dtype | None = struct.field(
    default=None, pytree_node=False
  )

  def __repr__(self) -> str:
    """Returns dtype, shape and axes, such as `float32[vocab=32, embed=8]`."""
    value = self.value
    if not hasattr(value, "shape") or len(value.shape) != len(self.names):
      return f"{type(value).__name__}[{', '.join(map(str, self.names))}]"
    sizes = zip(self.names, value.shape, strict=True)
    shown = ", ".join(f"{n}={s}" if n else str(s) for n, s in sizes)
    return f"{value.dtype}[{shown}]"

  def unbox(self, apply_constraint: bool = True) -> Any:
    """Returns the value, without a sharding constraint."""
    del apply_constraint
    return self.value

  def add_axis(self, index: int, params: dict[Any, Any]) -> "Variable":
    """Records an axis that `nn.scan` or `nn.vmap` adds."""
    if index != 0:
      raise ValueError(
        "Lifted transforms must add axis 0 to variables that name their "
        f"axes, got axis {index} for {self.names}."
      )
    name = params[meta.PARTITION_NAME]
    return self.replace(
      names=(name, *self.names),
      stacked=((name, params.get(PERIOD, 1)), *self.stacked),
    )

  def remove_axis(self, index: int, params: dict[Any, Any]) -> "Variable":
    """Reverts `add_axis` for the value of one layer."""
    del index, params
    return self.replace(names=self.names[1:], stacked=self.stacked[1:])


def make_boxed_init(
  initializer: Initializer,
  axes: Sequence[str | None],
  *,
  shape: Sequence[int],
  dtype: DTypeLike,
  update: UpdateRule = UpdateRule.REPLACE,
  combine: CombineRule = CombineRule.MEAN,
) -> Callable[[], Variable]:
  """Returns the init function for `self.variable(collection, name, ...)`.

  Axes, shape and dtype are those of the variable in one layer. Linen's init
  calls the initializer `(key, shape, dtype) -> array` with a constant key;
  `initialization.initial_values` uses a key per layer.
  """

  def init() -> Variable:
    return Variable(
      initializer(jax.random.key(0), tuple(shape), dtype),
      tuple(axes),
      initializer=initializer,
      update=update,
      combine=combine,
      regularized=False,
      trainable=update is not UpdateRule.REPLACE,
    )

  return init


@dataclasses.dataclass(frozen=True)
class VariableSpec:
  """The metadata of one variable. A leaf, not a pytree node.

  Attributes:
    name: Logical name, `collection/module/.../variable`.
    shape: Shape of the stored array, including leading `layers` axes.
    dtype: Dtype of the stored array.
    axes: One logical axis (or None) per dimension.
    initializer: Returns the value of one layer; None for a variable without our
      box, such as in linen modules of other libraries.
    stacked: `(axis, period)` of the leading axes of stacks, outermost first.
    update: Source of the next value.
    combine: Reduction over replicas and microbatches.
    regularized: Whether weight decay applies.
    trainable: Whether a learner may change the variable.
    on_host: Keeps the array in host memory between steps.
    read_dtype: Dtype to which a layer rounds the value wherever it reads it, so
      that decoding may store it rounded; None if it needs all bits.
  """

  name: str
  shape: tuple[int, ...]
  dtype: jax.numpy.dtype
  axes: tuple[str | None, ...]
  initializer: Initializer | None = None
  stacked: tuple[tuple[str, int], ...] = ()
  update: UpdateRule = UpdateRule.OPTIMIZER
  combine: CombineRule = CombineRule.MEAN
  regularized: bool = False
  trainable: bool = True
  on_host: bool = False
  read_dtype: jax.numpy.dtype | None = None

  @property
  def layer_shape(self) -> tuple[int, ...]:
    """Shape of the value in one layer."""
    return self.shape[len(self.stacked) :]


# Returns the mesh axes (one, several or None) of each dimension of an array,
# from its spec and the size of each mesh axis; None leaves it to the rules.
Partitioner = Callable[
  [VariableSpec, Mapping[str, int]],
  Sequence[str | tuple[str, ...] | None] | None,
]

_partitioner: contextvars.ContextVar[Partitioner | None] = (
  contextvars.ContextVar("partitioner", default=None)
)


@contextlib.contextmanager
def use_partitioner(partitioner: Partitioner | None) -> Iterator[None]:
  """Sets the partitioner of `choose_axes`, that of the active layout."""
  token = _partitioner.set(partitioner)
  try:
    yield
  finally:
    _partitioner.reset(token)


def choose_axes(
  spec: VariableSpec, mesh: Mapping[str, int]
) -> Sequence[str | tuple[str, ...] | None] | None:
  """Returns the result of the active layout's partitioner; None without one."""
  partitioner = _partitioner.get()
  return None if partitioner is None else partitioner(spec, mesh)


Specs = Mapping[str, Any]


def get_specs(abstract_variables: Mapping[str, Any]) -> Specs:
  """Returns the specs of abstract variables as nested dicts.

  `abstract_variables` is the result of `jax.eval_shape(model.init, ...)`.
  """
  leaves, treedef = jax.tree_util.tree_flatten_with_path(
    abstract_variables,
    is_leaf=lambda leaf: isinstance(leaf, meta.AxisMetadata),
  )
  names = ["/".join(str(p.key) for p in path) for path, _ in leaves]
  periods = _periods(names)
  return treedef.unflatten(
    _spec(name, leaf, periods)
    for name, (_, leaf) in zip(names, leaves, strict=True)
  )


def separate_layers(
  values: Mapping[str, Any],
  specs: Specs,
  *,
  split: Callable[[Any], Sequence[Any]] = tuple,
) -> dict[str, Any]:
  """Returns variables of which no layer of a stack shares an array.

  `layers/blocks_<p>/...` become `layers_<i>/...`, which `stacks.stack` accepts.
  A program that decodes on a CPU then reads its arguments where they are;
  otherwise it copies each layer's out of the stacked ones for every token.

  Args:
    values: Arrays by collection.
    specs: Their specs, in the same structure.
    split: Returns the entries of the first axis.
  """
  flat: dict[str, Any] = {}

  def add(name: str, stacked: tuple[tuple[str, int], ...], value: Any) -> None:
    match = _SLOT.search(name)
    if match is None or not stacked or stacked[0][0] != axis_names.LAYERS:
      flat[name] = value
      return
    (_, period), *inner = stacked
    front, rest = name[: match.start()], name[match.end() :]
    for group, part in enumerate(split(value)):
      layer = group * period + int(match.group(1))
      add(f"{front}/layers_{layer}{rest}", tuple(inner), part)

  # The structure may have other nodes of the same keys, such as `FrozenDict`.
  for spec, value in zip(
    jax.tree.leaves(specs), jax.tree.leaves(values), strict=True
  ):
    add(spec.name, spec.stacked, value)
  return traverse_util.unflatten_dict(flat, sep="/")


def unbox(boxed_variables: Any) -> Any:
  """Returns the tree with boxes replaced by their values."""
  return meta.unbox(boxed_variables)


def abstract(specs: Any, shardings: Any = None) -> Any:
  """Returns the tree with specs replaced by `jax.ShapeDtypeStruct`.

  Args:
    specs: A pytree of `VariableSpec`.
    shardings: Shardings of each; None leaves the arrays unplaced.
  """

  def to_array(spec: VariableSpec, sharding: Any = None) -> Any:
    return jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=sharding)

  trees = (specs,) if shardings is None else (specs, shardings)
  return jax.tree.map(to_array, *trees)


def _periods(names: Sequence[str]) -> dict[str, int]:
  """Returns the number of slots in the pattern of each stack, by path."""
  periods: dict[str, int] = {}
  for name in names:
    for match in _SLOT.finditer(name):
      stack, slot = name[: match.start()], int(match.group(1))
      periods[stack] = max(periods.get(stack, 0), slot + 1)
  return periods


def _foreign_axes(
  name: str, leaf: Any, rank: int, periods: Mapping[str, int]
) -> tuple[tuple[str | None, ...], tuple[tuple[str, int], ...]]:
  """Returns axes and stacked axes of a variable without our box.

  Linen's boxes name all axes. Without a box, each stack in the path stands for
  one leading axis.
  """
  stacked = tuple(
    (axis_names.LAYERS, periods[name[: match.start()]])
    for match in _SLOT.finditer(name)
  )
  names = getattr(leaf, "names", None)
  if names is None:
    front = tuple(axis for axis, _ in stacked)
    names = (*front, *(None,) * (rank - len(front)))
  known = (n if n in axis_names.LOGICAL_AXES else None for n in names)
  return tuple(known), stacked


def _spec(name: str, leaf: Any, periods: Mapping[str, int]) -> VariableSpec:
  value = leaf.unbox() if isinstance(leaf, meta.AxisMetadata) else leaf
  collection = name.partition("/")[0]
  if isinstance(leaf, Variable):
    rank = value.ndim - len(leaf.stacked)
    decayed = rank >= 2 if leaf.regularized is None else leaf.regularized
    return VariableSpec(
      name=name,
      shape=value.shape,
      dtype=value.dtype,
      axes=tuple(leaf.names),
      initializer=leaf.initializer,
      stacked=leaf.stacked,
      update=leaf.update,
      combine=leaf.combine,
      regularized=decayed,
      trainable=leaf.trainable,
      read_dtype=leaf.read_dtype,
    )
  is_param = collection in ("params", SHARED)
  axes, stacked = _foreign_axes(name, leaf, value.ndim, periods)
  return VariableSpec(
    name=name,
    shape=value.shape,
    dtype=value.dtype,
    axes=axes,
    stacked=stacked,
    update=UpdateRule.OPTIMIZER if is_param else UpdateRule.REPLACE,
    regularized=is_param and value.ndim - len(stacked) >= 2,
    trainable=is_param,
  )

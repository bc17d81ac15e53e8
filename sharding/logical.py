"""Logical axes on parameters and activations, for use inside layers."""

from collections.abc import Callable, Sequence
import math
from typing import Any, cast

from flax import linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from paxon.sharding import axes as axis_names
from paxon.sharding import rules, variables

Initializer = Callable[..., Any]


def partitioned(
  init: Initializer,
  axes: Sequence[str | None],
  *,
  regularized: bool | None = None,
  trainable: bool = True,
  read_dtype: DTypeLike | None = None,
) -> Initializer:
  """Returns an initializer for `self.param` that attaches metadata.

  `self.param` itself returns a plain array.

  Args:
    init: `(key, shape, dtype) -> array` for the value of one layer.
    axes: One logical axis (or None) per dimension.
    regularized: Whether weight decay applies; None applies it to parameters of
      rank 2 or more.
    trainable: Whether the optimizer updates the parameter.
    read_dtype: Dtype to which the layer rounds the parameter wherever it reads
      it; None if it may need all bits.
  """
  names = tuple(axes)

  def boxed_init(key: jax.Array, shape: Sequence[int], *args: Any) -> Any:
    if len(shape) != len(names):
      raise ValueError(
        f"A parameter of shape {tuple(shape)} needs {len(shape)} logical "
        f"axes, got {names}."
      )
    return variables.Variable(
      _initialize(init, key, shape, *args),
      names,
      initializer=init,
      regularized=regularized,
      trainable=trainable,
      read_dtype=None if read_dtype is None else jnp.dtype(read_dtype),
    )

  # Flax unboxes the result inside `Module.param`, so callers see an array.
  return cast(Initializer, boxed_init)


def _initialize(
  init: Initializer, key: jax.Array, shape: Sequence[int], *args: Any
) -> Any:
  """Returns the initial value; any function may be configured as `init`."""
  try:
    value = init(key, shape, *args)
  except TypeError as error:
    # Otherwise raised inside of the function, not by its call.
    if error.__traceback__ is None or error.__traceback__.tb_next:
      raise
    raise TypeError(
      f"{init!r} is not an initializer, which is called with a key, a shape"
      f" and a dtype: {error}."
    ) from error
  found = getattr(value, "shape", None)
  if found != tuple(shape):
    raise TypeError(
      f"{init!r} is not an initializer: for shape {tuple(shape)} it returned"
      f" {repr(value) if found is None else found}."
    )
  return value


def constrain(x: jax.Array, axes: Sequence[str | None]) -> jax.Array:
  """Returns `x`, sharded by the active rules; unchanged outside a layout.

  A dimension of size one (a broadcast, a decoding step) is not split. One that
  its shards do not divide is padded by XLA.

  Raises:
    ValueError: The number of axes is not the rank of `x`, or tokens or experts
      are not a multiple of their shards.
  """
  if x.ndim != len(axes):
    raise ValueError(
      f"An array of shape {x.shape} needs {x.ndim} logical axes, got "
      f"{tuple(axes)}."
    )
  active = tuple(nn.get_logical_axis_rules())
  if not active:
    return x
  spec = _partition(x.shape, axes, active)
  _check_divides(
    x.shape, [None if rules.may_be_uneven(a) else a for a in axes], spec
  )
  return jax.lax.with_sharding_constraint(x, spec)


def constrain_variables(values: Any, specs: variables.Specs) -> Any:
  """Returns variables, split as the layers compute with them.

  They are stored so, but for those with a size that is not a multiple of its
  shards (`rules.fit_stored` and `rules.fit_computed`). The gradient of such a
  variable is moved back once, before the optimizer reads it several times.

  Args:
    values: Arrays by collection, split as they are stored.
    specs: Their specs; other values are returned unchanged, and so are
      variables for which the layout's partitioner returns mesh axes.
  """
  active = tuple(nn.get_logical_axis_rules())
  if not active:
    return values
  mesh = dict(jax.sharding.get_abstract_mesh().shape)
  moved: dict[str, list[jax.sharding.PartitionSpec]] = {}
  for spec in jax.tree.leaves(specs):
    stored, computed = (
      fit(spec.shape, spec.axes, rules=active, mesh=mesh)
      for fit in (rules.fit_stored, rules.fit_computed)
    )
    if stored != computed and variables.choose_axes(spec, mesh) is None:
      # The transpose of a constraint is the same constraint: without the first
      # one XLA would move each term of the update.
      moved[spec.name] = [stored, computed]

  def constrain_one(path: tuple[Any, ...], value: Any) -> Any:
    name = "/".join(str(getattr(part, "key", "")) for part in path)
    for partition in moved.get(name, ()):
      value = jax.lax.with_sharding_constraint(value, partition)
    return value

  return jax.tree_util.tree_map_with_path(constrain_one, values)


def constrain_stored(x: jax.Array, spec: variables.VariableSpec) -> jax.Array:
  """Returns a gradient, split as its variable is stored."""
  active = tuple(nn.get_logical_axis_rules())
  if not active:
    return x
  mesh = dict(jax.sharding.get_abstract_mesh().shape)
  chosen = variables.choose_axes(spec, mesh)
  if chosen is None:
    stored = rules.fit_stored(spec.shape, spec.axes, rules=active, mesh=mesh)
  else:
    stored = jax.sharding.PartitionSpec(*chosen)
  return jax.lax.with_sharding_constraint(x, stored)


def gather_lengths(x: jax.Array) -> jax.Array:
  """Returns tokens [B,T,D] with whole sequences.

  Unchanged unless the rules split the sequences of the residual stream more
  than others (Megatron's sequence parallelism). Matmuls that split another
  dimension over the same mesh axes need them.
  """
  names = axis_names.LENGTH, axis_names.ACTIVATION_LENGTH
  inside, between = (num_shards((name,)) for name in names)
  if inside == between:
    return x
  axes = axis_names.BATCH, axis_names.LENGTH, axis_names.ACTIVATION_EMBED
  return constrain(x, axes)


def partition_spec(
  shape: Sequence[int], axes: Sequence[str | None]
) -> jax.sharding.PartitionSpec | None:
  """Returns the partition of an activation for `jax.shard_map`.

  It is None outside of a layout. A dimension of size one is not split.

  Raises:
    ValueError: A dimension is not a multiple of its shards.
  """
  active = tuple(nn.get_logical_axis_rules())
  if not active:
    return None
  spec = _partition(shape, axes, active)
  _check_divides(shape, axes, spec)
  return spec


def _partition(
  shape: Sequence[int], axes: Sequence[str | None], active: rules.Rules
) -> jax.sharding.PartitionSpec:
  names = [a if n > 1 else None for a, n in zip(axes, shape, strict=True)]
  return rules.to_partition_spec(names, rules=active)


def find_splits(
  shape: Sequence[int], axes: Sequence[str | None]
) -> jax.sharding.PartitionSpec | None:
  """Returns `partition_spec` without mesh axes of size one."""
  spec = partition_spec(shape, axes)
  if spec is None:
    return None
  sizes = jax.sharding.get_abstract_mesh().shape
  entries = (
    tuple(name for name in rules.as_tuple(entry) if sizes[name] > 1)
    for entry in spec
  )
  return jax.P(*(entry or None for entry in entries))


def count_shards(entry: rules.MeshAxes) -> int:
  """Returns the number of shards that mesh axes make."""
  sizes = jax.sharding.get_abstract_mesh().shape
  return math.prod(sizes[name] for name in rules.as_tuple(entry))


def num_shards(axes: Sequence[str | None]) -> tuple[int, ...]:
  """Returns the number of shards of each axis of an activation.

  It is 1 outside of a layout, and for axes without a rule.
  """
  active = tuple(nn.get_logical_axis_rules())
  known = {axis for axis, _ in active}
  if axis_names.LENGTH in known:
    known.add(axis_names.ACTIVATION_LENGTH)
  names = [axis if axis in known else None for axis in axes]
  spec = rules.to_partition_spec(names, rules=active)
  return tuple(map(count_shards, spec))


def _check_divides(
  shape: Sequence[int],
  axes: Sequence[str | None],
  spec: jax.sharding.PartitionSpec,
) -> None:
  sizes = jax.sharding.get_abstract_mesh().shape
  for axis, size, entry in zip(axes, shape, spec, strict=True):
    names = rules.as_tuple(entry)
    if axis is not None and size % math.prod(sizes[name] for name in names):
      over = ", ".join(f"{name}={sizes[name]}" for name in names)
      raise ValueError(
        f"The activation {tuple(axes)} of shape {tuple(shape)} cannot be"
        " split: "
        f"'{axis}' of size {size} does not divide by {over}."
      )

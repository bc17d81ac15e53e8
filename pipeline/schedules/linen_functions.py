"""A linen model as the three functions that a schedule runs.

The model has a field `stack`, a `ScheduledStack`, which its loss function calls
once. It is cut there by what stands in the place of the stack:

  first    the loss function, of which only what the stack is given is used
  chunk    groups of the stack's layers, each by itself
  last     the loss function, with rows that the last chunk has made

The compiler drops what is not used: the embedding in `last`, the head in
`first`. What layers sow (losses of their own, summaries) travels beside the
rows, so that `last` sees it where the stack would have left it, and gradients
of it travel back.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
import dataclasses
from typing import Any, NamedTuple

from flax import linen as nn
from flax import traverse_util
import jax
import jax.numpy as jnp

from paxon.layers import shared
from paxon.learners import loss_function
from paxon.learners import metrics as metrics_lib
from paxon.pipeline import (
  layer_calls,
  live_gradients,
  placement,
  spmd_pipeline,
)
from paxon.pipeline.schedules import model_functions, table
from paxon.sharding import axes

_Tree = model_functions.Tree
_Path = tuple[str, ...]

FIELD = "stack"
# The gradients of these are summed over microbatches; of the others, which are
# values that replace the variables, the largest is taken.
SUMMED, MAXIMA = "summed", "maxima"


class Given(NamedTuple):
  """What the stack of a model is called with.

  Attributes:
    x: The rows that layers change.
    args: Arrays that all layers are given.
    static: Keyword arguments that all layers are given.
    mutable: Linen's filter of the collections that layers may make.
  """

  x: _Tree
  args: tuple[Any, ...]
  static: Mapping[str, Any]
  mutable: Any


class Message(NamedTuple):
  """What passes between chunks.

  Attributes:
    x: The rows that layers change.
    sown: What layers have sown so far, [G,...] by collection.
  """

  x: _Tree
  sown: _Tree


class _Begin(nn.Module):
  """Tells what the stack is given.

  Attributes:
    tell: Is called with it.
  """

  tell: Callable[[Given], None]

  def __call__(
    self, x: _Tree, *args: Any, layer_index: Any = None, **static: Any
  ) -> _Tree:
    if layer_index is not None:
      raise ValueError("A ScheduledStack must not be a layer of another stack.")
    mutable = layer_calls.mutable_in(self)
    self.tell(Given(x, args, static, mutable))
    return x


class _End(nn.Module):
  """Returns what the last chunk has made.

  Attributes:
    message: Returns it.
  """

  message: Callable[[], Message]

  def __call__(self, x: _Tree, *args: Any, **static: Any) -> _Tree:
    del x, args, static
    x, sown = self.message()
    for collection, tree in sown.items():
      self.put_variable(collection, axes.LAYERS, tree)
    return x


def _with_stack(model: nn.Module, part: nn.Module) -> nn.Module:
  """Returns a copy of a model with something in the place of its stack."""
  fields: dict[str, Any] = {FIELD: part}
  return model.clone(**fields)


LossFnOf = Callable[[nn.Module], loss_function.LossFn]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cut:
  """A model, cut at its stack.

  Attributes:
    model: With a `ScheduledStack` as its field `stack`.
    loss_fn_of: Returns the loss function of a model.
    metric_fns: Evaluated on each microbatch and its outputs.
  """

  model: nn.Module
  loss_fn_of: LossFnOf
  metric_fns: Sequence[metrics_lib.MetricFn]

  @property
  def stack(self) -> spmd_pipeline.PipelinedStack:
    """The stack of the model."""
    return getattr(self.model, FIELD)

  def given(
    self, values: _Tree, batch: Mapping[str, Any], rngs: Mapping[str, Any]
  ) -> Given:
    """Returns what the stack is given for a batch.

    Args:
      values: Variables of the model, those of the layers not needed.
      batch: Rows.
      rngs: Random keys by stream.

    Raises:
      ValueError: The model does not call its stack once.
    """
    found: list[Given] = []
    begun = _with_stack(self.model, _Begin(found.append))
    self.loss_fn_of(begun)(values, dict(batch), dict(rngs))
    if len(found) != 1:
      raise ValueError(
        f"{type(self.model).__name__} called its {FIELD} {len(found)} times in"
        " one loss; with a schedule it must be once."
      )
    return found[0]

  def result(
    self,
    values: _Tree,
    message: Message,
    batch: Mapping[str, Any],
    rngs: Mapping[str, Any],
  ) -> tuple[jax.Array, loss_function.Metrics]:
    """Returns the sum of the loss and all metrics of a microbatch."""
    ended = _with_stack(self.model, _End(lambda: message))
    found = self.loss_fn_of(ended)(values, dict(batch), dict(rngs))
    metrics = loss_function.measure(
      found, metric_fns=self.metric_fns, batch=batch
    )
    return found.loss[0], metrics


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layers:
  """Calls the groups of layers of one virtual stage.

  Attributes:
    stack: Whose they are.
    given: What the stack is called with; of it the shapes of `x` and of the
      arguments are those of a whole batch.
    schedule: With K virtual stages.
  """

  stack: spmd_pipeline.PipelinedStack
  given: Given
  schedule: table.Table

  @property
  def groups_per_stage(self) -> int:
    """Groups of a virtual stage; the last ones may not be used."""
    return -(-self.stack.num_groups() // self.schedule.num_virtual_stages)

  @property
  def padding(self) -> int:
    """Groups of virtual stages that are none of the stack's."""
    groups = self.schedule.num_virtual_stages * self.groups_per_stage
    return groups - self.stack.num_groups()

  def one_group(self, variables: _Tree, x: _Tree, inputs: "Inputs") -> _Tree:
    """Returns what one group of layers sows.

    Args:
      variables: Of one piece.
      x: Rows of a microbatch.
      inputs: Of a microbatch.
    """
    groups, common = variables
    one, keys = jax.tree.map(lambda x: x[0], (groups, inputs.layer_keys))
    return self._group(one, common, keys, jnp.int32(0), x, inputs.args)[1]

  def stacked(self, made: _Tree) -> _Tree:
    """Returns the shapes of what the layers of all pieces sow.

    Args:
      made: Shapes of what one group does.

    Raises:
      ValueError: A layer sows something that has no gradient.
    """

    def stack(path: Any, leaf: Any) -> jax.ShapeDtypeStruct:
      if not jnp.issubdtype(leaf.dtype, jnp.floating):
        name = "/".join(str(getattr(p, "key", "")) for p in path).strip("/")
        raise ValueError(
          f"A layer of a ScheduledStack sows {name}, of dtype"
          f" {leaf.dtype.name}, which cannot pass between stages; sow it as a"
          " float."
        )
      number = self.stack.num_groups() + self.padding
      return jax.ShapeDtypeStruct((number, *leaf.shape), leaf.dtype)

    return jax.tree.map_with_path(stack, made)

  def __call__(
    self,
    variables: _Tree,
    message: Message,
    virtual_stage: jax.Array,
    inputs: "Inputs",
  ) -> Message:
    """Returns what one piece makes.

    Args:
      variables: Of its groups, [groups,...], and the parameters of shared
        modules.
      message: What comes in.
      virtual_stage: The number of the piece.
      inputs: Of the microbatch.
    """
    groups, common = variables
    first = virtual_stage * self.groups_per_stage
    numbers = first + jnp.arange(self.groups_per_stage, dtype=jnp.int32)
    keys = jax.tree.map(
      lambda leaf: jax.lax.dynamic_slice_in_dim(
        leaf, first, self.groups_per_stage
      ),
      inputs.layer_keys,
    )

    def group(x: _Tree, given: Any) -> tuple[_Tree, _Tree]:
      own, keys, number = given
      return self._live(own, common, keys, number, x, inputs.args)

    xs = (groups, keys, numbers)
    if not self.stack.scan:
      x, each = message.x, []
      for i in range(self.groups_per_stage):
        x, one = group(x, jax.tree.map(lambda leaf, i=i: leaf[i], xs))
        each.append(one)
      made = jax.tree.map(lambda *leaves: jnp.stack(leaves), *each)
    else:
      x, made = jax.lax.scan(group, message.x, xs)
    sown = jax.tree.map(
      lambda whole, new: jax.lax.dynamic_update_slice_in_dim(
        whole, new, first, axis=0
      ),
      message.sown,
      made,
    )
    return Message(x, sown)

  def _live(
    self,
    group: _Tree,
    common: _Tree,
    keys: _Tree,
    number: jax.Array,
    x: _Tree,
    args: Sequence[Any],
  ) -> tuple[_Tree, _Tree]:
    """Calls a group, or hands on `x` where there is none of that number."""
    if not self.padding:
      return self._group(group, common, keys, number, x, args)
    live = number < self.stack.num_groups()
    used = live_gradients.only_if(live, (group, common, x))
    y, made = self._group(used[0], used[1], keys, number, used[2], args)
    y = jax.tree.map(lambda new, old: jnp.where(live, new, old), y, x)
    made = jax.tree.map(
      lambda leaf: jnp.where(live, leaf, jnp.zeros_like(leaf)), made
    )
    return y, made

  def _group(
    self,
    group: _Tree,
    common: _Tree,
    keys: _Tree,
    number: jax.Array,
    x: _Tree,
    args: Sequence[Any],
  ) -> tuple[_Tree, _Tree]:
    stack = self.stack
    call = layer_calls.GroupCall(
      tuple(stack.blocks),
      stack.layer_call(dict(self.given.static)),
      (FIELD,),
      self.given.mutable,
    )
    start = number * len(stack.blocks) if stack.pass_layer_index else None
    with placement.inside_a_stage(), placement.with_whole_tables():
      y, made = call(group, common, keys, start, x, args)
    return y, dict(made)


class Inputs(NamedTuple):
  """What a microbatch is, beside its activations.

  Attributes:
    batch: Its rows.
    args: What the stack's layers are given.
    keys: Random keys by stream.
    layer_keys: Those of each group of layers, [G,...] by stream.
  """

  batch: Mapping[str, jax.Array]
  args: tuple[Any, ...]
  keys: Mapping[str, jax.Array]
  layer_keys: Mapping[str, jax.Array]


def _whole(by_rule: Mapping[str, _Tree], paths: Collection[_Path]) -> _Tree:
  """Returns variables, of which no mesh axis splits some."""

  def one(path: _Path, x: jax.Array) -> jax.Array:
    return placement.whole(x) if path[1:] in paths else x

  flat: Any = traverse_util.flatten_dict(dict(by_rule))
  return traverse_util.unflatten_dict(
    {path: one(path, x) for path, x in flat.items()}
  )


def merged(by_rule: Mapping[str, _Tree]) -> dict[str, _Tree]:
  """Returns variables by collection, of entries `SUMMED` and `MAXIMA`.

  What a stage has of layers has the names that it has below the stack.

  Args:
    by_rule: Nested dicts.
  """
  flat: dict[Any, Any] = {}
  for tree in by_rule.values():
    flat |= traverse_util.flatten_dict(dict(tree))
  prefix = (FIELD, axes.LAYERS)
  return traverse_util.unflatten_dict(
    {
      (path[0], *path[3:]) if path[1:3] == prefix else path: x
      for path, x in flat.items()
    }
  )


def functions_of(
  cut: Cut,
  *,
  layers: Layers,
  inputs_of: Callable[[Mapping[str, jax.Array]], Inputs],
  sown: _Tree,
  tables: Collection[_Path],
) -> model_functions.ModelFunctions:
  """Returns the functions that a schedule runs.

  XLA's partitioner fails (a check in its program) on lookups of rows that one
  mesh axis splits in a table that others split, where a further axis, `stage`,
  is not its own. So whatever may look up is given tables whole: `first` and
  `chunk`, not the head in `last`, where they are largest.

  Args:
    cut: The model.
    layers: Of its stack.
    inputs_of: Returns a microbatch of what the executor is given.
    sown: Shapes of what layers sow, `Layers.stacked`.
    tables: Paths of variables that have a vocabulary, as the executor is given
      them.
  """

  def first(outer: _Tree, context: model_functions.Context) -> Message:
    inputs = inputs_of(context.inputs)
    with placement.inside_a_stage(), placement.with_whole_tables():
      values = merged(_whole(outer, tables))
      given = cut.given(values, inputs.batch, inputs.keys)
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), sown)
    return Message(given.x, zeros)

  def chunk(
    variables: _Tree, x: Message, context: model_functions.Context
  ) -> tuple[Message, jax.Array]:
    own = merged(_whole(variables, tables))
    common = own.pop(shared.COLLECTION, {})
    inputs = inputs_of(context.inputs)
    made = layers((own, common), Message(*x), context.virtual_stage, inputs)
    # What layers add to the loss, `last` finds in what they have sown.
    return made, jnp.float32(0)

  def last(
    outer: _Tree, y: Message, context: model_functions.Context
  ) -> tuple[jax.Array, loss_function.Metrics]:
    inputs = inputs_of(context.inputs)
    groups = layers.stack.num_groups()
    message = Message(y.x, jax.tree.map(lambda leaf: leaf[:groups], y.sown))
    with placement.inside_a_stage():
      return cut.result(merged(outer), message, inputs.batch, inputs.keys)

  return model_functions.ModelFunctions(first=first, chunk=chunk, last=last)

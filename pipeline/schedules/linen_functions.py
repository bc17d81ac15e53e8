"""A linen model as the three functions that a schedule runs.

The model has a field `stack`, a `ScheduledStack`, which its loss function calls
once. The model is split there by replacing the stack:

  first    the loss function, of which only the inputs of the stack are used
  chunk    groups of the stack's layers
  last     the loss function, with the output of the last chunk

The compiler removes what is not used: the embedding in `last`, the head in
`first`. What layers sow (auxiliary losses, summaries) passes between stages
with the activations, so that `last` finds it where the stack would have put it,
and its gradients flow back.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
import dataclasses
from typing import Any, NamedTuple

from flax import linen as nn
from flax import traverse_util
import jax
import jax.numpy as jnp

from paxon.layers.stacks import shared
from paxon.learners import loss_function
from paxon.learners import metrics as metrics_lib
from paxon.pipeline import layer_calls, spmd_pipeline, stage_sharding
from paxon.pipeline.schedules import model_functions, table
from paxon.sharding import axes

_Tree = model_functions.Tree
_Path = tuple[str, ...]

FIELD = "stack"
# Variables by how their gradients are combined over microbatches: summed, or,
# where they are values that replace the variables, by maximum.
SUMMED, MAXIMA = "summed", "maxima"


class StackCall(NamedTuple):
  """Arguments of a call of a model's stack.

  Attributes:
    x: Input of the first layer.
    args: Arrays for every layer.
    static: Keyword arguments for every layer.
    mutable: Linen's filter of the collections that layers may create.
  """

  x: _Tree
  args: tuple[Any, ...]
  static: Mapping[str, Any]
  mutable: Any


class Message(NamedTuple):
  """Message from one chunk to the next.

  Attributes:
    x: Activations.
    sown: Values that layers have sown so far, [G,...] by collection.
  """

  x: _Tree
  sown: _Tree


class _CaptureCall(nn.Module):
  """Replaces a stack to capture the arguments of its call.

  Attributes:
    capture: Receives them.
  """

  capture: Callable[[StackCall], None]

  def __call__(
    self, x: _Tree, *args: Any, layer_index: Any = None, **static: Any
  ) -> _Tree:
    if layer_index is not None:
      raise ValueError("A ScheduledStack must not be a layer of another stack.")
    mutable = layer_calls.mutable_filter(self)
    self.capture(StackCall(x, args, static, mutable))
    return x


class _ReplaceOutput(nn.Module):
  """Replaces a stack to return the output of the last chunk.

  Attributes:
    message: Returns that output.
  """

  message: Callable[[], Message]

  def __call__(self, x: _Tree, *args: Any, **static: Any) -> _Tree:
    del x, args, static
    x, sown = self.message()
    for collection, tree in sown.items():
      self.put_variable(collection, axes.LAYERS, tree)
    return x


LossFnOf = Callable[[nn.Module], loss_function.LossFn]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SplitModel:
  """A model, split at its stack.

  Attributes:
    model: Has a `ScheduledStack` as its field `stack`.
    loss_fn_of: Returns the loss function of a model.
    metric_fns: Evaluated on each microbatch and its outputs.
  """

  model: nn.Module
  loss_fn_of: LossFnOf
  metric_fns: Sequence[metrics_lib.MetricFn]

  @property
  def stack(self) -> spmd_pipeline.PipelinedStack:
    """The stack of the model."""
    model: Any = self.model
    return model.stack

  def capture_call(
    self, values: _Tree, batch: Mapping[str, Any], rngs: Mapping[str, Any]
  ) -> StackCall:
    """Returns the arguments of the stack for a batch.

    Raises:
      ValueError: The loss function does not call the stack once.
    """
    calls: list[StackCall] = []
    model = self._replace_stack(_CaptureCall(calls.append))
    self.loss_fn_of(model)(values, dict(batch), dict(rngs))
    if len(calls) != 1:
      raise ValueError(
        f"{type(self.model).__name__} called its {FIELD} {len(calls)} times in"
        " one loss; a schedule needs exactly one call."
      )
    return calls[0]

  def loss(
    self,
    values: _Tree,
    message: Message,
    batch: Mapping[str, Any],
    rngs: Mapping[str, Any],
  ) -> tuple[jax.Array, loss_function.Metrics]:
    """Returns the summed loss and all metrics of a microbatch."""
    model = self._replace_stack(_ReplaceOutput(lambda: message))
    found = self.loss_fn_of(model)(values, dict(batch), dict(rngs))
    metrics = loss_function.measure(
      found, metric_fns=self.metric_fns, batch=batch
    )
    return found.loss[0], metrics

  def _replace_stack(self, module: nn.Module) -> nn.Module:
    fields: dict[str, Any] = {FIELD: module}
    return self.model.clone(**fields)


class Inputs(NamedTuple):
  """A microbatch without its activations.

  Attributes:
    batch: Its arrays of the batch.
    args: Arguments of the stack's layers.
    keys: Random keys by stream.
    layer_keys: Random keys of each group of layers, [G,...] by stream.
  """

  batch: Mapping[str, jax.Array]
  args: tuple[Any, ...]
  keys: Mapping[str, jax.Array]
  layer_keys: Mapping[str, jax.Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layers:
  """The groups of layers of one virtual stage, as a function.

  Attributes:
    stack: The stack.
    stack_call: Arguments of the stack for the whole batch.
    schedule: A table with K virtual stages.
  """

  stack: spmd_pipeline.PipelinedStack
  stack_call: StackCall
  schedule: table.Table

  @property
  def groups_per_stage(self) -> int:
    """Groups of a virtual stage; the last ones may be unused."""
    return -(-self.stack.num_groups() // self.schedule.num_virtual_stages)

  @property
  def padding(self) -> int:
    """Unused groups of all virtual stages."""
    groups = self.schedule.num_virtual_stages * self.groups_per_stage
    return groups - self.stack.num_groups()

  def sow_one_group(self, variables: _Tree, x: _Tree, inputs: Inputs) -> _Tree:
    """Returns the values that one group of layers sows."""
    groups, common = variables
    one, keys = jax.tree.map(lambda x: x[0], (groups, inputs.layer_keys))
    return self._group(one, common, keys, jnp.int32(0), x, inputs.args)[1]

  def stack_shapes(self, made: _Tree) -> _Tree:
    """Returns the shapes of the values that all groups sow.

    Raises:
      ValueError: A layer sows an array that has no gradient.
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
    inputs: Inputs,
  ) -> Message:
    """Returns the output of one virtual stage.

    Args:
      variables: Variables of its groups, [groups_per_stage,...], and parameters
        of shared modules.
      message: Its input.
      virtual_stage: Index of the virtual stage.
      inputs: The microbatch.
    """
    groups, common = variables
    size = self.groups_per_stage
    first = virtual_stage * size
    numbers = first + jnp.arange(size, dtype=jnp.int32)
    keys = jax.tree.map(
      lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, first, size),
      inputs.layer_keys,
    )

    def group(x: _Tree, given: Any) -> tuple[_Tree, _Tree]:
      own, keys, number = given
      return self._live_group(own, common, keys, number, x, inputs.args)

    xs = (groups, keys, numbers)
    if self.stack.scan:
      x, made = jax.lax.scan(group, message.x, xs)
    else:
      # Not an unrolled scan, which would be one equation of the jaxpr: all that
      # it saves would be residuals, including kernels cast to bfloat16.
      x, sown_by_group = message.x, []
      for i in range(size):
        x, one = group(x, jax.tree.map(lambda leaf, i=i: leaf[i], xs))
        sown_by_group.append(one)
      made = jax.tree.map(lambda *leaves: jnp.stack(leaves), *sown_by_group)
    sown = jax.tree.map(
      lambda whole, new: jax.lax.dynamic_update_slice_in_dim(
        whole, new, first, axis=0
      ),
      message.sown,
      made,
    )
    return Message(x, sown)

  def _live_group(
    self,
    group: _Tree,
    common: _Tree,
    keys: _Tree,
    number: jax.Array,
    x: _Tree,
    args: Sequence[Any],
  ) -> tuple[_Tree, _Tree]:
    """Calls a group; returns `x` if the group is unused."""
    if not self.padding:
      return self._group(group, common, keys, number, x, args)
    live = number < self.stack.num_groups()
    used = layer_calls.mask_gradient(live, (group, common, x))
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
      stack.layer_call(dict(self.stack_call.static)),
      (FIELD,),
      self.stack_call.mutable,
    )
    start = number * len(stack.blocks) if stack.pass_layer_index else None
    with (
      stage_sharding.inside_stage(),
      stage_sharding.with_replicated_vocab(),
    ):
      y, made = call(group, common, keys, start, x, args)
    return y, dict(made)


def merge_rules(by_rule: Mapping[str, _Tree]) -> dict[str, _Tree]:
  """Returns variables by collection, of the entries `SUMMED` and `MAXIMA`.

  Variables of layers get their paths below the stack.
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


def make_functions(
  split: SplitModel,
  *,
  layers: Layers,
  read_inputs: Callable[[Mapping[str, jax.Array]], Inputs],
  sown: _Tree,
  tables: Collection[_Path],
) -> model_functions.ModelFunctions:
  """Returns the functions that a schedule runs.

  XLA's partitioner aborts on lookups in a table of which two mesh axes shard
  different dimensions, where a further axis (`stage`) is manual. So tables are
  replicated for `first` and `chunk`, which may look up; not for the head in
  `last`, where they are largest.

  Args:
    split: The model.
    layers: The layers of its stack.
    read_inputs: Returns the microbatch of the executor's arrays.
    sown: Shapes of the sown values, `Layers.stack_shapes`.
    tables: Paths of variables with a vocabulary axis.
  """

  def replicate_tables(by_rule: Mapping[str, _Tree]) -> dict[str, _Tree]:
    flat: Any = traverse_util.flatten_dict(dict(by_rule))
    for path, x in flat.items():
      if path[1:] in tables:
        flat[path] = stage_sharding.replicate(x)
    return merge_rules(traverse_util.unflatten_dict(flat))

  def first(outer: _Tree, context: model_functions.Context) -> Message:
    inputs = read_inputs(context.inputs)
    with (
      stage_sharding.inside_stage(),
      stage_sharding.with_replicated_vocab(),
    ):
      values = replicate_tables(outer)
      call = split.capture_call(values, inputs.batch, inputs.keys)
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), sown)
    return Message(call.x, zeros)

  def chunk(
    variables: _Tree, x: Message, context: model_functions.Context
  ) -> tuple[Message, jax.Array]:
    own = replicate_tables(variables)
    common = own.pop(shared.COLLECTION, {})
    inputs = read_inputs(context.inputs)
    made = layers((own, common), Message(*x), context.virtual_stage, inputs)
    # `last` adds the auxiliary losses that layers have sown.
    return made, jnp.float32(0)

  def last(
    outer: _Tree, y: Message, context: model_functions.Context
  ) -> tuple[jax.Array, loss_function.Metrics]:
    inputs = read_inputs(context.inputs)
    groups = layers.stack.num_groups()
    message = Message(y.x, jax.tree.map(lambda leaf: leaf[:groups], y.sown))
    with stage_sharding.inside_stage():
      return split.loss(merge_rules(outer), message, inputs.batch, inputs.keys)

  return model_functions.ModelFunctions(first=first, chunk=chunk, last=last)

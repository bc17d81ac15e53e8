"""Gradients of a linen model by an explicit schedule.

The result is that of a learner that accumulates over microbatches
(`learners.gradients`): the same sums of losses, gradients and metrics, divided
once by the total weight, and the same values of variables that are overwritten
with their gradient.

Only the mesh axis `stage` is manual. Batch and weights may be sharded over all
other axes by the layout; layers then compute on whole microbatches.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any

from flax import linen as nn
from flax import traverse_util
import jax
import jax.numpy as jnp

from paxon.layers.stacks import shared
from paxon.learners import gradients, loss_function, metrics, variable_groups
from paxon.pipeline import stage_sharding
from paxon.pipeline.schedules import (
  executor,
  linen_functions,
  lowering,
  microbatch_inputs,
  model_functions,
)
from paxon.pipeline.schedules import table as table_lib
from paxon.sharding import axes, logical
from paxon.sharding import variables as variables_lib

_SUMMED, _MAXIMA = linen_functions.SUMMED, linen_functions.MAXIMA
_Path = tuple[str, ...]
_Flat = dict[_Path, Any]


def make_gradient_fn(
  model: nn.Module,
  *,
  loss_fn_of: linen_functions.LossFnOf,
  metric_fns: Sequence[metrics.MetricFn],
  specs: variable_groups.Specs,
  table_for: Callable[[int], table_lib.Table],
  residuals: lowering.Residuals,
) -> gradients.GradientFn:
  """Returns `(variables, batch, rngs) -> Gradients`, as a learner has it.

  Args:
    model: Has a `scheduled_stack.ScheduledStack` as its field `stack`, which
      its loss function calls once. The weight of its loss must not depend on
      variables.
    loss_fn_of: Returns the loss function of a model like it.
    metric_fns: Evaluated on each microbatch and its outputs.
    specs: A `VariableSpec` for each variable.
    table_for: Returns the schedule's table for a batch size.
    residuals: Values that forward operations save for backward operations.

  Raises:
    ValueError: A variable changes in a way that a schedule cannot combine.
  """
  flat_specs = _flat(specs)
  _check_specs(flat_specs)
  split = linen_functions.SplitModel(
    model=model, loss_fn_of=loss_fn_of, metric_fns=metric_fns
  )

  def gradient_fn(
    variables: gradients.Variables,
    batch: metrics.Batch,
    rngs: dict[str, jax.Array],
  ) -> gradients.Gradients:
    groups = (variables.params, variables.overwritten, variables.constant)
    values = _flat(variable_groups.merge(*groups))
    outer = {path: x for path, x in values.items() if not _is_layers(path)}
    size = microbatch_inputs.batch_size(batch)
    schedule = table_for(size)
    call = split.capture_call(_tree(outer), batch, rngs)
    layers = linen_functions.Layers(
      stack=split.stack,
      stack_call=call,
      schedule=schedule,
    )
    inputs = microbatch_inputs.make(
      batch,
      rngs,
      args=call.args,
      num_microbatches=schedule.num_microbatches,
      num_groups=split.stack.num_groups(),
      padding=layers.padding,
    )
    chunks = _group_by_rule(_chunks(values, layers), flat_specs)
    functions = _functions(
      split,
      layers,
      inputs,
      chunks,
      size=size // schedule.num_microbatches,
      tables=[p for p, s in flat_specs.items() if axes.VOCAB in s.axes],
    )
    run = executor.make_gradient_fn(
      functions,
      schedule=schedule,
      maxima=(_MAXIMA,),
      residuals=residuals,
      pin=_make_pin(flat_specs),
    )
    found = run(chunks, _group_by_rule(outer, flat_specs), inputs.arrays)
    return _gradients(found, variables, layers)

  return gradient_fn


def _check_specs(specs: _Flat) -> None:
  for spec in specs.values():
    group = variable_groups.find_group(spec)
    if group is variable_groups.Group.REPLACED:
      raise ValueError(
        f"{spec.name} is replaced by the forward pass, which a schedule cannot"
        " combine over microbatches; use a PipelinedStack (unset"
        " pipeline_schedule)."
      )
    is_maximum = spec.combine is variables_lib.CombineRule.MAX
    if group is variable_groups.Group.OVERWRITTEN and not is_maximum:
      raise ValueError(
        f"{spec.name} is overwritten with its gradient and combined by"
        f" {spec.combine.name} over microbatches; a schedule supports only"
        " MAX."
      )
    if not jnp.issubdtype(spec.dtype, jnp.floating):
      raise ValueError(
        f"{spec.name} has dtype {jnp.dtype(spec.dtype).name}; with a schedule"
        " all variables must be floats, which have gradients."
      )


def _make_pin(specs: _Flat) -> Callable[[Any], Any]:
  """Returns a function that shards gradients like their variables."""

  def one(path: _Path, x: jax.Array) -> jax.Array:
    names = specs[path].axes
    if _is_layers(path):
      names = names[1:]
    # Preceded by chunks of a stage and layers of a chunk.
    before = (None,) * (x.ndim - len(names))
    return logical.constrain(x, (*before, *names))

  def pin(by_rule: dict[str, Any]) -> dict[str, Any]:
    with stage_sharding.inside_stage():
      return {
        rule: _tree({path: one(path, x) for path, x in _flat(tree).items()})
        for rule, tree in by_rule.items()
      }

  return pin


def _functions(
  split: linen_functions.SplitModel,
  layers: linen_functions.Layers,
  inputs: microbatch_inputs.MicrobatchInputs,
  chunks: Any,
  *,
  size: int,
  tables: Collection[_Path],
) -> model_functions.ModelFunctions:
  """Returns the model's functions."""

  def slice_specs(tree: Any) -> Any:
    return jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), tree
    )

  def sown(chunk: Any, x: Any, arrays: Any) -> Any:
    own = linen_functions.merge_rules(chunk)
    common = own.pop(shared.COLLECTION, {})
    return layers.sow_one_group((own, common), x, inputs.read(arrays))

  x = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct((size, *x.shape[1:]), x.dtype),
    layers.stack_call.x,
  )
  made = jax.eval_shape(
    sown, slice_specs(chunks), x, slice_specs(inputs.arrays)
  )
  return linen_functions.make_functions(
    split,
    layers=layers,
    read_inputs=inputs.read,
    sown=layers.stack_shapes(made),
    tables=tables,
  )


def _chunks(values: _Flat, layers: linen_functions.Layers) -> _Flat:
  """Returns the variables of virtual stages, arrays [K,...], by path.

  Shared parameters are copied, so that their gradients are added once, after
  the loop.
  """
  schedule = layers.schedule
  found = {}
  for path, x in values.items():
    if _is_layers(path):
      if layers.padding:
        # Not zeros, whose gradients may be NaN.
        last = jnp.broadcast_to(x[-1:], (layers.padding, *x.shape[1:]))
        x = jnp.concatenate([x, last])
      found[path] = model_functions.split_layers(
        x, num_virtual_stages=schedule.num_virtual_stages
      )
    elif path[0] == shared.COLLECTION:
      found[path] = jnp.broadcast_to(
        x[None], (schedule.num_virtual_stages, *x.shape)
      )
  return found


def _gradients(
  found: model_functions.Gradients,
  variables: gradients.Variables,
  layers: linen_functions.Layers,
) -> gradients.Gradients:
  """Returns sums over microbatches as a learner expects them."""
  by_rule = {}
  for rule in (_SUMMED, _MAXIMA):
    total = _flat(found.outer[rule])
    for path, x in _flat(found.chunks[rule]).items():
      if _is_layers(path):
        total[path] = model_functions.merge_layers(x)[
          : layers.stack.num_groups()
        ]
      else:
        combined = jnp.sum if rule is _SUMMED else jnp.max
        both = jnp.stack([total[path], combined(x, axis=0)])
        total[path] = combined(both, axis=0)
    by_rule[rule] = total
  divisor = loss_function.divisor(found.metrics["loss"][1])
  params, overwritten = _flat(variables.params), _flat(variables.overwritten)
  return gradients.Gradients(
    params=_tree({path: by_rule[_SUMMED][path] / divisor for path in params}),
    overwritten=_tree(
      {
        path: by_rule[_MAXIMA][path].astype(x.dtype)
        for path, x in overwritten.items()
      }
    ),
    new_collections={},
    metrics=found.metrics,
  )


def _group_by_rule(values: _Flat, specs: _Flat) -> dict[str, Any]:
  """Groups variables by how their gradients are combined."""
  rules: dict[str, _Flat] = {_SUMMED: {}, _MAXIMA: {}}
  for path, x in values.items():
    group = variable_groups.find_group(specs[path])
    is_value = group is variable_groups.Group.OVERWRITTEN
    rules[_MAXIMA if is_value else _SUMMED][path] = x
  return {rule: _tree(flat) for rule, flat in rules.items()}


def _is_layers(path: _Path) -> bool:
  return path[1:3] == (linen_functions.FIELD, axes.LAYERS)


def _flat(tree: Any) -> _Flat:
  flat: Any = traverse_util.flatten_dict(dict(tree))
  return flat


def _tree(flat: _Flat) -> dict[str, Any]:
  return traverse_util.unflatten_dict(flat)

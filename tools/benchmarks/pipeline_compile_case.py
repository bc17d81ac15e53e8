"""The time to compile a pipeline of many microbatches over that of few.

A pipelined stack, and a schedule's step: both loop over their ticks, so a
program has the same size for any number of microbatches.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from paxon.layers import stack as stack_lib
from paxon.learners import gradients, loss_function
from paxon.pipeline import spmd_pipeline
from paxon.pipeline.schedules import scheduled_stack
from paxon.sharding import variables
from paxon.tools.benchmarks import (
  comparison,
  decoder_lm_job,
  decoder_lm_workload,
  interleaving,
)

# Of issue 8: compile time does not grow.
LIMIT = 1.2
FEW = 4


def _loss_fn(model: Any) -> loss_function.LossFn:
  def loss_fn(values: Any, batch: Any, rngs: Any) -> loss_function.LossOutput:
    del rngs
    loss, metrics, outputs = model.apply(values, batch, method="loss")
    return loss_function.LossOutput(loss, metrics, outputs, {})

  return loss_fn


def lowered(
  workload: decoder_lm_workload.Workload,
  *,
  num_microbatches: int,
  has_schedule: bool,
) -> jax.stages.Lowered:
  """Returns loss and gradients of a pipelined model, lowered, traced anew.

  One device does the work of all stages of the stack; a schedule has one stage.

  Args:
    workload: Sizes; its batch has one row a microbatch.
    num_microbatches: How many.
    has_schedule: Whether a schedule orders forward and backward work.
  """
  model: Any = decoder_lm_job.make_model(workload.config)
  plain: stack_lib.Stack = model.stack
  kind: Any = spmd_pipeline.PipelinedStack
  if has_schedule:
    kind = scheduled_stack.ScheduledStack
  model = model.clone(
    stack=kind(
      plain.blocks,
      plain.num_layers,
      num_stages=1 if has_schedule else 2,
      num_microbatches=num_microbatches,
    )
  )
  shape = (num_microbatches, workload.length)
  ids = jax.ShapeDtypeStruct(shape, jnp.int32)
  batch = dict.fromkeys(("inputs", "targets", "positions", "segment_ids"), ids)
  batch["weights"] = jax.ShapeDtypeStruct(shape, jnp.float32)
  boxed = jax.eval_shape(
    lambda b: model.init(jax.random.key(0), b, method="loss"), batch
  )
  specs = variables.specs_of(boxed)
  values = variables.unbox(boxed)
  make: Callable[..., gradients.GradientFn] = gradients.make_gradient_fn
  if has_schedule:
    gradient_fn = model.stack.make_gradient_fn(
      model, loss_fn_of=_loss_fn, metric_fns=(), specs=specs
    )
  else:
    gradient_fn = make(
      _loss_fn(model), metric_fns=(), num_microbatches=1, specs=specs
    )

  def run(params: Any, batch: Any) -> Any:
    own = gradients.Variables(params=params, overwritten={}, constant={})
    made = gradient_fn(own, batch, {})
    return made.params, made.metrics

  kinds = (jax.sharding.AxisType.Auto,)
  mesh = jax.make_mesh(
    (1,), ("stage",), axis_types=kinds, devices=jax.devices()[:1]
  )
  with jax.set_mesh(mesh):
    return jax.jit(run).lower(values, batch)


def run(
  workload: decoder_lm_workload.Workload,
  *,
  name: str,
  rounds: int,
  num_microbatches: int,
  has_schedule: bool,
) -> comparison.Comparison:
  """Returns the time to trace and compile for many microbatches over few.

  Args:
    workload: Sizes.
    name: Of the comparison.
    rounds: How often each is compiled.
    num_microbatches: How many.
    has_schedule: As for `lowered`.
  """

  def compiles(number: int) -> None:
    lowered(
      workload, num_microbatches=number, has_schedule=has_schedule
    ).compile()

  return comparison.Comparison(
    case=name,
    first=f"compiling {num_microbatches} microbatches",
    second=f"{FEW} microbatches",
    pairs=interleaving.interleave(
      lambda: compiles(num_microbatches), lambda: compiles(FEW), rounds=rounds
    ),
    limit=LIMIT,
    facts=workload.facts(),
  )

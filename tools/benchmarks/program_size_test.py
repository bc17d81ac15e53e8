"""The size of a lowered program is independent of depth and microbatches."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from paxon.layers.stacks import stack as stack_lib
from paxon.learners import gradients, loss_function
from paxon.pipeline import spmd_pipeline
from paxon.pipeline.schedules import scheduled_stack
from paxon.sharding import variables
from paxon.tools.benchmarks import cases, decoder_lm_workload


def _abstract_batch(batch_size: int, length: int) -> Any:
  ids = jax.ShapeDtypeStruct((batch_size, length), jnp.int32)
  batch = dict.fromkeys(("inputs", "targets", "positions", "segment_ids"), ids)
  return batch | {"weights": jax.ShapeDtypeStruct(ids.shape, jnp.float32)}


def _abstract_variables(model: Any, batch: Any) -> Any:
  return jax.eval_shape(
    lambda b: model.init(jax.random.key(0), b, method="loss"), batch
  )


def _num_lines(function: Any, *arguments: Any) -> int:
  return jax.jit(function).lower(*arguments).as_text().count("\n")


def test_depth_of_a_scanned_model():
  sizes = {"embed_dim": 32, "mlp_dim": 48, "vocab_size": 64}
  config = cases.resize(cases.QUICKSTART, sizes).config
  batch = _abstract_batch(8, 16)

  def measure(num_layers: int) -> int:
    model = decoder_lm_workload.make_model(
      dataclasses.replace(config, num_layers=num_layers)
    )

    def loss(values: Any, batch: Any) -> jax.Array:
      total, weight = model.apply(values, batch, method="loss")[0]
      return total / weight

    values = _abstract_variables(model, batch)
    return _num_lines(jax.value_and_grad(loss), values, batch)

  assert measure(48) == measure(2)


def _make_loss(model: Any) -> loss_function.LossFn:
  def loss_fn(values: Any, batch: Any, rngs: Any) -> loss_function.LossOutput:
    del rngs
    loss, metrics, outputs = model.apply(values, batch, method="loss")
    return loss_function.LossOutput(loss, metrics, outputs, {})

  return loss_fn


@pytest.mark.parametrize("has_schedule", [False, True])
def test_microbatches_of_a_pipeline(has_schedule):
  sizes = {"embed_dim": 8, "mlp_dim": 8, "vocab_size": 16}
  config = cases.resize(cases.QUICKSTART, sizes).config

  def measure(num_microbatches: int) -> int:
    model: Any = decoder_lm_workload.make_model(config)
    plain: stack_lib.Stack = model.stack
    kind: Any = (
      scheduled_stack.ScheduledStack
      if has_schedule
      else spmd_pipeline.PipelinedStack
    )
    # One device runs all stages; a schedule has one stage.
    model = model.clone(
      stack=kind(
        plain.blocks,
        plain.num_layers,
        num_stages=1 if has_schedule else 2,
        num_microbatches=num_microbatches,
      )
    )
    batch = _abstract_batch(num_microbatches, 8)
    boxed = _abstract_variables(model, batch)
    specs = variables.get_specs(boxed)
    if has_schedule:
      gradient_fn = model.stack.make_gradient_fn(
        model, loss_fn_of=_make_loss, metric_fns=(), specs=specs
      )
    else:
      gradient_fn = gradients.make_gradient_fn(
        _make_loss(model), metric_fns=(), num_microbatches=1, specs=specs
      )

    def run(params: Any, batch: Any) -> Any:
      own = gradients.Variables(params=params, overwritten={}, constant={})
      result = gradient_fn(own, batch, {})
      return result.params, result.metrics

    kinds = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh(
      (1,), ("stage",), axis_types=kinds, devices=jax.devices()[:1]
    )
    with jax.set_mesh(mesh):
      return _num_lines(run, variables.unbox(boxed), batch)

  assert measure(64) == measure(4)

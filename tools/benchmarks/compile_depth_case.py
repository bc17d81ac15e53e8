"""The time to compile a deep scanned model over that of a shallow one."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from paxon.tools.benchmarks import (
  comparison,
  decoder_lm_job,
  decoder_lm_workload,
  interleaving,
)

# Of issue 5.
LIMIT = 1.5
SHALLOW = 2


def lowered(
  workload: decoder_lm_workload.Workload, *, num_layers: int
) -> jax.stages.Lowered:
  """Returns loss and gradient of a model with so many layers, lowered.

  It is traced anew at each call, and needs no memory for parameters.

  Args:
    workload: Its other sizes.
    num_layers: Number of layers of the scanned stack.
  """
  config = dataclasses.replace(workload.config, num_layers=num_layers)
  model = decoder_lm_job.make_model(config)
  shape = (workload.global_batch_size, workload.length)
  ids = jax.ShapeDtypeStruct(shape, jnp.int32)
  batch = dict.fromkeys(("inputs", "targets", "positions", "segment_ids"), ids)
  batch["weights"] = jax.ShapeDtypeStruct(shape, jnp.float32)
  values = jax.eval_shape(
    lambda b: model.init(jax.random.key(0), b, method="loss"), batch
  )

  def loss(values: Any, batch: Any) -> jax.Array:
    total, weight = model.apply(values, batch, method="loss")[0]
    return total / weight

  return jax.jit(jax.value_and_grad(loss)).lower(values, batch)


def run(
  workload: decoder_lm_workload.Workload, *, name: str, rounds: int
) -> comparison.Comparison:
  """Returns the time to trace and compile a deep model over a shallow one's.

  Args:
    workload: Sizes; its number of layers is that of the deep one.
    name: Of the comparison.
    rounds: How often each is compiled.
  """
  deep = workload.config.num_layers

  def compiles(num_layers: int) -> None:
    lowered(workload, num_layers=num_layers).compile()

  return comparison.Comparison(
    case=name,
    first=f"compiling {deep} layers",
    second=f"{SHALLOW} layers",
    pairs=interleaving.interleave(
      lambda: compiles(deep), lambda: compiles(SHALLOW), rounds=rounds
    ),
    limit=LIMIT,
    facts=workload.facts(),
  )

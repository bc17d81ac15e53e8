"""Steps by schedules beside the sequential model, on fake devices."""

from collections.abc import Mapping
import statistics
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from paxon.pipeline.schedules import (
  executor,
  gpipe,
  interleaved,
  lowering,
  model_functions,
  one_f_one_b,
  sequential,
  table,
  virtual_stages,
  zero_bubble,
)
from paxon.sharding import axes
from paxon.tools.benchmarks import timing

NUM_STAGES: Final = 4
NUM_MICROBATCHES: Final = 8
NUM_LAYERS: Final = 8
EMBED: Final = 128
ROWS: Final = 4
LENGTH: Final = 64

_MAKERS: Final = (
  gpipe.make,
  one_f_one_b.make,
  one_f_one_b.two_slots,
  interleaved.make,
  interleaved.two_slots,
)
# With saved residuals.
_SAVING: Final = (
  one_f_one_b.two_slots,
  interleaved.two_slots,
  zero_bubble.make_h1,
)


def measure(*, rounds: int) -> list[tuple[str, ...]]:
  """Returns a row for each schedule: its name, milliseconds, and the ratio.

  Args:
    rounds: How often each step is timed, in turn with the sequential one.

  Raises:
    ValueError: There are too few devices.
  """
  if jax.device_count() < NUM_STAGES:
    raise ValueError(
      f"Measuring needs {NUM_STAGES} devices, there are {jax.device_count()};"
      f" set JAX_NUM_CPU_DEVICES={NUM_STAGES}."
    )
  return [
    _row(
      make(num_stages=NUM_STAGES, num_microbatches=NUM_MICROBATCHES),
      residuals,
      rounds=rounds,
    )
    for residuals, makers in (
      (lowering.Residuals.RECOMPUTE, _MAKERS),
      (lowering.Residuals.SAVE, _SAVING),
    )
    for make in makers
  ]


def _row(
  schedule: table.Table, residuals: lowering.Residuals, *, rounds: int
) -> tuple[str, ...]:
  functions = _functions()
  layers, outer, batch = _arrays()
  pieces = schedule.pieces
  chunks = virtual_stages.from_layers(layers, pieces=pieces)
  mesh = jax.make_mesh(
    (NUM_STAGES,),
    (axes.STAGE,),
    axis_types=(jax.sharding.AxisType.Auto,),
    devices=jax.devices()[:NUM_STAGES],
  )
  staged = jax.device_put(
    chunks,
    jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(axes.STAGE)),
  )
  ours = jax.jit(
    executor.make_gradient_fn(functions, schedule=schedule, residuals=residuals)
  )
  plain = jax.jit(sequential.make_gradient_fn(functions, pieces=pieces))

  def run_ours() -> object:
    with jax.set_mesh(mesh):
      return jax.block_until_ready(ours(staged, outer, batch))

  def run_plain() -> object:
    return jax.block_until_ready(plain(chunks, outer, batch))

  pairs = timing.interleave(run_ours, run_plain, rounds=rounds)
  first, second = (
    f"{statistics.median(seconds) * 1000:.0f}"
    for seconds in (pairs.first, pairs.second)
  )
  ratio = f"{statistics.median(pairs.ratios()):.2f}"
  with jax.set_mesh(mesh):
    memory = ours.lower(staged, outer, batch).compile().memory_analysis()
  assert memory is not None
  temporary = f"{memory.temp_size_in_bytes / 1e6:.0f}"
  saves = residuals is lowering.Residuals.SAVE
  name = f"{schedule.name}, saved" if saves else schedule.name
  return name, first, second, ratio, temporary


def _functions() -> model_functions.ModelFunctions:
  def layer(x: jax.Array, given: Any) -> tuple[jax.Array, None]:
    up, down = given
    hidden = jnp.tanh(jnp.einsum("BTD,DF->BTF", x, up))
    return x + jnp.einsum("BTF,FD->BTD", hidden, down), None

  def chunk(variables: Any, x: jax.Array, _: Any) -> tuple[Any, jax.Array]:
    # One after the other, as a chunk must be whose gradients are split.
    for up, down in zip(variables["up"], variables["down"], strict=True):
      x, _ = layer(x, (up, down))
    return x, jnp.float32(0)

  def last(outer: Any, y: jax.Array, piece: Any) -> tuple[jax.Array, Any]:
    error = jnp.einsum("BTD,DE->BTE", y, outer) - piece.inputs["targets"]
    return jnp.sum(error**2), {"weight": jnp.float32(error.size)}

  return model_functions.ModelFunctions(
    first=lambda outer, piece: piece.inputs["x"], chunk=chunk, last=last
  )


def _arrays() -> tuple[Mapping[str, Any], jax.Array, Mapping[str, jax.Array]]:
  rng = np.random.default_rng(0)

  def draw(*shape: int, scale: float = 1.0) -> jax.Array:
    return jnp.asarray(scale * rng.standard_normal(shape), jnp.float32)

  wide, scale = 4 * EMBED, EMBED**-0.5
  layers = {
    "up": draw(NUM_LAYERS, EMBED, wide, scale=scale),
    "down": draw(NUM_LAYERS, wide, EMBED, scale=scale / 4),
  }
  rows = (NUM_MICROBATCHES, ROWS, LENGTH, EMBED)
  batch = {"x": draw(*rows), "targets": draw(*rows)}
  return layers, draw(EMBED, EMBED, scale=scale), batch

"""Tests of layers that keep, draw or look up something, with a schedule."""

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers.stacks import stack
from paxon.pipeline import spmd_pipeline
from paxon.pipeline.schedules import (
  chunk_gradients,
  generators,
  linen_testing,
  lowering,
  scheduled_stack,
)
from paxon.quantization import recipes
from paxon.sharding import axes, logical

MICROBATCHES, LAYERS = 4, 5


def _scheduled(block, name, residuals, **fields):
  """A stack whose layers do not divide by its two stages."""
  return scheduled_stack.ScheduledStack(
    (block,),
    LAYERS,
    num_stages=2,
    num_microbatches=MICROBATCHES,
    schedule=generators.find(name),
    residuals=lowering.Residuals(residuals),
    **fields,
  )


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize(
  ("name", "residuals", "on"),
  [
    ("fp8", "save", "stage=2"),
    ("fp8_current", "recompute", "stage=2,data=2"),
  ],
)
def test_quantized_products_are_those_of_a_learner(name, residuals, on):
  """Those of layers and of the head, with histories of delayed scales."""
  recipe = recipes.find_recipe(name)
  block = linen_testing.block(recipe=recipe)
  plain = linen_testing.make_model(stack.Stack((block,), LAYERS), recipe)
  values, specs = linen_testing.make_variables(plain)
  schedule = "1f1b" if residuals == "save" else "1f1b_two_slots"
  own = _scheduled(block, schedule, residuals)
  got = linen_testing.compute_scheduled(
    linen_testing.make_model(own, recipe), on, values=values, specs=specs
  )
  want = linen_testing.compute_accumulated(
    plain, MICROBATCHES, values=values, specs=specs
  )
  linen_testing.assert_equal(got, want)
  if name == "fp8":
    histories = jax.tree.leaves(got[1]["fp8"])
    # Of two operands and a gradient of three products.
    assert len(histories) == 9
    assert all(np.all(x[..., 0] > 0) for x in histories)


class Noise(nn.Module):
  """Multiplies by random numbers of two streams."""

  @nn.compact
  def __call__(self, x, positions):
    """Returns `x`, each number with a factor of its own."""
    del positions
    for stream in ("dropout", "rounding"):
      x *= 0.5 + jax.random.uniform(self.make_rng(stream), x.shape)
    return x


@pytest.mark.nightly
def test_random_numbers_depend_on_layer_and_microbatch_only():
  """Those of layers and of what is before and after them, on any stage."""
  block = linen_testing.block(more=Noise())
  # A stack's scan draws other numbers than a pipeline of one stage.
  one = spmd_pipeline.PipelinedStack(
    (block,), LAYERS, num_stages=1, num_microbatches=1
  )
  plain = linen_testing.make_model(one)
  values, specs = linen_testing.make_variables(plain)
  # Typed keys and raw ones.
  rngs = {"dropout": jax.random.key(3), "rounding": jax.random.PRNGKey(4)}
  given = {"values": values, "specs": specs, "rngs": rngs}
  own = _scheduled(block, "1f1b_two_slots", "save")
  got = linen_testing.compute_scheduled(
    linen_testing.make_model(own), "stage=2,data=2", **given
  )
  want = linen_testing.compute_accumulated(plain, MICROBATCHES, **given)
  linen_testing.assert_equal(got, want)


class Lookup(nn.Module):
  """Adds rows of a table, as embeddings of positions in each layer do."""

  @nn.compact
  def __call__(self, x, positions):
    """Returns `x` and the rows of `positions`."""
    init = logical.partitioned(
      nn.initializers.normal(1.0), (axes.VOCAB, axes.EMBED)
    )
    table = self.param("table", init, (linen_testing.VOCAB, x.shape[-1]))
    return x + jnp.take(table, positions, axis=0, mode="fill")


def test_layers_may_look_up_rows_of_a_table():
  """XLA's partitioner would abort if both axes of the table stayed split."""
  block = linen_testing.block(more=Lookup())
  plain = linen_testing.make_model(stack.Stack((block,), LAYERS))
  values, specs = linen_testing.make_variables(plain)
  own = _scheduled(block, "1f1b_two_slots", "recompute")
  got = linen_testing.compute_scheduled(
    linen_testing.make_model(own),
    "stage=2,fsdp=2,tensor=2",
    values=values,
    specs=specs,
  )
  want = linen_testing.compute_accumulated(
    plain, MICROBATCHES, values=values, specs=specs
  )
  linen_testing.assert_equal(got, want)


class Bfloat16(nn.Module):
  """A matmul in bfloat16 with a float32 kernel."""

  @nn.compact
  def __call__(self, x, positions):
    """Returns the matmul, in the dtype of `x`."""
    del positions
    init = logical.partitioned(
      nn.initializers.lecun_normal(), (axes.EMBED, axes.MLP)
    )
    kernel = self.param("kernel", init, (linen_testing.EMBED,) * 2)
    y = jnp.einsum(
      "BTD,DE->BTE", x.astype(jnp.bfloat16), kernel.astype(jnp.bfloat16)
    )
    return y.astype(x.dtype)


def test_unrolled_layers_save_no_kernels(monkeypatch):
  """Kernels cast to bfloat16 are cast again by the backward operation."""
  splits = []
  split = chunk_gradients.split

  def record(*args, **given):
    splits.append(split(*args, **given))
    return splits[-1]

  monkeypatch.setattr(chunk_gradients, "split", record)
  block = linen_testing.block(more=Bfloat16())
  plain = linen_testing.make_model(stack.Stack((block,), LAYERS))
  values, specs = linen_testing.make_variables(plain)
  own = _scheduled(block, "1f1b_two_slots", "save", scan=False)
  got = linen_testing.compute_scheduled(
    linen_testing.make_model(own), "stage=2", values=values, specs=specs
  )
  (made,) = splits
  assert any(saved.dtype == jnp.bfloat16 for saved in made.residuals)
  kernel = (linen_testing.EMBED,) * 2
  for saved in made.residuals:
    # Nor stacked kernels of several layers.
    assert saved.shape[-2:] != kernel, saved
  want = linen_testing.compute_accumulated(
    plain, MICROBATCHES, values=values, specs=specs
  )
  linen_testing.assert_equal(got, want)

"""Tests for `QuantizedEinsum`: state, names, random keys."""

import functools

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.quantization import (
  einsum,
  matmuls,
  number_formats,
  quantized_einsum,
  recipes,
)
from paxon.quantization import recipe as recipe_lib
from paxon.sharding import variables

LAYERS, BATCH, WIDTH = 3, 4, 8


class Layer(nn.Module):
  """Two matmuls of one layer, and one of a submodule."""

  einsum: matmuls.Einsum

  @nn.compact
  def __call__(self, x, _=None):
    """Returns `x` and a branch."""
    init = nn.initializers.normal()
    kernels = self.param("kernels", init, (3, WIDTH, WIDTH), jnp.float32)
    call = functools.partial(matmuls.call, self.einsum)
    y = call("in", "BD,DF->BF", x, kernels[0])
    y = call("out", "BD,DF->BF", jnp.tanh(y), kernels[1])
    part = matmuls.name_einsum(self.einsum, "part")
    y += matmuls.call(part, "kernel", "BD,DF->BF", x, kernels[2])
    return x + y, None


class Stack(nn.Module):
  """Scanned layers."""

  recipe: recipe_lib.Recipe

  @nn.compact
  def __call__(self, x):
    """Returns `x` after all layers."""
    provider = einsum.QuantizedEinsum(self.recipe, parent=None)
    scanned = nn.scan(
      Layer,
      variable_axes={True: 0},
      split_rngs={True: True},
      length=LAYERS,
      metadata_params={nn.PARTITION_NAME: "layers"},
    )
    return scanned(provider, name="layers")(x)[0]


def _x():
  x = np.random.default_rng(1).standard_normal((BATCH, WIDTH))
  return jax.device_put(np.float32(x))


def _variables(module):
  return nn.unbox(jax.jit(module.init)(jax.random.key(0), _x()))


def test_a_plain_function_is_called_without_names():
  layer = Layer(jnp.einsum)
  v = _variables(layer)
  y, _ = jax.jit(layer.apply)(v, _x())
  k = np.asarray(v["params"]["kernels"], np.float64)
  x = np.asarray(_x(), np.float64)
  wanted = x + np.tanh(x @ k[0]) @ k[1] + x @ k[2]
  np.testing.assert_allclose(y, wanted, rtol=1e-5, atol=1e-6)
  assert matmuls.name_einsum(jnp.einsum, "part") is jnp.einsum
  assert not matmuls.is_provider(jnp.einsum)


def test_each_matmul_of_each_layer_has_state():
  module = Stack(recipes.find_recipe("fp8"))
  abstract = jax.eval_shape(lambda: module.init(jax.random.key(0), _x()))
  specs = variables.get_specs(abstract)["fp8"]["layers"]["einsum"]
  assert set(specs) == {"in", "out", "part"}
  spec = specs["part"]["gradient_amax_history"]
  assert (spec.shape, spec.axes) == ((LAYERS, 1024), ("layers", None))
  assert spec.update is variables.UpdateRule.OVERWRITE_WITH_GRADIENT
  assert spec.combine is variables.CombineRule.MAX
  assert spec.trainable
  assert not spec.regularized
  assert spec.dtype == jnp.float32


def test_the_gradient_of_the_state_is_the_next_state_of_each_layer():
  module = Stack(recipes.find_recipe("fp8"))
  values = _variables(module)

  @jax.jit
  def next_state(values):
    def loss(state):
      return jnp.sum(module.apply({**values, "fp8": state}, _x()) ** 2)

    return jax.grad(loss)(values["fp8"])

  new = next_state(values)["layers"]["einsum"]
  kernels = np.abs(values["params"]["layers"]["kernels"]).max((2, 3))
  for number, product in enumerate(("in", "out", "part")):
    history = np.asarray(new[product]["rhs_amax_history"])
    np.testing.assert_array_equal(history[:, 0], kernels[:, number])
    np.testing.assert_array_equal(history[:, 1:], 0)
  # Each layer's own: what it was given differs from layer to layer.
  assert len(set(np.asarray(new["in"]["lhs_amax_history"])[:, 0])) == LAYERS


class Twice(nn.Module):
  """A layer that is called twice."""

  recipe: recipe_lib.Recipe

  @nn.compact
  def __call__(self, x):
    """Returns `x` after both."""
    layer = Layer(einsum.QuantizedEinsum(self.recipe, parent=None), name="a")
    return layer(layer(x)[0])[0]


def test_rejects_two_uses_of_a_state():
  """Its next value is a gradient, and those of two uses are added up."""
  key = jax.random.key(0)
  with pytest.raises(ValueError, match=r"a/einsum/in is computed twice in one"):
    jax.eval_shape(Twice(recipes.find_recipe("fp8")).init, key, _x())
  # Without a state there is nothing to add up.
  made = jax.eval_shape(
    Twice(recipes.find_recipe("fp8_current")).init, key, _x()
  )
  assert set(made) == {"params"}


def test_without_a_state_delayed_scales_are_current():
  delayed = Layer(einsum.QuantizedEinsum(recipes.find_recipe("fp8")))
  current = Layer(einsum.QuantizedEinsum(recipes.find_recipe("fp8_current")))
  params = {"params": _variables(delayed)["params"]}
  np.testing.assert_array_equal(
    *(jax.jit(layer.apply)(params, _x())[0] for layer in (delayed, current))
  )


def _random(operand):
  tensor = recipe_lib.TensorRecipe(
    number_formats.INT8, rounding=recipe_lib.Rounding.STOCHASTIC
  )
  plain = recipe_lib.TensorRecipe(number_formats.INT8)
  operands = {"lhs": plain, "rhs": plain, "gradient": plain, operand: tensor}
  return einsum.QuantizedEinsum(recipe_lib.Recipe(**operands))


def test_stochastic_rounding_uses_its_stream():
  provider = _random("lhs")
  assert provider.random_streams == ("rounding",)
  layer = Layer(provider)
  values = _variables(layer)

  apply = jax.jit(lambda rngs: layer.apply(values, _x(), rngs=rngs)[0])

  def run(**rngs):
    return np.asarray(apply(rngs))

  first = run(rounding=jax.random.key(0))
  np.testing.assert_array_equal(first, run(rounding=jax.random.key(0)))
  assert np.any(first != run(rounding=jax.random.key(1)))
  # As evaluation has it: without the stream, to the nearest.
  np.testing.assert_array_equal(run(), run(dropout=jax.random.key(3)))
  assert einsum.QuantizedEinsum(recipes.find_recipe("fp8")).random_streams == ()


def test_rejects_training_without_the_stream():
  layer = Layer(_random("gradient"))
  values = nn.unbox(jax.eval_shape(layer.init, jax.random.key(0), _x()))
  gradient = jax.grad(lambda v: jnp.sum(layer.apply(v, _x())[0]))
  with pytest.raises(ValueError, match="needs a random key"):
    jax.eval_shape(gradient, values)


def test_matches_quantized_einsum():
  recipe = recipes.find_recipe("int8")
  provider = einsum.QuantizedEinsum(recipe)
  kernel = np.random.default_rng(2).standard_normal((WIDTH, 5))
  equation, wide = "BD,DF->BF", {"preferred_element_type": jnp.float32}
  args = (
    _x().astype(jnp.bfloat16),
    jax.device_put(np.asarray(kernel, jnp.bfloat16)),
  )
  actual = jax.jit(
    lambda *args: provider.apply({}, equation, *args, matmul="kernel", **wide)
  )(*args)
  wanted = jax.jit(
    lambda *args: quantized_einsum.quantized_einsum(
      equation, *args, recipe=recipe, **wide
    )
  )(*args)
  assert actual.dtype == jnp.float32
  np.testing.assert_array_equal(actual, wanted)


def test_monitor_reports_clipped_and_flushed_values():
  layer = Layer(
    einsum.QuantizedEinsum(recipes.find_recipe("fp8"), monitor=True)
  )
  values = _variables(layer)
  product = values["fp8"]["einsum"]["in"]
  # Half of the largest value: what is larger than it saturates.
  largest = np.float32(np.abs(_x()).max())
  limit = 2.0 ** np.floor(np.log2(largest / 448.0)) * 448.0
  product["lhs_amax_history"] = product["lhs_amax_history"].at[0].set(limit)
  product["gradient_shares"] = jax.device_put(np.float32([1, 0.25, 0.5]))

  @jax.jit
  def run(state):
    def loss(state):
      given = {**values, "fp8": state}
      (y, _), new = layer.apply(given, _x(), mutable=["summaries"])
      return jnp.sum(y**2) * 2.0**-60, new["summaries"]

    return jax.grad(loss, has_aux=True)(state)

  gradient, told = run(values["fp8"])
  told = told["einsum"]["in"]
  clipped = np.mean(np.abs(_x()) > limit)
  assert clipped > 0
  np.testing.assert_allclose(told["lhs_clipped"][0], clipped)
  assert told["rhs_clipped"] == (0,)
  # Of the step before.
  assert told["gradient_clipped"] == (0.25,)
  assert told["gradient_flushed"] == (0.5,)
  # Of this step: beside the first scale, all of it is zero. So nothing reaches
  # the product before it, which keeps its record.
  shares = {k: v["gradient_shares"] for k, v in gradient["einsum"].items()}
  np.testing.assert_array_equal(shares["out"], [1, 0, 1])
  np.testing.assert_array_equal(shares["in"], [0, 0, 0])

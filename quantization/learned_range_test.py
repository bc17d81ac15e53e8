"""Tests of learned ranges, against float64 from the definition."""

import functools

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.quantization import (
  einsum,
  learned_range,
  matmuls,
  number_formats,
  recipe,
  recipes,
  served_einsum,
)
from paxon.quantization import testing as quantization_testing
from paxon.sharding import logical, variables

C, N, GROUP = 12, 8, 4
_RECIPE = recipe.TensorRecipe(
  number_formats.INT4, granularity=recipe.Granularity.BLOCK, block=(GROUP, 1)
)
_LEARNED = recipe.Recipe(None, _RECIPE, None, learned_range=True)


def _draw(seed, *shape):
  return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), "f4")


def test_values_and_gradients_are_those_of_the_definition():
  w, p, g = _draw(0, C, N), _draw(1, C // GROUP, N), _draw(2, C, N)

  def total(w, p):
    groups = jax.lax.stop_gradient(jnp.abs(w)).reshape(-1, GROUP, N)
    ranges = jax.nn.sigmoid(p) * jnp.max(groups, axis=1)
    return jnp.sum(learned_range.quantize(w, ranges, _RECIPE) * g)

  loss, (of_w, of_p) = jax.jit(jax.value_and_grad(total, (0, 1)))(w, p)
  w, p, g = (np.asarray(x, np.float64) for x in (w, p, g))
  share = 1 / (1 + np.exp(-p))
  largest = np.abs(w).reshape(-1, GROUP, N).max(axis=1)
  scale = np.repeat(share * largest / 7, GROUP, 0)
  q = w / scale
  inside = np.abs(q) <= 7
  values = np.round(np.clip(q, -7, 7))
  assert 10 < inside.sum() < inside.size - 10
  np.testing.assert_allclose(loss, (values * scale * g).sum(), rtol=1e-5)
  np.testing.assert_allclose(of_w, inside * g, rtol=1e-6)
  by_scale = np.where(inside, values - q, values) * g
  expected = by_scale.reshape(-1, GROUP, N).sum(axis=1)
  expected *= share * (1 - share) * largest / 7
  np.testing.assert_allclose(of_p, expected, rtol=1e-4, atol=1e-6)


class _Layer(nn.Module):
  """A kernel, and a matmul of two activations."""

  einsum: nn.Module

  @nn.compact
  def __call__(self, x):
    init = logical.partitioned(nn.initializers.normal(), ("embed", "mlp"))
    kernel = self.param("kernel", init, (C, N), jnp.float32)
    y = matmuls.call(self.einsum, "kernel", "BD,DF->BF", x, kernel)
    return matmuls.call(self.einsum, "scores", "BF,CF->BC", y, y)


def test_stored_weights_are_those_of_training():
  """Also where the range was moved; activations have no range."""
  x = _draw(3, 8, C)
  layer = _Layer(einsum.QuantizedEinsum(_LEARNED))
  made = jax.jit(layer.init)(jax.random.key(0), x)
  specs = {s.name: s for s in jax.tree.leaves(variables.get_specs(made))}
  spec = specs["params/einsum/kernel/range"]
  assert (spec.shape, spec.axes) == ((C // GROUP, N), ("embed", "mlp"))
  assert spec.regularized is False
  assert not any("scores" in name for name in specs)
  values = nn.unbox(made)
  values["params"]["einsum"]["kernel"]["range"] = _draw(4, C // GROUP, N)
  trained = jax.jit(layer.apply)(values, x)
  serve = _Layer(served_einsum.ServedEinsum(_LEARNED))
  store = functools.partial(serve.apply, mutable=[served_einsum.COLLECTION])
  _, stored = jax.jit(store)(values, x)
  fields = nn.unbox(stored)["served"]["einsum"]["kernel"]
  share = jax.nn.sigmoid(values["params"]["einsum"]["kernel"]["range"])
  kernel = np.asarray(values["params"]["kernel"], np.float64)
  largest = np.abs(kernel).reshape(-1, GROUP, N).max(axis=1)
  np.testing.assert_allclose(fields["scale"], share * largest / 7, rtol=1e-5)
  served = jax.jit(serve.apply)(values | nn.unbox(stored), x)
  weights = served_einsum.dequantize(
    fields["values"],
    fields["scale"],
    number_format=number_formats.INT4,
    layer_shape=(C, N),
  )
  y = np.asarray(x, np.float64) @ np.asarray(weights, np.float64)
  np.testing.assert_allclose(served, y @ y.T, rtol=1e-4, atol=1e-6)
  # Training quantizes the right operand of the scores, too.
  rounded = quantization_testing.quantize(np.float32(y), _RECIPE, (1,))
  np.testing.assert_allclose(trained, y @ rounded.T, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"search_range": True}, r"learned_range excludes search_range"),
    ({"calibration": recipe.Gptq()}, r"excludes search_range and calibration"),
    ({"rhs": None}, r"learned_range needs a Recipe.rhs of integers .* None"),
    (
      {"rhs": recipe.TensorRecipe(number_formats.INT4)},
      r"with Granularity.CHANNEL or BLOCK",
    ),
  ],
)
def test_rejects_other_recipes(fields, message):
  given = {"lhs": None, "rhs": _RECIPE, "gradient": None, **fields}
  with pytest.raises(ValueError, match=message):
    recipe.Recipe(**given, learned_range=True)


def test_the_named_recipe_stores_what_it_trains():
  made = served_einsum.serving_recipe(recipes.find_recipe("int4_learned"))
  assert made.learned_range
  assert not made.search_range

"""Tests for matmuls with quantized stored weights."""

import functools

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.quantization import (
  calibration,
  equations,
  learned_range,
  matmuls,
  number_formats,
  recipe,
  recipes,
  served_einsum,
  testing,
)
from paxon.quantization import quantized_array as qa
from paxon.sharding import logical, variables

IN, OUT = 12, 4
X = jax.device_put(
  np.float32(np.random.default_rng(0).standard_normal((2, 3, IN)))
)


class _Layer(nn.Module):
  """A kernel, and a product of two activations of the same name's layer."""

  einsum: nn.Module

  @nn.compact
  def __call__(self, x):
    init = logical.partitioned(nn.initializers.normal(), ("embed", "mlp"))
    kernel = self.param("kernel", init, (IN, OUT), jnp.float32)
    y = matmuls.call(self.einsum, "kernel", "BTD,DF->BTF", x, kernel)
    return y, matmuls.call(self.einsum, "scores", "BTF,BSF->BTS", y, y)


def _layer(name):
  rules = served_einsum.serving_recipe(recipes.find_recipe(name))
  return _Layer(served_einsum.ServedEinsum(rules))


@functools.partial(jax.jit, static_argnums=0)
def _outputs(layer, values):
  return layer.apply(values, X)


def _values():
  """Parameters, whose outputs have scales far apart."""
  kernel = np.random.default_rng(1).standard_normal((IN, OUT)) * [1, 10, 0.1, 3]
  return {"params": {"kernel": jax.device_put(np.float32(kernel))}}


def _calibrate(layer, values, x):
  apply = functools.partial(layer.apply, mutable=[calibration.COLLECTION])
  return dict(jax.jit(apply)(values, x)[1])


def _converted(layer, values):
  told = [served_einsum.COLLECTION, served_einsum.NOT_SERVED]
  _, made = jax.jit(lambda v: layer.apply(v, X, mutable=told))(values)
  made = dict(variables.unbox(made))
  # The product of two activations.
  assert list(made.pop(served_einsum.NOT_SERVED)["einsum"]) == ["scores"]
  return made


def _rounded(x, axis, largest):
  """Whole numbers and their scales, in float64."""
  scale = np.abs(x).max(axis, keepdims=True) / largest
  return np.round(x / scale), scale


def _least_wrong(x, axis):
  """As `_rounded` to 4 bits, by the range of each output that loses least."""
  found = []
  for factor in np.arange(20, 9, -1) / 20:
    scale = factor * np.abs(x).max(axis, keepdims=True) / 7
    q = np.clip(np.round(x / scale), -7, 7)
    found.append((((q * scale - x) ** 2).sum(axis, keepdims=True), q, scale))
  best = np.argmin([error for error, _, _ in found], axis=0)
  return tuple(np.choose(best, [f[i] for f in found]) for i in (1, 2))


@pytest.mark.parametrize(("name", "largest"), [("int8", 127), ("int4", 7)])
def test_matches_numpy(name, largest):
  layer, values = _layer(name), _values()
  served = _converted(layer, values)
  y, scores = _outputs(layer, served | values)
  kernel = np.asarray(values["params"]["kernel"], np.float64)
  q, scale = _rounded(kernel, 0, largest)
  if name == "int4":
    whole, (q, scale) = scale, _least_wrong(kernel, 0)
    assert np.any(scale < whole)
  # Activations have eight bits with both.
  rows, row_scale = _rounded(np.asarray(X, np.float64), -1, 127)
  expected = (rows @ q) * row_scale * scale
  np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)
  stored = served["served"]["einsum"]["kernel"]
  np.testing.assert_allclose(stored["scale"], scale, rtol=1e-6)
  # Products of activations are as they are.
  plain = np.einsum("btf,bsf->bts", expected, expected)
  np.testing.assert_allclose(scores, plain, rtol=1e-4, atol=1e-4)


def test_fp8_is_close():
  layer, values = _layer("fp8"), _values()
  served = _converted(layer, values)
  assert served["served"]["einsum"]["kernel"]["values"].dtype == (
    jnp.float8_e4m3fn
  )
  y = np.asarray(_outputs(layer, served | values)[0])
  exact = np.asarray(X) @ np.asarray(values["params"]["kernel"])
  bound = np.abs(X) @ np.abs(values["params"]["kernel"]) * 2 * 2.0**-4
  assert (np.abs(y - exact) <= bound).all()


def test_weight_only_quantization_uses_the_layer_dtype():
  one = recipe.TensorRecipe(
    recipes.find_recipe("int8").rhs.format,
    granularity=recipe.Granularity.CHANNEL,
  )
  layer = _Layer(served_einsum.ServedEinsum(recipe.Recipe(None, one, None)))
  values = _values()
  y, _ = _outputs(layer, _converted(layer, values) | values)
  q, scale = _rounded(np.asarray(values["params"]["kernel"], "f8"), 0, 127)
  np.testing.assert_allclose(y, np.asarray(X, "f8") @ (q * scale), rtol=1e-5)


@pytest.mark.parametrize("name", ["int8", "int4", "fp8"])
def test_the_parameter_is_not_read_and_the_bytes_are_as_the_bits_say(name):
  layer, values = _layer(name), _values()
  served = _converted(layer, values)
  y, _ = _outputs(layer, served | values)
  nothing = {"params": {"kernel": np.full((IN, OUT), np.nan, np.float32)}}
  again, _ = _outputs(layer, served | nothing)
  np.testing.assert_array_equal(y, again)
  size = sum(x.nbytes for x in jax.tree.leaves(served))
  bits = 4 if name == "int4" else 8
  assert size == IN * OUT * bits // 8 + OUT * 4


def test_without_stored_weights_matmuls_are_not_quantized():
  layer, values = _layer("int8"), _values()
  y, _ = jax.jit(layer.apply)(values, X)
  np.testing.assert_array_equal(y, X @ values["params"]["kernel"])


def test_stored_weights_have_the_axes_of_the_parameter():
  made = jax.eval_shape(_layer("int4").init, jax.random.key(0), X)
  specs = {s.name: s for s in jax.tree.leaves(variables.get_specs(made))}
  values = specs["served/einsum/kernel/values"]
  assert (values.shape, values.axes) == ((IN, OUT // 2), ("embed", "mlp"))
  scale = specs["served/einsum/kernel/scale"]
  assert (scale.shape, scale.axes) == ((1, OUT), (None, "mlp"))
  assert "served/einsum/scores/values" not in specs
  assert {name.partition("/")[0] for name in specs} == {"params", "served"}
  assert not values.trainable


def test_a_stored_mapping_its_parameter():
  name = "served/stack/layers/blocks_0/mlp/einsum/gate/values"
  found = served_einsum.stored_parameter(name)
  assert found == "params/stack/layers/blocks_0/mlp/gate"
  for other in (name.replace("values", "scale"), "params/a/b/c/values"):
    assert served_einsum.stored_parameter(other) is None


def test_an_odd_kernel_of_four_bits_is_not_packed():
  int4 = recipes.find_recipe("int4").rhs.format
  assert served_einsum.packed_axis(int4, (4, 3)) == -2
  assert served_einsum.packed_axis(int4, (5, 3)) is None
  assert (
    served_einsum.packed_axis(recipes.find_recipe("int8").rhs.format, (4,))
    is None
  )


INT4 = number_formats.INT4
GRANULARITIES = {
  "tensor": {},
  "channel": {"granularity": recipe.Granularity.CHANNEL},
  "rows": {"granularity": recipe.Granularity.BLOCK, "block": (16, 1)},
}
_best = jax.jit(
  served_einsum.search_scale,
  static_argnames=("tensor_recipe", "contracted", "power"),
)


@pytest.mark.parametrize("power", [2.0, 3.5])
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_best_has_the_smallest_error(granularity, power):
  tensor = recipe.TensorRecipe(INT4, **GRANULARITIES[granularity])
  x = np.random.default_rng(0).standard_normal((64, 3)).astype(np.float32)
  got = _best(
    jax.device_put(x), tensor_recipe=tensor, contracted=(0,), power=power
  )
  off = np.abs(np.asarray(got.dequantize(), np.float64) - x) ** power
  clipped = False
  for tile in testing.tiles(x, tensor, (0,)):
    errors = []
    for factor in served_einsum.FACTORS:
      amax = np.float32(factor) * np.max(np.abs(x[tile]))
      scale = testing.make_scale(float(amax), tensor)
      values = testing.round_to_format(x[tile] * (1 / scale), tensor) * scale
      errors.append((np.abs(values - x[tile]) ** power).sum())
    assert off[tile].sum() == pytest.approx(min(errors), rel=1e-4)
    clipped |= min(errors) < errors[0] * 0.99
  assert clipped


def test_without_outliers_nothing_is_clipped():
  x = jnp.where(jnp.arange(64) % 2 == 0, 1.0, -1.0)
  got = _best(x, tensor_recipe=recipe.TensorRecipe(INT4))
  np.testing.assert_array_equal(got.dequantize(), x)


@pytest.mark.parametrize("factors", [(), (1.0, 0.0)])
def test_ranges_are_positive(factors):
  with pytest.raises(ValueError, match=r"positive factors, and at least one"):
    served_einsum.search_scale(
      jnp.ones(2), recipe.TensorRecipe(INT4), factors=factors
    )


def test_weights_have_no_history():
  delayed = recipe.TensorRecipe(INT4, scaling=recipe.Delayed())
  with pytest.raises(
    ValueError, match=r"search_scale needs TensorRecipe.scaling"
  ):
    served_einsum.search_scale(jnp.ones(2), delayed)


@pytest.mark.parametrize("name", ["int4_gptq", "int4_awq", "int8_smooth"])
def test_calibrated_weights_are_those_of_the_statistics(name):
  layer, values = _layer(name), _values()
  halves = jnp.split(X, 2)
  statistics = {}
  for half in halves:
    statistics = _calibrate(layer, values | statistics, half)
  served = _converted(layer, values | statistics)
  stored = served["served"]["einsum"]["kernel"]
  rules = served_einsum.serving_recipe(recipes.find_recipe(name))
  equation = equations.parse("BTD,DF->BTF", 3, 2)
  nearest = functools.partial(
    served_einsum.search_scale if rules.search_range else qa.quantize,
    tensor_recipe=rules.rhs,
    contracted=(0,),
  )
  kernel = values["params"]["kernel"]
  expected, inputs = calibration.quantize(
    equation,
    kernel,
    calibration.measure(equation, X, rules.calibration),
    rules.calibration,
    nearest,
  )
  got = qa.QuantizedArray(
    stored["values"],
    stored["scale"],
    format=rules.rhs.format,
    packed_axis=served_einsum.packed_axis(rules.rhs.format, kernel.shape),
  )
  np.testing.assert_allclose(got.dequantize(), expected.dequantize(), rtol=1e-5)
  x = np.asarray(X, "f8")
  if inputs is not None:
    np.testing.assert_allclose(stored["inputs"], inputs, rtol=1e-5)
    x = x * np.asarray(inputs)[:, 0]
  if rules.lhs is not None:
    whole, scale = _rounded(x, -1, 127)
    x = whole * scale
  y, _ = _outputs(layer, served | values)
  np.testing.assert_allclose(
    y, x @ np.asarray(expected.dequantize(), "f8"), rtol=1e-4, atol=1e-4
  )


@pytest.mark.parametrize("name", ["int8_static", "fp8_static"])
def test_a_static_range_is_that_of_the_batches(name):
  layer, values = _layer(name), _values()
  statistics = {}
  for half in jnp.split(X, 2):
    statistics = _calibrate(layer, values | statistics, half)
  served = _converted(layer, values | statistics)
  stored = served["served"]["einsum"]["kernel"]
  np.testing.assert_array_equal(stored["input_range"], np.abs(X).max())
  # Larger activations saturate, and smaller ones keep their scale.
  limit = np.abs(X).max()
  if name == "fp8_static":
    limit = 448 * 2 ** np.ceil(np.log2(limit / 448))
  apply = jax.jit(layer.apply)
  y, _ = apply(served | values, X * 3)
  clipped, _ = apply(served | values, jnp.clip(X * 3, -limit, limit))
  np.testing.assert_allclose(y, clipped, rtol=1e-6)
  one, _ = apply(served | values, X[:1, :1])
  np.testing.assert_allclose(one, _outputs(layer, served | values)[0][:1, :1])


def test_calibration_needs_statistics_and_inputs():
  layer = _layer("int4_gptq")
  with pytest.raises(ValueError, match=r"Gptq needs the statistics of the mat"):
    _converted(layer, _values())
  with pytest.raises(ValueError, match=r"Gptq cannot quantize the kernel 'up'"):
    layer.einsum.apply(
      {}, "BD,DF->BF", jnp.ones((IN, OUT)), matmul="up", method="make_grouped"
    )


@pytest.mark.nightly(keep=8)
@pytest.mark.parametrize("name", recipes.NAMES)
def test_outputs_are_those_of_the_simulated_recipe(name):
  """Activations rounded in numpy times the stored weights, in float64."""
  layer, values = _layer(name), _values()
  rules = served_einsum.serving_recipe(recipes.find_recipe(name))
  if rules.learned_range:
    learned = {"kernel": {learned_range.PARAMETER: jnp.full((1, OUT), 2.0)}}
    values["params"]["einsum"] = learned
  served = _converted(layer, values | _calibrate(layer, values, X))
  stored = served["served"]["einsum"]["kernel"]
  weights = np.asarray(
    served_einsum.dequantize(
      stored["values"],
      served_einsum.load_scale(stored),
      stored.get("zero"),
      number_format=rules.rhs.format,
      layer_shape=(IN, OUT),
    ),
    "f8",
  )
  x = np.array(X)
  if "inputs" in stored:
    x *= np.asarray(stored["inputs"])[:, 0]
  if "input_range" in stored:
    largest = np.abs(x).max()
    np.testing.assert_array_equal(stored["input_range"], largest)
  x = testing.quantize(x, rules.lhs, (2,))
  y, _ = _outputs(layer, served | values)
  np.testing.assert_allclose(y, x @ weights, rtol=1e-5, atol=1e-5)
  kernel = np.asarray(values["params"]["kernel"])
  off = x @ weights - np.asarray(X) @ kernel
  assert 0 < np.abs(off).max() < np.abs(np.asarray(X) @ kernel).max()

"""Tests for calibrated quantization, against float64 from the papers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.quantization import (
  calibration,
  equations,
  number_formats,
  quantized_array,
  recipe,
  recipes,
  served_einsum,
)

C, N, T, GROUP = 12, 5, 40, 4
_WEIGHTS = recipe.TensorRecipe(
  number_formats.INT4,
  granularity=recipe.Granularity.BLOCK,
  block=(GROUP, 1),
)


def _inputs(seed, *shape):
  """Correlated inputs whose features have scales far apart."""
  draw = np.random.default_rng(seed)
  x = draw.standard_normal((*shape, C)) @ draw.standard_normal((C, C))
  return np.float32(x * np.exp(draw.standard_normal(C)))


def _weights(seed, *shape):
  return np.float32(np.random.default_rng(seed).standard_normal(shape))


@functools.partial(jax.jit, static_argnames=("contracted", "channel"))
def _nearest(rhs, *, contracted=(0,), channel=False):
  if channel:
    return quantized_array.quantize(
      rhs, recipes.find_recipe("int8").rhs, contracted=contracted
    )
  return served_einsum.search_scale(rhs, _WEIGHTS, contracted=contracted)


@functools.partial(jax.jit, static_argnums=(0, 3, 4))
def _run(text, lhs, rhs, method, channel):
  equation = equations.parse(text, lhs.ndim, rhs.ndim)
  nearest = functools.partial(
    _nearest, contracted=equation.contracted_axes(equation.rhs), channel=channel
  )
  measured = calibration.measure(equation, lhs, method)
  made, inputs = calibration.quantize(equation, rhs, measured, method, nearest)
  return made.values, made.scale, made.dequantize(), inputs


def _quantize(text, lhs, rhs, method, *, channel=False):
  return jax.tree.map(np.asarray, _run(text, lhs, rhs, method, channel))


def _optimal_brain_quantization(w, scale, hessian, damping):
  """GPTQ by its definition: one input after the other, by inverse Hessians."""
  w, hessian = np.array(w, "f8"), np.array(hessian, "f8")
  order = np.argsort(-np.diag(hessian), kind="stable")
  hessian += damping * np.diag(hessian).mean() * np.eye(len(w))
  inverse, values = np.linalg.inv(hessian), np.zeros(w.shape)
  for i in order:
    values[i] = np.clip(np.round(w[i] / scale[i]), -7, 7)
    row = inverse[i] / inverse[i, i]
    w -= np.outer(row, w[i] - values[i] * scale[i])
    # That of the Hessian without this input (equation 3 of the paper).
    inverse -= np.outer(inverse[:, i], row)
  return values


def test_gptq_is_that_of_its_definition():
  x, w = _inputs(0, 2, T), _weights(1, C, N)
  values, scale, _, inputs = _quantize(
    "BTC,CN->BTN", x, w, recipe.Gptq(damping=0.02)
  )
  assert inputs is None
  np.testing.assert_allclose(scale, _nearest(w).scale)
  rows = x.reshape(-1, C).astype("f8")
  expected = _optimal_brain_quantization(
    w, np.repeat(scale, GROUP, 0), rows.T @ rows, 0.02
  )
  np.testing.assert_array_equal(values, expected)
  assert np.any(values != _nearest(w).values)


def test_gptq_of_many_blocks_is_that_of_its_definition():
  size = 2 * 128
  draw = np.random.default_rng(2)
  x = np.float32(
    draw.standard_normal((900, size)) @ draw.standard_normal((size, size)) / 8
  )
  w = _weights(3, size, 3)
  values, scale, _, _ = _quantize("TC,CN->TN", x, w, recipe.Gptq())
  rows = x.astype("f8")
  expected = _optimal_brain_quantization(
    w, np.repeat(scale, GROUP, 0), rows.T @ rows, 0.01
  )
  # Ties in float32: a value that is rounded otherwise changes a few later ones.
  assert np.mean(values != expected) < 0.01


def test_gptq_loses_less_of_the_outputs():
  x, w = _inputs(4, T), _weights(5, C, N)
  exact = x @ w
  *_, gptq, _ = _quantize("TC,CN->TN", x, w, recipe.Gptq())
  off = [
    np.sum((x @ each - exact) ** 2)
    for each in (gptq, np.asarray(_nearest(w).dequantize()))
  ]
  assert off[0] < 0.7 * off[1]


def test_inputs_that_never_vary_are_rounded_to_nearest():
  w = _weights(6, C, N)
  values, *_ = _quantize("TC,CN->TN", np.zeros((T, C), "f4"), w, recipe.Gptq())
  np.testing.assert_array_equal(values, _nearest(w).values)


def _prune_by_definition(w, hessian, damping):
  """SparseGPT with 2:4: one group after the other, by inverse Hessians."""
  w, hessian = np.array(w, "f8"), np.array(hessian, "f8")
  hessian += damping * np.diag(hessian).mean() * np.eye(len(w))
  inverse, kept = np.linalg.inv(hessian), np.ones(w.shape, bool)
  for i in range(len(w)):
    if i % 4 == 0:
      # Each input of the group without those before it, whatever they keep.
      rest, costs = inverse.copy(), []
      for j in range(i, i + 4):
        costs.append(rest[j, j])
        rest -= np.outer(rest[:, j], rest[j]) / rest[j, j]
      scores = w[i : i + 4] ** 2 / np.array(costs)[:, None]
      for n in range(w.shape[1]):
        kept[i + np.argsort(scores[:, n])[:2], n] = False
    row = inverse[i] / inverse[i, i]
    w -= np.outer(row, np.where(kept[i], 0.0, w[i]))
    inverse -= np.outer(inverse[:, i], row)
  return np.where(kept, w, 0.0), kept


@pytest.mark.parametrize("size", [C, 2 * 128])
def test_sparsegpt_is_that_of_its_definition(size):
  draw = np.random.default_rng(20)
  x = np.float32(
    draw.standard_normal((900, size)) @ draw.standard_normal((size, size)) / 8
  )
  w = _weights(21, size, 3)
  values, scale, made, inputs = _quantize(
    "TC,CN->TN", x, w, recipe.SparseGpt(damping=0.02)
  )
  assert inputs is None
  assert np.all(scale == 1)
  rows = x.astype("f8")
  expected, kept = _prune_by_definition(w, rows.T @ rows, 0.02)
  # In float32, a near tie keeps another weight.
  assert np.mean((values != 0) != kept) < 0.01
  if size == C:
    np.testing.assert_allclose(made, expected, rtol=1e-3, atol=1e-4)
  nearest = np.where(kept, w, 0)
  losses = [np.sum((x @ each - x @ w) ** 2) for each in (made, nearest)]
  assert losses[0] < losses[1]


def test_wanda_is_that_of_its_definition():
  x, w = _inputs(22, 2, T), _weights(23, C, N)
  values, scale, made, inputs = _quantize(
    "BTC,CN->BTN", x, w, recipe.Wanda(keep=1, of=3)
  )
  assert inputs is None
  assert scale.shape == (1, N)
  norms = np.linalg.norm(x.reshape(-1, C).astype("f8"), axis=0)
  scores = np.abs(w) * norms[:, None]
  expected = np.zeros(w.shape, "f4")
  for start in range(0, C, 3):
    best = start + np.argmax(scores[start : start + 3], 0)
    expected[best, range(N)] = w[best, range(N)]
  np.testing.assert_array_equal(values, expected)
  np.testing.assert_array_equal(made, expected)


def test_pruned_groups_divide_the_inputs():
  x, w = _inputs(24, T), _weights(25, C, N)
  with pytest.raises(ValueError, match=r"Wanda\.of \(5\) must divide the numb"):
    _quantize("TC,CN->TN", x, w, recipe.Wanda(of=5))


def _least_error_by_definition(x, w, quantized):
  """AWQ: weights and factors of the exponent that loses least."""
  x, w = x.astype("f8"), w.astype("f8")
  mean, best = np.abs(x).mean(0), None
  for i in range(20):
    s = np.maximum((mean / mean.max()) ** (i / 20), 1e-4)
    s /= np.sqrt(s.max() * s.min())
    made = quantized(w * s[:, None]) / s[:, None]
    loss = np.mean((x @ made - x @ w) ** 2)
    if best is None or loss < best[0]:
      best = loss, made, s
  return best[1:]


def test_awq_is_that_of_its_definition():
  x, w = _inputs(7, T), _weights(8, C, N)
  *_, made, inputs = _quantize("TC,CN->TN", x, w, recipe.Awq())
  expected, factors = _least_error_by_definition(
    x, w, lambda w: np.asarray(_nearest(np.float32(w)).dequantize(), "f8")
  )
  np.testing.assert_allclose(inputs, 1 / factors[:, None], rtol=1e-5)
  np.testing.assert_allclose(made * inputs, expected, rtol=1e-4, atol=1e-6)
  assert np.ptp(factors) > 0.1


@pytest.mark.parametrize("strength", [0.5, 0.8])
def test_smooth_quant_is_that_of_its_definition(strength):
  x, w = _inputs(9, 2, T), _weights(10, C, N)
  method = recipe.SmoothQuant(strength=strength)
  values, scale, _, inputs = _quantize(
    "BTC,CN->BTN", x, w, method, channel=True
  )
  largest = np.abs(x).max((0, 1)).astype("f8")
  factors = largest**strength / np.abs(w).max(1) ** (1 - strength)
  np.testing.assert_allclose(inputs[:, 0], 1 / factors, rtol=1e-5)
  smooth = w * factors[:, None]
  np.testing.assert_allclose(scale[0], np.abs(smooth).max(0) / 127, rtol=1e-5)
  assert np.abs(values - smooth / scale).max() < 0.501


@pytest.mark.parametrize(
  "method",
  [recipe.Gptq(), recipe.Awq(), recipe.Wanda(), recipe.SparseGpt()],
)
def test_batches_and_several_inputs_are_each_their_own(method):
  """An equation of experts, and one of two contracted dimensions."""
  x, w = _inputs(11, 3, T), _weights(12, 3, N, C)
  values, _, made, inputs = _quantize("ETC,ENC->ETN", x, w, method)
  for i in range(3):
    one = _quantize("TC,CN->TN", x[i], w[i].T, method)
    np.testing.assert_array_equal(values[i].T, one[0])
    np.testing.assert_allclose(made[i].T, one[2], rtol=1e-5)
    if inputs is not None:
      np.testing.assert_allclose(inputs[i].T, one[3], rtol=1e-5)

  heads, w = _inputs(13, T).reshape(T, 3, 4), _weights(14, 3, 4, N)
  values, _, _, inputs = _quantize("THK,HKN->TN", heads, w, method)
  one = _quantize("TC,CN->TN", heads.reshape(T, C), w.reshape(C, N), method)
  np.testing.assert_array_equal(values.reshape(C, N), one[0])
  if inputs is not None:
    np.testing.assert_allclose(inputs.reshape(C, 1), one[3], rtol=1e-5)


@pytest.mark.parametrize(
  "method",
  [recipe.Gptq(), recipe.Awq(), recipe.SmoothQuant(), recipe.Wanda()],
)
def test_statistics_of_two_batches_are_those_of_both(method):
  equation = equations.parse("TC,CN->TN", 2, 2)
  x = _inputs(15, T)
  halves = [
    calibration.measure(equation, jnp.asarray(half), method)
    for half in (x[:10], x[10:])
  ]
  both = calibration.combine(*halves)
  whole = calibration.measure(equation, jnp.asarray(x), method)
  for name, value in whole.items():
    np.testing.assert_allclose(both[name], value, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
  ("make", "message"),
  [
    (
      lambda: recipe.Gptq(batches=0),
      r"Gptq\.batches must be positive, got 0",
    ),
    (
      lambda: recipe.Gptq(damping=0.0),
      r"Gptq\.damping must be positive, got 0\.0",
    ),
    (
      lambda: recipe.SmoothQuant(strength=2.0),
      r"strength must be in \[0, 1\]",
    ),
    (
      lambda: recipe.Recipe(None, None, None, calibration=recipe.Awq()),
      r"Recipe\.calibration requires Recipe\.rhs",
    ),
    (
      lambda: recipe.Wanda(keep=4),
      r"Wanda\.keep must be between 1 and of - 1, got keep=4, of=4",
    ),
    (
      lambda: recipe.SparseGpt(damping=0.0),
      r"SparseGpt\.damping must be positive, got 0\.0",
    ),
    (
      lambda: recipe.Recipe(
        None, recipes.find_recipe("int8").rhs, None, calibration=recipe.Wanda()
      ),
      r"calibration must be Wanda or SparseGpt with float32 weights, and with"
      r" no others, got Wanda\(",
    ),
    (
      lambda: recipes.parse("sparsegpt"),
      r"'sparsegpt' prunes trained weights, so it needs sparsegpt:convert or",
    ),
  ],
)
def test_rejects(make, message):
  with pytest.raises(ValueError, match=message):
    make()

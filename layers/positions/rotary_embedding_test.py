"""Tests for the rotary embedding."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers import testing
from paxon.layers.positions import rotary_embedding, rotary_scaling

BATCH, LENGTH, HEADS, HEAD_DIM = 2, 4, 3, 6
POSITIONS = testing.array([[0, 1, 2, 3], [0, 1, 0, 500]], jnp.int32)


def _x(dtype=jnp.float32):
  return testing.normal(BATCH, LENGTH, HEADS, HEAD_DIM, dtype=dtype)


def _oracle(x, positions, wavelength):
  """Each pair as a complex number, turned by its angle."""
  x = np.asarray(x, np.float64)
  half = x.shape[-1] // 2
  y = np.zeros_like(x)
  for b, t, n, i in np.ndindex((*x.shape[:3], half)):
    angle = int(positions[b, t]) * wavelength ** (-2 * i / x.shape[-1])
    turned = complex(x[b, t, n, i], x[b, t, n, i + half]) * np.exp(1j * angle)
    y[b, t, n, i], y[b, t, n, i + half] = turned.real, turned.imag
  return y


@pytest.mark.parametrize("wavelength", [10_000.0, 100.0])
def test_matches_complex_rotation(wavelength):
  rotary = rotary_embedding.Rotary(max_wavelength=wavelength)
  np.testing.assert_allclose(
    jax.jit(rotary)(_x(), POSITIONS),
    _oracle(_x(), POSITIONS, wavelength),
    rtol=1e-5,
    # float32 holds an angle of 500 to 3e-5.
    atol=1e-4,
  )


def test_products_depend_on_distance_only():
  rotary = jax.jit(rotary_embedding.Rotary())
  q, k = (testing.normal(1, 1, 1, HEAD_DIM, seed=s) for s in (1, 2))

  def product(i, j):
    def at(x, p):
      return np.asarray(rotary(x, np.int32([[p]])))

    return float(np.sum(at(q, i) * at(k, j)))

  np.testing.assert_allclose(product(7, 3), product(104, 100), rtol=1e-4)
  assert abs(product(7, 3) - product(7, 2)) > 1e-3


def test_position_zero_changes_nothing():
  zero = jnp.zeros((BATCH, LENGTH), jnp.int32)
  np.testing.assert_array_equal(rotary_embedding.Rotary()(_x(), zero), _x())


def test_layers_share_sines():
  """Of queries and keys of two layers, on one CPU; they take long."""
  rotary = rotary_embedding.Rotary()

  def layers(x, positions):
    for _ in range(2):
      query, key = (rotary(x @ jnp.full((6, 6), f), positions) for f in (2, 3))
      x = jnp.einsum("btnh,btnh,btni->btni", query, key, x)
    return x

  text = jax.jit(layers).lower(_x(), POSITIONS).compile().as_text()
  assert text.count(" sine(") == text.count(" cosine(") == 1


def test_gradients_match_finite_differences():
  rotary = rotary_embedding.Rotary()

  def loss(x):
    return jnp.sum(jnp.sin(rotary(x, POSITIONS)))

  testing.assert_gradients_match(loss, _x())


def test_bfloat16_angles_are_in_float32():
  rotary = rotary_embedding.Rotary()
  # 1001 is no bfloat16 number: a narrow angle would be off by one radian.
  positions = jnp.full((BATCH, LENGTH), 1001, jnp.int32)
  y = rotary(_x(jnp.bfloat16), positions)
  assert y.dtype == jnp.bfloat16
  expected = _oracle(_x(jnp.bfloat16), positions, 10_000.0)
  np.testing.assert_allclose(
    np.asarray(y, np.float32), expected, rtol=1e-2, atol=1e-2
  )


def test_equal_settings_are_equal():
  assert rotary_embedding.Rotary() == rotary_embedding.Rotary()


def test_rejects_odd_head_dim():
  with pytest.raises(ValueError, match=r"head_dim must be even .* got 5"):
    rotary_embedding.Rotary()(testing.normal(1, 4, 1, 5), POSITIONS[:1])


def test_rejects_short_wavelength():
  with pytest.raises(ValueError, match=r"max_wavelength must exceed 1, got 1"):
    rotary_embedding.Rotary(max_wavelength=1.0)


def _llama3_1(frequencies, factor, low, high, old_length):
  """The reference code of Llama 3.1 (`apply_scaling`), in float64."""
  low_wavelength, high_wavelength = old_length / low, old_length / high
  scaled = []
  for frequency in frequencies:
    wavelength = 2 * math.pi / frequency
    if wavelength < high_wavelength:
      scaled.append(frequency)
    elif wavelength > low_wavelength:
      scaled.append(frequency / factor)
    else:
      smooth = (old_length / wavelength - low) / (high - low)
      scaled.append((1 - smooth) * frequency / factor + smooth * frequency)
  return np.asarray(scaled)


@pytest.mark.parametrize(
  "settings",
  [(8.0, 1.0, 4.0, 8192), (32.0, 1.0, 4.0, 8192), (2.0, 2.0, 3.0, 64)],
)
def test_llama3_scaling_matches_the_reference(settings):
  factor, low, high, length = settings
  scaling = rotary_scaling.Llama3Scaling(
    factor=factor,
    low_frequency_factor=low,
    high_frequency_factor=high,
    original_length=length,
  )
  plain = 500_000.0 ** (-np.arange(64) / 64)
  expected = _llama3_1(plain, *settings)
  # All three kinds of pairs are there.
  kinds = np.unique(np.round(plain / expected, 6))
  assert {1.0, float(factor)} < set(kinds.tolist())
  np.testing.assert_allclose(
    scaling(testing.array(plain), 500_000.0), expected, rtol=1e-5
  )


def test_a_scaled_rotary_turns_by_the_scaled_frequencies():
  scaling = rotary_scaling.Llama3Scaling(original_length=32)
  rotary = rotary_embedding.Rotary(max_wavelength=100.0, scaling=scaling)
  x, half = testing.normal(1, 1, 1, 8), 4
  plain = 100.0 ** (-np.arange(half) / half)
  angle = 37 * _llama3_1(plain, 8.0, 1.0, 4.0, 32)
  values = np.asarray(x, np.float64)[0, 0, 0]
  turned = (values[:half] + 1j * values[half:]) * np.exp(1j * angle)
  np.testing.assert_allclose(
    jax.jit(rotary)(x, np.int32([[37]]))[0, 0, 0],
    np.concatenate([turned.real, turned.imag]),
    rtol=1e-5,
    atol=1e-5,
  )


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"factor": 0.5}, r"Llama3Scaling.factor must be in \[1, inf\), got 0\.5"),
    ({"high_frequency_factor": 1.0}, r"must exceed .* got 1\.0 and 1\.0"),
    ({"original_length": 0}, r"original_length must be positive, got 0"),
  ],
)
def test_rejects_wrong_scaling(fields, message):
  with pytest.raises(ValueError, match=message):
    rotary_scaling.Llama3Scaling(**fields)


def _linear(plain, base):
  del base
  return plain / 4.0


def _ntk(plain, base):
  dim = 2 * len(plain)
  longer = base * 4.0 ** (dim / (dim - 2))
  return longer ** (-np.arange(dim // 2) * 2 / dim)


def _yarn(plain, base, factor=4.0, length=64, fast=32.0, slow=1.0):
  """As transformers' `_compute_yarn_parameters`, one pair at a time."""
  dim = 2 * len(plain)

  def correction(turns):
    return dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(base))

  low = max(math.floor(correction(fast)), 0)
  high = min(math.ceil(correction(slow)), dim - 1)
  scaled = []
  for i, frequency in enumerate(plain):
    ramp = min(max((i - low) / (high - low), 0), 1)
    kept = 1 - ramp
    scaled.append(frequency / factor * (1 - kept) + frequency * kept)
  return np.asarray(scaled)


SCALINGS = {
  "linear": (rotary_scaling.LinearScaling(factor=4.0), _linear, 1.0),
  "ntk": (rotary_scaling.NtkScaling(factor=4.0), _ntk, 1.0),
  "yarn": (
    rotary_scaling.YarnScaling(factor=4.0, original_length=64),
    _yarn,
    0.1 * math.log(4.0) + 1,
  ),
}


@pytest.mark.parametrize("case", SCALINGS)
@pytest.mark.parametrize("base", [100.0, 10_000.0])
def test_scalings_match_their_formulas(case, base):
  scaling, formula, amplitude = SCALINGS[case]
  plain = base ** (-np.arange(16) / 16)
  expected = formula(plain, base)
  assert np.any(np.abs(expected / plain - 1) > 0.1)
  np.testing.assert_allclose(
    scaling(testing.array(plain), base), expected, rtol=1e-5
  )
  rotary = rotary_embedding.Rotary(max_wavelength=base, scaling=scaling)
  x, half = testing.normal(1, 1, 1, 32), 16
  values = np.asarray(x, np.float64)[0, 0, 0]
  turned = values[:half] + 1j * values[half:]
  turned *= amplitude * np.exp(1j * 53 * expected)
  np.testing.assert_allclose(
    jax.jit(rotary)(x, np.int32([[53]]))[0, 0, 0],
    np.concatenate([turned.real, turned.imag]),
    rtol=1e-4,
    atol=1e-4,
  )


def test_interleaved_pairs_are_neighbours():
  """GPT-J's pairs, one at a time."""
  rotary = rotary_embedding.Rotary(interleaved=True)
  y = np.asarray(jax.jit(rotary)(_x(), POSITIONS))
  x = np.asarray(_x(), np.float64)
  for b, t, n, i in np.ndindex((*x.shape[:3], HEAD_DIM // 2)):
    angle = int(POSITIONS[b, t]) * 10_000.0 ** (-2 * i / HEAD_DIM)
    pair = complex(x[b, t, n, 2 * i], x[b, t, n, 2 * i + 1])
    turned = pair * np.exp(1j * angle)
    np.testing.assert_allclose(
      y[b, t, n, 2 * i : 2 * i + 2], (turned.real, turned.imag), atol=1e-4
    )


@pytest.mark.parametrize("interleaved", [False, True])
def test_partial_rotary_leaves_the_last_features(interleaved):
  part = rotary_embedding.Rotary(rotary_dim=4, interleaved=interleaved)
  whole = rotary_embedding.Rotary(interleaved=interleaved)
  x = np.asarray(_x())
  y = np.asarray(jax.jit(part)(x, POSITIONS))
  np.testing.assert_array_equal(y[..., 4:], x[..., 4:])
  np.testing.assert_allclose(
    y[..., :4], jax.jit(whole)(x[..., :4], POSITIONS), rtol=1e-6
  )


def test_rejects_wrong_dims_and_scalings():
  with pytest.raises(ValueError, match=r"rotary_dim \(8\) must be at most .*6"):
    rotary_embedding.Rotary(rotary_dim=8)(_x(), POSITIONS)
  with pytest.raises(ValueError, match=r"rotary_dim must be even, got 3"):
    rotary_embedding.Rotary(rotary_dim=3)
  with pytest.raises(ValueError, match=r"rotary_dim must be positive, got 0"):
    rotary_embedding.Rotary(rotary_dim=0)
  for scaling in (rotary_scaling.LinearScaling, rotary_scaling.NtkScaling):
    with pytest.raises(
      ValueError, match=r"factor must be in \[1, inf\), got 0\.5"
    ):
      scaling(factor=0.5)
  with pytest.raises(ValueError, match=r"fast_turns must be at least"):
    rotary_scaling.YarnScaling(factor=2.0, original_length=8, fast_turns=0.5)


@pytest.mark.parametrize("dim", [2, 4, 6])
@pytest.mark.parametrize("base", [10_000.0, 100.0])
def test_partial_interleaved_pairs_match_gpt_j_by_hand(dim, base):
  """GPT-J: features 2 i and 2 i + 1 of the first `dim` turn as a plane."""
  x = testing.normal(2, 5, 3, 6, seed=4)
  positions = testing.array([[0, 1, 2, 3, 4], [7, 0, 900, 3, 1]], jnp.int32)
  rotary = rotary_embedding.Rotary(
    max_wavelength=base, rotary_dim=dim, interleaved=True
  )
  expected = np.asarray(x, np.float64).copy()
  for b, t, n, i in np.ndindex(2, 5, 3, dim // 2):
    angle = int(positions[b, t]) * base ** (-2 * i / dim)
    turn = np.asarray(
      [[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]]
    )
    pair = slice(2 * i, 2 * i + 2)
    expected[b, t, n, pair] = turn @ expected[b, t, n, pair]
  np.testing.assert_allclose(jax.jit(rotary)(x, positions), expected, atol=2e-4)


def test_a_least_timescale_is_a_linear_scaling():
  """Pax's timescales from 5 to 1000: `5 * (1000 / 5) ** (2 i / head_dim)`."""
  x, positions = testing.normal(1, 4, 1, 6), testing.make_positions(1, 4)
  scaling = rotary_scaling.LinearScaling(factor=5.0)
  rotary = rotary_embedding.Rotary(max_wavelength=200.0, scaling=scaling)
  expected = np.asarray(x, np.float64).copy()
  for t, i in np.ndindex(4, 3):
    turn = np.exp(1j * t / (5 * 200 ** (2 * i / 6)))
    turned = (expected[0, t, 0, i] + 1j * expected[0, t, 0, i + 3]) * turn
    expected[0, t, 0, [i, i + 3]] = turned.real, turned.imag
  np.testing.assert_allclose(jax.jit(rotary)(x, positions), expected, atol=1e-5)

"""Tests for diagonal state spaces, against float64 numpy step by step."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers import testing as layer_testing
from paxon.layers.recurrent import diagonal, testing

N = 6
FROZEN = diagonal.DiagonalStateSpace(state_dim=N, step=0.3, chunk_length=4)
TRAINED = FROZEN.clone(rates=diagonal.legendre, train_rates=True)
GATED = diagonal.GatedStateSpace(inner_dim=5, gate_dim=7, mixer=TRAINED)
LAYERS = {"frozen": FROZEN, "trained": TRAINED, "gated": GATED}
# Padding before, between and after documents; ids occur again.
PACKED = testing.segments("1111122220333", "0011111111100", "1222111333332")


def _gelu(x):
  return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def _state_space(layer, p, x, segments):
  """Runs the recurrence of each document alone, one token at a time."""
  rates = layer.rates(N)[None]
  step = np.full(1, layer.step)
  if layer.train_rates:
    rates = -np.exp(p["log_rate"]) + 1j * p["frequency"]
    step = np.exp(p["log_step"])
  decay = np.exp(rates * step[:, None])
  read = p["read_real"] + 1j * p["read_imaginary"]
  y = np.zeros_like(x)
  for b in range(x.shape[0]):
    previous, state = 0, 0
    for t in range(x.shape[1]):
      segment = int(segments[b, t])
      if not segment:
        continue
      if segment != previous:
        state, previous = 0, segment
      state = decay * state + (decay - 1) / rates * x[b, t][:, None]
      y[b, t] = (read * state).sum(axis=1).real + p["skip"] * x[b, t]
  return y


def _oracle(layer, params, x, segments):
  p = jax.tree.map(lambda v: np.asarray(v, np.float64), params)
  x, segments = np.asarray(x, np.float64), np.asarray(segments)
  if layer is not GATED:
    return _state_space(layer, p, x, segments)
  inner, gate = (_gelu(x @ p[name]["kernel"]) for name in ("inner", "gate"))
  mixed = _state_space(layer.mixer, p["mixer"], inner, segments)
  context = mixed @ p["context"]["kernel"]
  return (context * gate) @ p["out"]["kernel"]


def _inputs(layer):
  x = layer_testing.normal(*PACKED.shape, 6)
  return x, layer_testing.random_values(layer, x)


@pytest.mark.parametrize("chunk_length", [1, 4, 5, 64])
@pytest.mark.parametrize("name", ["frozen", "trained"])
def test_equals_the_recurrence(name, chunk_length):
  layer = LAYERS[name]
  x, values = _inputs(layer)
  expected = _oracle(layer, values["params"], x, PACKED)
  layer = layer.clone(chunk_length=chunk_length)
  found = layer_testing.apply(
    layer, values, *layer_testing.in_context(x, None, PACKED)
  )
  np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)


def test_a_gate_multiplies_the_context():
  x, values = _inputs(GATED)
  found = layer_testing.apply(
    GATED, values, *layer_testing.in_context(x, None, PACKED)
  )
  expected = _oracle(GATED, values["params"], x, PACKED)
  np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)


def _hippo(name):
  """The matrices of Gu et al. 2021, and the vectors that make them normal."""
  a = np.zeros((N, N))
  for n in range(N):
    for k in range(n + 1):
      a[n, k] = -1
      if name == "legendre":
        a[n, k] = -np.sqrt((2 * n + 1) * (2 * k + 1))
        if n == k:
          a[n, k] = -(n + 1)
  p = np.sqrt(np.arange(N) + 0.5)
  return a, p if name == "legendre" else np.full(N, np.sqrt(0.5))


@pytest.mark.parametrize("name", ["legendre", "laguerre"])
def test_rates_are_eigenvalues_of_the_normal_hippo_matrices(name):
  a, p = _hippo(name)
  expected = np.linalg.eigvals(a + np.outer(p, p))
  found = getattr(diagonal, name)(N)
  scale = N if name == "laguerre" else 1
  np.testing.assert_allclose(found.real, -0.5, atol=1e-12)
  np.testing.assert_allclose(expected.real, -0.5, atol=1e-12)
  np.testing.assert_allclose(
    np.sort(found.imag), np.sort(expected.imag) * scale, atol=1e-12
  )


def test_other_rates_are_those_of_the_papers():
  np.testing.assert_allclose(
    diagonal.linear_rates(3).imag, [0, np.pi, 2 * np.pi]
  )
  np.testing.assert_allclose(
    diagonal.inverse(3).imag * np.pi / 3, [2, 0, 3 / 5 - 1]
  )
  np.testing.assert_allclose(
    diagonal.evenly_spaced(4).imag / np.pi, [-1.5, -0.75, 0, 0.75]
  )


def test_wrong_fields():
  for fields, message in (
    ({"state_dim": 0}, r"state_dim must be positive"),
    ({"step": 0.0}, r"step must be positive"),
  ):
    with pytest.raises(ValueError, match=message):
      FROZEN.clone(**fields)
  with pytest.raises(ValueError, match=r"inner_dim must be positive"):
    GATED.clone(inner_dim=0)
  x = layer_testing.normal(1, 2, 3)
  with pytest.raises(ValueError, match=r"rates must return 6 numbers with"):
    FROZEN.clone(rates=np.ones).init(jax.random.key(0), x)
  values = layer_testing.random_values(FROZEN, x)
  with pytest.raises(ValueError, match=r"DiagonalStateSpace got a prefix"):
    FROZEN.apply(
      values, *layer_testing.in_context(x, None, None, jnp.ones((1, 2), bool))
    )

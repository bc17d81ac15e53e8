"""Tests for the gated delta net, against float64 numpy step by step."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers import testing as layer_testing
from paxon.layers.recurrent import gated_delta_net, testing

LAYER = gated_delta_net.GatedDeltaNet(
  num_heads=3, key_dim=4, value_dim=5, chunk_length=4
)
# Two heads of values for each of keys and queries.
GROUPED = LAYER.clone(num_heads=4, num_key_heads=2, activation=jax.nn.relu)
PACKED = testing.segments("1111122220333", "0011111111100", "1222111333332")


def _silu(x):
  return x / (1 + np.exp(-x))


def _relu(x):
  return np.maximum(x, 0)


def _unit(x):
  return x / np.sqrt((x**2).sum(-1, keepdims=True) + 1e-6)


def _oracle(layer, params, x, segments):
  """Runs the recurrence of each document alone, one token at a time."""
  p = jax.tree.map(lambda v: np.asarray(v, np.float64), params)
  x, segments = np.asarray(x, np.float64), np.asarray(segments)
  y = np.zeros_like(x)
  for b in range(x.shape[0]):
    previous, state, window = 0, None, []
    for t in range(x.shape[1]):
      segment = int(segments[b, t])
      if not segment:
        continue
      if segment != previous:
        state = np.zeros((layer.num_heads, layer.value_dim, layer.key_dim))
        window, previous = [], segment
      names = ("query", "key", "value", "gate", "step", "rate")
      projected = {n: np.tensordot(x[b, t], p[n], 1) for n in names}
      window = [*window, projected][-layer.conv_width :]
      mixed = {
        name: (_relu if layer.activation is jax.nn.relu else _silu)(
          sum(
            p[f"{name}_conv"]["kernel"][layer.conv_width - 1 - back]
            * each[name]
            for back, each in enumerate(reversed(window))
          )
        )
        for name in ("query", "key", "value")
      }
      step = np.log1p(np.exp(projected["step"] + p["step_offset"]))
      decay = np.exp(-np.exp(p["log_rate"]) * step)
      rate = 1 / (1 + np.exp(-projected["rate"]))
      key = _unit(mixed["key"])
      query = _unit(mixed["query"]) / np.sqrt(layer.key_dim)
      heads = np.zeros((layer.num_heads, layer.value_dim))
      for n in range(layer.num_heads):
        shared = n // (layer.num_heads // len(key))
        k = key[shared]
        erased = np.eye(layer.key_dim) - rate[n] * np.outer(k, k)
        state[n] = decay[n] * state[n] @ erased
        state[n] += rate[n] * np.outer(mixed["value"][n], k)
        heads[n] = state[n] @ query[shared]
      mean_square = (heads**2).mean(1, keepdims=True)
      heads /= np.sqrt(mean_square + layer.norm.epsilon)
      heads *= p["norm"]["scale"] * _silu(projected["gate"])
      y[b, t] = np.tensordot(heads, p["out"], 2)
  return y


def _inputs(layer=LAYER):
  x = layer_testing.normal(*PACKED.shape, 6)
  return x, layer_testing.random_values(layer, x)


@pytest.mark.parametrize(
  ("layer", "chunk_length"),
  [(LAYER, 1), (LAYER, 4), (LAYER, 64), (GROUPED, 4)],
  ids=["1", "4", "64", "grouped"],
)
def test_equals_the_recurrence_in_float64(layer, chunk_length):
  x, values = _inputs(layer)
  layer = layer.clone(chunk_length=chunk_length, param_dtype=jnp.float64)
  dirty = np.array(x, np.float64)
  dirty[np.asarray(PACKED) == 0] = np.nan
  with jax.enable_x64(True):
    wide = jax.tree.map(lambda v: np.asarray(v, np.float64), values)
    found = jax.jit(
      lambda v, x: layer.apply(v, *layer_testing.in_context(x, None, PACKED))
    )(wide, dirty)
  expected = _oracle(layer, values["params"], x, PACKED)
  np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-11)


def test_wrong_fields():
  with pytest.raises(ValueError, match="key_dim must be positive"):
    LAYER.clone(key_dim=0)
  with pytest.raises(ValueError, match="num_heads"):
    LAYER.clone(num_key_heads=2)

"""Tests for Mamba-2, against float64 numpy step by step."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers import testing as layer_testing
from paxon.layers.recurrent import mamba2, state_space, testing

LAYER = mamba2.Mamba2(
  num_heads=4, head_dim=3, state_dim=5, num_groups=2, chunk_length=4
)
# Padding before, between and after documents; ids occur again.
PACKED = testing.segments("1111122220333", "0011111111100", "1222111333332")


def _silu(x):
  return x / (1 + np.exp(-x))


def _oracle(layer, params, x, segments):
  """Runs the recurrence of each document alone, one token at a time."""
  p = jax.tree.map(lambda v: np.asarray(v, np.float64), params)
  x, segments = np.asarray(x, np.float64), np.asarray(segments)
  y = np.zeros_like(x)
  repeats = layer.num_heads // layer.num_groups
  for b in range(x.shape[0]):
    previous, state, window = 0, None, []
    for t in range(x.shape[1]):
      segment = int(segments[b, t])
      if not segment:
        continue
      if segment != previous:
        state = np.zeros((layer.num_heads, layer.head_dim, layer.state_dim))
        window, previous = [], segment
      token = x[b, t]
      projected = {
        name: np.tensordot(token, p[name], 1) + p.get(f"{name}_bias", 0)
        for name in ("gate", "value", "key", "query", "step")
      }
      window = [*window, projected][-layer.conv_width :]
      mixed = {}
      for name in ("value", "key", "query"):
        kernel = p[f"{name}_conv"]["kernel"]
        total = np.zeros_like(kernel[0]) + p[f"{name}_conv"].get("bias", 0)
        for back, each in enumerate(reversed(window)):
          total += kernel[layer.conv_width - 1 - back] * each[name]
        mixed[name] = _silu(total)
      step = np.log1p(np.exp(projected["step"] + p["step_offset"]))
      step = np.clip(step, *layer.step_limits)
      decay = np.exp(-np.exp(p["log_rate"]) * step)
      heads = np.zeros((layer.num_heads, layer.head_dim))
      for n in range(layer.num_heads):
        g = n // repeats
        value = mixed["value"][n]
        state[n] = decay[n] * state[n] + step[n] * np.outer(
          value, mixed["key"][g]
        )
        heads[n] = state[n] @ mixed["query"][g] + p["skip"][n] * value
      heads *= _silu(projected["gate"])
      flat = heads.reshape(layer.norm.num_groups, -1)
      flat /= np.sqrt((flat**2).mean(1, keepdims=True) + layer.norm.epsilon)
      heads = flat.reshape(heads.shape) * p["norm"]["scale"]
      y[b, t] = np.tensordot(heads, p["out"], 2) + p.get("out_bias", 0)
  return y


def _inputs():
  x = layer_testing.normal(*PACKED.shape, 6)
  return x, layer_testing.random_values(LAYER, x)


@pytest.mark.parametrize("chunk_length", [1, 4, 5, 64])
def test_equals_the_recurrence(chunk_length):
  x, values = _inputs()
  layer = LAYER.clone(chunk_length=chunk_length)
  found = layer_testing.apply(
    layer, values, *layer_testing.in_context(x, None, PACKED)
  )
  expected = _oracle(layer, values["params"], x, PACKED)
  np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)


def test_equals_the_recurrence_in_float64():
  x, values = _inputs()
  with jax.enable_x64(True):
    wide = jax.tree.map(lambda v: np.asarray(v, np.float64), values)
    found = jax.jit(
      lambda v, x: LAYER.clone(param_dtype=jnp.float64).apply(
        v, *layer_testing.in_context(x, None, PACKED)
      )
    )(wide, np.asarray(x, np.float64))
  expected = _oracle(LAYER, values["params"], x, PACKED)
  np.testing.assert_allclose(found, expected, rtol=1e-11, atol=1e-12)


def test_biases_step_limits_and_groups_of_the_norm():
  x, _ = _inputs()
  layer = LAYER.clone(
    step_limits=(0.5, 0.9),
    norm=LAYER.norm.clone(num_groups=2),
    use_bias=True,
    use_conv_bias=False,
  )
  values = layer_testing.random_values(layer, x)
  found = layer_testing.apply(
    layer, values, *layer_testing.in_context(x, None, PACKED)
  )
  expected = _oracle(layer, values["params"], x, PACKED)
  is_real = np.asarray(PACKED) != 0
  np.testing.assert_allclose(
    np.asarray(found)[is_real], expected[is_real], rtol=2e-5, atol=2e-5
  )


def test_decays_that_vanish_have_finite_gradients():
  shape = (1, 8, 1)

  def loss(log_decay, value):
    ones = jnp.ones((1, 8, 1, 2))
    runs = jnp.zeros((1, 8), jnp.int32)
    y, _ = state_space.scan(value, log_decay, ones, ones, runs, chunk_length=4)
    return jnp.sum(y)

  decay = -jnp.full(shape, 1e4)
  gradients = jax.jit(jax.grad(loss, argnums=(0, 1)))(
    decay, jnp.ones((1, 8, 1, 2))
  )
  assert all(np.isfinite(g).all() for g in gradients)


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"num_groups": 3}, r"num_heads \(4\) must be a multiple of num_groups"),
    ({"state_dim": 0}, "state_dim must be positive"),
    ({"step_limits": (1.0, 0.5)}, "step_limits must be"),
  ],
)
def test_wrong_fields(fields, message):
  with pytest.raises(ValueError, match=message):
    LAYER.clone(**fields)


def test_wrong_states():
  x, values = _inputs()
  with pytest.raises(ValueError, match="Mamba2 got a prefix"):
    LAYER.apply(values, *layer_testing.in_context(x, None, PACKED, PACKED > 0))

  def call(variables, x, **static):
    args = layer_testing.in_context(x, **static)
    return LAYER.apply(variables, *args, mutable=["cache"])

  _, state = jax.eval_shape(lambda x: call(values, x, cache_length=1), x)
  state = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), state)
  with pytest.raises(ValueError, match="a state exists already"):
    call({**values, **state}, x, cache_length=1)
  with pytest.raises(ValueError, match="does not fit a state of 3"):
    call({**values, **state}, x[:1])
  with pytest.raises(ValueError, match="but the layer needs"):
    LAYER.clone(state_dim=6).apply(
      {**layer_testing.random_values(LAYER.clone(state_dim=6), x), **state},
      x,
      mutable=["cache"],
    )

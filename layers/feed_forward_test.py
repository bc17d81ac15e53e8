"""Tests for feed-forward layers, gated and plain."""

from flax import linen as nn
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers import feed_forward, testing

BATCH, LENGTH, EMBED, MLP = 2, 3, 4, 8


def _x(dtype=jnp.float32):
  return testing.normal(BATCH, LENGTH, EMBED, dtype=dtype)


def _layer(**kwargs):
  return feed_forward.GatedFeedForward(mlp_dim=MLP, **kwargs)


def _oracle(params, x, activation):
  """The definition, in float64 numpy, one position at a time."""
  w = {name: np.asarray(value, np.float64) for name, value in params.items()}
  bias = {name: w.get(f"{name}_bias", 0.0) for name in ("gate", "up", "down")}
  y = np.zeros_like(x, np.float64)
  for index in np.ndindex(x.shape[:-1]):
    gate = activation(x[index] @ w["gate"] + bias["gate"])
    hidden = gate * (x[index] @ w["up"] + bias["up"])
    y[index] = hidden @ w["down"] + bias["down"]
  return y


@pytest.mark.parametrize("use_bias", [False, True])
@pytest.mark.parametrize(
  ("activation", "reference"),
  [
    pytest.param(nn.silu, lambda v: v / (1 + np.exp(-v)), id="swiglu"),
    pytest.param(nn.relu, lambda v: np.maximum(v, 0), id="reglu"),
  ],
)
def test_matches_numpy(activation, reference, use_bias):
  layer = _layer(activation=activation, use_bias=use_bias)
  values = testing.random_values(layer, _x())
  expected = _oracle(values["params"], np.asarray(_x()), reference)
  np.testing.assert_allclose(
    testing.apply(layer, values, _x()), expected, rtol=1e-5, atol=1e-6
  )


def test_gradients_match_finite_differences():
  layer = _layer()

  def loss(at):
    return jnp.sum(jnp.sin(layer.apply(*at)))

  at = (testing.random_values(layer, _x()), _x())
  testing.assert_gradients_match(loss, at)


def test_positions_are_independent():
  layer = _layer()
  values = testing.random_values(layer, _x())
  before = np.asarray(testing.apply(layer, values, _x()))
  after = np.asarray(testing.apply(layer, values, _x().at[:, 1].set(0.0)))
  np.testing.assert_array_equal(after[:, [0, 2]], before[:, [0, 2]])
  assert not np.any(after[:, 1])


def test_bfloat16_compute_keeps_float32_params():
  layer = _layer(dtype=jnp.bfloat16)
  values = testing.random_values(layer, _x())
  y = testing.apply(layer, values, _x())
  assert y.dtype == jnp.bfloat16
  assert {p.dtype for p in values["params"].values()} == {jnp.dtype("float32")}
  np.testing.assert_allclose(
    np.asarray(y, np.float32),
    testing.apply(_layer(), values, _x()),
    rtol=2e-2,
    atol=2e-2,
  )


def test_logical_axes():
  assert testing.axes(_layer(), _x()) == {
    "params/gate": ("embed", "mlp"),
    "params/up": ("embed", "mlp"),
    "params/down": ("mlp", "embed"),
  }


def test_einsum_is_injected():
  calls = []

  def einsum(equation, *args):
    calls.append(equation)
    return jnp.einsum(equation, *args)

  layer = _layer(einsum=einsum)
  testing.apply(layer, testing.random_values(_layer(), _x()), _x())
  assert calls == ["BTD,DF->BTF", "BTD,DF->BTF", "BTF,FD->BTD"]


def test_rejects_nonpositive_mlp_dim():
  message = r"GatedFeedForward.mlp_dim must be positive, got 0"
  with pytest.raises(ValueError, match=message):
    feed_forward.GatedFeedForward(mlp_dim=0)


def _plain(**kwargs):
  return feed_forward.FeedForward(mlp_dim=MLP, **kwargs)


def _plain_oracle(params, x, activation):
  params = {k: np.asarray(v, np.float64) for k, v in params.items()}
  y = np.zeros_like(x, np.float64)
  for index in np.ndindex(x.shape[:-1]):
    hidden = activation(x[index] @ params["up"] + params.get("up_bias", 0))
    y[index] = hidden @ params["down"] + params.get("down_bias", 0)
  return y


@pytest.mark.parametrize("use_bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize(
  ("activation", "reference"),
  [
    pytest.param(nn.relu, lambda v: np.maximum(v, 0), id="relu"),
    pytest.param(jnp.tanh, np.tanh, id="tanh"),
  ],
)
def test_plain_matches_numpy(activation, reference, use_bias):
  layer = _plain(activation=activation, use_bias=use_bias)
  values = testing.random_values(layer, _x())
  np.testing.assert_allclose(
    testing.apply(layer, values, _x()),
    _plain_oracle(values["params"], np.asarray(_x()), reference),
    rtol=1e-5,
    atol=1e-6,
  )


def test_gradients_of_plain_match_finite_differences():
  layer = _plain(activation=jnp.tanh)

  def loss(at):
    return jnp.sum(jnp.sin(layer.apply(*at)))

  at = (testing.random_values(layer, _x()), _x())
  testing.assert_gradients_match(loss, at)


def test_plain_axes_start_and_decay():
  specs = testing.specs(_plain(), _x())["params"]
  assert {k: (s.axes, s.regularized) for k, s in specs.items()} == {
    "up": (("embed", "mlp"), True),
    "up_bias": (("mlp",), False),
    "down": (("mlp", "embed"), True),
    "down_bias": (("embed",), False),
  }
  params = testing.initial_values(_plain(), _x())["params"]
  assert not np.any(params["up_bias"])
  assert not np.any(params["down_bias"])
  assert set(testing.axes(_plain(use_bias=False), _x())) == {
    "params/up",
    "params/down",
  }


def test_plain_bfloat16_compute_keeps_float32_params():
  layer = _plain(dtype=jnp.bfloat16)
  values = testing.random_values(layer, _x())
  y = testing.apply(layer, values, _x())
  assert y.dtype == jnp.bfloat16
  assert {p.dtype for p in values["params"].values()} == {jnp.dtype("float32")}
  np.testing.assert_allclose(
    np.asarray(y, np.float32),
    testing.apply(_plain(), values, _x()),
    rtol=2e-2,
    atol=2e-2,
  )


def test_plain_rejects_nonpositive_mlp_dim():
  message = r"FeedForward.mlp_dim must be positive, got -1"
  with pytest.raises(ValueError, match=message):
    feed_forward.FeedForward(mlp_dim=-1)


@pytest.mark.parametrize("make", [_layer, _plain])
def test_dropout_falls_on_the_hidden_activation(make):
  """Where all of it is dropped only the last bias is left."""
  layer = make(dropout=nn.Dropout(1.0))
  values = testing.random_values(layer, _x())
  y = testing.apply(layer, values, _x(), deterministic=False)
  left = values["params"].get("down_bias", jnp.zeros((EMBED,)))
  np.testing.assert_allclose(y, np.broadcast_to(left, y.shape), rtol=1e-6)
  np.testing.assert_array_equal(
    testing.apply(layer, values, _x()), testing.apply(make(), values, _x())
  )

"""Tests for discriminators and adversarial losses, against numpy."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers import testing
from paxon.layers.norms import batch_norm
from paxon.layers.vision import discriminator

NETWORK = discriminator.Discriminator(filters=2, multipliers=(1, 2))
SHAPES = {"image": (3, 6, 5, 2), "video": (2, 3, 4, 5, 1)}


def _wide(tree):
  return jax.tree.map(lambda v: np.asarray(v, np.float64), tree)


def _windows(x, size, stride):
  """Returns the zero-padded window at each output position."""
  rank = x.ndim - 2
  outs = [-(-n // stride) for n in x.shape[1:-1]]
  pads = [
    max((out - 1) * stride + size - n, 0)
    for out, n in zip(outs, x.shape[1:-1], strict=True)
  ]
  around = [(0, 0), *((pad // 2, pad - pad // 2) for pad in pads), (0, 0)]
  x = np.pad(x, around)
  windows = np.zeros((len(x), *outs, *(size,) * rank, x.shape[-1]))
  for place in itertools.product(*map(range, outs)):
    span = tuple(slice(i * stride, i * stride + size) for i in place)
    windows[(slice(None), *place)] = x[(slice(None), *span)]
  return windows


def _conv(x, params):
  kernel = params["kernel"]
  axes = kernel.ndim - 1
  y = np.tensordot(_windows(x, len(kernel), 1), kernel, axes)
  return y + params.get("bias", 0.0)


def _blur(x):
  rank = x.ndim - 2
  windows = np.moveaxis(_windows(x, 3, 2), -1, 1 + rank)
  for _ in range(rank):
    windows = windows @ np.array([1.0, 2.0, 1.0]) / 4
  return windows


def _leaky(x):
  return np.where(x > 0, x, 0.2 * x)


def _block(x, params):
  y = _blur(_leaky(_conv(x, params["first"])))
  y = _leaky(_conv(y, params["last"]))
  return (y + _conv(_blur(x), params["shortcut"])) / np.sqrt(2)


def _logits(x, params):
  x = _leaky(_conv(x, params["first"]))
  for i in range(2):
    x = _block(x, params[f"block_{i}"])
  x = _leaky(_conv(x, params["last"])).reshape(len(x), -1)
  for name, activation in (("hidden", _leaky), ("logit", lambda v: v)):
    x = activation(x @ params[name]["kernel"] + params[name]["bias"])
  return x[:, 0]


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_blur_pool_matches_numpy(shape):
  x = testing.normal(*shape)
  found = testing.apply(discriminator.BlurPool(), {}, x)
  np.testing.assert_allclose(found, _blur(_wide(x)), rtol=1e-5, atol=1e-6)


def test_blur_pool_sizes():
  x = testing.normal(1, 4, 6, 2)
  y = discriminator.BlurPool(5, (1, 2)).apply({}, jnp.ones_like(x))
  assert y.shape == (1, 4, 3, 2)
  # [1, 4, 6, 4, 1] / 16, of which two are in the zeros of each side.
  assert float(y[0, 0, 1, 0]) == pytest.approx(11 / 16)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_logits_match_numpy(shape):
  x = testing.normal(*shape)
  values = testing.random_values(NETWORK, x)
  expected = _logits(_wide(x), _wide(values["params"]))
  found = testing.apply(NETWORK, values, x)
  np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_gradients_match_finite_differences():
  x = testing.normal(2, 4, 4, 1)
  values = testing.random_values(NETWORK, x)

  def loss(at):
    return jnp.sum(jnp.sin(NETWORK.apply({"params": at[0]}, at[1])))

  testing.assert_gradients_match(loss, (values["params"], x), rtol=1e-5)


REAL, FAKE = testing.normal(4, 4, 4, 1), testing.normal(4, 4, 4, 1, seed=2)
WEIGHTS = testing.array([1.0, 0.0, 2.0, 1.0])
AVERAGES = {
  "mean_real": testing.array(0.7),
  "mean_fake": testing.array(-0.4),
}


def _adversary(**fields):
  layer = discriminator.AdversarialLoss(NETWORK, decay=0.9, **fields)
  values = testing.random_values(layer, REAL, FAKE, WEIGHTS)
  return layer, values | {batch_norm.COLLECTION: AVERAGES}


def _softplus(x):
  return np.logaddexp(0, x)


def test_terms_match_numpy():
  layer, values = _adversary(penalty_weight=10.0)
  # Padding of NaN changes nothing.
  real = REAL.at[1].set(jnp.nan)
  (total, terms), changed = testing.apply(
    layer,
    values,
    real,
    FAKE.at[1].set(jnp.nan),
    WEIGHTS,
    deterministic=False,
    mutable=[batch_norm.COLLECTION],
  )
  params = _wide(values["params"]["discriminator"])
  share = np.array([0.25, 0, 0.5, 0.25])
  on_real, on_fake = (_logits(_wide(x), params) for x in (REAL, FAKE))
  expected = {
    "generator": share @ _softplus(-on_fake),
    "discriminator": share @ (_softplus(-on_real) + _softplus(on_fake)),
    "lecam": share
    @ (np.maximum(on_real + 0.4, 0) ** 2 + np.maximum(0.7 - on_fake, 0) ** 2),
    "penalty": share @ _squared_slopes(_wide(REAL), params),
  }
  assert terms.keys() == expected.keys()
  for name, value in expected.items():
    np.testing.assert_allclose(terms[name], value, rtol=1e-4, err_msg=name)
  expected_total = 0.1 * expected["generator"] + expected["discriminator"]
  expected_total += 0.001 * expected["lecam"] + 10 * expected["penalty"]
  np.testing.assert_allclose(total, expected_total, rtol=1e-4)
  averages = changed[batch_norm.COLLECTION]
  for name, before, logits in (
    ("mean_real", 0.7, on_real),
    ("mean_fake", -0.4, on_fake),
  ):
    average = 0.9 * before + 0.1 * (share @ logits)
    np.testing.assert_allclose(averages[name], average, rtol=1e-4)


def _squared_slopes(x, params):
  """Sums the squared central differences over all inputs of each example."""
  squares, step = np.zeros(len(x)), 1e-6
  for place in np.ndindex(x.shape[1:]):
    moved = np.zeros_like(x)
    moved[(slice(None), *place)] = step
    slope = _logits(x + moved, params) - _logits(x - moved, params)
    squares += (slope / (2 * step)) ** 2
  return squares


def test_each_network_gets_the_gradient_of_its_loss():
  layer, values = _adversary(penalty_weight=0.5)
  averages = values[batch_norm.COLLECTION]

  def logits(params, x):
    return NETWORK.apply({"params": params["discriminator"]}, x)

  def mean(x):
    return jnp.sum(x * WEIGHTS) / 4

  def generator(fake, params):
    return 0.1 * mean(jax.nn.softplus(-logits(params, fake)))

  def discriminating(params, fake):
    on_real, on_fake = logits(params, REAL), logits(params, fake)
    loss = mean(jax.nn.softplus(-on_real) + jax.nn.softplus(on_fake))
    lecam = jnp.maximum(on_real - averages["mean_fake"], 0) ** 2
    lecam += jnp.maximum(averages["mean_real"] - on_fake, 0) ** 2
    slopes = jax.vmap(jax.grad(lambda x: logits(params, x[None])[0]))(REAL)
    penalty = jnp.sum(slopes**2, axis=(1, 2, 3))
    return loss + 0.001 * mean(lecam) + 0.5 * mean(penalty)

  def both(params, fake):
    return layer.apply(values | {"params": params}, REAL, fake, WEIGHTS)[0]

  params = values["params"]
  found = jax.jit(jax.grad(both, (0, 1)))(params, FAKE)
  expected = jax.jit(
    lambda: (
      jax.grad(discriminating)(params, FAKE),
      jax.grad(generator)(FAKE, params),
    )
  )()
  for one, other in zip(
    jax.tree.leaves(found), jax.tree.leaves(expected), strict=True
  ):
    assert np.abs(np.asarray(other)).max() > 0
    np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
  ("run", "message"),
  [
    (lambda: NETWORK.clone(multipliers=()), "multipliers must be positive"),
    (lambda: NETWORK.clone(filters=0), "filters must be positive"),
    (lambda: _adversary(lecam_weight=-1.0), "lecam_weight must not be"),
    (lambda: discriminator.BlurPool(0), "filter_size must be positive"),
  ],
)
def test_errors(run, message):
  with pytest.raises(ValueError, match=message):
    run()

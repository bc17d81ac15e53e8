"""Tests for stochastic depth, alone and in stacks."""

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers import remat, testing
from paxon.layers.stacks import block, stack, stochastic_residual

ROWS = 4000
X = testing.normal(ROWS, 1, 2)
BRANCH = testing.normal(ROWS, 1, 2, seed=2)


def _residual(**kwargs):
  return stochastic_residual.StochasticResidual(**kwargs)


def _train(layer, *args, **static):
  def apply(key, *args):
    return layer.apply({}, *args, **static, rngs={"dropout": key})

  return jax.jit(apply)(jax.random.key(0), *args)


def test_a_row_keeps_its_branch_or_loses_it():
  layer = _residual(rate=0.25, residual_weight=0.5)
  added = np.asarray(_train(layer, X, BRANCH, deterministic=False) - X)
  share = added / np.asarray(BRANCH)
  kept = np.abs(share[:, 0, 0]) > 1e-3
  np.testing.assert_allclose(share[kept], 0.5 / 0.75, rtol=1e-3)
  np.testing.assert_allclose(share[~kept], 0, atol=1e-3)
  np.testing.assert_allclose(np.mean(kept), 0.75, atol=0.03)


def test_evaluation_and_a_rate_of_zero_keep_everything():
  expected = np.asarray(X) + 0.5 * np.asarray(BRANCH)
  layer = _residual(rate=0.25, residual_weight=0.5)
  np.testing.assert_allclose(
    testing.apply(layer, {}, X, BRANCH), expected, rtol=1e-6, atol=1e-6
  )
  never = _residual(residual_weight=0.5)
  y = testing.apply(never, {}, X, BRANCH, deterministic=False)
  np.testing.assert_allclose(y, expected, rtol=1e-6, atol=1e-6)


def test_float64_stays():
  with jax.enable_x64(True):
    x = jax.device_put(np.float64(X[:2]))
    y = _residual(residual_weight=0.3).apply({}, x, x)
  np.testing.assert_allclose(y, 1.3 * np.asarray(x), rtol=1e-12)


def test_bfloat16_stays():
  x = X.astype(jnp.bfloat16)
  assert (
    _train(_residual(rate=0.5), x, x, deterministic=False).dtype == jnp.bfloat16
  )


def test_a_linear_rate_grows_with_the_layer():
  rate = stochastic_residual.LinearRate(0.4, num_layers=8)
  rates = [float(rate(jnp.int32(i))) for i in range(8)]
  np.testing.assert_allclose(rates, [0.05 * i for i in range(8)], rtol=1e-6)


class Part(nn.Module):
  """Attention, feed-forward or norm that gives ones of its input's shape."""

  def __call__(self, x, *args, **kwargs):
    """Returns ones."""
    return jnp.ones_like(x)


BLOCKS = {
  "pre": lambda r: block.TransformerBlock(
    Part(), Part(), Part(), Part(), residual=r
  ),
  "sandwich": lambda r: block.SandwichBlock(
    Part(), Part(), Part(), Part(), residual=r
  ),
  "parallel": lambda r: block.ParallelBlock(Part(), Part(), Part(), residual=r),
}


def _args(rows=ROWS):
  return testing.in_context(jnp.zeros((rows, 1, 1)), deterministic=False)


class Grower(nn.Module):
  """Adds a one that is dropped, in a column for each layer."""

  residual: nn.Module

  def __call__(self, x, *, layer_index=None, deterministic=True):
    """Returns `x` with the column of this layer."""
    column = jax.nn.one_hot(layer_index, x.shape[-1])
    branch = jnp.broadcast_to(column[None, None, :], x.shape)
    return self.residual(x, branch, layer_index, deterministic=deterministic)


LAYOUTS = {
  "scan": {},
  "unrolled": {"scan": False},
  "remat": {"remat_policy": remat.save_nothing},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_layer_of_a_stack_has_its_own_rate(layout):
  """Also the layers of a remainder, and those of a pattern of two."""
  rate = stochastic_residual.LinearRate(0.9, num_layers=5)
  layers = stack.Stack(
    (Grower(_residual(rate=rate)),) * 2,
    num_layers=5,
    pass_layer_index=True,
    **LAYOUTS[layout],
  )
  y = _train(layers, jnp.zeros((ROWS, 1, 5)), deterministic=False)
  survived = np.mean(np.asarray(y[:, 0]) > 0, axis=0)
  survival = 1 - 0.9 * np.arange(5) / 5
  np.testing.assert_allclose(survived, survival, atol=0.03)
  # The mean stays what it is in evaluation.
  np.testing.assert_allclose(np.mean(y[:, 0], axis=0), 1.0, atol=0.1)


@pytest.mark.parametrize("kind", BLOCKS)
def test_blocks_add_their_branches_by_it(kind):
  layer = BLOCKS[kind](_residual(rate=0.25))
  layers = stack.Stack((layer,), num_layers=1, pass_layer_index=True)
  y = np.asarray(_train(layers, *_args()))[:, 0, 0]
  branches = 1 if kind == "parallel" else 2
  size = 2.0 if kind == "parallel" else 1.0
  counts = np.round(y * 0.75 / size).astype(int)
  np.testing.assert_allclose(y, counts * size / 0.75, rtol=1e-5)
  assert set(counts) == set(range(branches + 1))
  np.testing.assert_allclose(counts.mean(), 0.75 * branches, atol=0.05)


def test_a_post_norm_comes_after_the_sum():
  """Norms of ones hide the branches, dropped or not."""
  layer = block.PostNormBlock(
    Part(), Part(), Part(), Part(), residual=_residual(rate=0.5)
  )
  assert np.all(_train(layer, *_args(8)) == 1)


def test_a_missing_number_is_an_error():
  rate = stochastic_residual.LinearRate(0.5, num_layers=2)
  with pytest.raises(ValueError, match=r"set Stack.pass_layer_index"):
    _train(_residual(rate=rate), X, BRANCH, deterministic=False)


def test_rejects_wrong_rates():
  message = r"StochasticResidual.rate must be in \[0, 1\), got 1.0"
  with pytest.raises(ValueError, match=message):
    _residual(rate=1.0)
  message = r"LinearRate.rate must be in \[0, 1\), got -0.1"
  with pytest.raises(ValueError, match=message):
    stochastic_residual.LinearRate(-0.1, num_layers=2)

"""Tests that linen's own dropout is what blocks need; there is no other here.

`nn.Dropout(rate, broadcast_dims=(1,))` drops a feature of all tokens of a row,
`broadcast_dims=(1, 2)` a whole row: noise of another shape is noise of size one
along some axes. For dropout in evaluation a model is called with
`deterministic=False`, or the part is given that field.
"""

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers import feed_forward, remat, testing
from paxon.layers.stacks import stack

SHAPE = (40, 6, 50)


def _dropped(layer, x, seed=0, **kwargs):
  return testing.apply(
    layer, {}, x, rngs={"dropout": jax.random.key(seed)}, **kwargs
  )


@pytest.mark.parametrize("dims", [(), (1,), (2,), (1, 2), (-1,)])
def test_values_are_dropped_together_along_broadcast_dims(dims):
  layer = nn.Dropout(0.25, broadcast_dims=dims)
  y = np.asarray(_dropped(layer, jnp.ones(SHAPE), deterministic=False))
  # What stays is scaled, so that the mean does.
  assert set(np.unique(y)) == {np.float32(0), np.float32(1 / 0.75)}
  first = y[
    tuple(
      slice(0, 1) if i in {d % 3 for d in dims} else slice(None)
      for i in range(3)
    )
  ]
  np.testing.assert_array_equal(y, np.broadcast_to(first, SHAPE))
  np.testing.assert_allclose(np.mean(first > 0), 0.75, atol=0.15)
  others = [i for i in range(3) if i not in {d % 3 for d in dims}]
  for axis in others:
    assert np.any(first != np.roll(first, 1, axis=axis))


def test_evaluation_is_the_identity_unless_told_otherwise():
  x = testing.normal(*SHAPE)
  layer = nn.Dropout(0.5)
  np.testing.assert_array_equal(_dropped(layer, x, deterministic=True), x)
  always = nn.Dropout(0.5, deterministic=False)
  assert not np.all(_dropped(always, x))


class Layer(nn.Module):
  """A feed-forward layer with dropout around it."""

  feed_forward: nn.Module
  dropout: nn.Module

  def __call__(self, x, *, deterministic):
    """Returns the transformed `x`."""
    return x + self.dropout(self.feed_forward(x), deterministic=deterministic)


def test_layers_and_steps_draw_their_own_and_remat_draws_again():
  """The recomputed forward pass drops what the first one dropped."""

  def layers(policy):
    layer = Layer(feed_forward.GatedFeedForward(8), nn.Dropout(0.5))
    return stack.Stack((layer,), num_layers=3, remat_policy=policy)

  x = testing.normal(2, 3, 4)
  values = testing.random_values(layers(None), x, deterministic=True)

  def gradient(policy, seed):
    def loss(values):
      rngs = {"dropout": jax.random.key(seed)}
      y = layers(policy).apply(values, x, deterministic=False, rngs=rngs)
      return jnp.sum(jnp.sin(y))

    return jax.jit(jax.grad(loss))(values)

  saved, again = gradient(None, 0), gradient(remat.save_nothing, 0)
  jax.tree.map(
    lambda a, e: np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-6),
    again,
    saved,
  )
  other = jax.tree.leaves(gradient(None, 1))
  assert not np.allclose(other[0], jax.tree.leaves(saved)[0])

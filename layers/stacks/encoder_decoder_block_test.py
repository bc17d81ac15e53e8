"""Tests for the blocks of a decoder that reads a memory."""

import dataclasses

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers import feed_forward, testing, token_context
from paxon.layers.attention import cross_attention, grouped_query
from paxon.layers.attention import testing as attention_testing
from paxon.layers.norms import layer_norm as norms
from paxon.layers.stacks import encoder_decoder_block, stack

X, MEMORY = testing.normal(2, 5, 8), testing.normal(2, 4, 6, seed=2)
SEGMENTS = testing.array([[1, 1, 1, 2, 2], [1, 1, 1, 0, 0]], jnp.int32)
MEMORY_SEGMENTS = testing.array([[1, 2, 2, 0], [1, 1, 1, 1]], jnp.int32)
POSITIONS = testing.array([[0, 1, 2, 0, 1], [0, 1, 2, 0, 0]], jnp.int32)
CONTEXT = token_context.TokenContext(POSITIONS, SEGMENTS)
ARGS = (X, CONTEXT, MEMORY, MEMORY_SEGMENTS)


def _block(cls, **fields):
  return cls(
    self_attention=grouped_query.GroupedQueryAttention(
      2, num_kv_heads=2, head_dim=4
    ),
    self_attention_norm=norms.LayerNorm(),
    cross_attention=cross_attention.CrossAttention(
      2, num_kv_heads=1, head_dim=4, **attention_testing.fields(use_bias=True)
    ),
    cross_attention_norm=norms.LayerNorm(),
    feed_forward=feed_forward.FeedForward(12),
    feed_forward_norm=norms.LayerNorm(),
    **fields,
  )


PRE = encoder_decoder_block.CrossBlock
POST = encoder_decoder_block.PostNormCrossBlock


@pytest.mark.nightly(keep=2)
@pytest.mark.parametrize("cls", [PRE, POST])
@pytest.mark.parametrize("skip", [False, True], ids=["memory", "alone"])
def test_is_its_parts_in_their_order(cls, skip):
  block = _block(cls)
  values = testing.random_values(block, *ARGS)

  def part(name, *args):
    own = {"params": values["params"][name]}
    return testing.apply(getattr(block, name), own, *args)

  more = {
    "self_attention": (CONTEXT,),
    "cross_attention": (MEMORY, CONTEXT, MEMORY_SEGMENTS),
    "feed_forward": (),
  }
  x = X
  for name, args in more.items():
    if skip and name == "cross_attention":
      continue
    if cls is PRE:
      x = x + part(name, part(f"{name}_norm", x), *args)
    else:
      x = part(f"{name}_norm", x + part(name, x, *args))
  memory = (None, None) if skip else (MEMORY, MEMORY_SEGMENTS)
  actual = testing.apply(block, values, X, CONTEXT, *memory, skip_memory=skip)
  np.testing.assert_allclose(actual, x, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("cls", [PRE, POST])
def test_dropout_is_on_every_branch(cls):
  block = _block(cls, dropout=nn.Dropout(0.999))
  values = testing.random_values(block, *ARGS)
  rngs = {"dropout": jax.random.key(0)}
  context = dataclasses.replace(CONTEXT, deterministic=False)
  y = testing.apply(block, values, X, context, *ARGS[2:], rngs=rngs)
  if cls is PRE:
    # Nearly all of all branches is dropped.
    assert np.mean(np.isclose(y, X)) > 0.9
  assert np.any(np.asarray(y) != testing.apply(block, values, *ARGS))


class Doubled(nn.Module):
  """Adds a branch twice, times one more than the layer."""

  def __call__(self, x, branch, layer_index, *, deterministic):
    del deterministic
    return x + 2 * (1 + layer_index).astype(x.dtype) * branch


def test_the_residual_is_a_part_that_knows_the_layer():
  class Ones(nn.Module):
    """A branch of ones."""

    def __call__(self, x, *args, **static):
      del args, static
      return jnp.ones_like(x)

  block = PRE(Ones(), Ones(), Ones(), Ones(), Ones(), Ones(), None, Doubled())
  layers = stack.Stack((block,), num_layers=3, pass_layer_index=True)
  y = testing.apply(layers, {}, *ARGS)
  np.testing.assert_allclose(y, X + 3 * 2 * (1 + 2 + 3), rtol=1e-6)

"""Tests for the positions and segments that layers are called with."""

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers import token_context
from paxon.layers.stacks import stack


class _Layer(nn.Module):
  """A layer without annotations, which would check shapes and dtypes first."""

  def __call__(self, x, **arrays):
    return token_context.TokenContext(**arrays).fill_arrays(self, x)


def test_fills_in_one_unpadded_document():
  positions, segments = _Layer().apply({}, jnp.ones((2, 3, 8)))
  assert positions.tolist() == [[0, 1, 2]] * 2
  assert segments.tolist() == [[1, 1, 1]] * 2
  assert positions.dtype == segments.dtype == jnp.int32


def test_given_arrays_stay_the_same_objects():
  # Masks and stacks recognize them by identity.
  given = {
    "positions": jnp.zeros((2, 3), jnp.int32),
    "segment_ids": jnp.ones((2, 3), jnp.int8),
  }
  filled = _Layer().apply({}, jnp.ones((2, 3, 8)), **given)
  assert all(a is b for a, b in zip(filled, given.values(), strict=True))


@pytest.mark.parametrize(
  ("arrays", "error", "message"),
  [
    pytest.param(
      {"segment_ids": np.ones((2, 3), np.float32)},
      TypeError,
      r"_Layer: `segment_ids` must be an integer array of shape "
      r"\[batch, length\], got float32\[2, 3\]\. Segments are numbered from 1",
      id="a float attention mask",
    ),
    pytest.param(
      {"segment_ids": np.ones((2, 3), np.bool_)},
      TypeError,
      r"`segment_ids` must be an integer array .* got bool\[2, 3\]",
      id="a boolean attention mask",
    ),
    pytest.param(
      {"positions": np.zeros((2, 3), np.float32)},
      TypeError,
      r"`positions` must be an integer array .* got float32\[2, 3\]",
      id="float positions",
    ),
    pytest.param(
      {"positions": np.zeros((3,), np.int32)},
      ValueError,
      r"`positions` must have the shape \[batch, length\] = \[2, 3\] of the "
      r"tokens, got int32\[3\]",
      id="positions of one sequence",
    ),
    pytest.param(
      {"segment_ids": np.ones((2, 3, 1), np.int32)},
      ValueError,
      r"`segment_ids` must have the shape .* got int32\[2, 3, 1\]",
      id="one dimension too many",
    ),
    pytest.param(
      {"prefix": np.ones((2, 3), np.int32)},
      TypeError,
      r"`prefix` must be a boolean array .* got int32\[2, 3\]",
      id="an integer prefix",
    ),
  ],
)
def test_rejects_arrays_of_another_dtype_or_shape(arrays, error, message):
  arrays = {name: jax.device_put(array) for name, array in arrays.items()}
  with pytest.raises(error, match=message):
    _Layer().apply({}, jnp.ones((2, 3, 8)), **arrays)


def test_rejects_tokens_of_another_rank():
  message = (
    r"_Layer needs tokens of shape \[batch, length, embed\], got \(2, 8\)"
  )
  with pytest.raises(ValueError, match=message):
    _Layer().apply({}, jnp.ones((2, 8)))


class _Reader(nn.Module):
  """A block that adds the positions, and what is constant in its context."""

  def __call__(self, x, context):
    assert context.cache_length == 7
    assert context.deterministic is False
    assert context.prefix is None
    return x + context.positions[..., None].astype(x.dtype)


@pytest.mark.parametrize(
  "fields",
  [{}, {"scan": False}, {"remat_policy": "save_nothing"}],
  ids=["scan", "unrolled", "remat"],
)
def test_constants_stay_constants_in_stacks(fields):
  layers = stack.Stack((_Reader(),), num_layers=3, **fields)
  context = token_context.TokenContext(
    jnp.arange(3, dtype=jnp.int32)[None], cache_length=7, deterministic=False
  )
  y = jax.jit(layers.apply)({}, jnp.zeros((1, 3, 2)), context)
  np.testing.assert_array_equal(y, np.float32([[[0, 0], [3, 3], [6, 6]]]))


def test_a_batch_gives_its_context():
  batch = {name: jnp.ones((1, 2), jnp.int32) for name in ("inputs", "weights")}
  batch |= {"positions": batch["inputs"], "segment_ids": batch["weights"]}
  plain = token_context.TokenContext.from_batch(batch)
  assert plain.positions is batch["positions"]
  assert plain.segment_ids is batch["segment_ids"]
  assert plain.prefix is None
  assert plain.deterministic
  batch["prefix"] = batch["inputs"] > 0
  context = token_context.TokenContext.from_batch(batch, deterministic=False)
  assert context.prefix is batch["prefix"]
  assert not context.deterministic

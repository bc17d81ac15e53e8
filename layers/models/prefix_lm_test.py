"""Tests for prefix language models: masks, losses, decoding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers import testing
from paxon.layers.models import decoder_lm
from paxon.layers.models import testing as models_testing

MODEL = models_testing.tiny_prefix_lm()
BATCH = models_testing.packed_batch([[5, 3], [7]], 8)
ARGS = models_testing.token_args(BATCH)
# Of the first document three tokens, of the second none; of the third four.
PREFIX = testing.array(
  [[1, 1, 1, 0, 0, 0, 0, 0], [1, 1, 1, 1, 0, 0, 0, 0]], bool
)
_forward = jax.jit(MODEL.apply)


@pytest.fixture(name="values", scope="module")
def _values():
  return testing.random_values(MODEL, *ARGS)


def _changed(values, row, t, prefix):
  """At which positions of a row the logits change with token `t`."""
  ids = ARGS[0].at[row, t].set((ARGS[0][row, t] + 1) % models_testing.VOCAB)
  before = _forward(values, *ARGS, prefix)
  after = _forward(values, ids, *ARGS[1:], prefix)
  return np.flatnonzero(np.any(before != after, axis=-1)[row]).tolist()


def test_tokens_see_their_prefix_and_what_came_before(values):
  assert _changed(values, 0, 0, PREFIX) == [0, 1, 2, 3, 4]
  assert _changed(values, 0, 2, PREFIX) == [0, 1, 2, 3, 4]
  assert _changed(values, 0, 3, PREFIX) == [3, 4]
  assert _changed(values, 0, 6, PREFIX) == [6, 7]
  assert _changed(values, 1, 3, PREFIX) == [0, 1, 2, 3, 4, 5, 6]


def test_an_empty_prefix_is_a_causal_model(values):
  causal = decoder_lm.DecoderLm(MODEL.embedding, MODEL.stack, MODEL.final_norm)
  np.testing.assert_allclose(
    _forward(values, *ARGS, jnp.zeros_like(PREFIX)),
    testing.apply(causal, values, *ARGS),
    rtol=1e-5,
    atol=1e-6,
  )


def test_the_loss_has_the_prefix_and_the_weights_of_the_suffix(values):
  weights = jnp.where(PREFIX, 0, BATCH["weights"])
  batch = {**BATCH, "weights": weights, "prefix": PREFIX}
  loss = testing.apply(MODEL, values, batch, method="loss")[0]
  log_probs = jax.nn.log_softmax(_forward(values, *ARGS, PREFIX))
  nll = -np.take_along_axis(log_probs, BATCH["targets"][:, :, None], 2)[..., 0]
  np.testing.assert_allclose(loss, (np.sum(nll * weights), 8), rtol=1e-5)
  scores = testing.apply(MODEL, values, batch, method="score")
  np.testing.assert_array_equal(scores.length[:, :2], [[2, 3], [3, 0]])
  expected = -np.sum((nll * weights)[0, 5:])
  np.testing.assert_allclose(scores.log_likelihood[0, 1], expected, rtol=1e-5)


def test_decoding_reads_the_prompt_as_a_prefix(values):
  ids = testing.array([[1, 2, 3, 4, 5, 6, 7, 0]] * 2, jnp.int32)
  at, lengths = (
    testing.make_positions(2, 8),
    testing.array([4, 2], np.int32)[:, None],
  )
  inside = (at < lengths).astype(jnp.int32)
  prompt = tuple(x[:, :4] for x in (ids, at, inside))
  first, state = testing.apply(
    MODEL,
    values,
    *prompt,
    cache_length=6,
    method="prefill",
    mutable=["cache"],
  )
  next_ids = jnp.take_along_axis(ids, lengths, axis=1)
  last, _ = testing.apply(
    MODEL,
    {**values, **state},
    next_ids,
    lengths.astype(jnp.int32),
    testing.ones(2, 1),
    method="decode_step",
    mutable=["cache"],
  )
  segments = (at <= lengths).astype(jnp.int32)
  expected = _forward(values, ids, at, segments, at < lengths)
  for row, length in enumerate((4, 2)):
    actual = np.concatenate([first[row, :length], last[row]])
    np.testing.assert_allclose(
      actual, expected[row, : length + 1], rtol=1e-5, atol=1e-5
    )


def test_says_what_it_needs(values):
  for method in ("loss", "score"):
    with pytest.raises(ValueError, match=r"PrefixLm needs batch\['prefix'\]"):
      MODEL.apply(values, BATCH, method=method)
  with pytest.raises(ValueError, match=r"PrefixLm.prefill creates a cache"):
    MODEL.apply(values, *ARGS, cache_length=9, method="prefill")

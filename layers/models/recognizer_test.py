"""Tests for the speech recognizer."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers import feed_forward, linear, testing
from paxon.layers.attention import grouped_query
from paxon.layers.attention import mask as attention_mask
from paxon.layers.models import recognizer
from paxon.layers.norms import layer_norm
from paxon.layers.speech import (
  audio_encoder,
  conformer,
  ctc,
  spectrogram,
)
from paxon.layers.stacks import stack
from paxon.layers.vision import convolutions

EMBED, VOCAB, SPACE, RATE = 8, 6, 1, 1000
RNG = np.random.default_rng(0)


def _model(**kwargs):
  def layer():
    return feed_forward.FeedForward(12, activation=jax.nn.silu)

  norm = layer_norm.LayerNorm
  block = conformer.ConformerBlock(
    first_norm=norm(),
    first=layer(),
    attention_norm=norm(),
    attention=grouped_query.GroupedQueryAttention(
      2, num_kv_heads=2, head_dim=4, mask=attention_mask.MaskRules(causal=False)
    ),
    convolution_norm=norm(),
    convolution=conformer.LightConvolution(
      convolution=convolutions.DepthwiseConv((3,), kernel_axes=(None, "mlp"))
    ),
    last_norm=norm(),
    last=layer(),
    final_norm=norm(),
  )
  encoder = audio_encoder.AudioEncoder(
    features=spectrogram.LogMel(sample_rate=RATE, num_bins=6),
    subsampling=[
      convolutions.ConvNormAct(
        convolutions.Conv(EMBED, (3,), 2, kernel_axes=(None, "embed"))
      )
    ],
    projection=linear.Linear(EMBED, kernel_axes=("embed", None)),
    stack=stack.Stack((block,), num_layers=2),
    augmentation=spectrogram.SpecAugment(max_bins=3),
  )
  head = linear.Linear(VOCAB, kernel_axes=("embed", None))
  given = {"encoder": encoder, "head": head, "space_id": SPACE}
  return recognizer.Recognizer(**{**given, **kwargs})


def _batch():
  audio = RNG.uniform(-1, 1, (3, 400)).astype(np.float32)
  labels = RNG.integers(1, VOCAB, (3, 5)).astype(np.int32)
  return {
    "audio": jnp.asarray(audio),
    "audio_lengths": jnp.asarray([400, 300, 0], jnp.int32),
    "labels": jnp.asarray(labels),
    "label_lengths": jnp.asarray([5, 3, 0], jnp.int32),
    "example_weights": jnp.asarray([1, 1, 0], jnp.float32),
  }


BATCH = _batch()


@functools.cache
def _values():
  return testing.initial_values(_model(), BATCH, method="loss")


@functools.partial(jax.jit, static_argnames=("method", "deterministic"))
def _jitted(values, batch, rngs, **static):
  return _model().apply(values, batch, rngs=rngs, **static)


def _apply(batch, rngs=None, **static):
  return _jitted(_values(), batch, rngs, **static)


def _loss(batch, **kwargs):
  return _apply(batch, method="loss", **kwargs)


def test_predictions_for_a_search():
  rng = np.random.default_rng(1)
  logits = rng.normal(size=(2, 4, 3)).astype(np.float32)
  logits[0, 1, 2] = -80  # Below what is written.
  mask = np.asarray([[True, False, True, True], [False, False, True, False]])
  shifted = logits.astype(np.float64)
  expected = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
  batch = {
    "labels": jnp.asarray([[2, 1, 2], [1, 2, 1]], jnp.int32),
    "label_lengths": jnp.asarray([3, 1], jnp.int32),
  }
  outputs = {
    "row_nll": jnp.asarray([0.5, 0.25]),
    "log_probs": jax.nn.log_softmax(jnp.asarray(logits)),
    "frame_mask": jnp.asarray(mask),
  }
  found = recognizer.write_log_probs(batch, outputs)
  assert found["labels"].tolist() == [[2, 1, 2], [1, 0, 0]]
  assert found["num_frames"].tolist() == [3, 1]
  assert found["row_nll"].tolist() == [0.5, 0.25]
  for i, count in enumerate([3, 1]):
    np.testing.assert_allclose(
      found["log_probs"][i, :count], 1000 * expected[i, mask[i]], atol=0.501
    )
  # The padding of the first clip comes last.
  assert found["log_probs"][0, 3, 2] == -30_000


def test_loss_and_rates_are_those_of_their_definitions():
  (total, weight), metrics, outputs = _loss(BATCH)
  logits, is_real = _apply(BATCH)
  assert logits.shape == (3, 19, VOCAB)
  assert is_real.sum(1).tolist() == [19, 14, 0]
  found = _apply(BATCH, method="predict")
  expected, words, letters = 0.0, ctc.Errors(), ctc.Errors()
  for i in range(2):
    count, frames = int(BATCH["label_lengths"][i]), int(is_real[i].sum())
    reference = BATCH["labels"][i, :count].tolist()
    nll = ctc.loss(
      logits[i : i + 1, :frames],
      jnp.ones((1, frames), bool),
      jnp.asarray([reference], jnp.int32),
      jnp.ones((1, count), bool),
    )
    np.testing.assert_allclose(outputs["row_nll"][i], nll[0], rtol=1e-5)
    expected += float(nll[0]) / count
    best = np.argmax(np.asarray(logits[i, :frames]), axis=-1)
    merged = [b for n, b in enumerate(best) if n == 0 or b != best[n - 1]]
    text = [int(b) for b in merged if b]
    length = int(found["label_lengths"][i])
    assert found["labels"][i, :length].tolist() == text
    letters += ctc.count_errors(reference, text)
    words += ctc.count_errors(_split(reference), _split(text))
  assert weight == 2
  np.testing.assert_allclose(total, expected, rtol=1e-5)
  np.testing.assert_allclose(metrics["ctc_loss"][0], expected, rtol=1e-5)
  for name, errors in (
    ("word_error_rate", words),
    ("character_error_rate", letters),
  ):
    value, count = metrics[name]
    assert count == errors.length
    np.testing.assert_allclose(value / count, errors.rate, rtol=1e-6)


def _split(ids):
  text = "".join(" " if i == SPACE else chr(96 + i) for i in ids)
  return text.split()


def test_padding_changes_nothing():
  expected, _, _ = _loss(BATCH)
  changed = dict(BATCH)
  beyond = np.arange(400)[None] >= np.asarray(BATCH["audio_lengths"])[:, None]
  changed["audio"] = jnp.where(beyond, jnp.nan, BATCH["audio"])
  beyond = np.arange(5)[None] >= np.asarray(BATCH["label_lengths"])[:, None]
  changed["labels"] = jnp.where(beyond, 77, BATCH["labels"])
  found, _, _ = _loss(changed)
  np.testing.assert_array_equal(found[0], expected[0])
  longer = dict(BATCH)
  longer["audio"] = jnp.pad(BATCH["audio"], ((0, 0), (0, 80)))
  found, _, _ = _loss(longer)
  np.testing.assert_allclose(found[0], expected[0], rtol=2e-6)


def test_texts_that_do_not_fit_have_no_loss_and_no_gradient():
  short = {**BATCH, "audio_lengths": jnp.asarray([400, 60, 0], jnp.int32)}

  def loss(values):
    result: Any = _model().apply(values, short, method="loss")
    (total, _), metrics, _ = result
    return total, metrics["too_long_texts"]

  (total, (count, weight)), gradients = jax.jit(
    jax.value_and_grad(loss, has_aux=True)
  )(_values())
  assert np.isfinite(total)
  assert (count, weight) == (1, 2)
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(gradients))


def test_training_augments_and_has_no_error_rates():
  keys = [jax.random.key(i) for i in range(2)]
  results = [
    _loss(BATCH, deterministic=False, rngs={audio_encoder.STREAM: key})
    for key in (keys[0], keys[0], keys[1])
  ]
  losses = [float(total) for (total, _), _, _ in results]
  assert losses[0] == losses[1] != losses[2]
  assert "word_error_rate" not in results[0][1]


def test_without_spaces_there_is_no_word_error_rate():
  model = _model(space_id=None)
  result: Any = testing.apply(model, _values(), BATCH, method="loss")
  _, metrics, _ = result
  assert "word_error_rate" not in metrics
  assert "character_error_rate" in metrics


def test_errors():
  with pytest.raises(ValueError, match="space_id and blank_id must differ"):
    _model(space_id=0)
  with pytest.raises(ValueError, match="space_id must not be negative"):
    _model(space_id=-1)
  with pytest.raises(ValueError, match=r"needs batch\['audio_lengths'\]"):
    _model().apply(_values(), {"audio": BATCH["audio"]})

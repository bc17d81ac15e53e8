"""Tests for CTC, against all alignments, one by one."""

import functools
import importlib.util
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers import testing
from paxon.layers.speech import ctc

FRAMES, VOCAB = 5, 3


def _text(alignment, blank_id):
  merged = [k for k, _ in itertools.groupby(alignment)]
  return tuple(i for i in merged if i != blank_id)


def _log_probs(logits):
  logits = np.asarray(logits, np.float64)
  return logits - np.log(np.sum(np.exp(logits), axis=-1, keepdims=True))


@functools.cache
def _texts(frames, blank_id, seed):
  """Returns the probability of each text that some alignment has."""
  log_probs = _log_probs(_logits(seed)[:frames])
  found = {}
  for alignment in itertools.product(range(VOCAB), repeat=frames):
    log_prob = sum(log_probs[t, i] for t, i in enumerate(alignment))
    text = _text(alignment, blank_id)
    found[text] = found.get(text, 0) + np.exp(log_prob)
  return found


def _logits(seed):
  return np.asarray(testing.normal(FRAMES, VOCAB, seed=seed))


def _batch(texts, frames, seeds, *, pad=0):
  """Returns arguments of the loss, with `pad` frames of NaN in between."""
  width = max(map(len, texts)) + 1
  labels, label_mask = np.full((len(texts), width), 99), []
  logits = np.full((len(texts), FRAMES + pad, VOCAB), np.nan, np.float32)
  frame_mask = np.zeros(logits.shape[:2], bool)
  for i, (text, count, seed) in enumerate(
    zip(texts, frames, seeds, strict=True)
  ):
    labels[i, : len(text)] = text
    label_mask.append(np.arange(width) < len(text))
    # The first frame, then the padding, then the rest.
    at = [t if t == 0 else t + pad for t in range(count)]
    logits[i, at], frame_mask[i, at] = _logits(seed)[:count], True
  arrays = (logits, frame_mask, labels.astype(np.int32), np.stack(label_mask))
  return tuple(jnp.asarray(x) for x in arrays)


@pytest.mark.parametrize("blank_id", [0, 2])
@pytest.mark.parametrize("pad", [0, 2])
def test_the_loss_is_that_of_all_alignments(blank_id, pad):
  texts, frames, seeds, expected = [], [], [], []
  for seed, count in enumerate((FRAMES, FRAMES - 1, 1, 0)):
    for text, probability in _texts(count, blank_id, seed).items():
      texts.append(text)
      frames.append(count)
      seeds.append(seed)
      expected.append(-np.log(probability))
  # Two equal labels need a blank in between.
  one = next(i for i in range(VOCAB) if i != blank_id)
  for text in ((one,) * (FRAMES // 2 + 2), (one, one)):
    texts.append(text)
    frames.append(FRAMES if len(text) > 2 else 2)
    seeds.append(0)
    expected.append(np.inf)
  batch = _batch(texts, frames, seeds, pad=pad)
  found = jax.jit(functools.partial(ctc.loss, blank_id=blank_id))(*batch)
  np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_the_gradient_is_that_of_all_alignments():
  """By central differences of the probability, and zero where it is zero."""
  text, count = (1, 2, 2), FRAMES
  logits, frame_mask, *labels = _batch(
    [text, (1, 1, 1, 1)], [count] * 2, [0, 1]
  )

  def total(logits):
    losses = ctc.loss(logits, frame_mask, *labels)
    return jnp.sum(jnp.where(jnp.isfinite(losses), losses, 0))

  found = jax.jit(jax.grad(total))(logits)

  def exact(logits):
    log_probs = _log_probs(logits)
    return -np.log(
      sum(
        np.exp(sum(log_probs[t, i] for t, i in enumerate(alignment)))
        for alignment in itertools.product(range(VOCAB), repeat=count)
        if _text(alignment, 0) == text
      )
    )

  at = np.asarray(logits[0], np.float64)
  expected = np.zeros_like(at)
  for index in np.ndindex(at.shape):
    step = np.zeros_like(at)
    step[index] = 1e-5
    expected[index] = (exact(at + step) - exact(at - step)) / 2e-5
  np.testing.assert_allclose(found[0], expected, atol=1e-5)
  np.testing.assert_array_equal(found[1], 0)


def test_without_frames_only_the_empty_text_is_possible():
  arrays = (jnp.ones((2, 2), jnp.int32), jnp.asarray([[False] * 2, [True] * 2]))
  empty = jnp.zeros((2, 0, VOCAB)), jnp.zeros((2, 0), bool), *arrays
  np.testing.assert_array_equal(ctc.loss(*empty), [0, np.inf])
  gradient = jax.grad(lambda x: jnp.sum(ctc.loss(x, *empty[1:])[:1]))(empty[0])
  assert gradient.shape == (2, 0, VOCAB)


@pytest.mark.skipif(
  importlib.util.find_spec("torch") is None,
  reason="torch is not here; --config=oracle brings it",
)
def test_the_loss_and_its_gradient_are_those_of_torch():
  import torch  # pyrefly: ignore[missing-import]

  rng = np.random.default_rng(0)
  logits = rng.normal(size=(4, 40, 12)).astype(np.float32)
  frames, counts = np.asarray([40, 31, 7, 12]), np.asarray([12, 0, 7, 5])
  labels = rng.integers(1, 12, (4, 12)).astype(np.int32)
  labels[2] = [*range(1, 8), *[1] * 5]
  theirs = torch.tensor(logits, requires_grad=True)
  losses = torch.nn.functional.ctc_loss(
    torch.log_softmax(theirs, -1).transpose(0, 1),
    torch.tensor(labels).long(),
    torch.tensor(frames),
    torch.tensor(counts),
    reduction="none",
  )
  losses.sum().backward()
  frame_mask = jnp.asarray(np.arange(40) < frames[:, None])
  label_mask = jnp.asarray(np.arange(12) < counts[:, None])

  def total(logits):
    losses = ctc.loss(logits, frame_mask, jnp.asarray(labels), label_mask)
    return jnp.sum(losses), losses

  (_, found), gradient = jax.jit(jax.value_and_grad(total, has_aux=True))(
    jnp.asarray(logits)
  )
  np.testing.assert_allclose(found, losses.detach(), rtol=1e-5)
  np.testing.assert_allclose(gradient, theirs.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("blank_id", [0, 2])
def test_the_greedy_text_is_that_of_the_best_alignment(blank_id):
  logits = jax.random.normal(jax.random.key(0), (64, 9, 4))
  mask = jax.random.bernoulli(jax.random.key(1), 0.8, (64, 9))
  found = jax.jit(functools.partial(ctc.greedy, blank_id=blank_id))(
    logits, mask
  )
  # An index of a JAX array is a program for each index.
  logits, mask, found = jax.device_get((logits, mask, found))
  for i in range(64):
    best = np.argmax(logits[i], axis=-1)[mask[i]]
    expected = _text(best.tolist(), blank_id)
    assert found.lengths[i] == len(expected)
    assert found.ids[i].tolist() == [*expected] + [0] * (9 - len(expected))


@pytest.mark.parametrize("blank_id", [0, 2])
def test_a_wide_search_has_the_probabilities_of_all_alignments(blank_id):
  texts = _texts(FRAMES, blank_id, 0)
  log_probs = _log_probs(_logits(0))
  found = ctc.search(log_probs, beam_size=1000, blank_id=blank_id)
  assert dict(found).keys() == texts.keys()
  for text, log_prob in found:
    assert np.exp(log_prob) == pytest.approx(texts[text], rel=1e-9)
  assert [x[1] for x in found] == sorted((x[1] for x in found), reverse=True)
  few = ctc.search(log_probs, beam_size=3, blank_id=blank_id)
  assert len(few) == 3
  for text, log_prob in few:
    assert np.exp(log_prob) <= texts[text] * (1 + 1e-9)
  # The best text of many alignments, not that of the best alignment.
  unsure = np.log([[0.4, 0.6], [0.4, 0.6]])
  assert ctc.search(unsure, beam_size=2, blank_id=1)[0][0] == (0,)
  assert ctc.search(np.zeros((0, 2)), beam_size=1) == [((), 0.0)]


def test_a_search_rejects_wrong_arguments():
  with pytest.raises(ValueError, match=r"beam_size must be positive, got 0"):
    ctc.search(np.zeros((2, 2)), beam_size=0)
  with pytest.raises(ValueError, match=r"must be \[T,V\], got \(2,\)"):
    ctc.search(np.zeros(2), beam_size=1)


def _distance(a, b):
  """The recursive definition of Levenshtein's distance."""

  @functools.cache
  def of(i, j):
    if not i or not j:
      return i + j
    return min(
      of(i - 1, j) + 1,
      of(i, j - 1) + 1,
      of(i - 1, j - 1) + (a[i - 1] != b[j - 1]),
    )

  return of(len(a), len(b))


def test_errors_are_those_of_the_shortest_edits():
  rng = np.random.default_rng(0)
  total = ctc.Errors()
  for _ in range(200):
    a, b = (
      tuple(rng.integers(0, 3, rng.integers(0, 7)).tolist()) for _ in range(2)
    )
    found = ctc.count_errors(a, b)
    errors = found.substitutions + found.deletions + found.insertions
    assert errors == _distance(a, b)
    assert len(a) - found.deletions + found.insertions == len(b)
    assert found.length == len(a)
    total += found
  assert total.length > 300
  words = (
    ["the", "cat", "sat", "on", "the", "mat"],
    ["a", "cat", "on", "the", "the", "mat"],
  )
  found = ctc.count_errors(*words)
  assert found.rate == pytest.approx(3 / 6)
  assert np.isnan(ctc.count_errors([], ["a"]).rate)


@pytest.mark.parametrize("blank_id", [0, 2])
@pytest.mark.parametrize("pad", [0, 2])
def test_forced_alignments_are_the_best_of_all(blank_id, pad):
  texts, frames, seeds, expected = [], [], [], []
  for seed, count in enumerate((FRAMES, FRAMES - 1, 1, 0)):
    log_probs = _log_probs(_logits(seed)[:count])
    best = {}
    for alignment in itertools.product(range(VOCAB), repeat=count):
      score = sum(log_probs[t, i] for t, i in enumerate(alignment))
      text = _text(alignment, blank_id)
      best[text] = max(best.get(text, (-np.inf, ())), (score, alignment))
    for text, found in best.items():
      texts.append(text)
      frames.append(count)
      seeds.append(seed)
      expected.append(found)
  # Impossible.
  one = next(i for i in range(VOCAB) if i != blank_id)
  texts.append((one,) * (FRAMES // 2 + 2))
  frames.append(FRAMES)
  seeds.append(0)
  args = _batch(texts, frames, seeds, pad=pad)
  align = functools.partial(ctc.align, blank_id=blank_id)
  found = jax.jit(align)(*args)
  assert found.log_probs[-1] == -np.inf
  for i, (score, alignment) in enumerate(expected):
    np.testing.assert_allclose(found.log_probs[i], score, rtol=1e-5, atol=1e-6)
    real = np.asarray(args[1])[i]
    assert tuple(np.asarray(found.ids)[i][real].tolist()) == alignment
    indices = np.asarray(found.indices)[i]
    assert set(indices[~real]) <= {-1}
    # Each label has frames, in order.
    kept = [k for k, _ in itertools.groupby(indices[real].tolist()) if k >= 0]
    assert kept == list(range(len(texts[i])))

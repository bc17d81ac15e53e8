"""Tests of sentence encoders, against float64 numpy from the definitions."""

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers import embedding
from paxon.layers.models import masked_lm, sentence_encoder

_LENGTHS = (5, 1, 3)


class _Stack(nn.Module):
  """Adds positions to tokens, which pads must not reach."""

  def __call__(self, x, context):
    return x * (1 + context.positions[:, :, None].astype(x.dtype))


def _model(**fields):
  encoder = masked_lm.TextEncoder(
    embedding=embedding.Embedding(vocab_size=11, embed_dim=4), stack=_Stack()
  )
  return sentence_encoder.SentenceEncoder(encoder=encoder, **fields)


def _batch(*, length=6, prefix="", seed=0):
  random = np.random.default_rng(seed)
  ids = np.zeros((len(_LENGTHS), length), np.int32)
  segments = np.zeros_like(ids)
  for row, count in enumerate(_LENGTHS):
    ids[row, :count] = random.integers(1, 11, count)
    segments[row, :count] = 1
  positions = np.where(segments, np.arange(length), 0).astype(np.int32)
  arrays = {"inputs": ids, "positions": positions, "segment_ids": segments}
  return {f"{prefix}{key}": jnp.asarray(x) for key, x in arrays.items()}


def _states(variables, batch, prefix=""):
  """Returns the states of each text, float64 [T,D]."""
  table = np.asarray(variables["params"]["embedding"]["table"], np.float64)
  ids = np.asarray(batch[f"{prefix}inputs"])
  return [
    table[ids[row, :count]] * np.arange(1, count + 1)[:, None]
    for row, count in enumerate(_LENGTHS)
  ]


_DEFINITIONS = {
  "cls": lambda x: x[0],
  "max": lambda x: x.max(0),
  "mean": lambda x: x.mean(0),
  "mean_sqrt_len_tokens": lambda x: x.sum(0) / np.sqrt(len(x)),
  "weightedmean": lambda x: np.average(x, 0, np.arange(1, len(x) + 1)),
  "lasttoken": lambda x: x[-1],
}


def test_poolings_are_those_of_their_definitions():
  names = tuple(_DEFINITIONS)
  assert set(names) == set(sentence_encoder.POOLINGS)
  model = _model(pooling=names)
  batch = _batch()
  variables = nn.unbox(model.init(jax.random.key(0), batch, method="loss"))
  assert set(variables["params"]) == {"embedding"}
  found = model.apply(variables, batch)
  expected = np.stack(
    [
      np.concatenate([_DEFINITIONS[name](x) for name in names])
      for x in _states(variables, batch)
    ]
  )
  np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
  # Padding does not count, however much there is.
  longer = model.apply(variables, _pad(batch, 3))
  np.testing.assert_allclose(longer, found, rtol=1e-6)


def _pad(batch, count):
  return {k: jnp.pad(x, ((0, 0), (0, count))) for k, x in batch.items()}


def test_the_loss_is_that_of_pairs():
  model = _model(steps=(sentence_encoder.normalize,), scale=7.0)
  pairs = _batch(prefix="encoder_", seed=1)
  batch = _batch() | pairs | {"example_weights": jnp.asarray([1.0, 1.0, 0.0])}
  variables = nn.unbox(model.init(jax.random.key(0), batch, method="loss"))
  apply = jax.jit(lambda v, b: model.apply(v, b, method="loss"))
  (loss, weight), metrics, outputs = apply(variables, batch)

  def unit(prefix):
    x = np.stack([s.mean(0) for s in _states(variables, batch, prefix)])
    return x / np.linalg.norm(x, axis=1, keepdims=True)

  own, other = unit(""), unit("encoder_")
  # The last example is padding.
  scores = 7 * own[:2] @ other[:2].T
  directions = [
    -np.log(np.diag(np.exp(s) / np.exp(s).sum(1, keepdims=True)))
    for s in (scores, scores.T)
  ]
  np.testing.assert_allclose(loss, np.mean(directions, 0).sum(), rtol=1e-5)
  assert weight == 2
  hits = (scores.argmax(1) == np.arange(2)).sum()
  np.testing.assert_allclose(metrics["accuracy"], (hits, 2))
  np.testing.assert_allclose(outputs["embedding"], own, rtol=1e-5, atol=1e-6)
  # Texts alone have vectors, and nothing to train on.
  (loss, weight), metrics, alone = apply(variables, _batch())
  assert (loss, weight, metrics) == (0, 0, {})
  np.testing.assert_array_equal(alone["embedding"], outputs["embedding"])


def test_zeros_are_normalized_to_zeros_with_a_finite_gradient():
  x = jnp.asarray([[0.0, 0.0], [3.0, 4.0]])
  gradient = jax.grad(lambda x: sentence_encoder.normalize(x).sum())(x)
  assert np.isfinite(gradient).all()
  found = sentence_encoder.normalize(x)
  np.testing.assert_allclose(found, [[0, 0], [0.6, 0.8]], rtol=1e-6)


def test_unknown_poolings_are_rejected():
  with pytest.raises(ValueError, match=r"among cls, max, .* got \['middle'\]"):
    _model(pooling=("middle",))

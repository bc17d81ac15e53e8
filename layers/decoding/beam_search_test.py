"""Tests for beam search, with a model of random log probabilities.

`layers/models/hugging_face/decoders_test` compares it with transformers.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers.decoding import beam_search, cache_rows, prompts
from paxon.sharding import axes, variables

VOCAB = 7
END = (5, 6)
STEPS = 6
EMPTY = -1e9
# Logits of the next id, by the last two ids.
TABLE = 1.5 * np.random.default_rng(1).standard_normal((VOCAB, VOCAB, VOCAB))


def _model():
  """The cache of a sequence is its last id, so beams must select it."""
  table = jnp.asarray(TABLE, jnp.float32)

  def boxed(last):
    return {"last": variables.Variable(last[:, None], (axes.BATCH, None))}

  def prefill(ids, positions, segment_ids, *, cache_length, at):
    del positions, segment_ids, cache_length
    pair = [
      jnp.take_along_axis(ids, jnp.maximum(at - i, 0)[:, None], axis=1)[:, 0]
      for i in (1, 0)
    ]
    return table[pair[0], pair[1]][:, None], boxed(pair[1])

  def decode_step(cache, ids, positions, segment_ids):
    del positions, segment_ids
    last = cache["last"].value[:, 0]
    return table[last, ids[:, 0]][:, None], boxed(ids[:, 0])

  return prefill, decode_step


def _log_probs(ids):
  x = TABLE[ids[max(len(ids) - 2, 0)], ids[-1]]
  return x - np.log(np.exp(x).sum())


def _define(prompt, search, steps, end_ids=END):
  """Pax's definition: (ids, score) of the pool, then live ones, float64."""
  live, pool = [([], 0.0)], []

  def norm(count):
    return ((5 + count) / 5) ** search.length_alpha

  for step in range(steps):
    extended = []
    for ids, score in live:
      each = _log_probs([*prompt, *ids])
      if step >= search.min_new_tokens:
        best = max(end_ids, key=lambda i: each[i])
        pool.append(([*ids, best], (score + each[best]) / norm(step + 1)))
      allowed = [*range(VOCAB)]
      if step < search.min_new_tokens:
        allowed = [i for i in allowed if i not in end_ids]
      # Pax's two stages: end ids count among the best ids of a sequence.
      allowed = sorted(allowed, key=lambda i, each=each: -each[i])
      extended += [
        ([*ids, i], score + each[i])
        for i in allowed[: search.tokens_per_beam]
        if i not in end_ids
      ]
    pool = sorted(pool, key=lambda x: -x[1])[: search.beam_size]
    live = sorted(extended, key=lambda x: -x[1])[: search.beam_size]
  rest = [(ids, score / norm(steps)) for ids, score in live]
  return [*pool, *rest][: search.beam_size]


@functools.cache
def _compiled(search, steps, end_id, num_samples):
  return jax.jit(
    lambda ids, lengths: search.generate(
      *_model(),
      ids,
      lengths,
      max_new_tokens=steps,
      end_id=end_id,
      num_samples=num_samples,
    )
  )


def _run(rows, search, *, steps=STEPS, end_id=END, num_samples=1):
  batch = prompts.pad_right(rows)
  run = _compiled(search, steps, end_id, num_samples)
  return run(jnp.asarray(batch.ids), jnp.asarray(batch.lengths))


@pytest.mark.nightly(keep=2)
@pytest.mark.parametrize(
  "search",
  [
    beam_search.BeamSearch(beam_size=3, tokens_per_beam=2),
    beam_search.BeamSearch(beam_size=3),
    beam_search.BeamSearch(beam_size=4, tokens_per_beam=4, min_new_tokens=2),
    beam_search.BeamSearch(beam_size=1),
    beam_search.BeamSearch(beam_size=5, length_alpha=0.0),
    beam_search.BeamSearch(beam_size=4, length_alpha=2.5, min_new_tokens=2),
    # One pool place is left to live sequences.
    beam_search.BeamSearch(beam_size=4, min_new_tokens=STEPS),
  ],
  ids=str,
)
def test_equals_the_definition_of_pax(search):
  rows = [[1, 2], [3], [0, 4, 4], [2, 2, 2]]
  found = _run(rows, search, num_samples=search.beam_size)
  expected = [x for row in rows for x in _define(row, search, STEPS)]
  assert found.ids.shape == (len(expected), STEPS)
  np.testing.assert_allclose(
    found.scores, [score for _, score in expected], rtol=1e-5
  )
  for i, (ids, _) in enumerate(expected):
    assert found.ids[i].tolist() == ids + [0] * (STEPS - len(ids))
    assert int(found.lengths[i]) == len(ids)
    assert bool(found.ended[i]) == (ids[-1] in END)
    prompt = rows[i // search.beam_size]
    each = [_log_probs([*prompt, *ids[:n]])[x] for n, x in enumerate(ids)]
    each += [0.0] * (STEPS - len(ids))
    np.testing.assert_allclose(found.log_probs[i], each, rtol=1e-4, atol=1e-5)


def test_a_beam_of_all_sequences_finds_the_best_of_all():
  search = beam_search.BeamSearch(beam_size=5, length_alpha=0.0)
  found = _run([[1, 2]], search, steps=2, end_id=6)
  every = {
    (a, b): _log_probs([1, 2])[a] + _log_probs([1, 2, a])[b]
    for a in range(VOCAB)
    for b in (6,)
    if a != 6
  }
  every[6,] = _log_probs([1, 2])[6]
  best = max(every, key=lambda ids: every[ids])
  assert found.ids[0, : found.lengths[0]].tolist() == list(best)
  np.testing.assert_allclose(found.scores[0], every[best], rtol=1e-5)


@pytest.mark.nightly(keep=3)
@pytest.mark.parametrize("stop", beam_search.Stop)
@pytest.mark.parametrize("pool", beam_search.Pool)
def test_a_prompt_does_not_depend_on_the_others(pool, stop):
  search = beam_search.BeamSearch(beam_size=3, pool=pool, stop=stop)
  rows = [[1, 2], [3, 0], [0, 4]]
  together = _run(rows, search)
  for i, row in enumerate(rows):
    # In the shape of the batch, so that one compilation serves all.
    alone = _run([row] * len(rows), search)
    assert alone.ids[0].tolist() == together.ids[i].tolist()
    assert float(alone.scores[0]) == float(together.scores[i])


def test_a_nan_makes_all_log_probs_of_its_prompt_nan(monkeypatch):
  broken = TABLE.copy()
  # Logits after the second prompt, which the first one cannot reach in a step.
  broken[3, 0, 1] = np.nan
  monkeypatch.setitem(globals(), "TABLE", broken)
  found = _run([[1, 2], [3, 0]], beam_search.BeamSearch(beam_size=3), steps=2)
  assert np.isnan(found.log_probs).any(axis=1).tolist() == [False, True]


def test_the_cache_follows_its_beam():
  """With the caches of other sequences the scores would be others."""
  search = beam_search.BeamSearch(beam_size=4, min_new_tokens=3)
  batch = prompts.pad_right([[1, 2], [3, 3]])
  wrong = jax.jit(
    lambda ids, lengths: search.generate(
      *_model(),
      ids,
      lengths,
      max_new_tokens=STEPS,
      end_id=END,
      num_samples=4,
      take=lambda cache, at: cache_rows.take(cache, jnp.sort(at) * 0),
    )
  )(jnp.asarray(batch.ids), jnp.asarray(batch.lengths))
  right = _run([[1, 2], [3, 3]], search, num_samples=4)
  assert wrong.scores.tolist() != right.scores.tolist()


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"beam_size": 0}, r"BeamSearch.beam_size must be positive, got 0"),
    ({"length_alpha": np.inf}, r"length_alpha must be finite, got inf"),
    ({"length_offset": -1.0}, r"length_offset must not be negative"),
    ({"min_new_tokens": -1}, r"min_new_tokens must not be negative, got -1"),
  ],
)
def test_rejects_bad_settings(fields, message):
  with pytest.raises(ValueError, match=message):
    beam_search.BeamSearch(**fields)


def test_rejects_bad_arguments():
  search = beam_search.BeamSearch(beam_size=3)
  with pytest.raises(ValueError, match=r"num_samples \(4\) must not exceed"):
    _run([[1]], search, num_samples=4)
  with pytest.raises(ValueError, match=r"end_id is empty"):
    _run([[1]], search, end_id=())
  with pytest.raises(ValueError, match=r"beam_size \(6\) must be at most .*5"):
    _run([[1]], beam_search.BeamSearch(beam_size=6))

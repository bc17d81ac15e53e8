"""Tests for speculative decoding: plain generation, and distributions."""

import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from paxon.layers import testing
from paxon.layers.attention import sliding_cache
from paxon.layers.decoding import (
  generate,
  model_steps,
  prompts,
  samplers,
  sampling,
  speculative,
)
from paxon.layers.models import testing as models_testing
from paxon.sharding import axes, variables

VOCAB = models_testing.VOCAB
# 1,000 for the figure of docs/design/0043.
COUNT = int(os.environ.get("PAXON_SPECULATIVE_PROMPTS", "64"))
BATCH, NEW, END = 32, 14, (3, 9)


@functools.cache
def _model():
  """A model, its variables and those of its draft, which often agree.

  A layer with a ring, which drafts overwrite as a whole, and one without.
  """
  model = models_testing.tiny_decoder(num_layers=2)
  local, block = model.stack.blocks
  attention = local.attention.clone(cache=sliding_cache.SlidingCache(6))
  model = model.clone(
    stack=model.stack.clone(blocks=(local.clone(attention=attention), block))
  )
  tokens = jnp.ones((1, 4), jnp.int32)
  args = tokens, testing.make_positions(1, 4), testing.ones(1, 4)
  # Far from uniform, so that a small error does not swap two ids.
  values = jax.tree.map(lambda x: 2 * x, testing.random_values(model, *args))
  rng = np.random.default_rng(3)
  noisy = jax.tree.map(
    lambda x: x + 0.1 * rng.standard_normal(x.shape).astype(x.dtype), values
  )
  return model, values, noisy


def _steps(which):
  model, *values = _model()
  return (
    model_steps.make_prefill(model, values[which]),
    model_steps.make_decode_step(model, values[which]),
  )


def _draft(name):
  if name == "lookup":
    return speculative.PromptLookup(num_tokens=5)
  prefill, decode_step = _steps(1)
  return speculative.DraftModel(
    prefill=prefill, decode_step=decode_step, num_tokens=4
  )


def _batches(count):
  rng = np.random.default_rng(0)
  sizes = rng.integers(1, 12, count)
  rows = [rng.integers(0, VOCAB, size).tolist() for size in sizes]
  # Texts with repetitions.
  rows = [row + row[:3] if i % 2 else row for i, row in enumerate(rows)]
  for first in range(0, count, BATCH):
    batch = prompts.pad_right(rows[first : first + BATCH], length=15)
    yield jnp.asarray(batch.ids), jnp.asarray(batch.lengths)


_SHARED = {
  "key": jax.random.key(4),
  "max_new_tokens": NEW,
  "end_id": END,
  "num_alternatives": 2,
}


@functools.cache
def _plain():
  """Returns the compiled `(ids, lengths, settings) -> Generation`."""
  steps = _steps(0)

  def run(ids, lengths, settings=None):
    sampler = samplers.Greedy() if settings is None else settings
    return generate.generate(*steps, ids, lengths, sampler=sampler, **_SHARED)

  return jax.jit(run)


def _fast(name):
  """Returns the compiled `(ids, lengths, settings) -> Speculation`."""
  steps, draft = _steps(0), _draft(name)

  def run(ids, lengths, settings=None):
    return speculative.generate(
      *steps,
      ids,
      lengths,
      draft=draft,
      sampler=samplers.Greedy() if settings is None else settings,
      **_SHARED,
    )

  return jax.jit(run)


def _check_equal(plain, fast):
  for name in ("ids", "lengths", "ended", "top_ids"):
    np.testing.assert_array_equal(
      getattr(fast.generation, name), getattr(plain, name), name
    )
  for name in ("log_probs", "top_log_probs"):
    np.testing.assert_allclose(
      getattr(fast.generation, name),
      getattr(plain, name),
      rtol=1e-4,
      atol=1e-4,
    )


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("name", ["lookup", "model"])
def test_greedy_ids_are_those_of_plain_generation(name):
  """For 64 prompts; for as many as PAXON_SPECULATIVE_PROMPTS says."""
  run = _fast(name)
  accepted = drafted = steps = tokens = 0
  for ids, lengths in _batches(COUNT):
    plain, fast = _plain()(ids, lengths), run(ids, lengths)
    _check_equal(plain, fast)
    accepted += int(fast.num_accepted.sum())
    drafted += int(fast.num_drafted.sum())
    steps += int(fast.num_steps.sum())
    tokens += int(plain.lengths.sum())
    # The prefill gives an id, and each step one more than it accepts, unless
    # the last accepted one ends the sequence.
    most = 1 + fast.num_steps + fast.num_accepted
    missing = most - plain.lengths
    assert np.all((missing == 0) | ((missing == 1) & plain.ended))
    rate = fast.num_accepted / np.maximum(fast.num_drafted, 1)
    np.testing.assert_allclose(fast.acceptance, rate, rtol=1e-6)
  print(
    f"{COUNT} prompts, {name}: {accepted} of {drafted} ids accepted,"
    f" {steps} steps for {tokens} ids"
  )
  assert 0 < accepted < drafted
  assert steps < 0.9 * tokens


def _settings(count):
  mixed = [
    sampling.Settings(temperature=0.0, min_new_tokens=4),
    sampling.Settings(temperature=0.7, top_k=5, seed=3),
    sampling.Settings(presence_penalty=1.0, frequency_penalty=0.5, seed=8),
    sampling.Settings(temperature=0.0, repetition_penalty=1.3),
    sampling.Settings(top_p=0.8, max_new_tokens=5, seed=1),
    sampling.Settings(temperature=0.0, max_new_tokens=1),
  ]
  return [mixed[i % len(mixed)] for i in range(count)]


@pytest.mark.nightly
def test_samples_with_lookup_are_those_of_plain_generation():
  """With the settings of each sequence, and the same random draws."""
  ids, lengths = next(_batches(BATCH))
  settings = sampling.stack(_settings(BATCH))
  plain = _plain()(ids, lengths, settings)
  fast = _fast("lookup")(ids, lengths, settings)
  _check_equal(plain, fast)
  assert fast.num_accepted.sum() > 0
  assert plain.lengths[4] <= 5
  assert not fast.num_steps[5]


@pytest.mark.nightly
def test_a_draft_model_of_one_sequence_does_not_depend_on_the_others():
  """Greedy ones are those of plain generation; all are reproducible."""
  ids, lengths = next(_batches(BATCH))
  each = _settings(BATCH)
  run = _fast("model")
  fast = run(ids, lengths, sampling.stack(each))
  turned = run(ids[::-1], lengths[::-1], sampling.stack(each[::-1]))
  np.testing.assert_array_equal(
    fast.generation.ids, turned.generation.ids[::-1]
  )
  np.testing.assert_array_equal(fast.num_accepted, turned.num_accepted[::-1])
  plain = _plain()(ids, lengths, sampling.stack(each))
  greedy = np.asarray([s.temperature == 0 for s in each])
  np.testing.assert_array_equal(fast.generation.ids[greedy], plain.ids[greedy])
  assert np.any(fast.generation.ids != plain.ids)


def _markov(table):
  """Returns the steps of a model whose logits depend on the last id only."""

  def cache(ids):
    index = variables.Variable(jnp.zeros_like(ids), (axes.BATCH,))
    return {"cache": {"index": index}}

  def prefill(ids, positions, segment_ids, *, cache_length, at):
    del positions, segment_ids, cache_length
    last = jnp.take_along_axis(ids, at[:, None], axis=1)
    return table[last], cache(last[:, 0])

  def decode_step(cache, ids, positions, segment_ids):
    del positions, segment_ids
    return table[ids], cache

  return prefill, decode_step


def _define(settings, logits, generated):
  """The probabilities of the next id from the definitions, float64."""
  x = np.asarray(logits, np.float64)
  for i in set(generated):
    x[i] -= settings.presence_penalty
    x[i] -= settings.frequency_penalty * generated.count(i)
  p = np.exp(x / (settings.temperature or 1))
  p /= p.sum()
  order = np.argsort(-p, kind="stable")[: settings.top_k]
  q = np.zeros_like(p)
  for i in order:
    if q.sum() < settings.top_p * p[order].sum():
      q[i] = p[i]
  return q / q.sum()


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("draws", [10_000, 100_000])
def test_samples_of_each_setting_follow_the_distribution(draws):
  """A chi-squared test of three ids together, for two settings."""
  size, new, chunk = 5, 3, 10_000
  rng = np.random.default_rng(5)
  target, other = (
    rng.standard_normal((size, size)).astype(np.float32) for _ in range(2)
  )
  settings = [
    sampling.Settings(temperature=1.3, top_k=4, top_p=0.9),
    sampling.Settings(presence_penalty=0.8, frequency_penalty=-0.3, seed=2),
  ]
  prefill, decode_step = _markov(jnp.asarray(other))
  draft = speculative.DraftModel(
    prefill=prefill, decode_step=decode_step, num_tokens=2
  )

  @jax.jit
  def run(key):
    return speculative.generate(
      *_markov(jnp.asarray(target)),
      jnp.asarray([[2, 1, 1], [0, 1, 0]]),
      jnp.asarray([3, 3]),
      draft=draft,
      sampler=sampling.stack(settings, num_samples=chunk),
      key=key,
      max_new_tokens=new,
      num_samples=chunk,
    )

  counts = np.zeros((len(settings), size**new), np.int64)
  for i in range(draws // chunk):
    drawn = run(jax.random.key(i))
    ids = np.asarray(drawn.generation.ids).reshape(len(settings), chunk, new)
    for n, cells in enumerate(ids @ size ** np.arange(new)[::-1]):
      counts[n] += np.bincount(cells, minlength=size**new)
    rates = np.asarray(drawn.acceptance)
    assert 0.1 < rates.mean() < 0.9
  for n, (each, last) in enumerate(zip(settings, (1, 0), strict=True)):
    expected = np.zeros((size,) * new)
    for cell in np.ndindex(expected.shape):
      before = (last, *cell)
      expected[cell] = np.prod(
        [
          _define(each, target[before[i]], [*cell[:i]])[cell[i]]
          for i in range(new)
        ]
      )
    expected = expected.reshape(-1) * draws
    assert not counts[n][expected == 0].any()
    likely = expected > 5
    rest = [counts[n][~likely].sum()], [expected[~likely].sum()]
    found = np.concatenate([counts[n][likely], rest[0]])
    wanted = np.concatenate([expected[likely], rest[1]])
    keep = wanted > 0
    p = stats.chisquare(found[keep], wanted[keep]).pvalue
    assert p > 1e-3, (str(each), p)


def test_lookup_continues_the_longest_and_latest_match():
  lookup = speculative._Lookup(4, 3, jnp.zeros(5, jnp.int32))
  rows = [
    [1, 2, 3, 4, 9, 2, 3],  # 2 3 -> 4 9 2 3
    [1, 2, 7, 2, 8, 6, 2],  # latest 2 -> 8 6 2, then again
    [5, 5, 5],  # period of 1
    [1, 2, 3],  # no match
    [4, 1, 2, 6, 0, 1, 2, 5, 4, 1, 2],  # longest, not latest
  ]
  batch = prompts.pad_right(rows)
  look_up = jax.jit(lookup._look_up)
  found = look_up(jnp.asarray(batch.ids), jnp.asarray(batch.lengths))
  assert found[0].tolist() == [4, 9, 2, 3]
  assert found[1].tolist() == [8, 6, 2, 8]
  assert found[2].tolist() == [5, 5, 5, 5]
  assert found[4].tolist() == [6, 0, 1, 2]


@pytest.mark.parametrize(
  ("make", "message"),
  [
    (
      lambda: speculative.PromptLookup(num_tokens=0),
      "PromptLookup.num_tokens must be positive, got 0",
    ),
    (
      lambda: speculative.PromptLookup(max_ngram=0),
      "PromptLookup.max_ngram must be positive, got 0",
    ),
    (
      lambda: speculative.DraftModel(
        prefill=lambda: None, decode_step=lambda: None, num_tokens=0
      ),
      "DraftModel.num_tokens must be positive, got 0",
    ),
  ],
)
def test_settings_are_checked(make, message):
  with pytest.raises(ValueError, match=message):
    make()


def _generate(size=5, *, steps=None, **kwargs):
  """Traces a generation."""
  prefill, decode_step = _markov(jnp.zeros((size, size)))
  run = functools.partial(
    speculative.generate,
    *(steps or _markov(jnp.zeros((5, 5)))),
    **{
      "draft": speculative.DraftModel(prefill=prefill, decode_step=decode_step),
      "sampler": samplers.Greedy(),
      "key": jax.random.key(0),
      "max_new_tokens": 4,
      **kwargs,
    },
  )
  jax.eval_shape(run, jnp.ones((1, 2), jnp.int32), jnp.asarray([2]))


def test_what_does_not_fit_is_rejected():
  with pytest.raises(
    ValueError, match=r"vocabulary of the model, 5 ids, got 6"
  ):
    _generate(6)
  with pytest.raises(ValueError, match="Greedy or BatchSettings, got Temper"):
    _generate(sampler=samplers.Temperature())
  prefill, decode_step = _markov(jnp.zeros((5, 5)))

  def recurrent(cache, ids, positions, segment_ids):
    state = variables.Variable(ids[:, 0], (axes.BATCH,))
    logits, _ = decode_step(cache, ids, positions, segment_ids)
    return logits, {"cache": {"state": state}}

  def begin(*args, **kwargs):
    logits, cache = prefill(*args, **kwargs)
    return logits, {"cache": {"state": cache["cache"]["index"]}}

  with pytest.raises(ValueError, match=r"'state'\] has no index, so it cannot"):
    _generate(steps=(begin, recurrent), draft=speculative.PromptLookup())
  with pytest.raises(ValueError, match="A ring of 6 slots cannot take back 7"):
    _generate(
      steps=_steps(0),
      draft=speculative.PromptLookup(num_tokens=6),
      max_new_tokens=8,
    )

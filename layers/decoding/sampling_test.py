"""Tests for the sampling settings of each request."""

import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from paxon.layers.decoding import sampling, sampling_cases

VOCAB = 12
SETTINGS = (
  sampling.Settings(),
  sampling.Settings(temperature=0.5),
  sampling.Settings(top_k=4),
  sampling.Settings(top_p=0.7),
  sampling.Settings(top_k=6, top_p=0.7),
  sampling.Settings(top_k=6, top_p=0.7, global_normalize=True),
  sampling.Settings(min_p=0.2),
  sampling.Settings(typical_p=0.5),
  sampling.Settings(epsilon=0.08),
  sampling.Settings(repetition_penalty=1.8),
  sampling.Settings(presence_penalty=0.7, frequency_penalty=0.4),
  sampling.Settings(logit_bias={3: 2.5, 0: -np.inf}),
  sampling.Settings(min_new_tokens=4),
  sampling.Settings(
    temperature=1.4,
    top_k=9,
    top_p=0.95,
    min_p=0.02,
    typical_p=0.9,
    epsilon=0.05,
    repetition_penalty=1.3,
    frequency_penalty=-0.2,
    logit_bias={1: 1.0},
  ),
)
END = 5
STEP = 3


def _define(settings, logits, prompt, generated):
  """The probabilities of one sequence from the definitions, float64."""
  x = np.asarray(logits, np.float64)
  for i in set(prompt) | set(generated):
    by = settings.repetition_penalty
    x[i] = x[i] / by if x[i] > 0 else x[i] * by
  for i in set(generated):
    x[i] -= settings.presence_penalty
    x[i] -= settings.frequency_penalty * generated.count(i)
  for i, bias in settings.logit_bias.items():
    x[i] += bias
  if len(generated) < settings.min_new_tokens:
    x[END] = -np.inf
  p = np.exp((x - x.max()) / settings.temperature)
  p /= p.sum()

  def limit(order, mass, counted=None):
    total, kept = 0.0, []
    for i in order:
      if total < mass:
        kept.append(i)
      total += (p if counted is None else counted)[i]
    return kept

  def restrict(kept):
    nonlocal p
    p = np.where(np.isin(np.arange(VOCAB), kept), p, 0)
    p /= p.sum()

  counted = p if settings.global_normalize else None
  restrict(np.argsort(-p, kind="stable")[: settings.top_k])
  if settings.top_p < 1:
    kept = limit(np.argsort(-p, kind="stable"), settings.top_p, counted)
    restrict([i for i in kept if p[i]])
  restrict(np.flatnonzero(p >= settings.min_p * p.max()))
  if settings.typical_p < 1:
    alive = np.flatnonzero(p)
    entropy = -np.sum(p[alive] * np.log(p[alive]))
    order = alive[np.argsort(np.abs(-np.log(p[alive]) - entropy))]
    restrict(limit(order, settings.typical_p))
  restrict(np.flatnonzero((p >= settings.epsilon) | (p == p.max())))
  return p


def _history(prompts, generated, vocab=VOCAB):
  lengths = jnp.asarray([len(p) for p in prompts], jnp.int32)
  width = max(len(p) for p in prompts)
  ids = np.zeros((len(prompts), width), np.int32)
  for row, prompt in enumerate(prompts):
    ids[row, : len(prompt)] = prompt
  history = _begin(jnp.asarray(ids), lengths, vocab)
  for column in np.asarray(generated, np.int32).T:
    keep = jnp.ones(len(prompts), bool)
    history = _add(history, jnp.asarray(column), keep)
  return history


_begin = jax.jit(sampling.begin, static_argnums=2)
_add = jax.jit(lambda history, ids, keep: history.add(ids, keep))


@pytest.fixture(name="batch", scope="module")
def _batch():
  """Settings with logits, prompts and generated ids of their own."""
  rng = np.random.default_rng(0)
  logits = rng.standard_normal((len(SETTINGS), VOCAB)).astype(np.float32)
  prompts = [rng.integers(1, VOCAB, 2 + i % 3) for i in range(len(SETTINGS))]
  generated = rng.integers(0, VOCAB, (len(SETTINGS), STEP))
  generated[:, 1] = generated[:, 0]  # An id that was generated twice.
  return 1.5 * logits, [p.tolist() for p in prompts], generated


log_weights = jax.jit(
  lambda rows, logits, history, step: rows.log_weights(
    logits, history, step, (END,)
  )
)


def _draw(rows, logits, key, history, step):
  return rows.draw(logits, key, history, step, (END,))


draw = jax.jit(_draw)
# Optimized, because it draws a million ids.
draw_many = jax.jit(
  _draw, compiler_options={"xla_backend_optimization_level": 1}
)


def test_distributions_match_their_definitions(batch):
  logits, prompts, generated = batch
  rows = sampling.stack(SETTINGS, vocab_size=VOCAB)
  step = jnp.full(len(SETTINGS), STEP)
  history = _history(prompts, generated)
  weights = log_weights(rows, jnp.asarray(logits), history, step)
  actual = np.asarray(jax.nn.softmax(weights, axis=-1))
  for i, settings in enumerate(SETTINGS):
    expected = _define(settings, logits[i], prompts[i], generated[i].tolist())
    np.testing.assert_array_equal(actual[i] == 0, expected == 0, str(settings))
    np.testing.assert_allclose(actual[i], expected, rtol=2e-5, atol=1e-7)


@pytest.mark.nightly
def test_100_000_draws_of_each_setting_follow_its_distribution(batch):
  """A chi-squared test of each; all are drawn by one compiled call."""
  logits, prompts, generated = batch
  draws, chunk = 100_000, 5_000
  rows = sampling.stack(SETTINGS, num_samples=chunk, vocab_size=VOCAB)
  history = jax.tree.map(
    lambda x: jnp.repeat(x, chunk, axis=0), _history(prompts, generated)
  )
  repeated = jnp.repeat(jnp.asarray(logits), chunk, axis=0)
  counts = np.zeros((len(SETTINGS), VOCAB))
  for i in range(draws // chunk):
    step = jnp.full(repeated.shape[0], STEP)
    ids = draw_many(rows, repeated, jax.random.key(i), history, step)
    for row, own in enumerate(np.asarray(ids).reshape(-1, chunk)):
      counts[row] += np.bincount(own, minlength=VOCAB)
  for i, settings in enumerate(SETTINGS):
    expected = _define(settings, logits[i], prompts[i], generated[i].tolist())
    assert not counts[i][expected == 0].any(), settings
    alive = expected > 0
    test = stats.chisquare(counts[i][alive], draws * expected[alive])
    # One of 1000 right samplers would fail; the keys are fixed.
    assert test.pvalue > 1e-3, (settings, test)


def test_a_request_gets_the_same_ids_alone_bit_for_bit(batch):
  logits, prompts, generated = batch
  seeded = [dataclasses.replace(s, seed=i) for i, s in enumerate(SETTINGS)]
  seeded.append(sampling.Settings(temperature=0.0))
  logits = np.concatenate([logits, logits[:1]])
  prompts = [*prompts, prompts[0]]
  generated = np.concatenate([generated, generated[:1]])
  rows = sampling.stack(seeded, vocab_size=VOCAB)
  history = _history(prompts, generated)
  steps = np.arange(len(seeded), dtype=np.int32)
  key = jax.random.key(3)
  together = np.asarray(draw(rows, jnp.asarray(logits), key, history, steps))
  weights = np.asarray(log_weights(rows, jnp.asarray(logits), history, steps))
  assert int(together[-1]) == int(np.argmax(logits[-1]))
  for i, each in enumerate(seeded):
    alone = (
      sampling.stack([each], vocab_size=VOCAB),
      jnp.asarray(logits[i : i + 1]),
    )
    rest = _history(prompts[i : i + 1], generated[i : i + 1]), steps[i : i + 1]
    np.testing.assert_array_equal(
      log_weights(*alone, *rest)[0], weights[i], str(each)
    )
    assert int(draw(*alone, key, *rest)[0]) == int(together[i])


def test_distributions_are_those_of_transformers():
  """Its logits processors, by stored goldens (`make_goldens`)."""
  path = pathlib.Path(__file__).parent / "goldens" / "sampling.json"
  goldens = json.loads(path.read_text(encoding="utf-8"))
  cases = sampling_cases.CASES
  settings = [
    sampling.Settings(**case) for case in cases for _ in sampling_cases.logits()
  ]
  logits = np.tile(sampling_cases.logits(), (len(cases), 1))
  prompts = sampling_cases.prompts().tolist() * len(cases)
  history = _history(prompts, np.zeros((len(settings), 0)), logits.shape[1])
  weights = log_weights(
    sampling.stack(settings),
    jnp.asarray(logits),
    history,
    jnp.full(len(settings), 0),
  )
  actual = jax.nn.log_softmax(weights, axis=-1)
  rows = [row for case in goldens for row in case]
  expected = [[-np.inf if x is None else x for x in row] for row in rows]
  np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=2e-6)


def test_samples_of_a_request_differ_and_its_seed_repeats_them():
  def ids(seed, key=0):
    rows = sampling.stack([sampling.Settings(seed=seed)], num_samples=64)
    step = jnp.full(64, 0)
    history = _history([[1]] * 64, np.zeros((64, 0)))
    logits = jnp.zeros((64, VOCAB))
    return draw(rows, logits, jax.random.key(key), history, step).tolist()

  assert len(set(ids(0))) > VOCAB // 2
  assert ids(0) == ids(0)
  assert ids(0) != ids(1)
  assert ids(0) != ids(0, key=1)


def test_one_compilation_serves_any_settings(batch):
  logits, prompts, generated = batch
  compiled = jax.jit(
    lambda rows, x, history: rows.log_weights(
      x, history, jnp.full(len(SETTINGS), 0)
    )
  )
  for settings in (
    SETTINGS,
    (sampling.Settings(temperature=0.0),) * len(SETTINGS),
  ):
    rows = sampling.stack(settings, vocab_size=VOCAB)
    compiled(rows, jnp.asarray(logits), _history(prompts, generated))
  assert compiled._cache_size() == 1


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"temperature": -1.0}, r"Settings.temperature must not be negative"),
    ({"temperature": np.nan}, r"Settings.temperature must not be negative"),
    ({"top_k": 0}, r"Settings.top_k must be positive, got 0"),
    ({"top_p": 0.0}, r"Settings.top_p must be in \(0, 1\], got 0.0"),
    ({"min_p": 1.5}, r"Settings.min_p must be in \[0, 1\], got 1.5"),
    ({"typical_p": 0.0}, r"Settings.typical_p must be in \(0, 1\]"),
    ({"epsilon": 1.0}, r"Settings.epsilon must be in \[0, 1\), got 1.0"),
    ({"repetition_penalty": 0.0}, r"repetition_penalty must be positive"),
    ({"presence_penalty": np.inf}, r"presence_penalty must be finite, got inf"),
    ({"frequency_penalty": np.nan}, r"frequency_penalty must be finite"),
    ({"logit_bias": {3: np.inf}}, r"logit_bias of id 3 must be finite or -inf"),
    ({"max_new_tokens": 0}, r"max_new_tokens must be positive, got 0"),
    ({"seed": -1}, r"Settings.seed must be in"),
  ],
)
def test_rejects_bad_settings(fields, message):
  with pytest.raises(ValueError, match=message):
    sampling.Settings(**fields)


def test_rejects_bad_batches():
  with pytest.raises(ValueError, match=r"settings must not be empty"):
    sampling.stack([])
  biased = [sampling.Settings(logit_bias={VOCAB: 1.0})]
  with pytest.raises(ValueError, match=r"needs vocab_size, because a request"):
    sampling.stack(biased)
  with pytest.raises(ValueError, match=r"id 12, which is not in the vocabul"):
    sampling.stack(biased, vocab_size=VOCAB)
  rows = sampling.stack([sampling.Settings()] * 2)
  history = _history([[1]] * 3, np.zeros((3, 0)))
  with pytest.raises(ValueError, match=r"settings of 2 sequences, .* are 3"):
    rows.draw(jnp.zeros((3, 4)), jax.random.key(0), history, jnp.full(3, 0))

"""Tests for decoding methods, compared with their definitions in float64.

The logits of the scripted model are a table by the last two ids.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers import testing
from paxon.layers.decoding import (
  generate,
  methods,
  model_steps,
  prompts,
  samplers,
  sampling,
)
from paxon.layers.models import testing as models_testing
from paxon.sharding import axes, variables

VOCAB, STEPS = 7, 6
END = (5, 6)
TABLE = 1.5 * np.random.default_rng(5).standard_normal((VOCAB, VOCAB, VOCAB))
PROMPTS = [[1, 2, 3], [4], [0, 2]]


def _scripted():
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


def _logits(ids):
  return TABLE[ids[max(len(ids) - 2, 0)], ids[-1]]


def _log_softmax(x):
  return x - np.log(np.exp(x).sum())


def _run(method, rows=PROMPTS, steps=None, **kwargs):
  batch = prompts.pad_right(rows)
  shared = {"sampler": samplers.Greedy(), "max_new_tokens": STEPS, **kwargs}
  run = generate.generate if method is None else method.generate
  prefill, decode_step = steps or _scripted()
  compiled = jax.jit(
    lambda ids, lengths: run(
      prefill, decode_step, ids, lengths, key=jax.random.key(0), **shared
    )
  )
  return compiled(jnp.asarray(batch.ids), jnp.asarray(batch.lengths))


def _settings():
  # Alone, the minimum would let an end id follow. The last one is impossible.
  each = [
    sampling.Settings(temperature=0.0, min_new_tokens=n) for n in (0, 3, 9)
  ]
  return sampling.stack(each)


@pytest.mark.parametrize("sampler", [samplers.Greedy(), _settings()], ids=type)
def test_the_best_end_maximizes_the_log_probability_of_all_ids(sampler):
  result = _run(
    methods.BestEnd(), sampler=sampler, end_id=END, num_alternatives=1
  )
  for row, prompt in enumerate(PROMPTS):
    ids, sums, found = [], [], []
    for _ in range(STEPS):
      each = _log_softmax(_logits([*prompt, *ids]))
      end = max(END, key=lambda i, each=each: each[i])
      found.append(([*ids, end], [*sums, each[end]]))
      ids.append(int(np.argmax([each[i] for i in range(VOCAB - len(END))])))
      sums.append(each[ids[-1]])
    least = int(getattr(sampler, "min_new_tokens", [0] * 3)[row])
    least = min(least, STEPS - 1)
    best, log_probs = max(found[least:], key=lambda x: sum(x[1]))
    length = int(result.lengths[row])
    assert result.ids[row, :length].tolist() == best
    np.testing.assert_allclose(
      result.log_probs[row, :length], log_probs, rtol=1e-5, atol=1e-6
    )
    assert not result.ids[row, length:].any()
    assert not result.top_log_probs[row, length:].any()
  assert result.ended.all()
  assert len(set(result.lengths.tolist())) > 1


@pytest.mark.parametrize("scale", [2.5, -1.0, (0.5, 3.0)], ids=str)
def test_guidance_mixes_the_logits_of_two_prompts(scale):
  count = len(scale) if isinstance(scale, tuple) else 2
  negative = [3, 0, 1, 2]
  method = methods.Guidance(scale=scale, negative_ids=tuple(negative))
  result = _run(method, num_samples=count)
  for row in range(len(PROMPTS) * count):
    each = scale[row % count] if isinstance(scale, tuple) else scale
    ids, log_probs = [], []
    for _ in range(STEPS):
      without = _logits([*negative, *ids])
      mixed = without + each * (
        _logits([*PROMPTS[row // count], *ids]) - without
      )
      ids.append(int(np.argmax(mixed)))
      log_probs.append(_log_softmax(mixed)[ids[-1]])
    assert result.ids[row].tolist() == ids
    np.testing.assert_allclose(
      result.log_probs[row], log_probs, rtol=1e-4, atol=1e-5
    )


@pytest.fixture(name="steps", scope="module")
def _steps():
  model = models_testing.tiny_decoder()
  batch = models_testing.packed_batch([[3, 4]], length=8)
  values = testing.random_values(model, batch, method="loss")
  return (
    model_steps.make_prefill(model, values),
    model_steps.make_decode_step(model, values),
  )


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("negative", [(7, 6, 5, 4, 3), (7,)], ids=len)
def test_guidance_of_one_prompt_alone_is_plain_generation(steps, negative):
  """Each branch has its own padding and positions."""
  for scale, rows in ((1.0, PROMPTS), (0.0, [list(negative)] * len(PROMPTS))):
    method = methods.Guidance(scale=scale, negative_ids=negative)
    guided = _run(method, steps=steps)
    plain = _run(None, rows, steps=steps)
    np.testing.assert_array_equal(guided.ids, plain.ids)
    np.testing.assert_allclose(
      guided.log_probs, plain.log_probs, rtol=1e-4, atol=1e-5
    )


def test_the_best_sample_of_each_block_continues():
  """Sample `i` of a block draws the i-th most likely id."""
  size, count, interval = 2, 4, 2

  def rank(logits, key):
    del key
    order = jnp.argsort(-logits, axis=-1)
    at = jnp.arange(len(logits)) % size
    return jnp.take_along_axis(order, at[:, None], axis=1)[:, 0].astype(
      jnp.int32
    )

  method = methods.Rerank(interval=interval, block_num_samples=size)
  result = _run(method, sampler=rank, num_samples=count)
  for row, prompt in enumerate(PROMPTS):
    samples = [([], [])] * count
    for step in range(1, STEPS + 1):
      extended = []
      for i, (ids, log_probs) in enumerate(samples):
        each = _log_softmax(_logits([*prompt, *ids]))
        new = int(np.argsort(-each)[i % size])
        extended.append(([*ids, new], [*log_probs, each[new]]))
      samples = extended
      if step % interval == 0 and step < STEPS:
        samples = [
          max(block, key=lambda x: sum(x[1]))
          for i in range(0, count, size)
          for block in [samples[i : i + size]] * size
        ]
    found = result.ids[row * count : (row + 1) * count].tolist()
    assert found == [ids for ids, _ in samples]


def test_a_scorer_chooses():
  def score(found):
    return -jnp.sum(found.ids, axis=1)

  method = methods.Rerank(interval=1, block_num_samples=3, scorer=score)
  sampler = samplers.Temperature(temperature=2.0)
  result = _run(method, sampler=sampler, num_samples=3)
  for row in range(0, len(result.ids), 3):
    first = result.ids[row : row + 3, :-1]
    assert (first == first[:1]).all()
  plain = _run(None, sampler=sampler, num_samples=3)
  assert result.ids[:, :-1].sum() < plain.ids[:, :-1].sum()


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("num_samples", [1, 2])
def test_growth_changes_no_token(steps, num_samples):
  settings = {"num_samples": num_samples, "end_id": 3}
  settings["sampler"] = samplers.Temperature(temperature=2.0)
  shapes = set()

  def step(cache, *tokens):
    jax.tree.map(lambda x: shapes.add(x.shape), variables.unbox(cache))
    return steps[1](cache, *tokens)

  grown = _run(
    methods.Growth(stages=(2, 3, 50)), steps=(steps[0], step), **settings
  )
  width = 0 if num_samples > 1 else max(map(len, PROMPTS))
  size = len(PROMPTS) * num_samples
  for slots in (1, 2, STEPS - 1):
    assert any(s[1:4] == (size, 2, width + slots) for s in shapes), shapes
  plain = _run(None, steps=steps, **settings)
  np.testing.assert_array_equal(grown.ids, plain.ids)
  np.testing.assert_allclose(
    grown.log_probs, plain.log_probs, rtol=1e-4, atol=1e-5
  )


def test_a_suffix_is_scored_after_each_sequence():
  suffixes = [[1, 3, 2], [4]]

  def prefill(ids, positions, segment_ids, *, cache_length, at=None):
    del cache_length
    assert at is None
    before = jnp.pad(ids, ((0, 0), (1, 0)))[:, :-1]
    before = before.at[:, 0].set(ids[:, 0])
    logits = jnp.asarray(TABLE, jnp.float32)[before, ids]
    is_token = segment_ids > 0
    # Nothing depends on padding, which needs no positions.
    logits = jnp.where(is_token[..., None], logits, jnp.nan)
    needed = jnp.any(jnp.where(is_token, 0, positions) > 0)
    return jnp.where(needed, jnp.nan, logits), None

  sampler = samplers.Temperature(temperature=2.0)
  result = _run(None, sampler=sampler, num_samples=2, end_id=END)
  assert 0 < result.ended.sum() < len(result.ended)
  batch, given = prompts.pad_right(PROMPTS), prompts.pad_right(suffixes)
  scores = methods.score_suffixes(
    prefill,
    jnp.asarray(batch.ids),
    jnp.asarray(batch.lengths),
    result,
    jnp.asarray(given.ids),
    jnp.asarray(given.lengths),
  )
  for row, length in enumerate(result.lengths.tolist()):
    kept = result.ids[row, : length - int(result.ended[row])].tolist()
    for number, suffix in enumerate(suffixes):
      ids, total = [*PROMPTS[row // 2], *kept], 0.0
      for new in suffix:
        total += _log_softmax(_logits(ids))[new]
        ids.append(new)
      np.testing.assert_allclose(scores[row, number], total, rtol=1e-5)


@pytest.mark.parametrize(
  ("make", "message"),
  [
    (
      lambda: methods.Growth(stages=()),
      r"Growth.stages must be incr.*got \(\)",
    ),
    (lambda: methods.Growth(stages=(4, 4)), r"from 2 on, got \(4, 4\)"),
    (lambda: methods.Growth(stages=(1, 4)), r"from 2 on, got \(1, 4\)"),
    (
      lambda: methods.Guidance(scale=np.inf, negative_ids=(1,)),
      r"Guidance.scale must be finite, or a tuple of these, got inf",
    ),
    (
      lambda: methods.Guidance(scale=1.0, negative_ids=()),
      r"Guidance.negative_ids must have an id, .* got \(\)",
    ),
    (
      lambda: _run(
        methods.Guidance(scale=(1.0, 2.0), negative_ids=(1,)), num_samples=3
      ),
      r"Guidance.scale has 2 values, and there are 3 samples",
    ),
    (
      lambda: _run(
        methods.Rerank(interval=1, block_num_samples=2), num_samples=3
      ),
      r"num_samples \(3\) must be a multiple of Rerank.block_num_samples \(2\)",
    ),
    (lambda: _run(methods.BestEnd()), r"BestEnd requires end_id, got None"),
  ],
)
def test_rejects_bad_settings(make, message):
  with pytest.raises(ValueError, match=message):
    make()

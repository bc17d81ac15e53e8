"""Tests for generation: the loop with a scripted model, then a real one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers import testing
from paxon.layers.decoding import (
  generate,
  model_steps,
  prompts,
  samplers,
  sampling,
)
from paxon.layers.models import testing as models_testing

VOCAB = 10


def _scripted():
  """A model that continues n with n + 1, modulo VOCAB, and counts its steps.

  Its cache is the number of steps and the last positions it was given.
  """

  def logits(ids):
    return 5.0 * jax.nn.one_hot((ids + 1) % VOCAB, VOCAB)

  def prefill(ids, positions, segment_ids, *, cache_length, at):
    del segment_ids, cache_length
    last = jnp.take_along_axis(ids, at[:, None], axis=1)
    return logits(last), (jnp.int32(0), positions[:, -1])

  def decode_step(cache, ids, positions, segment_ids):
    del segment_ids
    return logits(ids), (cache[0] + 1, positions[:, 0])

  return prefill, decode_step


def _repeat(cache, count, *, length):
  del length
  return cache[0], jnp.repeat(cache[1], count)


def _generation(steps, **kwargs):
  """Returns the compiled `(ids, lengths) -> generated`."""
  prefill, decode_step = steps

  def run(ids, lengths):
    return generate.generate(
      prefill,
      decode_step,
      ids,
      lengths,
      **{
        "sampler": samplers.Greedy(),
        "key": jax.random.key(0),
        "max_new_tokens": 4,
        **kwargs,
      },
    )

  return jax.jit(run)


def _run(rows, steps=None, **kwargs):
  batch = prompts.pad_right(rows)
  run = _generation(steps or _scripted(), **kwargs)
  return run(jax.device_put(batch.ids), jax.device_put(batch.lengths))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_log_probability_that_is_nan_ends_a_sequence(bad):
  prefill, decode_step = _scripted()

  def break_after_five(cache, ids, positions, segment_ids):
    logits, cache = decode_step(cache, ids, positions, segment_ids)
    return jnp.where(ids[..., None] == 5, bad, logits), cache

  result = _run([[2], [8]], steps=(prefill, break_after_five))
  assert result.lengths.tolist() == [4, 4]
  result = _run([[3], [8]], steps=(prefill, break_after_five))
  assert result.lengths.tolist() == [3, 4]
  assert np.isnan(result.log_probs).tolist() == [
    [False, False, True, False],
    [False] * 4,
  ]


def test_a_sequence_that_has_ended_takes_no_more_positions():
  positions = []
  prefill, decode_step = _scripted()

  def record(cache, ids, at, segment_ids):
    jax.debug.callback(positions.append, at[:, 0], ordered=True)
    return decode_step(cache, ids, at, segment_ids)

  settings = [
    sampling.Settings(temperature=0.0, max_new_tokens=n) for n in (2, 4)
  ]
  _run([[1, 2], [3]], steps=(prefill, record), sampler=sampling.stack(settings))
  jax.effects_barrier()
  # P + N - 2 at most.
  assert [p.tolist() for p in positions] == [[2, 1], [2, 2], [2, 3]]


def test_continues_each_prompt_from_its_own_end():
  result = _run([[1, 2, 3], [7], [4, 5]])
  assert result.ids.dtype == result.lengths.dtype == jnp.int32
  assert result.ids.tolist() == [[4, 5, 6, 7], [8, 9, 0, 1], [6, 7, 8, 9]]
  assert result.lengths.tolist() == [4, 4, 4]


def test_a_row_ends_after_its_end_id():
  result = _run([[1, 2, 3], [7], [4]], end_id=6)
  assert result.ids.tolist() == [[4, 5, 6, 0], [8, 9, 0, 1], [5, 6, 0, 0]]
  assert result.lengths.tolist() == [3, 4, 2]


@pytest.mark.parametrize("end_id", [(6, 9), {9, 6}, [6, 9, 6]], ids=str)
def test_a_row_ends_after_any_of_its_end_ids(end_id):
  result = _run([[1, 2, 3], [7], [4]], end_id=end_id)
  assert result.ids.tolist() == [[4, 5, 6, 0], [8, 9, 0, 0], [5, 6, 0, 0]]
  assert result.lengths.tolist() == [3, 2, 2]


def test_log_probabilities_are_those_of_the_model():
  """Whatever the temperature; 0 after the end."""
  sampler = samplers.Temperature(temperature=0.01)
  result = _run([[1], [4]], sampler=sampler, end_id=6)
  each = float(jax.nn.log_softmax(5.0 * jax.nn.one_hot(0, VOCAB))[0])
  expected = np.asarray([[each] * 4, [each, each, 0, 0]])
  np.testing.assert_allclose(result.log_probs, expected, rtol=1e-5)


def test_says_which_sequences_ended_and_the_alternatives_of_each_id():
  result = _run([[1], [4]], end_id=6, num_alternatives=2)
  assert result.ended.tolist() == [False, True]
  assert result.top_ids[:, :, 0].tolist() == result.ids.tolist()
  np.testing.assert_array_equal(result.top_log_probs[:, :, 0], result.log_probs)
  other = float(jax.nn.log_softmax(5.0 * jax.nn.one_hot(0, VOCAB))[1])
  np.testing.assert_allclose(result.top_log_probs[0, :, 1], other, rtol=1e-5)
  assert not np.any(result.top_log_probs[1, 2:])


def test_requests_of_one_batch_have_their_own_settings():
  """Each result is that of the request alone, whatever the others are."""
  settings = [
    sampling.Settings(temperature=0.0, max_new_tokens=3),
    sampling.Settings(temperature=0.0, min_new_tokens=3),
    sampling.Settings(
      temperature=0.0, repetition_penalty=1e9, logit_bias={2: -4.0}
    ),
    sampling.Settings(temperature=9.0, seed=5),
    sampling.Settings(
      temperature=0.0, logit_bias={8: 7.0}, presence_penalty=9.0
    ),
  ]
  rows = [[1], [3, 4], [2, 1], [3], [5]]

  @functools.partial(jax.jit, static_argnames="num_samples")
  def compiled(ids, lengths, sampler, num_samples):
    return generate.generate(
      *_scripted(),
      ids,
      lengths,
      sampler=sampler,
      key=jax.random.key(0),
      max_new_tokens=4,
      end_id=6,
      num_samples=num_samples,
      repeat=_repeat,
    )

  def run(rows, settings, num_samples=1):
    batch = prompts.pad_right(rows, length=2)
    sampler = sampling.stack(
      settings, num_samples=num_samples, vocab_size=VOCAB
    )
    return compiled(
      jnp.asarray(batch.ids), jnp.asarray(batch.lengths), sampler, num_samples
    )

  together = run(rows, settings)
  assert together.ids[0].tolist() == [2, 3, 4, 0]
  assert not together.ended[0]
  # The end id 6 would be the second; without it, equal ids follow.
  assert together.ids[1].tolist() == [5, 0, 1, 2]
  # 2 follows 1, but was in the prompt.
  assert together.ids[2, 0] == 0
  # 8 is best only until it was generated.
  assert together.ids[4].tolist() == [8, 9, 0, 1]
  for i in range(len(rows)):
    alone = run(rows[i : i + 1], settings[i : i + 1])
    for one, batch in zip(
      jax.tree.leaves(alone), jax.tree.leaves(together), strict=True
    ):
      np.testing.assert_array_equal(one[0], batch[i])
  samples = run(rows[3:4], settings[3:4], num_samples=4)
  np.testing.assert_array_equal(samples.ids[0], together.ids[3])
  assert len({tuple(row) for row in samples.ids.tolist()}) > 2


def test_one_new_token_needs_no_step():
  result = _run([[1], [2]], max_new_tokens=1)
  assert result.ids.tolist() == [[2], [3]]


@pytest.mark.parametrize(
  ("end_id", "steps"), [(None, 5), (4, 2), (3, 1), (2, 0)]
)
def test_stops_as_soon_as_all_rows_have_ended(end_id, steps):
  """Steps are counted in the sampler's keys and by a host callback."""
  calls = []
  prefill, decode_step = _scripted()

  def counting(*args):
    jax.debug.callback(lambda: calls.append(1))
    return decode_step(*args)

  result = _run(
    [[1], [1]], (prefill, counting), end_id=end_id, max_new_tokens=6
  )
  jax.effects_barrier()
  jax.block_until_ready(result)
  assert len(calls) == steps


def test_steps_get_positions_after_their_prompt_and_enough_slots():
  seen = {}
  prefill, decode_step = _scripted()

  def watched(ids, positions, segment_ids, *, cache_length, at):
    seen["slots"] = cache_length
    jax.debug.callback(
      lambda p, s: seen.update(p=p, s=s), positions, segment_ids
    )
    return prefill(
      ids, positions, segment_ids, cache_length=cache_length, at=at
    )

  positions = []

  def stepped(cache, ids, at, segment_ids):
    jax.debug.callback(lambda p: positions.append(p.tolist()), at)
    return decode_step(cache, ids, at, segment_ids)

  _run([[1, 2, 3], [7]], (watched, stepped), max_new_tokens=3)
  jax.effects_barrier()
  assert seen["slots"] == 5
  assert seen["p"].tolist() == [[0, 1, 2]] * 2
  assert seen["s"].tolist() == [[1, 1, 1], [1, 0, 0]]
  assert sorted(positions) == [[[3], [1]], [[4], [2]]]


def test_keys_are_folded_by_step():
  def sampler(logits, key):
    return jax.random.randint(key, logits.shape[:1], 0, 1000)

  result = _run([[1], [2]], sampler=sampler, key=jax.random.key(9))
  for i in range(4):
    key = jax.random.fold_in(jax.random.key(9), i)
    expected = jax.random.randint(key, (2,), 0, 1000)
    np.testing.assert_array_equal(result.ids[:, i], expected)


@pytest.fixture(name="model", scope="module")
def _model():
  model = models_testing.tiny_decoder(num_layers=2)
  tokens = jnp.ones((1, 4), jnp.int32)
  args = tokens, testing.make_positions(1, 4), testing.ones(1, 4)
  values = testing.random_values(model, *args)
  # Far from uniform, so that a small error does not swap two ids.
  values = jax.tree.map(lambda x: 2 * x, values)
  return model, values


def _steps(model, values):
  return model_steps.make_prefill(model, values), model_steps.make_decode_step(
    model, values
  )


def test_greedy_equals_the_full_forward_pass_at_each_step(model):
  model, values = model
  rows = [[1, 2, 3, 4], [5], [6, 7]]
  result = _run(rows, _steps(model, values), max_new_tokens=5)
  forward = jax.jit(model.apply)
  for row, ids in enumerate(rows):
    text = list(ids)
    for new in result.ids[row].tolist():
      # One padded width, so that one compilation serves all steps.
      padded = testing.array([text + [0] * (9 - len(text))], jnp.int32)
      segments = testing.array(
        [[1] * len(text) + [0] * (9 - len(text))], np.int32
      )
      logits = forward(
        values, padded, testing.make_positions(1, 9), segments.astype(jnp.int32)
      )
      assert int(jnp.argmax(logits[0, len(text) - 1])) == new
      text.append(new)


def test_samples_of_a_prompt_are_as_many_rows_with_that_prompt(model):
  """Their cache is copied: the same ids, from the same random keys."""
  rows = [[1, 2, 3], [5]]
  sampler = samplers.Temperature(temperature=3.0)
  settings = {"sampler": sampler, "max_new_tokens": 4}
  steps = _steps(*model)
  copied = _run(rows, steps, num_samples=3, **settings)
  repeated = _run([r for r in rows for _ in range(3)], steps, **settings)
  np.testing.assert_array_equal(copied.ids, repeated.ids)
  np.testing.assert_allclose(
    copied.log_probs, repeated.log_probs, rtol=1e-4, atol=1e-5
  )
  assert len({tuple(row) for row in copied.ids[:3].tolist()}) > 1


def test_a_cache_that_names_no_rows_is_not_copied():
  with pytest.raises(
    ValueError, match=r"variable \[0\] does not name its axes"
  ):
    _run([[1]], num_samples=2)
  result = _run([[1], [4]], num_samples=2, repeat=_repeat, max_new_tokens=2)
  assert result.ids.tolist() == [[2, 3], [2, 3], [5, 6], [5, 6]]


def test_rows_do_not_depend_on_the_rest_of_the_batch(model):
  batch = prompts.pad_right([[1, 2, 3, 4, 5], [6], [7, 8, 9]])
  other = prompts.pad_right([[9, 1], [2, 4, 6, 8, 3], [5, 5, 5, 7]])
  steps = _steps(*model)
  run = _generation(steps, max_new_tokens=6)
  together = run(jax.device_put(batch.ids), jax.device_put(batch.lengths))
  for row in range(3):
    # In shapes of the batch, so that one compilation serves all.
    ids, lengths = np.array(other.ids), np.array(other.lengths)
    ids[row], lengths[row] = batch.ids[row], batch.lengths[row]
    among_others = run(jax.device_put(ids), jax.device_put(lengths))
    np.testing.assert_array_equal(together.ids[row], among_others.ids[row])
  alone = _run([[6]], steps, max_new_tokens=6)
  np.testing.assert_array_equal(together.ids[1], alone.ids[0])


def test_what_stands_in_the_padding_has_no_influence(model):
  prefill, decode_step = _steps(*model)
  lengths = testing.array([2, 3], jnp.int32)

  @jax.jit
  def run(ids):
    return generate.generate(
      prefill,
      decode_step,
      ids,
      lengths,
      sampler=samplers.Temperature(top_p=0.9),
      key=jax.random.key(1),
      max_new_tokens=3,
    )

  clean = testing.array([[3, 4, 0], [5, 6, 7]], jnp.int32)
  dirty = clean.at[0, 2].set(9)
  np.testing.assert_array_equal(run(clean).ids, run(dirty).ids)


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"max_new_tokens": 0}, r"max_new_tokens must be positive, got 0"),
    ({"num_samples": 0}, r"num_samples must be positive, got 0"),
    ({"end_id": ()}, r"end_id is empty; use None"),
    ({"num_alternatives": -1}, r"num_alternatives must not be neg.*got -1"),
    ({"prompts": jnp.zeros((2, 0), jnp.int32)}, r"\(2, 0\) are empty"),
    (
      {"prompt_lengths": jnp.ones((3,), jnp.int32)},
      r"prompt_lengths of shape \(3,\) must have one entry for each of the 2",
    ),
  ],
)
def test_rejects_bad_requests(fields, message):
  prefill, decode_step = _scripted()
  arguments = {
    "prompts": jnp.ones((2, 3), jnp.int32),
    "prompt_lengths": jnp.ones((2,), jnp.int32),
    "max_new_tokens": 1,
    **fields,
  }
  with pytest.raises(ValueError, match=message):
    generate.generate(
      prefill,
      decode_step,
      sampler=samplers.Greedy(),
      key=jax.random.key(0),
      **arguments,
    )

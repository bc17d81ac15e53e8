"""Tests for requests that enter and leave a batch."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers import embedding, testing
from paxon.layers.attention import sliding_cache
from paxon.layers.decoding import (
  continuous_batching,
  generate,
  model_steps,
  prompts,
  samplers,
  sampling,
)
from paxon.layers.models import decoder_lm
from paxon.layers.models import testing as models_testing
from paxon.layers.norms import rms_norm
from paxon.layers.recurrent import mamba2
from paxon.layers.stacks import block, stack
from paxon.sharding import axes, layout, mesh, rules

LENGTH, PROMPT, NEW, CHUNK, SLOTS = 28, 17, 12, 5, 4
KEY = 3


@functools.cache
def _model(*, has_ring=True):
  """A model with a ring and a contiguous cache, in stacked layers."""
  model = models_testing.tiny_decoder(num_layers=4)
  if has_ring:
    local, block = model.stack.blocks
    attention = local.attention.clone(cache=sliding_cache.SlidingCache(3))
    model = model.clone(
      stack=model.stack.clone(blocks=(local.clone(attention=attention), block))
    )
  tokens = jnp.ones((1, 4), jnp.int32)
  args = tokens, testing.make_positions(1, 4), testing.ones(1, 4)
  values = testing.random_values(model, *args)
  # Far from uniform, so that a small error does not swap two ids.
  return model, jax.tree.map(lambda x: 2 * x, values)


def _make_steps(values, *, has_ring=True):
  model, _ = _model(has_ring=has_ring)
  return (
    model_steps.make_prefill(model, values),
    model_steps.make_decode_step(model, values),
  )


def _batcher(num_slots=SLOTS, *, has_ring=True, **fields):
  return continuous_batching.Batcher(
    functools.partial(_make_steps, has_ring=has_ring),
    _model(has_ring=has_ring)[1],
    num_slots=num_slots,
    cache_length=LENGTH,
    chunk=CHUNK,
    key=jax.random.key(KEY),
    max_alternatives=2,
    **fields,
  )


@functools.cache
def _small():
  return _batcher(num_slots=2)


@functools.cache
def _paged():
  """A batch of a model whose whole cache is in pages."""
  return _batcher(has_ring=False, num_pages=14)


def _random_request(rng):
  chance = lambda *values: values[rng.integers(len(values))]  # noqa: E731
  settings = sampling.Settings(
    temperature=chance(0.0, 0.7, 1.5),
    top_k=chance(None, None, 3),
    top_p=chance(1.0, 0.8),
    min_p=chance(0.0, 0.1),
    repetition_penalty=chance(1.0, 1.3),
    presence_penalty=chance(0.0, 0.5),
    frequency_penalty=chance(0.0, -0.4),
    logit_bias=chance({}, {3: 2.0, 5: -np.inf}),
    min_new_tokens=chance(0, 3),
    max_new_tokens=int(rng.integers(1, NEW + 1)),
    seed=int(rng.integers(100)),
  )
  size = int(rng.integers(1, PROMPT + 1))
  return continuous_batching.Request(
    prompt=rng.integers(0, models_testing.VOCAB, size).tolist(),
    settings=settings,
    end_ids=chance((), (1, 2)),
    sample=int(rng.integers(2)),
    num_alternatives=chance(0, 2),
  )


@functools.cache
def _generator(end_ids):
  @jax.jit
  def run(values, ids, lengths, settings):
    return generate.generate(
      *_make_steps(values),
      ids,
      lengths,
      sampler=settings,
      key=jax.random.key(KEY),
      max_new_tokens=NEW,
      end_id=end_ids or None,
      num_alternatives=2,
    )

  return run


def _alone(request):
  """Returns what `generate` makes of a request, alone."""
  batch = prompts.pad_right([request.prompt], length=PROMPT)
  settings = sampling.stack([request.settings], vocab_size=models_testing.VOCAB)
  settings = dataclasses.replace(
    settings, sample=jnp.asarray([request.sample], jnp.int32)
  )
  run = _generator(request.end_ids)
  return run(_model()[1], batch.ids, batch.lengths, settings)


def _check(tokens, request):
  """Compares the tokens of a request with those that it gets alone."""
  expected = _alone(request)
  count = int(expected.lengths[0])
  assert [t.id for t in tokens] == expected.ids[0, :count].tolist()
  np.testing.assert_allclose(
    [t.log_prob for t in tokens],
    expected.log_probs[0, :count],
    rtol=1e-4,
    atol=1e-4,
  )
  finish = "stop" if expected.ended[0] else "length"
  assert [t.finish for t in tokens] == [None] * (count - 1) + [finish]
  top = [tuple(i for i, _ in t.alternatives) for t in tokens]
  number = request.num_alternatives
  assert top == [
    tuple(x) for x in np.asarray(expected.top_ids)[0, :count, :number]
  ]


@pytest.fixture(name="compiled")
def _compiled():
  """Counts the programs that are compiled."""
  events = []

  def listen(event, duration, **_):
    del duration
    if event == "/jax/core/compile/backend_compile_duration":
      events.append(event)

  jax.monitoring.register_event_duration_secs_listener(listen)
  yield events
  jax.monitoring.unregister_event_duration_listener(listen)


def _serve(batcher, requests, *, seed):
  """Returns the tokens of requests that arrive at random times."""
  rng = np.random.default_rng(seed)
  found, numbers, waiting = [[] for _ in requests], {}, [*enumerate(requests)]
  most = 0
  while waiting or batcher.is_busy:
    for _ in range(min(rng.poisson(0.3), len(waiting))):
      i, request = waiting.pop(0)
      numbers[batcher.submit(request)] = i
    for token in batcher.step():
      found[numbers[token.request]].append(
        dataclasses.replace(token, request=-1)
      )
    most = max(most, batcher.num_running)
  assert most == SLOTS
  return found


def test_random_requests_get_the_tokens_that_each_gets_alone(compiled):
  """With random arrivals, lengths and settings; nothing compiles."""
  rng = np.random.default_rng(0)
  requests = [_random_request(rng) for _ in range(200)]
  batcher = _batcher()
  batcher.run([requests[0]] * 2)
  del compiled[:]
  found = _serve(batcher, requests, seed=0)
  assert not compiled
  for i, request in enumerate(requests):
    _check(found[i], request)
  assert {tokens[-1].finish for tokens in found} == {"stop", "length"}


@pytest.mark.nightly
def test_pages_change_nothing_bit_by_bit(compiled):
  """200 random requests that share pages, of which there are too few."""
  rng = np.random.default_rng(1)
  begins = [rng.integers(0, models_testing.VOCAB, PROMPT) for _ in range(3)]
  requests = []
  for _ in range(200):
    request = _random_request(rng)
    begin = begins[rng.integers(3)][: rng.integers(PROMPT + 1)].tolist()
    prompt = [*begin, *request.prompt][:PROMPT]
    requests.append(dataclasses.replace(request, prompt=prompt))
  whole = _batcher(has_ring=False)
  paged = _paged()
  for batcher in (whole, paged):
    batcher.run([requests[0]] * 2)
  before = paged.pages.num_reused
  del compiled[:]
  expected = _serve(whole, requests, seed=2)
  assert _serve(paged, requests, seed=3) == expected
  assert not compiled
  size = sum(len(request.prompt) for request in requests)
  assert 0.2 * size < paged.pages.num_reused - before < size
  assert paged.num_preempted > 5
  assert paged.pages.num_free == 14


def test_samples_of_a_prompt_have_its_pages_once():
  batcher = _paged()
  pages = batcher.pages
  free, reused = pages.num_free, pages.num_reused
  request = _greedy([*range(2 * CHUNK), 3], NEW)
  numbers = [
    batcher.submit(dataclasses.replace(request, sample=sample))
    for sample in range(SLOTS)
  ]
  # The first one reads three chunks, the others one each: four in a step that
  # generates nothing, then one in each.
  for _ in range(3):
    batcher.step()
  assert batcher.num_running == SLOTS
  assert pages.num_reused - reused == (SLOTS - 1) * 2 * CHUNK
  # Two pages of the prompt, and one of each sample.
  assert free - pages.num_free == 2 + SLOTS
  for number in numbers:
    batcher.cancel(number)
  assert pages.num_free == free


def _greedy(prompt, count):
  return continuous_batching.Request(
    prompt=prompt,
    settings=sampling.Settings(temperature=0.0, max_new_tokens=count),
  )


def test_a_cancelled_request_frees_its_slot_and_the_others_go_on():
  batcher = _small()
  requests = [_greedy([7, 8], NEW), _greedy([9] * 11, NEW), _greedy([3], NEW)]
  numbers = [batcher.submit(request) for request in requests]
  found = {number: [] for number in numbers}

  def step():
    for token in batcher.step():
      found[token.request].append(token)

  step()
  step()
  # The first generates, the second is being read, and the third waits.
  assert (batcher.num_running, batcher.num_waiting) == (2, 1)
  batcher.cancel(numbers[0])
  step()
  assert (batcher.num_running, batcher.num_waiting) == (2, 0)
  while batcher.is_busy:
    step()
  # Those of the first step; those of the second were pending.
  assert len(found[numbers[0]]) == 2
  for number, request in zip(numbers[1:], requests[1:], strict=True):
    _check(found[number], request)
  # While its prompt is read, and while it waits.
  number = batcher.submit(requests[1])
  batcher.step()
  batcher.cancel(number)
  batcher.cancel(batcher.submit(requests[0]))
  assert (batcher.num_running, batcher.num_waiting) == (0, 0)
  assert not batcher.step()
  (tokens,) = batcher.run(requests[1:2])
  _check(tokens, requests[1])


class Counting:
  """Allows one id, then the next one."""

  def __init__(self, first):
    self.next = first

  def mask(self):
    return np.asarray([1 << self.next], np.uint32)

  def advance(self, number):
    assert number == self.next
    self.next += 1


class Anything:
  """Allows all ids."""

  def mask(self):
    return np.asarray([2**32 - 1], np.uint32)

  def advance(self, number):
    assert 0 <= number < models_testing.VOCAB


def test_a_constraint_excludes_ids_of_its_request_only():
  batcher = _small()
  free = _greedy([7, 8], 5)
  settings = sampling.Settings(temperature=1.0, max_new_tokens=5)
  bound = dataclasses.replace(
    free, settings=settings, end_ids=(9,), constraint=Counting(6)
  )
  hot = dataclasses.replace(free, settings=settings)
  anything = dataclasses.replace(hot, constraint=Anything())
  tokens, *others = batcher.run([bound, free, anything])
  for found, request in zip(others, (free, hot), strict=True):
    _check(found, request)
  assert [t.id for t in tokens] == [6, 7, 8, 9]
  assert tokens[-1].finish == "stop"


class Failing(Counting):
  """Allows two ids, and fails then."""

  def mask(self):
    if self.next == 8:
      raise ValueError("no more")
    return super().mask()


def test_a_constraint_that_fails_ends_its_request_only():
  batcher = _small()
  free = _greedy([7, 8], 9)
  alone = batcher.run([free])[0]
  bound = dataclasses.replace(free, constraint=Failing(6))
  at_once = dataclasses.replace(free, constraint=Failing(8))
  # More than there are slots.
  tokens, first, *others = batcher.run([bound, at_once, free, free, free])
  assert [t.id for t in tokens] == [6, 7, -1]
  assert [t.error for t in tokens] == ["", "", "no more"]
  assert [t.finish for t in (*tokens, *first)] == [None, None, "error", "error"]
  for other in others:
    assert [t.id for t in other] == [t.id for t in alone]
    assert [t.log_prob for t in other] == [t.log_prob for t in alone]


def test_a_slot_forgets_its_last_request():
  """Even NaN in its cache."""
  batcher = _small()
  batcher.run([_greedy([5] * PROMPT, NEW)])
  broken = jax.tree.map(
    lambda x: x * jnp.nan if x.dtype == jnp.float32 else x, batcher.steps.cache
  )
  batcher.steps.cache = broken
  request = _greedy([1, 2, 3, 4, 5, 6], NEW)
  (tokens,) = batcher.run([request])
  _check(tokens, request)


@pytest.mark.nightly
def test_heads_may_be_split_over_devices():
  """With pages for layers without a window only, so that none are shared."""
  split = rules.replace(
    rules.keep_lengths(rules.DEFAULT_RULES), {axes.BATCH: None}
  )
  spec = mesh.MeshSpec.parse("tensor=2")
  devices = jax.devices()[:2]
  batcher = _batcher(
    layout=layout.Layout(mesh.make_mesh(spec, devices=devices), split),
    num_pages=8,
  )
  rng = np.random.default_rng(1)
  requests = [_random_request(rng) for _ in range(6)] * 2
  for tokens, request in zip(batcher.run(requests), requests, strict=True):
    _check(tokens, request)
  assert batcher.num_preempted
  assert not batcher.pages.num_reused


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"prompt": []}, r"Request.prompt is empty"),
    ({"prompt": [3, 99]}, r"Request.prompt has the id 99, .* of \d+ ids"),
    (
      {"prompt": [1] * 18},
      r"18 ids of the prompt and max_new_tokens=12 exc",
    ),
    ({"settings": sampling.Settings()}, r"max_new_tokens is None; set a numb"),
    (
      {
        "constraint": Counting(0),
        "settings": sampling.Settings(max_new_tokens=2, min_new_tokens=1),
      },
      r"min_new_tokens must be 0 with a constraint",
    ),
    ({"end_ids": (-1,)}, r"Request.end_ids has the id -1"),
    ({"end_ids": (1,) * 9}, r"Request.end_ids: 9 is more than 8"),
    ({"num_alternatives": 3}, r"Request.num_alternatives: 3 is more than 2"),
  ],
)
def test_rejects_requests_that_can_never_be_served(fields, message):
  batcher = _small()
  request = dataclasses.replace(_greedy([1], NEW), **fields)
  with pytest.raises(ValueError, match=message):
    batcher.submit(request)
  assert not batcher.num_waiting


def test_rejects_bad_batches():
  with pytest.raises(ValueError, match=r"num_slots must be positive, got 0"):
    _batcher(num_slots=0)
  with pytest.raises(ValueError, match=r"at least 6, for .* 28 .* 5, got 5"):
    _batcher(num_pages=5)
  spec = mesh.MeshSpec.parse("data=8")
  with pytest.raises(ValueError, match=r"must not split the batch, got 8"):
    _batcher(layout=layout.Layout(mesh.make_mesh(spec)))


@functools.cache
def _recurrent():
  """A model with a recurrent state: its steps' maker, and its values."""
  mixer = mamba2.Mamba2(num_heads=2, head_dim=8, state_dim=4)
  layer = block.MixerBlock(norm=rms_norm.RmsNorm(), mixer=mixer)
  model = decoder_lm.DecoderLm(
    embedding=embedding.Embedding(models_testing.VOCAB, 8),
    stack=stack.Stack([layer], num_layers=2),
    final_norm=rms_norm.RmsNorm(),
  )
  args = testing.ones(1, 4), testing.make_positions(1, 4), testing.ones(1, 4)
  values = jax.tree.map(lambda x: 2 * x, testing.random_values(model, *args))

  def make_steps(values):
    prefill = model_steps.make_prefill(model, values)
    return prefill, model_steps.make_decode_step(model, values)

  @jax.jit
  def generated(values, ids, lengths):
    return generate.generate(
      *make_steps(values),
      ids,
      lengths,
      sampler=samplers.Greedy(),
      key=jax.random.key(KEY),
      max_new_tokens=6,
    ).ids

  return make_steps, values, generated


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("num_pages", [None, 14])
def test_recurrent_states_are_those_of_each_request(num_pages):
  """More requests than slots, one of them twice; pages hold nothing."""
  make_steps, values, generated = _recurrent()
  batcher = continuous_batching.Batcher(
    make_steps,
    values,
    num_slots=2,
    cache_length=20,
    chunk=5,
    key=jax.random.key(KEY),
    num_pages=num_pages,
  )
  rng = np.random.default_rng(0)
  requests = [
    continuous_batching.Request(
      prompt=rng.integers(0, models_testing.VOCAB, size).tolist(),
      settings=sampling.Settings(temperature=0.0, max_new_tokens=6),
    )
    for size in (3, 11, 7, 1)
  ]
  requests.append(requests[1])
  batch = prompts.pad_right([each.prompt for each in requests], length=11)
  expected = generated(values, batch.ids, batch.lengths)
  found = [[t.id for t in tokens] for tokens in batcher.run(requests)]
  assert found == np.asarray(expected).tolist()

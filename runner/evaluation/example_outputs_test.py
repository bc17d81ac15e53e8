"""Tests for figures that are joined by row.

The programs here are sums of a batch, compiled in no time; those of a model run
in `tasks/lm:seqio_runs_test`.
"""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.inputs import base_input
from paxon.layers.decoding import samplers
from paxon.runner import user_error
from paxon.runner.evaluation import (
  evaluation,
  example_outputs,
  prediction_writer,
)
from paxon.runner.session import compiled_steps
from paxon.runner.session import session as session_lib
from paxon.runner.settings import generation
from paxon.runner.training import testing
from paxon.sharding import layout as layouts

ROWS, LENGTH, BATCHES = 8, 4, 3
SLOW_SECONDS = 1e6


class _Collector:
  """Adds scores and predictions up; takes its time if the input says so."""

  needs_scores = True
  needs_predictions = True

  def __init__(self, source):
    self._source = source
    self._rows = {}

  def add(self, rows):
    self._source.clock.now += self._source.delay
    ids, scores = rows["example_ids"], rows["scores"]
    predictions = rows["predictions"]
    for each in zip(ids, scores, predictions, strict=True):
      self._rows[int(each[0])] = float(each[1]), int(each[2].sum())

  def compute(self):
    scores, predictions = zip(*self._rows.values(), strict=True)
    return {
      "examples": float(len(self._rows)),
      "scores": sum(scores),
      "predictions": float(sum(predictions)),
    }


@dataclasses.dataclass(kw_only=True, eq=False)
class _Clock:
  """Each look takes a second."""

  now: float = 0.0

  def monotonic(self):
    self.now += 1.0
    return self.now


@dataclasses.dataclass(kw_only=True, eq=False)
class _Examples(base_input.BaseInput):
  """Batches of rows with ids; row i holds i."""

  clock: _Clock
  delay: float = 0.0
  position: int = 0

  def get_next(self):
    if self.position == BATCHES:
      raise StopIteration
    ids = np.arange(ROWS, dtype=np.int32) + ROWS * self.position
    self.position += 1
    inputs = np.repeat(ids[:, None], LENGTH, axis=1)
    return {
      "inputs": inputs,
      "targets": inputs,
      "example_ids": ids,
      "example_weights": np.ones(ROWS, np.float32),
    }

  def get_state(self):
    return {"position": self.position}

  def set_state(self, state):
    self.position = state["position"]

  def reset(self):
    self.position = 0

  def row_metrics(self):
    return _Collector(self)


@pytest.fixture(scope="module")
def session():
  source = _Examples(global_batch_size=ROWS, length=LENGTH, clock=_Clock())
  job = dataclasses.replace(testing.make()[0], eval_inputs={"rows": source})
  return session_lib.open_session(job)


@pytest.fixture(scope="module")
def state(session):
  return jax.tree.map(
    lambda leaf: jax.device_put(np.zeros(leaf.shape, leaf.dtype)),
    session_lib.strip_for_evaluation(session.abstract_state()),
  )


@pytest.fixture(name="traced")
def _traced(monkeypatch):
  """Stands in for the model; the names of programs, each when it is traced."""
  names = []

  def scores(session, state, batch):
    names.append("scores")
    return jnp.sum(batch["inputs"], axis=1).astype(jnp.float32)

  class Writer:
    def __init__(self, session, settings):
      names.append("predictions")

    def write(self, state, values, length):
      assert values["prompt_lengths"].tolist() == [1] * ROWS
      return -np.repeat(values["prompts"], length, axis=1)

    def release(self):
      pass

  def compile_eval_step(session, batch):
    names.append("step")
    step = jax.jit(lambda state, batch: {"loss": (jnp.float32(1), 32.0)})
    return step.lower(state_of(session), batch).compile()

  def state_of(session):
    return session_lib.strip_for_evaluation(session.abstract_state())

  monkeypatch.setattr(example_outputs, "_scores", scores)
  monkeypatch.setattr(prediction_writer, "PredictionWriter", Writer)
  monkeypatch.setattr(compiled_steps, "compile_eval_step", compile_eval_step)
  return names


def test_programs_are_compiled_once_and_examples_are_of_one_evaluation(
  session, state, traced
):
  evaluator = evaluation.Evaluator(session)
  total = LENGTH * sum(range(ROWS * BATCHES))
  for _ in range(3):
    values = evaluator.evaluate(state)["rows"]
    assert values["examples"] == ROWS * BATCHES
    assert (values["scores"], values["predictions"]) == (total, -total)
  assert sorted(traced) == ["predictions", "scores", "step"]


def test_example_outputs_do_not_count_as_step_time(
  session, state, traced, monkeypatch
):
  source = session.job.eval_inputs["rows"]
  clock = types.SimpleNamespace(monotonic=source.clock.monotonic)
  monkeypatch.setattr(evaluation, "time", clock)
  evaluator = evaluation.Evaluator(session)
  speeds = []
  for delay in (0.0, SLOW_SECONDS):
    monkeypatch.setattr(source, "delay", delay)
    speeds.append(evaluator.evaluate(state)["rows"]["tokens_per_second"])
  assert speeds[0] == speeds[1] > 1


def test_programs_are_compiled_with_the_options_of_the_session(
  session, monkeypatch
):
  given = []
  jit = layouts.Layout.jit

  def noting(self, fn, **options):
    given.append(options["compiler_options"])
    return jit(self, fn, **options)

  monkeypatch.setattr(layouts.Layout, "jit", noting)
  options = {"xla_an_option": True}
  monkeypatch.setattr(session_lib.Session, "compiler_options", options)
  source = session.job.eval_inputs["rows"]
  assert example_outputs.make_outputs(source, session=session) is not None
  assert given == [options] * 2


class _Kept:
  """Keeps the texts."""

  needs_scores = False
  needs_predictions = True

  def __init__(self):
    self.texts = {}

  def add(self, rows):
    assert rows["example_ids"].shape == rows["example_weights"].shape
    self.texts |= dict(
      zip(
        rows["example_ids"].tolist(), rows["predictions"].tolist(), strict=True
      )
    )

  def compute(self):
    return {}


def _write(session, state, settings, order):
  """Returns ids by example; those of a prefix, some of which only pad."""
  ids = np.random.default_rng(5).integers(1, 99, (ROWS, 6), np.int32)
  sizes = np.arange(ROWS) % 5
  prefix = np.arange(6) < sizes[:, None]
  batch = {
    "inputs": ids,
    "targets": ids,
    "prefix": prefix.astype(np.int32),
    "example_ids": np.arange(ROWS, dtype=np.int32),
    "example_weights": np.ones(ROWS, np.float32),
  }
  outputs = example_outputs.ExampleOutputs(session, _Kept, settings=settings)
  batch = {key: jnp.asarray(x[order]) for key, x in batch.items()}
  outputs.add(state, batch)
  outputs.metrics()
  return outputs.collector.texts, [
    row[: max(size, 1)].tolist() for row, size in zip(ids, sizes, strict=True)
  ]


def test_a_text_follows_its_prefix_and_fits_the_sequence(session):
  """The most likely ids, by forward passes."""
  state, order = session.initial_state(), np.arange(ROWS)
  texts, prompts = _write(session, state, None, order)
  apply = jax.jit(session.job.task.model.apply)
  end = session.job.task.tokenizer.end_id
  for row, prompt in enumerate(prompts):
    ids = [*prompt]
    while len(ids) < 7 and ids[len(prompt) :].count(end) == 0:
      inputs = np.zeros((1, 7), np.int32)
      inputs[0, : len(ids)] = ids
      positions = np.arange(7, dtype=np.int32)[None]
      segments = (positions < len(ids)).astype(np.int32)
      logits = apply(
        state.variables, *map(jnp.asarray, (inputs, positions, segments))
      )
      ids.append(int(np.argmax(logits[0, len(ids) - 1])))
    new = ids[len(prompt) :]
    assert texts[row] == new + [end] * (6 - len(new))


def test_draws_do_not_depend_on_the_batch_and_the_most_likely_counts(session):
  state, order = session.initial_state(), np.arange(ROWS)
  sampler = samplers.Temperature(temperature=3.0)
  found = []
  for count in (1, 4):
    settings = generation.GenerationSettings(sampler=sampler, num_samples=count)
    texts, prompts = _write(session, state, settings, order)
    again, _ = _write(session, state, settings, order[::-1])
    assert texts == again
    found.append(texts)
  one, best = (
    [_log_likelihood(session, state, prompts[i], texts[i]) for i in range(ROWS)]
    for texts in found
  )
  # The first of four samples has the same draws as a single one.
  assert all(a <= b + 1e-4 for a, b in zip(one, best, strict=True))
  assert sum(best) > sum(one)


def _log_likelihood(session, state, prompt, ids):
  end = session.job.task.tokenizer.end_id
  size = 7 - len(prompt)
  ids = ids[: min(ids.index(end) + 1 if end in ids else 6, size)]
  tokens = np.zeros((1, 8), np.int32)
  tokens[0, : len(prompt) + len(ids)] = [*prompt, *ids]
  positions = np.arange(8, dtype=np.int32)[None]
  segments = (positions < len(prompt) + len(ids)).astype(np.int32)
  logits = session.job.task.model.apply(
    state.variables, *map(jnp.asarray, (tokens, positions, segments))
  )
  log_probs = np.asarray(jax.nn.log_softmax(logits[0].astype(jnp.float32)))
  at = np.arange(len(prompt) - 1, len(prompt) + len(ids) - 1)
  return float(log_probs[at, ids].sum())


def test_stop_texts_are_an_error(session):
  settings = generation.GenerationSettings(stop=("x",))
  with pytest.raises(user_error.UserError, match=r"stop must be \(\) for metr"):
    example_outputs.ExampleOutputs(session, _Kept, settings=settings)


def test_a_collector_without_requirements_has_no_outputs(session, monkeypatch):
  monkeypatch.setattr(_Collector, "needs_scores", False)
  monkeypatch.setattr(_Collector, "needs_predictions", False)
  source = session.job.eval_inputs["rows"]
  assert example_outputs.make_outputs(source, session=session) is None

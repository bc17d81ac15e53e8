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
from paxon.runner.evaluation import evaluation, example_outputs
from paxon.runner.session import compiled_steps
from paxon.runner.session import session as session_lib
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
    return {
      "inputs": np.repeat(ids[:, None], LENGTH, axis=1),
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

  def predictions(session, state, batch):
    names.append("predictions")
    return -batch["inputs"]

  def compile_eval_step(session, batch):
    names.append("step")
    step = jax.jit(lambda state, batch: {"loss": (jnp.float32(1), 32.0)})
    return step.lower(state_of(session), batch).compile()

  def state_of(session):
    return session_lib.strip_for_evaluation(session.abstract_state())

  monkeypatch.setattr(example_outputs, "_scores", scores)
  monkeypatch.setattr(example_outputs, "_predictions", predictions)
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
  assert given == [options] * 3


def test_a_collector_without_requirements_has_no_outputs(session, monkeypatch):
  monkeypatch.setattr(_Collector, "needs_scores", False)
  monkeypatch.setattr(_Collector, "needs_predictions", False)
  source = session.job.eval_inputs["rows"]
  assert example_outputs.make_outputs(source, session=session) is None

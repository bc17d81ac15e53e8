"""Tests for the order of things in the training loop, with a step that is not.

The step, the evaluator and the checkpoints only note that they were called.
"""

import dataclasses
import gc

import jax
import jax.numpy as jnp
import pytest

from paxon.learners import metrics as metrics_lib
from paxon.learners import train_state
from paxon.runner import user_error
from paxon.runner.checkpoints import checkpointer
from paxon.runner.evaluation import evaluation
from paxon.runner.monitoring import metrics_file, observer
from paxon.runner.session import compiled_steps, stop_signals
from paxon.runner.session import session as session_lib
from paxon.runner.settings import training
from paxon.runner.training import hooks, testing, train_loop


class _Evaluator(evaluation.Evaluator):
  def __init__(self, events, values):
    self._events, self._left = events, list(values)
    self._distributions = {}

  def evaluate(self, state, *, is_stopped=lambda: False):
    self._events.append(("evaluate", None))
    if is_stopped():
      return None
    return {"validation": {"loss": float(self._left.pop(0))}}

  def positions(self, step):
    return {}

  def skip(self, step):
    self._events.append(("skip", step))


class _Checkpoints(checkpointer.Checkpointer):
  def __init__(self, events):
    self._events = events

  def save(self, step, tree, **kwargs):
    self._events.append(("save", step))


class _Writer(metrics_file.SummaryWriter):
  def __init__(self):
    self.records = []

  def write(self, step, split, values):
    self.records.append(metrics_file.Record(step, split, values))

  def close(self):
    pass


class _Observer(observer.Observer):
  def on_compile(self, *args, **kwargs):
    pass


@pytest.fixture(scope="module")
def session():
  return session_lib.open_session(testing.make()[0])


@pytest.fixture(name="events")
def _events(monkeypatch):
  """What happens, in order; `read` is where the host waits for a step."""
  events = []
  add = metrics_lib.Totals.add

  def read(self, metrics):
    events.append(("read", int(metrics["loss"][0])))
    add(self, metrics)

  monkeypatch.setattr(metrics_lib.Totals, "add", read)
  # Has no field: a loop that looks into the state fails.
  hidden = object.__new__(train_state.TrainState)

  def compile_train_step(session, traced, *, more_options):
    steps = iter(range(_Loop.first_step + 1, 1000))

    class Step(jax.stages.Compiled):
      def __init__(self):
        pass

      def __call__(self, state, batch):
        assert not gc.isenabled()
        number = next(steps)
        events.append(("dispatch", number))
        return hidden, {"loss": (jnp.float32(number), jnp.float32(1.0))}

    return Step()

  monkeypatch.setattr(compiled_steps, "compile_train_step", compile_train_step)
  return events


class _Loop:
  """A loop of a job with other settings, run from some step."""

  first_step = 0

  def __init__(
    self,
    session,
    events,
    *,
    losses=(),
    records=(),
    hooks=(),
    more_savers=(),
    **settings,
  ):
    job = dataclasses.replace(
      session.job,
      **{
        "checkpoint_every_steps": None,
        "eval_every_steps": None,
        "summary_every_steps": 1,
      }
      | settings,
    )
    self._records = records
    self.stop = stop_signals.StopSignals()
    self.writer = _Writer()
    self._fields = {
      "session": dataclasses.replace(session, job=job),
      "traced": object.__new__(jax.stages.Traced),
      "checkpoints": _Checkpoints(events),
      "writer": self.writer,
      "evaluator": _Evaluator(events, losses),
      "stop": self.stop,
      "observer": _Observer(),
      "hooks": hooks,
      "more_savers": more_savers,
    }

  def run(self, first_step=0):
    _Loop.first_step = first_step
    state = object.__new__(train_state.TrainState)
    object.__setattr__(state, "step", jnp.int32(first_step))
    log = evaluation.EvaluationLog(
      self._records, splits=["validation"], until=first_step
    )
    loop = train_loop.TrainLoop(log=log, **self._fields)
    return loop, loop.run(state), state


def _steps(events, kind):
  return [step for name, step in events if name == kind]


def test_two_steps_at_most_are_in_flight_and_metrics_are_read_one_late(
  session, events
):
  _Loop(session, events, num_train_steps=5).run()
  assert events == [
    ("dispatch", 1),
    *(("dispatch", 2), ("read", 1)),
    *(("dispatch", 3), ("read", 2)),
    *(("dispatch", 4), ("read", 3)),
    *(("dispatch", 5), ("read", 4)),
    ("read", 5),
    ("save", 5),
  ]


def test_a_tier_saves_after_steps_without_a_checkpoint(session, events):
  class Local(_Checkpoints):
    def save(self, step, tree, **kwargs):
      events.append(("save locally", step))

  _Loop(
    session,
    events,
    num_train_steps=7,
    checkpoint_every_steps=4,
    more_savers=[(Local(events), 2)],
  ).run()
  assert _steps(events, "save") == [4, 7]
  assert _steps(events, "save locally") == [2, 6]
  # The metrics of the step are written first.
  at = events.index(("save locally", 2))
  assert events[at - 1] == ("read", 2)


class _Recorder(hooks.Hook):
  """Notes its calls."""

  def __init__(self, events, *, every_steps, runs_last):
    self._events = events
    self.every_steps, self.runs_last = every_steps, runs_last

  def start(self, progress):
    self._events.append(("start", progress.step))

  def run(self, progress):
    self._events.append(("run", progress.step))
    progress.writer.write(progress.step, "mine", {"x": 1.0})

  def prepare(self, state, batch):
    self._events.append(("prepare", None))
    return batch

  def wrap(self, step, train_step):
    self._events.append(("wrap", step))
    return train_step

  def on_dispatch(self, step, *, before, after):
    self._events.append(("dispatched", step))

  def on_finish(self, step, values):
    self._events.append(("finished", step))

  def check_state(self, progress):
    self._events.append(("check", progress.step))

  def close(self):
    self._events.append(("close", None))


@pytest.mark.parametrize("runs_last", [False, True])
def test_hooks_are_called_in_order(session, events, runs_last):
  recorder = _Recorder(events, every_steps=2, runs_last=runs_last)
  loop = _Loop(
    session,
    events,
    num_train_steps=4,
    checkpoint_every_steps=2,
    hooks=[recorder],
  )
  loop.run(first_step=1)
  assert events == [
    ("start", 1),
    *(("prepare", None), ("wrap", 2), ("dispatch", 2), ("dispatched", 2)),
    *(("read", 2), ("finished", 2), ("check", 2), ("save", 2), ("run", 2)),
    *(("prepare", None), ("wrap", 3), ("dispatch", 3), ("dispatched", 3)),
    *(("prepare", None), ("wrap", 4), ("dispatch", 4), ("dispatched", 4)),
    *(("read", 3), ("finished", 3), ("read", 4), ("finished", 4)),
    *(("check", 4), ("save", 4)),
    *([("run", 4)] if runs_last else []),
    ("close", None),
    *(("check", 4), ("save", 4)),
  ]
  written = {r.step for r in loop.writer.records if r.split == "mine"}
  assert written == ({2, 4} if runs_last else {2})


def test_cycles_are_collected_in_the_pauses_only(session, events, monkeypatch):
  collect = train_loop.DeferredGarbageCollection.collect

  def note(self):
    events.append(("collect", None))
    collect(self)

  monkeypatch.setattr(train_loop.DeferredGarbageCollection, "collect", note)
  settings = {"checkpoint_every_steps": 2, "eval_every_steps": 3}
  _Loop(session, events, losses=[1], num_train_steps=4, **settings).run()
  kept = [e for e in events if e[0] in ("dispatch", "collect")]
  assert [name for name, _ in kept] == [
    *("dispatch", "dispatch", "collect"),
    *("dispatch", "collect"),
    *("dispatch", "collect"),
  ]
  assert gc.isenabled()


def test_a_signal_before_the_first_step_leaves_everything_as_it_was(
  session, events, monkeypatch
):
  loop = _Loop(session, events, num_train_steps=5)
  compile_train_step = compiled_steps.compile_train_step

  def interrupted(session, traced, *, more_options):
    loop.stop.requested = "SIGINT"
    return compile_train_step(session, traced, more_options=more_options)

  monkeypatch.setattr(compiled_steps, "compile_train_step", interrupted)
  _, state, given = loop.run()
  assert state is given
  assert events == []


def test_a_signal_during_an_evaluation_ends_with_a_checkpoint(
  session, events, monkeypatch
):
  loop = _Loop(session, events, num_train_steps=9, eval_every_steps=3)

  def evaluate(self, state, *, is_stopped):
    loop.stop.requested = "SIGTERM"
    return None

  monkeypatch.setattr(_Evaluator, "evaluate", evaluate)
  loop.run()
  assert events[-2:] == [("read", 3), ("save", 3)]


def test_an_interrupted_evaluation_is_repeated(session, events):
  settings = {"num_train_steps": 6, "eval_every_steps": 3}
  loop = _Loop(session, events, losses=[7], **settings)
  loop.run(first_step=3)
  assert events[:2] == [("evaluate", None), ("dispatch", 4)]
  assert loop.writer.records[0].values == {"loss": 7.0}
  events.clear()
  _Loop(session, events, records=loop.writer.records, **settings).run(3)
  assert "evaluate" not in [name for name, _ in events]


LOSSES = {2: 5.0, 4: 3.0, 6: 4.0, 8: 3.0, 10: 1.0, 12: 9.0}


def _stopping(session, events, first_step, *, lost=False):
  """Runs with early stopping; returns the step of the last checkpoint."""
  recorded = [s for s in LOSSES if s < first_step + (not lost)]
  loop = _Loop(
    session,
    events,
    losses=[v for s, v in LOSSES.items() if s not in recorded],
    records=[
      metrics_file.Record(s, "validation", {"loss": LOSSES[s]})
      for s in recorded
    ],
    num_train_steps=20,
    checkpoint_every_steps=1,
    eval_every_steps=2,
    early_stopping=training.EarlyStopping(metric="validation/loss", patience=2),
  )
  ran, _, _ = loop.run(first_step)
  return max(_steps(events, "save"), default=first_step), ran.reason_to_stop()


def test_training_ends_early_by_the_rule(session, events):
  step, reason = _stopping(session, events, 0)
  assert step == 8
  assert reason.endswith("improved for 2 evaluations; best 3 at step 4")
  assert events.count(("save", 8)) == 2  # Due, and at the end: saved once.


@pytest.mark.parametrize("lost", [False, True], ids=["written", "lost"])
@pytest.mark.parametrize("first_step", [2, 3, 4, 7, 8])
def test_an_interrupted_run_ends_early_at_the_same_step(
  session, events, first_step, lost
):
  step, reason = _stopping(session, events, first_step, lost=lost)
  assert (step, "at step 4" in reason) == (8, True)
  assert (9 in _steps(events, "dispatch")) is False


def test_an_unknown_metric_is_an_error_at_the_first_evaluation(session, events):
  rule = training.EarlyStopping(metric="validation/los")
  loop = _Loop(
    session,
    events,
    losses=[1],
    num_train_steps=9,
    eval_every_steps=2,
    early_stopping=rule,
  )
  with pytest.raises(user_error.UserError, match=r"mean 'validation/loss'"):
    loop.run()
  assert _steps(events, "dispatch") == [1, 2]

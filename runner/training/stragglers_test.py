"""Tests for the report of the process for which the others wait."""

import gc
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.runner.hosts import agreement
from paxon.runner.monitoring import goodput
from paxon.runner.monitoring import observer as observer_lib
from paxon.runner.session import session as session_lib
from paxon.runner.training import stragglers, testing

_CAUSES = list(stragglers.CAUSES)


def _times(*, processes=4, steps=20):
  """Nobody is late: zeros, float [processes, steps, causes]."""
  return np.zeros((processes, steps, len(_CAUSES)))


def _define(times):
  """The sum of the excess of each process, from the definition."""
  costs = [0.0] * len(times)
  for step in range(len(times[0])):
    late = [sum(of_process[step]) for of_process in times]
    process = late.index(max(late))
    others = sorted(late[:process] + late[process + 1 :])
    middle = len(others) // 2
    median = (others[middle] + others[-middle - 1]) / 2
    excess = late[process] - median
    costs[process] += excess if excess >= 0.001 else 0.0
  return costs


def test_nobody_is_slow_without_an_excess():
  assert stragglers.find_slowest(_times()) is None
  times = _times()
  # All wait for the same checkpoint, and one of them 0.9 ms longer.
  times[:, 5, 1] = 2.0
  times[2, 5, 1] += 0.0009
  assert stragglers.find_slowest(times) is None


def test_line_names_process_host_steps_and_cause():
  times = _times()
  times[3, :18, _CAUSES.index("data")] = 0.038
  times[3, :18, _CAUSES.index("host")] = 0.005
  times[:, :, _CAUSES.index("host")] += 0.002
  slowest = stragglers.find_slowest(times)
  assert slowest.line("host-3") == (
    "slowest process 3 (host-3): 43 ms later than the median of the others at"
    " 18 of 20 steps; 38 ms of it waits for data"
  )
  metrics = slowest.metrics()
  assert metrics["straggler_process"] == 3
  assert metrics["straggler_steps"] == 18
  np.testing.assert_allclose(metrics["straggler_seconds"], 0.9 * 0.043)
  np.testing.assert_allclose(metrics["straggler_data_seconds"], 0.9 * 0.038)
  np.testing.assert_allclose(metrics["straggler_host_seconds"], 0.9 * 0.005)
  assert set(metrics) == {
    "straggler_process",
    "straggler_steps",
    "straggler_seconds",
    *(f"straggler_{cause}_seconds" for cause in _CAUSES),
  }


@pytest.mark.parametrize("processes", [2, 3, 4, 7])
def test_slowest_process_is_that_of_the_definition(processes):
  random = np.random.default_rng(processes)
  for _ in range(20):
    times = random.exponential(0.01, (processes, 12, len(_CAUSES)))
    times[random.random(times.shape) < 0.7] = 0.0
    costs = _define(times.tolist())
    slowest = stragglers.find_slowest(times)
    assert slowest.process == costs.index(max(costs))
    np.testing.assert_allclose(slowest.steps * slowest.excess, max(costs))


def test_time_that_all_spend_is_not_the_cause():
  times = _times(processes=3, steps=2)
  times[:, :, _CAUSES.index("checkpoint")] = 0.5
  times[1, :, _CAUSES.index("garbage")] = 0.02
  slowest = stragglers.find_slowest(times)
  assert slowest.process == 1
  assert slowest.line("b").endswith("20 ms of it collects garbage")
  assert slowest.causes["checkpoint"] == 0


def test_one_process_has_no_hook(session):
  observer = observer_lib.Observer()
  assert stragglers.make(session, observer) == []
  assert observer.sources == []


class _Clock:
  now = 100.0

  def __call__(self):
    return self.now


@pytest.fixture(scope="module")
def session():
  job, _ = testing.make(summary_every_steps=3)
  return session_lib.open_session(job)


@pytest.fixture(name="clock")
def _clock():
  return _Clock()


@pytest.fixture(name="hook")
def _hook(session, clock):
  """The hook of this process, which waits for the thread after each step."""
  ledger = goodput.Ledger(clock=clock)
  observer = observer_lib.Observer(ledger=ledger)
  hook = stragglers.Stragglers(session, observer, clock=clock)
  with ledger.span(goodput.Cause.PRODUCTIVE):
    yield hook, ledger
  hook.close()
  assert hook not in gc.callbacks


def _dispatch(session, hook, step, loss):
  """Runs a step whose result is a loss, and nothing else."""
  dispatch = hook.wrap(step, lambda state, batch: (state, {"loss": loss}))
  dispatch(session.abstract_state(), {})


def _step(session, hook, step):
  """Runs a step, and waits until its end is noted."""
  _dispatch(session, hook, step, (jnp.ones(()), jnp.ones(())))
  while hook._end[0] != step:
    time.sleep(0.001)


def test_causes_add_up_to_the_lateness(session, hook, clock, monkeypatch):
  hook, ledger = hook
  # Its time is zero: there is no step before it.
  _step(session, hook, 1)
  clock.now += 1.0
  with ledger.span(goodput.Cause.DATA):
    clock.now += 4.0
  with ledger.span(goodput.Cause.EVALUATION):
    clock.now += 2.0
  _step(session, hook, 2)
  with ledger.span(goodput.Cause.CHECKPOINT):
    clock.now += 3.0
  hook._garbage("start", {})
  clock.now += 0.5
  hook._garbage("stop", {})
  _step(session, hook, 3)
  gathered, count, seconds = hook._pending
  assert (gathered.shape, count, seconds) == ((1, 3, 5), 3, 10.5)
  np.testing.assert_allclose(
    gathered[0],
    [
      [0, 0, 0, 0, 0],
      [4, 0, 2, 0, 1],
      [0, 3, 0, 0.5, 0],
    ],
  )
  # The other process is never late.
  both = jnp.concatenate([gathered, jnp.zeros_like(gathered)])
  hook._pending = both, count, seconds
  hook._hosts = ["a", "b"]
  lines = []
  monkeypatch.setattr("builtins.print", lambda line, flush: lines.append(line))
  metrics = hook._report()
  assert lines == [
    "slowest process 0 (a): 5250 ms later than the median of the others at 2"
    " of 3 steps; 2000 ms of it waits for data"
  ]
  assert metrics["late_seconds"] == metrics["straggler_seconds"] == 3.5
  # Each interval is reported once.
  assert hook._report() == {}


def test_process_that_dispatches_in_time_is_not_late(session, hook, clock):
  hook, ledger = hook
  _step(session, hook, 1)
  # The devices are still at work when the next step is dispatched.
  hook._end = 0, clock.now
  with ledger.span(goodput.Cause.DATA):
    clock.now += 4.0
  _step(session, hook, 2)
  _step(session, hook, 3)
  assert not np.asarray(hook._pending[0]).any()


def test_a_step_that_fails_ends_the_thread_only(session, hook):
  hook, _ = hook
  fails = jax.jit(lambda: jnp.ones(()))()
  fails.delete()
  _dispatch(session, hook, 1, (fails, fails))
  hook._thread.join()
  assert hook._end[0] == -1


def test_hosts_are_gathered(session, monkeypatch):
  names = []
  monkeypatch.setattr(agreement, "is_alone", lambda: False)
  monkeypatch.setattr(agreement, "gather", lambda x: names.append(x) or [x])
  observer = observer_lib.Observer()
  (hook,) = stragglers.make(session, observer)
  assert len(names) == 1
  assert observer.sources == [hook._report]

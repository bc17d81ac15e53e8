"""Tests of timing in turn, with a made-up clock."""

import pytest

from paxon.tools.benchmarks import interleaving


class _Machine:
  """Contenders that take known times on a machine that gets slower."""

  def __init__(self, slowdown: float = 1.0) -> None:
    self.now = 0.0
    self.speed = 1.0
    self.calls: list[str] = []
    self._slowdown = slowdown

  def contender(self, name: str, seconds: float):
    def run() -> None:
      self.calls.append(name)
      self.now += seconds * self.speed
      self.speed *= self._slowdown

    return run

  def clock(self) -> float:
    return self.now


def _interleave(machine, rounds):
  return interleaving.interleave(
    machine.contender("a", 3.0),
    machine.contender("b", 2.0),
    rounds=rounds,
    clock=machine.clock,
  )


def test_warms_up_and_then_takes_turns_in_who_goes_first():
  machine = _Machine()
  pairs = _interleave(machine, rounds=3)
  assert "".join(machine.calls) == "ab" + "ab" + "ba" + "ab"
  assert pairs.first == (3.0,) * 3
  assert pairs.second == (2.0,) * 3
  assert pairs.ratios() == [1.5] * 3


def test_a_machine_that_gets_slower_favours_nobody():
  pairs = _interleave(_Machine(slowdown=1.1), rounds=10)
  # One after the other, the ratio of the means would be 1.5 / 1.1 ** 10 = 0.58.
  low, high = sorted(pairs.ratios())[4:6]
  assert low <= 1.5 <= high
  assert 1.3 < min(pairs.ratios()) <= max(pairs.ratios()) < 1.7


def test_refuses_no_round():
  with pytest.raises(ValueError, match=r"rounds must be positive, got 0\."):
    _interleave(_Machine(), rounds=0)


@pytest.mark.parametrize("times", [((), ()), ((1.0,), (1.0, 2.0))])
def test_refuses_times_without_a_partner(times):
  with pytest.raises(ValueError, match="as many times of one as of the other"):
    interleaving.Pairs(first=times[0], second=times[1])

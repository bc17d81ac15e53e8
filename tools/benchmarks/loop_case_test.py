"""Tests of the cases that run whole programs, at toy size."""

import pytest

from paxon.tools.benchmarks import (
  cases,
  loop_case,
  save_case,
)

TINY = cases.resized(
  cases.QUICKSTART,
  {
    "num_layers": 1,
    "embed_dim": 16,
    "mlp_dim": 16,
    "num_heads": 2,
    "head_dim": 8,
    "length": 16,
    "vocab_size": 32,
  },
)


class _Clock:
  def __init__(self, *times: float) -> None:
    self._times = list(times)

  def __call__(self) -> float:
    return self._times.pop(0)


def test_a_pause_acts_at_every_second_evaluation():
  actions = []
  pause = loop_case.Pause(
    global_batch_size=2,
    length=4,
    action=lambda: actions.append(None),
    # Bare steps at 10 to 12, 18 to 21 and 31 to 33.
    clock=_Clock(10, 12, 18, 21, 31, 33),
  )
  for i in range(6):
    pause.reset()
    with pytest.raises(StopIteration):
      pause.get_next()
    assert len(actions) == i // 2 + 1
  pairs = pause.pairs(units=2)
  assert pairs.first == (3.0, 5.0)
  assert pairs.second == (1.5, 1.0)


def test_program_and_bare_steps_alternate(capsys):
  result = loop_case.run(TINY, name="tiny", rounds=3, every_steps=4)
  assert len(result.pairs.first) == len(result.pairs.second) == 3
  assert min(result.pairs.first + result.pairs.second) > 0
  # What the program says is not the bench's.
  assert "loss" not in capsys.readouterr().out


@pytest.mark.parametrize("every", [0, 5])
def test_refuses_intervals_without_a_middle(every):
  with pytest.raises(ValueError, match=rf"positive and even, got {every}\."):
    loop_case.run(TINY, name="tiny", rounds=1, every_steps=every)


def test_times_saves_beside_steps():
  result = save_case.run(TINY, name="tiny", rounds=2)
  assert len(result.pairs.first) == 2
  assert min(result.pairs.first) > 0
  assert result.facts["state_MB"] > 0

"""Tests of the cases that run whole programs, at toy size."""

import pytest

from paxon.tools.benchmarks import cases, loop_case, step_cases

TINY = cases.resize(
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
    self._times = list(map(float, times))

  def __call__(self) -> float:
    return self._times.pop(0)


def test_a_pause_acts_at_four_of_five_evaluations_and_twice_before_the_fifth():
  actions = []
  pause = loop_case.Pause(
    global_batch_size=2,
    length=4,
    action=lambda: actions.append(None),
    # The program is at work from 2 to 3, from 4 to 6, from 9 to 13, ...
    clock=_Clock(0, 2, 3, 4, 6, 9, 13, 18, 20, 21, 24, 25, 26, 27, 29, 30),
  )
  counts = []
  for _ in range(9):
    pause.reset()
    with pytest.raises(StopIteration):
      pause.get_next()
    counts.append(len(actions))
  assert counts == [1, 2, 3, 5, 5, 6, 7, 8, 10]
  # The second round has three of its four actions.
  pairs = pause.pairs(units=10)
  assert pairs.first == (0.9,)
  assert pairs.second == (1.0,)


def test_program_and_bare_steps_alternate(capsys):
  result = loop_case.run(TINY, name="tiny", rounds=2, every_steps=5)
  assert len(result.pairs.first) == len(result.pairs.second) == 2
  assert min(result.pairs.first + result.pairs.second) > 0
  # The output of the program is not shown.
  assert "loss" not in capsys.readouterr().out


@pytest.mark.parametrize("every", [0, 4])
def test_rejects_intervals_that_blocks_do_not_divide(every):
  with pytest.raises(ValueError, match=rf"positive multiple of 5, got {every}"):
    loop_case.run(TINY, name="tiny", rounds=1, every_steps=every)


def test_times_saves_and_steps():
  result = step_cases.run_save(TINY, name="tiny", rounds=2)
  assert len(result.pairs.first) == 2
  assert min(result.pairs.first) > 0
  assert result.facts["state_MB"] > 0

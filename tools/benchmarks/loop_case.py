"""The whole training program compared with its bare compiled step.

The program runs as a user's does, with metrics, checkpoints, prefetching and
monitoring. It pauses at its own evaluations: its only evaluation split has no
batch, but reading it runs a block of bare steps, the same compiled program on
batches that are on the device already. So short blocks of both alternate in one
process, and the program needs no change.

There are five evaluations per checkpoint. The one at a checkpoint's own step
runs no bare steps, and the one before it twice as many, so that background
writing falls into steps of the program. A round is the steps from one
checkpoint to the next, and as many bare steps:

  10 of the program, 10 bare, 10, 10, 10, 20 bare, 20 with the checkpoint, 10

The time of the empty evaluations counts for the program.
"""

from collections.abc import Callable, Sequence
import contextlib
import dataclasses
import io
import tempfile
import time
from typing import Any

from etils import epath
import fiddle as fdl

from paxon.inputs import base_input
from paxon.runner.training import train
from paxon.tools.benchmarks import decoder_lm_workload, timing

LIMIT = 1.03
CHECKPOINT_EVERY_STEPS = 50
SUMMARY_EVERY_STEPS = 10
# Evaluations per checkpoint.
_EVALUATIONS = 5
# All devices, as experiments have by default.
_MESH = "data=-1"


@dataclasses.dataclass(kw_only=True, eq=False)
class Pause(base_input.BaseInput):
  """An evaluation split without batches that runs an action when it is read.

  Attributes:
    action: Called at four of five evaluations, twice at the fourth.
    clock: Seconds from any origin.
    begins: Start times of the actions, one per evaluation.
    ends: Their end times.
  """

  action: Callable[[], object]
  clock: Callable[[], float] = time.perf_counter
  begins: list[float] = dataclasses.field(default_factory=list, init=False)
  ends: list[float] = dataclasses.field(default_factory=list, init=False)
  _evaluations: int = dataclasses.field(default=0, init=False)

  def peek(self) -> base_input.Batch:
    """Returns an empty batch for the check at the start; runs nothing."""
    return {}

  def get_next(self) -> base_input.Batch:
    """Runs the action and raises StopIteration."""
    self._evaluations += 1
    index = self._evaluations % _EVALUATIONS
    if index:
      self.begins.append(self.clock())
      for _ in range(2 if index == _EVALUATIONS - 1 else 1):
        self.action()
      self.ends.append(self.clock())
    raise StopIteration

  def reset(self) -> None:
    """Does nothing: there is no position."""

  def get_state(self) -> base_input.State:
    """Returns an empty state."""
    return {}

  def set_state(self, state: base_input.State) -> None:
    """Does nothing: there is no position."""

  def pairs(self, *, units: int) -> timing.Pairs:
    """Returns the times between actions and the times of actions, by round.

    A round is five evaluations; the first one starts after the first action.

    Args:
      units: Divisor of both times.
    """
    between = [
      begin - end
      for end, begin in zip(self.ends[:-1], self.begins[1:], strict=True)
    ]
    actions = [
      end - begin
      for begin, end in zip(self.begins[1:], self.ends[1:], strict=True)
    ]
    return timing.Pairs(
      first=_sums(between, units), second=_sums(actions, units)
    )


def run(
  workload: decoder_lm_workload.Workload,
  *,
  name: str,
  rounds: int,
  every_steps: int = CHECKPOINT_EVERY_STEPS,
) -> timing.Comparison:
  """Returns the time of a step in the program over that of the bare step."""
  if every_steps <= 0 or every_steps % _EVALUATIONS:
    raise ValueError(
      f"every_steps must be a positive multiple of {_EVALUATIONS}, got"
      f" {every_steps}."
    )
  block = every_steps // _EVALUATIONS
  bare = decoder_lm_workload.compile_ours(workload.job(mesh=_MESH))
  pause = Pause(
    global_batch_size=workload.global_batch_size,
    length=workload.length,
    action=bare.start(count=block),
  )
  intervals: dict[str, Any] = {
    # A step follows the last evaluation.
    "num_train_steps": rounds * every_steps + block + 1,
    "checkpoint_every_steps": every_steps,
    "eval_every_steps": block,
    "summary_every_steps": SUMMARY_EVERY_STEPS,
  }
  job = workload.job(mesh=_MESH, **intervals, eval_inputs={"pause": pause})
  # Only stored with the run, which is never resumed.
  config = fdl.Config(type(job), experiment=job.experiment, **intervals)
  output = io.StringIO()
  with tempfile.TemporaryDirectory() as folder:
    try:
      with (
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(output),
      ):
        train.run(job, config, epath.Path(folder))
    except BaseException:
      print(output.getvalue())
      raise
  return timing.Comparison(
    case=name,
    first="the whole program",
    second="its bare step",
    pairs=pause.pairs(units=every_steps),
    limit=LIMIT,
    facts={
      **workload.facts(),
      "checkpoint_every": every_steps,
      "summary_every": SUMMARY_EVERY_STEPS,
    },
  )


def _sums(values: Sequence[float], units: int) -> tuple[float, ...]:
  """Returns the sum of each round's values, over `units`."""
  size = _EVALUATIONS - 1
  return tuple(
    sum(values[i : i + size]) / units
    for i in range(0, len(values) - size + 1, size)
  )

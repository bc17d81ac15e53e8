"""The whole training program beside the bare compiled step.

The program runs as a user's does, with its summaries, checkpoints, prefetched
input and observability. It pauses at its own evaluations: the only evaluation
split of its job has no batch, but when it is read it makes a block of bare
steps, the same compiled program on batches that lie on the device. So blocks of
both alternate in one process, and nothing of the program had to be changed.

Evaluations come at half the interval of checkpoints, and only every second one
makes bare steps: those half-way between two checkpoints, so that writing in the
background counts for the program. What the empty evaluations cost counts for
the program as well.
"""

from collections.abc import Callable
import contextlib
import dataclasses
import io
import tempfile
import time
from typing import Any

from etils import epath
import fiddle as fdl

from paxon.inputs import base_input
from paxon.runner.programs import train
from paxon.tools.benchmarks import (
  comparison,
  decoder_lm_workload,
  interleaving,
)

LIMIT = 1.03
CHECKPOINT_EVERY_STEPS = 50
SUMMARY_EVERY_STEPS = 10
# All devices, as experiments have by default.
_MESH = "data=-1"


@dataclasses.dataclass(kw_only=True, eq=False)
class Pause(base_input.BaseInput):
  """An evaluation split without batches that does something when it is read.

  Attributes:
    action: Called at every second evaluation, the first one included.
    clock: Seconds from any origin.
    begins: When each action began.
    ends: When each action ended.
  """

  action: Callable[[], object]
  clock: Callable[[], float] = time.perf_counter
  begins: list[float] = dataclasses.field(default_factory=list, init=False)
  ends: list[float] = dataclasses.field(default_factory=list, init=False)
  _evaluations: int = dataclasses.field(default=0, init=False)

  def get_next(self) -> base_input.Batch:
    """Acts, and says that there is no batch."""
    self._evaluations += 1
    if self._evaluations % 2:
      self.begins.append(self.clock())
      self.action()
      self.ends.append(self.clock())
    raise StopIteration

  def reset(self) -> None:
    """Does nothing: there is no position."""

  def get_state(self) -> base_input.State:
    """Returns nothing to remember."""
    return {}

  def set_state(self, state: base_input.State) -> None:
    """Does nothing: there is no position."""

  def pairs(self, *, units: int) -> interleaving.Pairs:
    """Returns the times between actions, and of the actions after them.

    Args:
      units: By how much both are divided.
    """
    between = zip(self.ends, self.begins[1:], strict=False)
    actions = zip(self.begins[1:], self.ends[1:], strict=True)
    return interleaving.Pairs(
      first=tuple((end - begin) / units for begin, end in between),
      second=tuple((end - begin) / units for begin, end in actions),
    )


def run(
  workload: decoder_lm_workload.Workload,
  *,
  name: str,
  rounds: int,
  every_steps: int = CHECKPOINT_EVERY_STEPS,
) -> comparison.Comparison:
  """Returns the time of a step in the program over that of the bare step.

  Args:
    workload: Sizes.
    name: Of the comparison.
    rounds: How often a block of each is timed.
    every_steps: Interval of checkpoints, and steps in a block; even.
  """
  if every_steps <= 0 or every_steps % 2:
    raise ValueError(
      f"every_steps must be positive and even, got {every_steps}."
    )
  bare = decoder_lm_workload.compile_ours(workload.job(mesh=_MESH))
  pause = Pause(
    global_batch_size=workload.global_batch_size,
    length=workload.length,
    action=bare.start(count=every_steps),
  )
  intervals: dict[str, Any] = {
    "num_train_steps": rounds * every_steps + every_steps // 2 + 1,
    "checkpoint_every_steps": every_steps,
    "eval_every_steps": every_steps // 2,
    "summary_every_steps": SUMMARY_EVERY_STEPS,
  }
  job = workload.job(mesh=_MESH, **intervals, eval_inputs={"pause": pause})
  # Only stored beside the run, which nobody will go on with.
  config = fdl.Config(type(job), experiment=job.experiment, **intervals)
  said = io.StringIO()
  with tempfile.TemporaryDirectory() as folder:
    try:
      with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        train.run(job, config, epath.Path(folder))
    except BaseException:
      print(said.getvalue())
      raise
  return comparison.Comparison(
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

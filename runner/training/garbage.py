"""Python's garbage collection, kept out of the steps.

Reference counts free nearly everything. What they cannot free, cycles, Python
looks for whenever enough objects have been made, and a full search visits every
object of the process: tens to hundreds of milliseconds with the objects of jax,
in the middle of a step, and on many hosts at a different step on each, while
all the others wait. So the objects that are there before the first step, which
live as long as the run, are set aside, and cycles made later are looked for
where training pauses anyhow, at the same steps on every host.
"""

import gc
from types import TracebackType

# Runs without checkpoints and evaluations make cycles too, a few.
_MAX_STEPS = 1000


class Postponed:
  """While entered, cycles are looked for only when `collect` is called."""

  def __init__(self) -> None:
    self._was_enabled = False
    self._was_frozen = False
    self._steps = 0

  def __enter__(self) -> "Postponed":
    self._was_enabled = gc.isenabled()
    self._was_frozen = gc.get_freeze_count() > 0
    gc.collect()
    gc.freeze()
    gc.disable()
    return self

  def __exit__(
    self,
    exception_type: type[BaseException] | None,
    exception: BaseException | None,
    traceback: TracebackType | None,
  ) -> None:
    # What others have set aside cannot be told from what is set aside here.
    if not self._was_frozen:
      gc.unfreeze()
    if self._was_enabled:
      gc.enable()

  def collect(self) -> None:
    """Frees the cycles made since the start, which are few objects."""
    gc.collect()
    self._steps = 0

  def after_step(self) -> None:
    """Counts a step; frees cycles if nothing else asked for that for long."""
    self._steps += 1
    if self._steps >= _MAX_STEPS:
      self.collect()

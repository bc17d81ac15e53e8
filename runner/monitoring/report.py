"""`report.html`: the page of a run, made from the other files of its folder.

It can be generated again at any time.
"""

from collections.abc import Callable, Mapping
import contextlib
import time

from etils import epath

from paxon.runner import files, run_dir
from paxon.runner.monitoring import metrics_file, run_page

# Training lines that are parsed while a run trains, and afterwards.
_LIVE_LINES, _ALL_LINES = 2_000, 100_000
# Writing takes at most about this share of the time.
_MAX_SHARE = 0.002


def write(folder: epath.PathLike, *, max_lines: int = _ALL_LINES) -> epath.Path:
  """Writes the report of a run directory and returns its path.

  Args:
    folder: The run directory.
    max_lines: Bound on the training lines of the metrics that are parsed; of
      more, evenly spaced ones are.
  """
  root = epath.Path(folder)
  page = run_page.make_frozen(root, max_lines=max_lines)
  files.write_text(root / run_dir.REPORT, page)
  return root / run_dir.REPORT


class ReportFile(metrics_file.SummaryWriter):
  """Writes the report while a run trains: at its first metrics, then paced.

  It reads the files of the other writers, so it must come after them. If it
  cannot be written, the run continues.
  """

  def __init__(
    self,
    folder: epath.PathLike,
    *,
    clock: Callable[[], float] = time.monotonic,
  ):
    self._folder = folder
    self._pace = files.FlushPace(clock, max_share=_MAX_SHARE)
    self._is_written = False

  def write(self, step: int, split: str, values: Mapping[str, float]) -> None:
    """Writes the report at the first call and when the pace allows."""
    del step, split, values  # They are fields of the files.
    if not self._is_written or self._pace.is_due():
      self._is_written = True
      self._pace.run(self.close)

  def close(self) -> None:
    """Writes the report."""
    with contextlib.suppress(OSError):
      write(self._folder, max_lines=_LIVE_LINES)

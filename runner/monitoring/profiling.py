"""Profiles of a few training steps, for TensorBoard's profile plugin and XProf.

A profile begins and ends while the devices are idle, so that it contains whole
steps only. Steps are annotated with their numbers.
"""

import contextlib
import os
import pathlib
import tempfile

from etils import epath
import jax

from paxon.runner import files
from paxon.runner.monitoring import launch


class Profiler:
  """Traces a window of steps once."""

  def __init__(
    self, window: launch.ProfileWindow | None, folder: epath.Path
  ) -> None:
    """Prepares to write `<folder>/plugins/profile/<time>/*.xplane.pb`."""
    self._window = window
    self._folder = folder
    self._is_tracing = False
    self._stack = contextlib.ExitStack()

  def is_edge(self, step: int) -> bool:
    """Returns whether the window begins with this step or ends before it."""
    if self._window is None:
      return False
    return self._is_tracing != (step in self._window)

  def move(self, step: int) -> str | None:
    """Starts or stops the trace before a step, while the devices are idle.

    Returns:
      A line for the user at the end of the window.
    """
    if not self.is_edge(step):
      return None
    if self._is_tracing:
      return self.close()
    local = os.fspath(self._folder)
    if not files.is_local(local):
      local = self._stack.enter_context(tempfile.TemporaryDirectory())
      self._stack.callback(_copy, pathlib.Path(local), self._folder)
    else:
      self._folder.mkdir(parents=True, exist_ok=True)
    jax.profiler.start_trace(local)
    self._is_tracing = True
    return None

  def step(self, step: int) -> contextlib.AbstractContextManager[object]:
    """Returns a context that annotates the dispatch of a step in the trace."""
    if not self._is_tracing:
      return contextlib.nullcontext()
    return jax.profiler.StepTraceAnnotation("train", step_num=step)

  def close(self) -> str | None:
    """Stops the trace if there is one; returns a line for the user."""
    if not self._is_tracing:
      return None
    # Never traced again, even if writing fails.
    self._is_tracing, window, self._window = False, self._window, None
    with self._stack:
      jax.profiler.stop_trace()
    return f"profile of steps {window}: {os.fspath(self._folder)}"


def _copy(source: pathlib.Path, target: epath.Path) -> None:
  """Copies the files of a directory tree."""
  for path in source.rglob("*"):
    if path.is_file():
      name = path.relative_to(source)
      files.write_bytes(target / name, path.read_bytes())

"""Profiles of a few steps, for TensorBoard's profile plugin and XProf.

The window begins and ends when the devices have nothing to do, so that it holds
whole steps and no part of others. Steps are marked by their numbers.
"""

import contextlib
import os
import pathlib
import tempfile

from etils import epath
import jax

from paxon.runner import files
from paxon.runner.monitoring import profile_window


class Profiler:
  """Traces the steps of a window, once."""

  def __init__(
    self, window: profile_window.ProfileWindow | None, folder: epath.Path
  ) -> None:
    """Prepares.

    Args:
      window: What to trace; None for nothing.
      folder: Gets `plugins/profile/<time>/*.xplane.pb`, where TensorBoard
        looks. It may be in an object store.
    """
    self._window = window
    self._folder = folder
    self._is_tracing = False
    self._stack = contextlib.ExitStack()

  def is_edge(self, step: int) -> bool:
    """Whether the window begins with this step, or ends before it."""
    if self._window is None:
      return False
    return self._is_tracing != (step in self._window)

  def move(self, step: int) -> str | None:
    """Begins or ends the window; called while the devices have nothing to do.

    Args:
      step: The next one.

    Returns:
      A line for the user at the end of a window.
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
    """Marks the dispatch of a step in the trace."""
    if not self._is_tracing:
      return contextlib.nullcontext()
    return jax.profiler.StepTraceAnnotation("train", step_num=step)

  def close(self) -> str | None:
    """Ends the window if it is open; returns a line for the user."""
    if not self._is_tracing:
      return None
    # Not traced twice, also if writing fails.
    self._is_tracing, window, self._window = False, self._window, None
    with self._stack:
      jax.profiler.stop_trace()
    return f"profile of the steps {window}: {os.fspath(self._folder)}"


def _copy(source: pathlib.Path, target: epath.Path) -> None:
  """Copies a folder's files; a store has no folders to make before."""
  for path in source.rglob("*"):
    if path.is_file():
      name = path.relative_to(source)
      files.write_bytes(target / name, path.read_bytes())

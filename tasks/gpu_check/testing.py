"""Checks that end in each way, for tests of processes."""

import os
import time

from paxon.tasks.gpu_check import isolation


def succeed(settings: isolation.Settings) -> isolation.Facts:
  """Returns its arguments, and NaN."""
  return {"is_dry": settings.is_dry, "number": float("nan")}


def fail(settings: isolation.Settings) -> isolation.Facts:
  """Raises a failed check."""
  del settings
  raise isolation.CheckError("it differs", {"error_size": 0.5})


def raise_bug(settings: isolation.Settings) -> isolation.Facts:
  """Raises any other error."""
  return {"found": {}[str(settings.folder)]}


def crash(settings: isolation.Settings) -> isolation.Facts:
  """Ends its process, as a broken driver does."""
  del settings
  os._exit(3)


def hang(settings: isolation.Settings) -> isolation.Facts:
  """Never returns."""
  del settings
  time.sleep(1000)
  return {}

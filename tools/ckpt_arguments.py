"""Arguments of `tools/ckpt` and `tools/hf`: places; mistakes are one line."""

import argparse
import os
import re
from typing import TYPE_CHECKING, NoReturn

from etils import epath

from paxon.runner import run_dir, user_error

if TYPE_CHECKING:
  from paxon.runner.checkpoints import stored_checkpoint


def find(place: str) -> "stored_checkpoint.StoredCheckpoint":
  """Returns the checkpoint that an argument names.

  Args:
    place: `RUN` or `RUN@STEP`.

  Raises:
    user_error.UserError: There is none.
  """
  path, step = parse_place(place)
  from paxon.runner.checkpoints import stored_checkpoint as stored

  return stored.find(path, step=step)


def parse_place(place: str) -> tuple[epath.Path, int | None]:
  """Returns the folder and the step that an argument names.

  Args:
    place: `RUN` or `RUN@STEP`.

  Raises:
    user_error.UserError: It names no folder.
  """
  if not place.strip():
    raise user_error.UserError("A folder is empty; name that of a run.")
  matched = re.fullmatch(r"(.+)@(\d+)", place)
  path = run_dir.resolve(matched[1] if matched else place, os.environ)
  return path, int(matched[2]) if matched else None


class Parser(argparse.ArgumentParser):
  """Reads one command's arguments; a mistake is a `UserError`."""

  def __init__(
    self, command: str, description: str, *, program: str = "tools/ckpt"
  ) -> None:
    """Makes a parser without arguments.

    Args:
      command: Its name.
      description: One sentence.
      program: What it is a command of.
    """
    super().__init__(
      prog=f"{program} {command}",
      description=description,
      allow_abbrev=False,
    )
    self._command = command

  def error(self, message: str) -> NoReturn:
    """Raises the mistake."""
    raise user_error.UserError(
      f"{self._command}: {message} ({self.prog} --help explains)."
    )

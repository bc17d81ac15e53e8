"""The error of a user's mistake, shown as one line instead of a traceback."""

import os
import traceback


class UserError(Exception):
  """A mistake of the user; the message says what is wrong and how to fix it.

  The command line prints `one_line(error)` on stderr and exits with `status`.

  Attributes:
    status: 2, as for a wrong command; a subclass may have another.
  """

  # ExitStatus.USAGE of `exit_status`, which few of those that raise need.
  status: int = 2

  def with_status(self, status: int) -> "UserError":
    """Returns the error, with another exit status."""
    self.status = status
    return self


def find_location(error: BaseException) -> str:
  """Returns the file and line where an error was raised: `quickstart.py:12`."""
  if isinstance(error, SyntaxError) and error.filename:
    return f"{os.path.basename(error.filename)}:{error.lineno}"
  frames = [
    frame
    for frame in traceback.extract_tb(error.__traceback__)
    # The import system and Fiddle only pass errors on.
    if not any(part in frame.filename for part in ("importlib", "fiddle/_src"))
  ]
  if not frames:
    return "unknown location"
  return f"{os.path.basename(frames[-1].filename)}:{frames[-1].lineno}"


def sentence(text: str) -> str:
  """Returns the text with a period at its end if it has no end mark."""
  return text if text.endswith((".", "?", "!")) else f"{text}."


def one_line(error: object) -> str:
  """Returns the text of an error as one printable line.

  Lines are joined by spaces and control characters are escaped, because the
  text may quote whatever the user typed.
  """
  joined = " ".join(part.strip() for part in str(error).splitlines()).strip()
  return "".join(
    char if char.isprintable() else char.encode("unicode_escape").decode()
    for char in joined
  )

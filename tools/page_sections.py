"""Parts of a page that a tool writes, between two marks.

Each part begins with a comment that names the command that makes it, and ends
with a comment that is the same for all.
"""

import pathlib
from typing import Final

END: Final = "<!-- Until here. -->"


def begin(command: str) -> str:
  """Returns the mark before what `command` makes."""
  return f"<!-- Made by {command}. -->"


def replaced(page: str, command: str, content: str) -> str:
  """Returns a page with another part.

  Args:
    page: The page as it is.
    command: What makes the part.
    content: Of the part.

  Raises:
    ValueError: The marks are not there, once and in order.
  """
  before, mark, rest = page.partition(begin(command))
  _, end, after = rest.partition(END)
  if not mark or not end or begin(command) in rest:
    raise ValueError(
      f"The page must have {begin(command)} once, and {END} after it."
    )
  return f"{before}{mark}\n\n{content}\n\n{end}{after}"


def write(path: pathlib.Path, command: str, content: str) -> None:
  """Writes another part into the page at `path`; raises as `replaced`."""
  path.write_text(replaced(path.read_text(), command, content))

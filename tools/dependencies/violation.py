"""A broken rule: where, which target, what is wrong, and how to fix it."""

import dataclasses


@dataclasses.dataclass(frozen=True, order=True)
class Violation:
  """A broken rule.

  Attributes:
    path: The file to change, relative to the workspace root.
    line: The line in it, from 1; 0 when the whole file is meant.
    subject: The target or file that breaks the rule.
    message: What is wrong and how to fix it.
    exception: The line of the list of exceptions that would allow it; empty
      where the rule has no exceptions.
  """

  path: str
  line: int
  subject: str
  message: str
  exception: str = ""

  def __str__(self) -> str:
    place = f"{self.path}:{self.line}" if self.line else self.path
    if self.subject == self.path:
      return f"{place}: {self.message}"
    return f"{place}: {self.subject}: {self.message}"

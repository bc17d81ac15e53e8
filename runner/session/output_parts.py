"""Output files that are made in parts, so that a stopped program resumes.

Parts lie in `OUTPUT.parts` until the last one is written; then they become the
output. `OUTPUT.json` describes what the output is made of.
"""

from collections.abc import Callable
import json
import os
import re
from typing import Any

from etils import epath

from paxon.runner import files, user_error
from paxon.runner.hosts import agreement


class Parts:
  """An output file, while it is made in parts.

  Attributes:
    step: Step of the checkpoint.
    path: The file.
    about: A file with its description, JSON.
    found: Numbers of the parts that were there.
    is_finished: Whether the whole output was there.
  """

  def __init__(
    self, path: epath.Path, description: dict[str, Any], *, advice: str = ""
  ) -> None:
    """Finds what an earlier command has left.

    Args:
      path: The file to write.
      description: Origin of the file, with its `step`; JSON values.
      advice: End of errors about an output of another origin.

    Raises:
      UserError: There is an output of another origin.
    """
    self.step: int = description["step"]
    self._advice = advice
    self.path = path
    self.about = epath.Path(f"{os.fspath(path)}.json")
    self._folder = epath.Path(f"{os.fspath(path)}.parts")
    self._description = description
    self.is_finished, found = agreement.from_first(self._open)
    self.found = frozenset(found)
    self._written = [*found]

  def _open(self) -> tuple[bool, list[int]]:
    files.check_store(self.path)
    if self.about.exists() and (self.path.exists() or self._folder.exists()):
      self._check()
      if self.path.exists():
        return True, []
    elif self.path.exists():
      raise user_error.UserError(
        f"{os.fspath(self.path)} exists; move it away{self._advice}."
      )
    files.write_text(self.about, json.dumps(self._description, indent=1))
    if not self._folder.exists():
      return False, []
    names = [part.name for part in self._folder.iterdir()]
    matches = [re.fullmatch(r"(\d{6})\.jsonl", name) for name in names]
    return False, sorted(int(match[1]) for match in matches if match)

  def _check(self) -> None:
    before = self.read_about()
    changed = [
      name
      for name, value in self._description.items()
      if before.get(name) != value
    ]
    if changed:
      name = changed[0]
      raise user_error.UserError(
        f"{os.fspath(self.path)} was begun with another {name}"
        f" ({before.get(name)!r}, now {self._description[name]!r}); move it and"
        f" {self.about.name} away{self._advice}."
      )

  def read_about(self) -> dict[str, Any]:
    """Returns the description of the output.

    Raises:
      DamagedFileError: It cannot be read.
    """
    return files.read_json(
      self.about,
      files.to_object,
      kind="the description of this output",
      advice="Move it away, and the output, too.",
    )

  def _part(self, number: int) -> epath.Path:
    return self._folder / f"{number:06}.jsonl"

  def write(self, number: int, text: str) -> None:
    """Writes a part."""
    self._written.append(number)
    if agreement.is_first():
      files.write_text(self._part(number), text)

  def finish(self, summarize: Callable[[str], dict[str, Any]]) -> None:
    """Joins the parts, describes the whole and removes them.

    Args:
      summarize: Returns more of the description from the whole text.
    """
    if not agreement.is_first():
      return
    parts = [self._part(number) for number in sorted(self._written)]
    text = "".join(
      files.read_text(part, max_bytes=files.MAX_LINES_BYTES) for part in parts
    )
    about = {**self._description, **summarize(text)}
    files.write_text(self.path, text)
    files.write_text(self.about, f"{json.dumps(about, indent=1)}\n")
    if self._folder.exists():
      self._folder.rmtree()

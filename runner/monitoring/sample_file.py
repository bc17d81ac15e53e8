r"""`samples.jsonl`: the texts that a model generates while it trains, by step.

  {"step": 100, "text": "def f(x):\n  return x"}

The number of steps is bounded: of more, every second one is dropped, so that
the others cover the whole training.
"""

import dataclasses
from typing import Any, Final

from etils import epath

from paxon.runner import files

MAX_STEPS: Final = 50


@dataclasses.dataclass(frozen=True)
class StepText:
  """Text that is generated at one step.

  Attributes:
    step: The training step.
    text: The continuations of all prompts, with the prompts.
  """

  step: int
  text: str


class SampleFile:
  """Writes `samples.jsonl` and keeps its existing lines up to a step."""

  def __init__(self, path: epath.PathLike, *, resume_step: int) -> None:
    """Reads the existing file; drops the texts of steps after `resume_step`."""
    self._path = epath.Path(path)
    self._texts: list[StepText] = []
    if self._path.exists():
      self._texts = [t for t in read(self._path) if t.step <= resume_step]

  def add(self, step: int, text: str) -> None:
    """Writes the text of a step, which replaces an earlier one."""
    self._texts = [each for each in self._texts if each.step != step]
    self._texts.append(StepText(step, text))
    if len(self._texts) > MAX_STEPS:
      # Without the first step there would be nothing to compare with.
      first, *others = self._texts
      self._texts = [first, *others[::-2][::-1]]
    text = files.to_json_lines(map(dataclasses.asdict, self._texts))
    files.write_text(self._path, text)


def read(path: epath.PathLike) -> list[StepText]:
  """Returns the texts of a run by step; raises files.DamagedFileError."""

  def make(fields: dict[str, Any]) -> StepText:
    return files.to_record(StepText, fields)

  return files.read_json_lines(path, make, kind="sample")

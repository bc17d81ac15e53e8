"""`decode/<step>.jsonl`: samples of a checkpoint, one JSON object a line.

  {"step": 1000, "prompt": "def ", "continuation": "f(x):", "ids": [102, ...],
   "seed": 0, "sampler": "Greedy()", "max_new_tokens": 256}

A sample that is drawn again, of the same prompt and with the same settings,
replaces its line; others stay.
"""

from collections.abc import Sequence
import json
import os
from typing import Any

from etils import epath

from paxon.runner import files, run_dir, user_error
from paxon.runner import job as job_lib
from paxon.runner.training import samples

_KEY = ("prompt", "seed", "sampler", "max_new_tokens")


def write(
  folder: epath.Path,
  drawn: Sequence[samples.Sample],
  *,
  step: int,
  job: job_lib.Job,
) -> epath.Path:
  """Writes samples beside those that are there; returns the file's path.

  Args:
    folder: Of the run.
    drawn: The samples.
    step: Of the checkpoint they were drawn with.
    job: Its seed and its generation settings say how they were drawn.

  Raises:
    UserError: The file holds something else.
  """
  path = folder / run_dir.DECODE / f"{step}.jsonl"
  settings = job.generation
  how = {
    "seed": job.seed,
    "sampler": _name(settings.sampler) if settings else None,
    "max_new_tokens": settings.max_new_tokens if settings else None,
  }
  lines = {_key(line): line for line in _read(path)}
  for sample in drawn:
    line = {
      "step": step,
      "prompt": sample.prompt,
      "continuation": sample.continuation,
      "ids": list(sample.ids),
      **how,
    }
    lines[_key(line)] = line
  text = "".join(
    f"{json.dumps(line, ensure_ascii=False)}\n" for line in lines.values()
  )
  files.write_text(path, text)
  return path


def _read(path: epath.Path) -> list[dict[str, Any]]:
  if not path.exists():
    return []
  try:
    lines = [json.loads(t) for t in path.read_text().split("\n") if t]
    for line in lines:
      _key(line)
  except (ValueError, KeyError, TypeError) as error:
    raise user_error.UserError(
      f"{os.fspath(path)} does not hold samples ({error!r}); move it away."
    ) from error
  return lines


def _key(line: dict[str, Any]) -> tuple[Any, ...]:
  return tuple(line[name] for name in _KEY)


def _name(sampler: Any) -> str:
  """Returns a dataclass with its fields, or the name of a function."""
  return getattr(sampler, "__qualname__", None) or repr(sampler)

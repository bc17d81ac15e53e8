"""`tools/check_upgrade`: a run of an earlier version resumes in this one.

Trains a small model with the code of an earlier commit, resumes the run with
the code of this checkout, and compares it with a run that this checkout trained
alone. Changed defaults that a run must name (`--allow_changes`) are printed,
and accepted. The exit status is 0 if the run resumes, its losses before the
resumption are equal to 1e-5, and those after it to 1e-3.
"""

import argparse
from collections.abc import Mapping, Sequence
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from typing import Final

from etils import epath
import numpy as np

from paxon.runner import run_dir
from paxon.runner.checkpoints import stored_checkpoint
from paxon.tools.dependencies import workspace
from paxon.tools.releasing import archives

# Knobs that the first versions had.
_FLAGS: Final = (
  "--exp=tasks.lm.params.quickstart.PythonStdlibLm",
  "--fdl.num_layers=2",
  "--fdl.embed_dim=32",
  "--fdl.mlp_dim=64",
  "--fdl.head_dim=8",
  "--fdl.length=64",
  "--fdl.summary_every_steps=1",
  "--fdl.eval_every_steps=None",
  "--fdl.prompts=None",
  "--fdl.max_new_tokens=None",
)
_FIRST, _LAST = 4, 8
_BEFORE_TOLERANCE, _AFTER_TOLERANCE = 1e-5, 1e-3
_ALLOW = re.compile(r"--allow_changes=(\S+)$", re.MULTILINE)


class UpgradeError(Exception):
  """A run of the earlier version does not resume; one line."""


def train(
  checkout: pathlib.Path,
  folder: pathlib.Path,
  num_steps: int,
  changes: str | None = None,
) -> subprocess.CompletedProcess[str]:
  """Trains with the code of a checkout, in a process.

  Args:
    checkout: The checkout.
    folder: The run directory; the run resumes if it exists.
    num_steps: Training steps.
    changes: Value of `--allow_changes`, or None.
  """
  environ = dict(os.environ, JAX_PLATFORMS="cpu", JAX_NUM_CPU_DEVICES="1")
  environ.pop("PYTHONPATH", None)
  return subprocess.run(
    [
      *(str(checkout / "tools" / "python"), "-m", "paxon.runner.main"),
      *(*_FLAGS, f"--fdl.num_train_steps={num_steps}"),
      f"--fdl.checkpoint_every_steps={_FIRST}",
      f"--job_log_dir={folder}",
      *([] if changes is None else [f"--allow_changes={changes}"]),
    ],
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
    check=False,
    env=environ,
    cwd=folder.parent,
  )


def resume(checkout: pathlib.Path, folder: pathlib.Path) -> str | None:
  """Resumes a run; returns the changes that had to be allowed, or None.

  Args:
    checkout: The checkout whose code resumes.
    folder: The run directory.

  Raises:
    UpgradeError: The run does not resume.
  """
  changes = None
  done = train(checkout, folder, _LAST)
  if done.returncode and (found := _ALLOW.search(done.stdout)):
    changes = found[1]
    done = train(checkout, folder, _LAST, changes)
  if done.returncode:
    raise UpgradeError(f"The run does not resume:\n{done.stdout}")
  if f"resuming from the checkpoint of step {_FIRST}" not in done.stdout:
    raise UpgradeError(f"The run began again:\n{done.stdout}")
  return changes


def read_losses(folder: pathlib.Path) -> Mapping[int, float]:
  """Returns the training loss by step."""
  lines = (folder / run_dir.METRICS).read_text().splitlines()
  records = [json.loads(line) for line in lines]
  return {
    record["step"]: record["loss"]
    for record in records
    if record["split"] == "train" and "loss" in record
  }


def compare_losses(
  resumed: Mapping[int, float], alone: Mapping[int, float]
) -> tuple[float, float]:
  """Returns the largest relative differences until and after the resumption.

  Raises:
    UpgradeError: The steps of the two differ.
  """
  if resumed.keys() != alone.keys() or max(resumed, default=0) != _LAST:
    raise UpgradeError(
      f"The resumed run has steps {sorted(resumed)}, the other"
      f" {sorted(alone)}: each must have the same, until {_LAST}."
    )
  before, after = (
    max(
      abs(resumed[step] - alone[step]) / abs(alone[step])
      for step in alone
      if (step <= _FIRST) == is_before
    )
    for is_before in (True, False)
  )
  return before, after


def _count_different(a: pathlib.Path, b: pathlib.Path) -> tuple[int, int]:
  """Returns how many arrays of the last checkpoints differ, and all."""
  arrays = []
  for folder in (a, b):
    stored = stored_checkpoint.find_checkpoint(
      epath.Path(folder) / run_dir.CHECKPOINTS
    )
    arrays.append(stored_checkpoint.read_numpy(stored, stored.arrays))
  if arrays[0].keys() != arrays[1].keys():
    names = sorted(arrays[0].keys() ^ arrays[1].keys())
    raise UpgradeError(f"Only one of the runs has {', '.join(names)}.")
  different = sum(
    not np.array_equal(array, arrays[1][name])
    for name, array in arrays[0].items()
  )
  return different, len(arrays[0])


def check(root: pathlib.Path, commit: str, scratch: pathlib.Path) -> bool:
  """Trains, resumes and compares; returns whether the losses agree.

  Args:
    root: The checkout.
    commit: The earlier commit.
    scratch: A folder for the earlier code and the runs.

  Raises:
    UpgradeError: The run does not resume.
  """
  earlier = scratch / "earlier" / "paxon"
  archives.export(root, commit, earlier)
  upgraded, alone = scratch / "upgraded", scratch / "alone"
  done = train(earlier, upgraded, _FIRST)
  if done.returncode:
    raise UpgradeError(f"{commit} does not train:\n{done.stdout}")
  changes = resume(root, upgraded)
  done = train(root, alone, _FIRST)
  if done.returncode:
    raise UpgradeError(f"This checkout does not train:\n{done.stdout}")
  resume(root, alone)
  before, after = compare_losses(read_losses(upgraded), read_losses(alone))
  different, total = _count_different(upgraded, alone)
  print(
    f"upgrade: a run of {commit} resumes"
    + (f" with --allow_changes={changes}" if changes else "")
    + f"; losses differ by {before:.1e} until step {_FIRST} and {after:.1e}"
    f" until step {_LAST}; {different} of {total} arrays differ"
  )
  return before <= _BEFORE_TOLERANCE and after <= _AFTER_TOLERANCE


def main(argv: Sequence[str]) -> int:
  """Checks an upgrade; returns the exit status."""
  parser = argparse.ArgumentParser(
    prog="tools/check_upgrade",
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  parser.add_argument("commit", metavar="COMMIT", help="or a tag")
  commit = parser.parse_args(argv).commit
  root = workspace.find_root(pathlib.Path(__file__))
  try:
    with tempfile.TemporaryDirectory() as scratch:
      return 0 if check(root, commit, pathlib.Path(scratch)) else 1
  except subprocess.CalledProcessError as error:
    text = (error.stderr or b"").decode().strip()
    print(f"check_upgrade: no commit {commit!r}: {text}", file=sys.stderr)
    return 2
  except UpgradeError as error:
    print(f"check_upgrade: {error}", file=sys.stderr)
    return 1


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))

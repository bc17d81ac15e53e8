"""Inspects, compares and verifies checkpoints.

  tools/ckpt list RUN                  list the checkpoints of a run
  tools/ckpt explain RUN[@STEP]        list the arrays of a checkpoint
  tools/ckpt diff A[@STEP] B[@STEP]    compare two; status 1 if they differ
  tools/ckpt verify RUN[@STEP]         read every array; status 1 if damaged
  tools/ckpt preview RUN[@STEP] --exp=a.b.C
                                       show what a warm start would load

RUN is a run directory, its checkpoints folder, or a checkpoint, local or in a
store (`gs://...`). Without @STEP, the newest checkpoint is used; `verify` reads
all of them. Usage errors print one line to stderr and exit with status 2.
"""

from collections.abc import Sequence
import os
from typing import TYPE_CHECKING, Final

from paxon.runner import user_error
from paxon.sharding import suggestions
from paxon.tools import command_line

if TYPE_CHECKING:
  from paxon.runner.checkpoints import stored_checkpoint

_SAME, _DIFFERENT = 0, 1


def main(argv: Sequence[str]) -> int:
  """Runs one command and returns its exit status.

  Args:
    argv: The command and its arguments.
  """
  return command_line.dispatch(argv, COMMANDS, help_text=lambda: __doc__ or "")


def _list(argv: list[str]) -> int:
  parser = command_line.Parser("list", "Lists the checkpoints of a run.")
  parser.add_argument("run", metavar="RUN", help="run directory")
  path, step = command_line.parse_place(parser.parse_args(argv).run)
  if step is not None:
    raise user_error.UserError(
      f"list shows all checkpoints of {os.fspath(path)}; remove @{step}, or use"
      " `explain`."
    )
  from paxon.tools import ckpt_list

  print("\n".join(ckpt_list.lines(path)))
  return _SAME


def _explain(argv: list[str]) -> int:
  parser = command_line.Parser(
    "explain", "Lists the arrays of a checkpoint with their sizes."
  )
  parser.add_argument("run", metavar="RUN[@STEP]", help="a checkpoint")
  parser.add_argument(
    "prefix", nargs="?", default="", help="only names below this prefix"
  )
  arguments = parser.parse_args(argv)
  checkpoint = command_line.find_checkpoint(arguments.run)
  from paxon.runner.checkpoints import inspection

  _check_prefix(arguments.prefix, checkpoint)
  print("\n".join(inspection.explain(checkpoint, prefix=arguments.prefix)))
  return _SAME


def _diff(argv: list[str]) -> int:
  parser = command_line.Parser("diff", "Compares two checkpoints.")
  parser.add_argument("a", metavar="A[@STEP]", help="a checkpoint")
  parser.add_argument("b", metavar="B[@STEP]", help="another checkpoint")
  parser.add_argument(
    "prefix", nargs="?", default="", help="only names below this prefix"
  )
  arguments = parser.parse_args(argv)
  a, b = (
    command_line.find_checkpoint(arguments.a),
    command_line.find_checkpoint(arguments.b),
  )
  from paxon.runner.checkpoints import checkpointer, inspection

  _check_prefix(arguments.prefix, a, b)
  try:
    found = inspection.compare(a, b, prefix=arguments.prefix)
  except checkpointer.DamagedCheckpointError as error:
    raise user_error.UserError(str(error)) from error
  print("\n".join(inspection.format_comparison(found)))
  return _SAME if found.is_same else _DIFFERENT


def _verify(argv: list[str]) -> int:
  parser = command_line.Parser(
    "verify", "Reads all arrays and reports damaged checkpoints."
  )
  parser.add_argument(
    "run", metavar="RUN[@STEP]", help="one checkpoint, or all of a run"
  )
  path, step = command_line.parse_place(parser.parse_args(argv).run)
  from paxon.tools import ckpt_verify

  is_sound = True
  for report in ckpt_verify.verify(path, step=step):
    print(report.line, flush=True)
    is_sound &= report.is_sound
  return _SAME if is_sound else _DIFFERENT


def _check_prefix(
  prefix: str, *checkpoints: "stored_checkpoint.StoredCheckpoint"
) -> None:
  from paxon.runner.checkpoints import inspection

  if any(inspection.select(c.arrays, prefix) for c in checkpoints):
    return
  folders = {
    "/".join(parts[:end])
    for checkpoint in checkpoints
    for parts in (name.split("/") for name in checkpoint.arrays)
    for end in range(1, len(parts) + 1)
  }
  raise user_error.UserError(
    f"No name begins with {prefix!r} in"
    f" {os.fspath(checkpoints[0].path)}{suggestions.suggest(prefix, folders)}"
  )


def _preview(argv: list[str]) -> int:
  # Building an experiment needs the largest imports.
  from paxon.tools import ckpt_preview

  return ckpt_preview.main(argv)


COMMANDS: Final[command_line.Commands] = {
  "list": _list,
  "explain": _explain,
  "diff": _diff,
  "verify": _verify,
  "preview": _preview,
}


if __name__ == "__main__":
  # Set before jax is imported: accelerators may be in use by a training run.
  os.environ["JAX_PLATFORMS"] = "cpu"
  command_line.run(main)

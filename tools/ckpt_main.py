"""The command line for checkpoints.

  tools/ckpt list RUN              the checkpoints of a run
  tools/ckpt explain RUN[@STEP]    what one holds
  tools/ckpt diff A[@STEP] B[@STEP]
                                   how two differ; status 1 if they do
  tools/ckpt verify RUN[@STEP]     reads them whole; status 1 if one is damaged
  tools/ckpt preview RUN[@STEP] --exp=a.b.C
                                   what a warm start from one would read

RUN is the folder of a run, of its checkpoints, or of one checkpoint, on a disk
or in a store (`gs://...`). Without @STEP the newest is meant, or all of them
where several are shown. Wrong use is one line on stderr and status 2.
"""

from collections.abc import Sequence
import os
from typing import TYPE_CHECKING, Final

from paxon.runner import user_error
from paxon.sharding import suggestions
from paxon.tools import ckpt_arguments, command_line

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
  parser = ckpt_arguments.Parser("list", "Prints the checkpoints of a run.")
  parser.add_argument("run", metavar="RUN", help="a folder")
  path, step = ckpt_arguments.parse_place(parser.parse_args(argv).run)
  if step is not None:
    raise user_error.UserError(
      f"list prints all checkpoints of {os.fspath(path)}; leave @{step} out, or"
      " explain that one."
    )
  from paxon.tools import ckpt_list

  print("\n".join(ckpt_list.lines(path)))
  return _SAME


def _explain(argv: list[str]) -> int:
  parser = ckpt_arguments.Parser(
    "explain", "Prints the names in a checkpoint, with sizes."
  )
  parser.add_argument("run", metavar="RUN[@STEP]", help="a checkpoint")
  parser.add_argument(
    "prefix", nargs="?", default="", help="only this folder of names, or name"
  )
  arguments = parser.parse_args(argv)
  checkpoint = ckpt_arguments.find(arguments.run)
  from paxon.runner.checkpoints import explanation

  _check_prefix(arguments.prefix, checkpoint)
  print("\n".join(explanation.explain(checkpoint, prefix=arguments.prefix)))
  return _SAME


def _diff(argv: list[str]) -> int:
  parser = ckpt_arguments.Parser("diff", "Prints how two checkpoints differ.")
  parser.add_argument("a", metavar="A[@STEP]", help="a checkpoint")
  parser.add_argument("b", metavar="B[@STEP]", help="another one")
  parser.add_argument(
    "prefix", nargs="?", default="", help="only this folder of names, or name"
  )
  arguments = parser.parse_args(argv)
  a, b = ckpt_arguments.find(arguments.a), ckpt_arguments.find(arguments.b)
  from paxon.runner.checkpoints import checkpointer, comparison

  _check_prefix(arguments.prefix, a, b)
  try:
    found = comparison.compare(a, b, prefix=arguments.prefix)
  except checkpointer.DamagedCheckpointError as error:
    raise user_error.UserError(str(error)) from error
  print("\n".join(comparison.lines(found)))
  return _SAME if found.is_same else _DIFFERENT


def _verify(argv: list[str]) -> int:
  parser = ckpt_arguments.Parser(
    "verify", "Reads checkpoints whole and says what is damaged."
  )
  parser.add_argument("run", metavar="RUN[@STEP]", help="one or all of a run")
  path, step = ckpt_arguments.parse_place(parser.parse_args(argv).run)
  from paxon.tools import ckpt_verify

  is_sound = True
  for report in ckpt_verify.verify(path, step=step):
    print(report.line, flush=True)
    is_sound &= report.is_sound
  return _SAME if is_sound else _DIFFERENT


def _check_prefix(
  prefix: str, *checkpoints: "stored_checkpoint.StoredCheckpoint"
) -> None:
  from paxon.runner.checkpoints import explanation

  if any(explanation.within(c.arrays, prefix) for c in checkpoints):
    return
  folders = {
    "/".join(parts[:end])
    for checkpoint in checkpoints
    for parts in (name.split("/") for name in checkpoint.arrays)
    for end in range(1, len(parts) + 1)
  }
  raise user_error.UserError(
    f"There is no name and no folder of names {prefix!r} in"
    f" {os.fspath(checkpoints[0].path)}{suggestions.suggest(prefix, folders)}"
  )


def _preview(argv: list[str]) -> int:
  # What builds an experiment is the largest import.
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
  # A training on this machine keeps its accelerators. jax comes later.
  os.environ["JAX_PLATFORMS"] = "cpu"
  command_line.run(main)

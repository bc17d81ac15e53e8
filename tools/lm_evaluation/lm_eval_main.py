"""Evaluates a run with EleutherAI's evaluation harness (lm-eval).

  tools/lm_eval RUN[@STEP] --tasks=TASK[,TASK ...] [--include_path=FOLDER]
    [--max_length=N] [--fdl.KNOB=VALUE ...] [OPTIONS OF lm-eval run]

RUN is the directory of a trained run, or of a model that `tools/hf import` has
imported. Tasks are those of lm-eval, most of which download their data, and
YAML files in FOLDER, whose data may be local: JSON lines, Parquet or Arrow.

  --max_length   Tokens that the model reads; longer contexts lose their first
                 ones. Default: the positions of an imported model, or the
                 length of the training sequences.
  --fdl.         Knobs of the run, such as --fdl.mesh=fsdp=8.
  --num_fewshot, --batch_size (16), --limit, --output_path, --log_samples,
  --use_cache, --gen_kwargs, --apply_chat_template, --seed: as of lm-eval.

The model runs in this process, or in several: --coordinator_address,
--num_processes and --process_id are those of the runner. --use_cache=PATH keeps
the answers, so that the same command resumes an interrupted evaluation.
"""

import argparse
from collections.abc import Sequence
import os
import sys
from typing import Any

from paxon.inputs import optional_library
from paxon.runner import run_dir as run_dirs
from paxon.runner import user_error
from paxon.runner.configuration import overrides as overrides_lib
from paxon.runner.hosts import compilation_cache, joining, process_settings
from paxon.tools import command_line, console_scripts


def main(argv: Sequence[str]) -> int:
  """Runs the harness; returns the exit status."""
  try:
    _run(list(argv))
  except user_error.UserError as error:
    print(user_error.one_line(error), file=sys.stderr)
    return command_line.WRONG_USE
  return 0


def _run(argv: list[str]) -> None:
  description = console_scripts.name_programs(__doc__ or "")
  parser = command_line.Parser("lm_eval", description)
  parser.prog = console_scripts.name_programs("tools/lm_eval")
  parser.formatter_class = argparse.RawDescriptionHelpFormatter
  parser.usage = "%(prog)s RUN[@STEP] --tasks=TASK [OPTIONS]"
  parser.add_argument("run", metavar="RUN[@STEP]")
  parser.add_argument("--max_length", type=int)
  parser.add_argument("--coordinator_address")
  parser.add_argument("--num_processes", type=int)
  parser.add_argument("--process_id", type=int)
  values, rest = parser.parse_known_args(argv)
  given = [each for each in rest if overrides_lib.parse_argument(each)]
  options = [each for each in rest if each not in given]
  # Before the wheels are imported, which takes seconds.
  path, _ = command_line.parse_place(values.run)
  run_dirs.check_existing(path)
  harness = _import_harness()
  settings = process_settings.ProcessSettings(
    coordinator_address=values.coordinator_address,
    num_processes=values.num_processes,
    process_id=values.process_id,
  )
  joining.join(settings, os.environ)
  compilation_cache.enable(os.environ)
  with joining.exit_together():
    harness.run(
      {
        "run": values.run,
        "overrides": given,
        "max_length": values.max_length,
      },
      options,
    )


def _import_harness() -> Any:
  """Returns the module `lm_eval_harness`, which needs optional libraries."""
  try:
    with optional_library.explain("lm_eval", name="lm-eval", extra="lm_eval"):
      from paxon.tools.lm_evaluation import lm_eval_harness
  except optional_library.MissingLibraryError as error:
    raise user_error.UserError(f"tools/lm_eval: {error}") from error
  return lm_eval_harness


if __name__ == "__main__":
  command_line.run(main)

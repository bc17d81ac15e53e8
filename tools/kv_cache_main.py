"""Compares generation with a quantized cache to generation with a plain one.

tools/kv_cache --job_log_dir=RUN                 int8, 256 tokens
tools/kv_cache --job_log_dir=RUN --write         and writes the documentation
"""

import argparse
from collections.abc import Sequence
import datetime
import json
import os
import pathlib
import sys
from typing import Final

import jax

from paxon.layers.attention import quantized_rows
from paxon.runner import run_dir as run_dirs
from paxon.runner import user_error
from paxon.runner.checkpoints import checkpointer
from paxon.runner.configuration import overrides, resolving
from paxon.runner.training import restoring, stored_settings
from paxon.runner.training import session as session_lib
from paxon.tools import kv_cache_agreement, page_sections

_ROOT: Final = pathlib.Path(__file__).parent.parent
_PAGE: Final = "docs/quantization.md"
_SECTION: Final = "tools/kv_cache --write"
_HEADINGS: Final = (
  "Cache",
  "Bytes",
  "Prompt",
  "Equal tokens",
  "Margin at the first difference",
  "Least margin before",
)


def main(arguments: Sequence[str]) -> int:
  """Runs the command; returns the status of the process."""
  parser = argparse.ArgumentParser(
    prog="tools/kv_cache",
    description="Compares greedy generation with quantized caches to that with"
    " a plain one, on the newest checkpoint of a run.",
  )
  parser.add_argument("--job_log_dir", required=True, help="of a trained run")
  parser.add_argument(
    "--kv_cache",
    action="append",
    choices=quantized_rows.NAMES,
    help="the format; may be given several times (default int8)",
  )
  parser.add_argument(
    "--tokens", type=int, default=256, help="that are generated"
  )
  parser.add_argument(
    "--prompt", action="append", help="instead of those of the run"
  )
  parser.add_argument(
    "--write", action="store_true", help=f"write the table into {_PAGE}"
  )
  options = parser.parse_args(arguments)
  if options.tokens < 1:
    parser.error(f"--tokens must be positive, got {options.tokens}.")
  try:
    name, found = _compared(options)
  except user_error.UserError as error:
    print(user_error.one_line(error), file=sys.stderr)
    return 2
  table = to_table(found)
  text = (
    f"{name}, greedy, {options.tokens} tokens a prompt;"
    f" {datetime.date.today()}, jax {jax.__version__} on"
    f" {jax.devices()[0].device_kind}.\n\n{table}"
  )
  print(text)
  if options.write:
    page_sections.write(_ROOT / _PAGE, _SECTION, text)
    print(f"wrote {_PAGE}")
  return 0


def to_table(found: dict[str, kv_cache_agreement.Comparison]) -> str:
  """Returns comparisons, by the format of the cache, as a Markdown table."""
  rows = []
  for kind, comparison in found.items():
    share = comparison.quantized_bytes / comparison.plain_bytes
    size = f"{comparison.quantized_bytes:,} ({share:.1%} of the plain one)"
    for each in comparison.agreements:
      rows.append(
        (
          kind,
          size,
          f"`{json.dumps(each.prompt)}`",
          f"all {each.tokens}"
          if each.margin is None
          else f"{each.equal} of {each.tokens}",
          "-" if each.margin is None else f"{each.margin:.4f}",
          "-" if each.least is None else f"{each.least:.4f}",
        )
      )
  lines = [_HEADINGS, ("---",) * len(_HEADINGS), *rows]
  return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _compared(
  options: argparse.Namespace,
) -> tuple[str, dict[str, kv_cache_agreement.Comparison]]:
  """Returns the run in words, and what each format changes."""
  run_dir = run_dirs.existing(run_dirs.resolve(options.job_log_dir, os.environ))
  settings = stored_settings.complete(None, (), run_dir)
  given = [each for each in settings.overrides if each.path != "kv_cache"]

  def job(kind: str | None) -> resolving.Resolved:
    more = [] if kind is None else [f"--{overrides.PREFIX}kv_cache={kind}"]
    parsed = [overrides.parse_argument(each) for each in more]
    return resolving.resolve(
      settings.experiment, [*given, *(each for each in parsed if each)]
    )

  session = session_lib.open_session(resolving.build(job(None).config))
  prompts = options.prompt
  if prompts is None:
    generation = session.job.generation
    prompts = list(generation.prompts) if generation else [""]
  folder = run_dir / run_dirs.CHECKPOINTS
  with checkpointer.Checkpointer(folder, read_only=True) as checkpoints:
    state = restoring.restore_for_evaluation(session, checkpoints, folder)
  found = {
    kind: kv_cache_agreement.compare(
      session,
      resolving.build(job(kind).config).task.model,
      state,
      prompts=prompts,
      tokens=options.tokens,
    )
    for kind in options.kv_cache or ["int8"]
  }
  name = settings.experiment.rpartition(".")[2]
  return f"{name} after {int(state.step)} steps", found


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))

"""Rewrites experiment modules of Pax as experiments of Paxon.

  tools/migrate_pax FILE... [--output=PATH] [--package=NAME] [--force]
    [--quiet]
  tools/migrate_pax FILE... --in_place [--quiet]

The output goes to the terminal, or to --output. Pass modules that derive from
each other together. A report follows on stderr: what Paxon does not need, and
what is left to do, each with its line. The output marks what is left by
comments that begin with MIGRATE.

  --output    file of the output; a folder if there are several modules
  --package   import path of that folder; by default the modules import each
              other by their names alone
  --force     overwrite existing files in --output
  --in_place  replace the modules; the originals are kept as FILE.pax
  --quiet     report only what is left to do

The status is 2 for a usage error or a module that is not Pax's, otherwise 0.
"""

from collections.abc import Mapping, Sequence
import pathlib
import sys
from typing import Final

from paxon.runner import files as files_lib
from paxon.runner import user_error
from paxon.tools import command_line, console_scripts
from paxon.tools.pax_migration import module_rewriting, project

_BACKUP: Final = ".pax"


def main(argv: Sequence[str]) -> int:
  """Runs the command; returns its exit status."""
  if not argv or argv[0] in ("-h", "--help", "help"):
    print(console_scripts.name_programs(__doc__ or ""))
    return 0 if argv else command_line.WRONG_USE
  return command_line.catch_user_errors(lambda: _run(argv))


def migrate(
  paths: Sequence[pathlib.Path], package: str = ""
) -> tuple[dict[pathlib.Path, str], list[project.Entry]]:
  """Returns the sources of modules for Paxon, and the report.

  Args:
    paths: The modules.
    package: Import path of the output's folder, or empty.

  Raises:
    user_error.UserError: A module is not one of Pax.
  """
  made = project.Project([project.read(path) for path in paths])
  texts = {
    file.path: module_rewriting.rewrite(made, file, package)
    for file in made.files
  }
  return texts, made.entries


def report(entries: Sequence[project.Entry], *, is_quiet: bool = False) -> str:
  """Returns the text of a report, by file and line."""
  ordered = sorted(entries, key=lambda each: (str(each.path), each.line))
  left = [each for each in ordered if each.is_open]
  other = [each for each in ordered if not each.is_open]
  lines = []
  if other and not is_quiet:
    lines.append("Not needed:")
    lines += [f"  {each.path}:{each.line}: {each.text}" for each in other]
  lines.append(f"Left to do: {len(left) or 'nothing'}")
  lines += [f"  {each.path}:{each.line}: {each.text}" for each in left]
  return "\n".join(lines)


def _run(argv: Sequence[str]) -> int:
  parser = command_line.Parser(
    "migrate_pax", __doc__ or "", program="tools/migrate_pax"
  )
  parser.add_argument("files", nargs="+", type=pathlib.Path)
  parser.add_argument("--output", type=pathlib.Path)
  parser.add_argument("--package", default="")
  for switch in ("force", "in_place", "quiet"):
    parser.add_argument(f"--{switch}", action="store_true")
  given = parser.parse_args(list(argv))
  targets = _find_targets(
    given.files, given.output, in_place=given.in_place, force=given.force
  )
  texts, entries = migrate(given.files, given.package)
  if given.output is not None and len(texts) > 1:
    given.output.mkdir(parents=True, exist_ok=True)
  for path, text in texts.items():
    if given.in_place:
      path.rename(path.with_name(path.name + _BACKUP))
    if path in targets:
      files_lib.write_text(targets[path], text)
    else:
      print(text, end="")
  print(report(entries, is_quiet=given.quiet), file=sys.stderr)
  return 0


def _find_targets(
  paths: Sequence[pathlib.Path],
  output: pathlib.Path | None,
  *,
  in_place: bool,
  force: bool,
) -> Mapping[pathlib.Path, pathlib.Path]:
  """Returns the output of each module; none for the terminal.

  Raises:
    user_error.UserError: An output exists, or the flags contradict each other.
  """
  if in_place:
    if output is not None or force:
      raise user_error.UserError(
        "--in_place takes neither --output nor --force."
      )
    for path in paths:
      backup = path.with_name(path.name + _BACKUP)
      if backup.exists():
        raise user_error.UserError(
          f"{backup} exists; --in_place keeps the original there."
        )
    return {path: path for path in paths}
  if output is None:
    if len(paths) > 1:
      raise user_error.UserError(
        "Several modules need a folder: pass --output=FOLDER."
      )
    return {}
  is_folder = output.is_dir() or len(paths) > 1
  targets = {
    path: output / path.name if is_folder else output for path in paths
  }
  for path, target in targets.items():
    if target.exists() and target.samefile(path):
      raise user_error.UserError(
        f"--output={target} is the module itself; pass --in_place."
      )
    if target.exists() and not force:
      raise user_error.UserError(
        f"{target} exists; pass --force to overwrite it."
      )
  if len(set(targets.values())) < len(targets):
    raise user_error.UserError(
      "Two modules have the same name; pass them apart."
    )
  return targets


if __name__ == "__main__":
  command_line.run(main)

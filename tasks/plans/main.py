"""`tools/plans`: compares golden plans with today's, or makes them again.

tools/plans                                 what differs from the files
tools/plans --list                          the names of all pairs
tools/plans --update                        writes what differs
tools/plans --update 'LmCloudSpmd2B.h200*'  writes these anyhow
tools/plans --table                         writes docs/plans.md
tools/plans --accuracy                      published times and the estimates
tools/plans --accuracy --update [ROW ...]   plans rows again
tools/plans --accuracy --table              writes docs/plan_accuracy.md
"""

import argparse
import pathlib
import sys

from paxon.runner import user_error
from paxon.runner.plan import golden
from paxon.tasks.plans import measuring, pairs, published, table

_PAGE = pathlib.Path("docs", "plans.md")
_ACCURACY = pathlib.Path("docs", "plan_accuracy.md")
_WRONG_USE = 2


def main(argv: list[str]) -> int:
  """Returns 0, 1 if plans differ, or 2 for wrong usage."""
  parser = argparse.ArgumentParser(
    prog="tools/plans", description="Golden plans of experiments."
  )
  parser.add_argument("--list", action="store_true", help="print the pairs")
  parser.add_argument("--update", action="store_true", help="write the files")
  parser.add_argument("--table", action="store_true", help="write the page")
  parser.add_argument(
    "--accuracy",
    action="store_true",
    help="published step times instead of golden plans",
  )
  parser.add_argument(
    "pairs",
    nargs="*",
    metavar="PAIR",
    help="a name, with * and ?, or a run's name; default all",
  )
  given = parser.parse_args(argv)
  try:
    if given.accuracy:
      _compare_published(given.pairs, given)
      return 0
    wanted = pairs.find(given.pairs)
    if given.list:
      print("\n".join(pair.name for pair in wanted))
      return 0
    status = 0
    if given.update or not given.table:
      is_named = bool(given.pairs)
      status = _compare(wanted, write=given.update, is_named=is_named)
    if given.table:
      _write_page()
  except user_error.UserError as error:
    print(user_error.one_line(error), file=sys.stderr)
    return _WRONG_USE
  return status


def _compare(wanted: list[pairs.Pair], *, write: bool, is_named: bool) -> int:
  differing = 0
  for pair in wanted:
    if pair.missing and not is_named:
      names = " and ".join(pair.missing)
      print(f"{pair.name}: left out, for want of {names}")
      continue
    found = measuring.measure(pair)
    lines = ["new"]
    if pair.path.exists():
      lines = golden.differences(pair.read().figures, found.figures)
    print(f"{pair.name}: {found.seconds:.0f} s", *lines, sep="\n  ", flush=True)
    differing += bool(lines)
    if write and (lines or is_named):
      pairs.FOLDER.mkdir(exist_ok=True)
      pair.path.write_text(golden.to_json(found))
  return 1 if differing and not write else 0


def _compare_published(names: list[str], given: argparse.Namespace) -> None:
  rows = published.find(names)
  if given.list:
    print("\n".join(row.name for row in rows))
    return
  if given.update:
    published.update(rows)
  if given.table:
    _check_folder()
    page = published.replace_section(_ACCURACY.read_text())
    _ACCURACY.write_text(page)
    print(f"written: {_ACCURACY}")
  if not given.update and not given.table:
    print(published.text(), end="")


def _write_page() -> None:
  _check_folder()
  _PAGE.write_text(table.text())
  print(f"written: {_PAGE}")


def _check_folder() -> None:
  if not _PAGE.parent.is_dir():
    raise user_error.UserError(
      f"There is no folder {_PAGE.parent} here; run this in the checkout."
    )


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))

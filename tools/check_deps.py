"""Checks BUILD files, imports and READMEs against the rules of the build.

    python -m paxon.tools.check_deps [WORKSPACE]
    python -m paxon.tools.check_deps --update

prints one line for each violation, and exits with status 1 if there is one.
`--update` rewrites the list of exceptions, tools/exceptions.txt, to what the
tree needs today.
"""

import pathlib
import sys

from paxon.tools.dependencies import (
  cycle_rules,
  edge_rules,
  exceptions,
  file_rules,
  folder_rules,
  module_rules,
  readme_rules,
  source_tree,
  target_rules,
  violation,
  vocabulary_rules,
  workspace,
)

_RULES = (
  edge_rules.check,
  folder_rules.check,
  cycle_rules.check,
  target_rules.check,
  file_rules.check,
  readme_rules.check,
  module_rules.check,
  vocabulary_rules.check,
)


def violations(root: pathlib.Path) -> list[violation.Violation]:
  """Returns all violations in the workspace at `root`, in file order."""
  found = _find(root)
  return sorted(exceptions.apply(found, exceptions.load(root)))


def main(arguments: list[str]) -> int:
  """Prints the violations; returns the exit status."""
  if arguments == ["--update"]:
    root = source_tree.find_root(pathlib.Path(__file__))
    exceptions.update(root, _find(root))
    return 0
  start = arguments[0] if arguments else __file__
  found = violations(source_tree.find_root(pathlib.Path(start)))
  for item in found:
    print(item)
  if found:
    print(f"check_deps: {len(found)} violations", file=sys.stderr)
  return 1 if found else 0


def _find(root: pathlib.Path) -> set[violation.Violation]:
  tree = workspace.load(root)
  found = set(tree.unreadable)
  for check in _RULES:
    found.update(check(tree))
  return found


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))

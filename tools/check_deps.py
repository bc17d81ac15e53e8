"""Checks BUILD files, imports and READMEs against the rules of the build.

    python -m paxon.tools.check_deps [WORKSPACE]

prints one line for each broken rule, and exits with status 1 if there is one.
"""

import pathlib
import sys

from paxon.tools.dependencies import (
  cycle_rules,
  edge_rules,
  file_rules,
  folder_rules,
  readme_rules,
  source_tree,
  target_rules,
  violation,
  workspace,
)

_RULES = (
  edge_rules.check,
  folder_rules.check,
  cycle_rules.check,
  target_rules.check,
  file_rules.check,
  readme_rules.check,
)


def violations(root: pathlib.Path) -> list[violation.Violation]:
  """Returns all broken rules of the workspace at `root`, in file order."""
  tree = workspace.load(root)
  found = set(tree.unreadable)
  for check in _RULES:
    found.update(check(tree))
  return sorted(found)


def main(arguments: list[str]) -> int:
  """Prints the broken rules; returns the exit status."""
  start = arguments[0] if arguments else __file__
  found = violations(source_tree.find_root(pathlib.Path(start)))
  for item in found:
    print(item)
  if found:
    print(f"check_deps: {len(found)} broken rules", file=sys.stderr)
  return 1 if found else 0


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))

"""Checks BUILD files, imports and READMEs against the rules of the build.

    python -m paxon.tools.check_deps [WORKSPACE]
    python -m paxon.tools.check_deps --fix
    python -m paxon.tools.check_deps --update

prints one line for each violation, and exits with status 1 if there is one.
`--fix` writes what imports determine into BUILD files: targets of new files,
and deps; visibility, sizes and data are yours.
`--update` rewrites the list of exceptions, tools/exceptions.txt, to what the
tree needs today, and prints each entry that it adds.
"""

import pathlib
import sys

from paxon.tools.dependencies import (
  build_writer,
  edge_rules,
  file_rules,
  order_rules,
  prose_rules,
  readme_rules,
  size_rules,
  violation,
  vocabulary_rules,
  workspace,
)

_RULES = (
  edge_rules.check,
  order_rules.check,
  file_rules.check,
  size_rules.check,
  readme_rules.check,
  vocabulary_rules.check,
  prose_rules.check,
)


def violations(root: pathlib.Path) -> list[violation.Violation]:
  """Returns all violations in the workspace at `root`, in file order."""
  found = _find(root)
  return sorted(
    violation.apply_exceptions(found, violation.load_exceptions(root))
  )


def fix(root: pathlib.Path) -> list[str]:
  """Writes targets and deps into BUILD files; returns the changed paths."""
  changed: set[str] = set()
  for _ in range(2):  # New targets get their deps in the second turn.
    texts = build_writer.find_updates(workspace.load(root))
    if not texts:
      break
    for path, text in texts.items():
      (root / path).write_text(text)
    changed.update(texts)
  return sorted(changed)


def main(arguments: list[str]) -> int:
  """Prints the violations; returns the exit status."""
  root = workspace.find_root(pathlib.Path(__file__))
  if arguments == ["--fix"]:
    for path in fix(root):
      print(f"wrote {path}")
    return 0
  if arguments == ["--update"]:
    for entry in violation.update_exceptions(root, _find(root)):
      print(f"added to {violation.PATH}: {entry}")
    return 0
  if arguments:
    root = workspace.find_root(pathlib.Path(arguments[0]))
  found = violations(root)
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

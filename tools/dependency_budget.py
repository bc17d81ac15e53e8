"""What each public target drags in, held against what was agreed.

A target costs its user every wheel of its closure: those that the targets
below it import, and those that these wheels require, as the locks say. What
only a setting such as `--config=tf` adds does not count. The agreed sets stand
in dependency_budget.txt, one public target a line, so that a new one is seen in
review.

    python -m paxon.tools.dependency_budget            compares
    python -m paxon.tools.dependency_budget --update   agrees to what is there
"""

from collections.abc import Iterator, Mapping
import pathlib
import sys

from paxon.tools.dependencies import source_tree, workspace

PATH = "tools/dependency_budget.txt"

_HEAD = """\
# The wheels that each public target drags in.
# Made by: tools/python -m paxon.tools.dependency_budget --update
"""

MEND = (
  "If that is meant: tools/python -m paxon.tools.dependency_budget --update"
)

Budget = Mapping[str, frozenset[str]]


def measure(root: pathlib.Path) -> Budget:
  """Returns the wheels in the closure of every public target of ours."""
  tree = workspace.load(root)
  budget = {}
  for label, target in tree.targets.items():
    if target.is_python and target.is_public:
      direct = [
        wheel.rpartition(":")[2]
        for wheel in tree.closure([label], optional=False)
        if wheel.startswith("@")
      ]
      budget[label] = tree.distributions.closure(direct)
  return budget


def parse(text: str) -> Budget:
  """Returns what a budget file says."""
  lines = [line.split() for line in text.splitlines()]
  return {
    words[0]: frozenset(words[1:])
    for words in lines
    if words and not words[0].startswith("#")
  }


def render(budget: Budget) -> str:
  """Returns the text of a budget file."""
  lines = [" ".join([key, *sorted(budget[key])]) for key in sorted(budget)]
  return _HEAD + "\n".join(lines) + "\n"


def differences(agreed: Budget, measured: Budget) -> Iterator[str]:
  """Yields a line for every target that drags in other wheels than agreed."""
  for label in sorted({*agreed, *measured}):
    if label not in measured:
      yield f"{label} is in the budget, but is no public target."
    elif label not in agreed:
      wheels = ", ".join(sorted(measured[label])) or "no wheel"
      yield f"{label} is not in the budget; it drags in {wheels}."
    else:
      added = sorted(measured[label] - agreed[label])
      removed = sorted(agreed[label] - measured[label])
      if added:
        yield f"{label} drags in more than agreed: {', '.join(added)}."
      if removed:
        yield f"{label} drags in less than agreed: {', '.join(removed)}."


def check(root: pathlib.Path) -> list[str]:
  """Returns all differences of the workspace at `root` from its budget."""
  agreed = parse((root / PATH).read_text())
  return list(differences(agreed, measure(root)))


def main(arguments: list[str]) -> int:
  """Compares or updates the budget; returns the exit status."""
  if arguments not in ([], ["--update"]):
    print(f"dependency_budget takes --update only, got {arguments}.")
    return 2
  root = source_tree.find_root(pathlib.Path(__file__))
  if arguments:
    (root / PATH).write_text(render(measure(root)))
    return 0
  found = check(root)
  for line in found:
    print(line)
  if found:
    print(MEND, file=sys.stderr)
  return 1 if found else 0


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))

"""The size of each public target: our modules and the wheels it needs.

A target costs its user every wheel of its closure: those that the targets
below it import, and those that these wheels require, as the locks list them.
What only a setting such as `--config=tf` adds does not count. It also costs
the time to import our own modules and to read them: those that `import` loads
are counted. The agreed sizes are in dependency_budget.txt, one public target a
line, so that a new one is seen in review.

    python -m paxon.tools.dependency_budget            compares
    python -m paxon.tools.dependency_budget --update   writes today's sizes
"""

from collections.abc import Iterator, Mapping
import dataclasses
import pathlib
import sys

from paxon.tools.dependencies import workspace

PATH = "tools/dependency_budget.txt"

_HEAD = """\
# For each public target: the largest number of our modules that importing it
# may load, and the wheels in its closure. A larger number needs a reason in the
# commit. Made by: tools/python -m paxon.tools.dependency_budget --update
"""

# Upper bounds that `--update` does not change.
MAX_MODULES = {
  "//runner:experiment": 50,
  # Of them two for CPUs, their matmuls and their platform, one for pages, and
  # one for the argument that all layers share.
  "//layers/attention:grouped_query": 20,
  # Of them seven for sampling, beam search, noise and adapters, and one that
  # the quickstarts of other layers share.
  "//tasks/lm/params:quickstart": 94,
}

UPDATE = (
  "If this is intended: tools/python -m paxon.tools.dependency_budget --update"
)


@dataclasses.dataclass(frozen=True)
class Size:
  """The size of a public target.

  Attributes:
    modules: Our modules that importing it loads, itself included.
    wheels: The distributions in its closure.
  """

  modules: int
  wheels: frozenset[str]


Budget = Mapping[str, Size]


def measure(root: pathlib.Path) -> Budget:
  """Returns the size of every public target of ours."""
  tree = workspace.load(root)
  budget = {}
  for label, target in tree.targets.items():
    if target.is_python and target.is_public:
      direct = [
        wheel.rpartition(":")[2]
        for wheel in tree.closure([label], optional=False)
        if wheel.startswith("@")
      ]
      modules = tree.loaded_modules(target.source_paths())
      budget[label] = Size(len(modules), tree.distributions.closure(direct))
  return budget


def parse(text: str) -> Budget:
  """Returns the sizes that a budget file holds."""
  lines = [line.split() for line in text.splitlines()]
  return {
    words[0]: Size(int(words[1]), frozenset(words[2:]))
    for words in lines
    if words and not words[0].startswith("#")
  }


def render(budget: Budget) -> str:
  """Returns the text of a budget file."""
  lines = [
    " ".join([label, str(size.modules), *sorted(size.wheels)])
    for label, size in sorted(budget.items())
  ]
  return _HEAD + "\n".join(lines) + "\n"


def differences(agreed: Budget, measured: Budget) -> Iterator[str]:
  """Yields a line for every target whose size is not the agreed one."""
  for label in sorted({*agreed, *measured}):
    if label not in measured:
      yield f"{label} is in the budget, but is no public target."
      continue
    size = measured[label]
    if label not in agreed:
      wheels = ", ".join(sorted(size.wheels)) or "no wheel"
      yield f"{label} is not in the budget; it needs {wheels}."
      continue
    added = sorted(size.wheels - agreed[label].wheels)
    removed = sorted(agreed[label].wheels - size.wheels)
    if added:
      yield f"{label} needs wheels beyond its budget: {', '.join(added)}."
    if removed:
      yield f"{label} no longer needs {', '.join(removed)}."
    if size.modules > agreed[label].modules:
      yield (
        f"{label} loads {size.modules} of our modules; its budget is"
        f" {agreed[label].modules}."
      )


def check(root: pathlib.Path) -> list[str]:
  """Returns all differences of the workspace at `root` from its budget."""
  agreed = parse((root / PATH).read_text())
  measured = measure(root)
  return [*differences(agreed, measured), *_over_limits(measured)]


def _over_limits(measured: Budget) -> Iterator[str]:
  for label, limit in MAX_MODULES.items():
    if label in measured and measured[label].modules > limit:
      yield (
        f"{label} loads {measured[label].modules} of our modules; its limit is"
        f" {limit}."
      )


def main(arguments: list[str]) -> int:
  """Compares or updates the budget; returns the exit status."""
  if arguments not in ([], ["--update"]):
    print(f"dependency_budget: the only option is --update, got {arguments}.")
    return 2
  root = workspace.find_root(pathlib.Path(__file__))
  if arguments:
    (root / PATH).write_text(render(measure(root)))
    return 0
  found = check(root)
  for line in found:
    print(line)
  if found:
    print(UPDATE, file=sys.stderr)
  return 1 if found else 0


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))

"""Nothing depends on itself in a roundabout way: no target, no folder.

A folder and the folders in it are one family: `runner:main` uses
`runner/training`, which uses `runner:job`. Between any other two folders,
edges lead one way. Tests and programs are left out there, as nothing depends
on them: `runner:main` brings `tasks/`, which uses `runner:experiment`.
"""

from collections.abc import Iterator, Mapping

from paxon.tools.dependencies import build_file, violation, workspace

Graph = Mapping[str, set[str]]


def check(tree: workspace.Workspace) -> Iterator[violation.Violation]:
  """Yields a violation for each cycle of targets or folders."""
  targets = {
    label: _neighbours(tree, target)
    for label, target in tree.targets.items()
    if target.is_python
  }
  for cycle in find_cycles(targets):
    first = tree.targets[cycle[0]]
    yield violation.Violation(
      first.build_path,
      first.line,
      first.label,
      f"depends on itself: {' -> '.join(cycle)}; move what both need into a"
      " target of its own.",
    )
  for cycle in find_cycles(_folders(tree, targets)):
    path = f"{cycle[0]}/BUILD"
    yield violation.Violation(
      path,
      0,
      path,
      f"the folder depends on itself: {' -> '.join(cycle)}; move what both"
      " need into one below them.",
    )


def find_cycles(graph: Graph) -> list[list[str]]:
  """Returns cycles as `[a, b, a]`, at least one for every cyclic component.

  Args:
    graph: The nodes that each node leads to; unknown nodes are left out.
  """
  done: set[str] = set()
  path: list[str] = []
  cycles: list[list[str]] = []

  def visit(node: str) -> None:
    if node in path:
      cycle = path[path.index(node) :]
      smallest = cycle.index(min(cycle))
      cycle = cycle[smallest:] + cycle[:smallest]
      cycles.append([*cycle, cycle[0]])
    elif node in graph and node not in done:
      path.append(node)
      for neighbour in sorted(graph[node]):
        visit(neighbour)
      path.pop()
      done.add(node)

  for node in sorted(graph):
    visit(node)
  return cycles


def _neighbours(
  tree: workspace.Workspace, target: build_file.Target
) -> set[str]:
  """Returns what a target names in BUILD and what its sources import."""
  labels = set(target.edges)
  for use in tree.uses(target):
    labels.update(use.labels)
  return {label for label in labels if label.startswith("//")}


def _folders(tree: workspace.Workspace, targets: Graph) -> Graph:
  """Returns the edges between folders that are not of one family."""
  folders: dict[str, set[str]] = {}
  for label, neighbours in targets.items():
    target = tree.targets[label]
    if target.testonly or target.kind != "py_library":
      continue
    package = target.package
    for neighbour in neighbours:
      other = neighbour.removeprefix("//").partition(":")[0]
      if not _is_family(package, other):
        folders.setdefault(package, set()).add(other)
  return folders


def _is_family(first: str, second: str) -> bool:
  inner, outer = f"{first}/".lstrip("/"), f"{second}/".lstrip("/")
  return inner.startswith(outer) or outer.startswith(inner)

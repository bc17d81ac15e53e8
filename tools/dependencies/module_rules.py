"""Module boundaries: no fragments, and an order of modules inside runner/.

A module of a few lines that one other module imports belongs into that module.
Within `runner/` an import leads to the same level or to a lower one.
"""

from collections.abc import Iterator, Mapping

from paxon.tools.dependencies import build_file, violation, workspace

# A module with fewer lines needs more than one importer.
MIN_LINES = 80

# From the lowest level to the highest; an entry is a module or a folder, and
# the longest one that fits counts. Modules of `runner` itself are listed by
# name, since folders above and below them share its folder.
RUNNER_LEVELS = (
  ("runner/user_error", "runner/files", "runner/settings"),
  ("runner/configuration", "runner"),
  (
    "runner/checkpoints",
    "runner/hosts",
    "runner/monitoring",
    "runner/plan",
  ),
  ("runner/training",),
  ("runner/planning",),
  ("runner/main",),
)


def check(tree: workspace.Workspace) -> Iterator[violation.Violation]:
  """Yields a violation for each fragment and each import up the levels."""
  importers = production_importers(tree)
  for path, users in importers.items():
    lines = tree.text(path).count("\n")
    if len(users) == 1 and lines < MIN_LINES:
      (user,) = users
      if _top(user) != _top(path):
        continue  # Public, and of use to others than our own packages.
      yield violation.Violation(
        path,
        0,
        path,
        f"has {lines} lines, and only {user} imports it; move its code there.",
        f"fragment {path}",
      )
  for target in tree.targets.values():
    if target.kind == "py_library" and not target.testonly:
      yield from _check_levels(tree, target)


def production_importers(
  tree: workspace.Workspace,
) -> Mapping[str, frozenset[str]]:
  """Returns the modules that import each module, tests left out."""
  found: dict[str, set[str]] = {}
  for target in tree.targets.values():
    if target.is_python and not target.testonly:
      for use in tree.uses(target):
        if not use.path.endswith(".py"):
          continue
        for label in use.labels:
          imported = tree.targets[label] if label.startswith("//") else None
          if imported and not imported.testonly:
            for path in imported.source_paths():
              found.setdefault(path, set()).add(use.path)
  return {
    path: frozenset(users)
    for path, users in sorted(found.items())
    if not path.endswith("__init__.py")
  }


def level(path: str) -> int | None:
  """Returns the level of a module in `runner/`, None elsewhere."""
  module = path.removesuffix(".py")
  found = [
    (len(entry), number)
    for number, entries in enumerate(RUNNER_LEVELS)
    for entry in entries
    if f"{module}/".startswith(f"{entry}/")
  ]
  return max(found)[1] if found else None


def _check_levels(
  tree: workspace.Workspace, target: build_file.Target
) -> Iterator[violation.Violation]:
  seen = set()
  for use in tree.uses(target):
    own = level(use.path)
    for label in use.labels:
      if own is None or not label.startswith("//runner"):
        continue
      (path,) = tree.targets[label].source_paths() or ("",)
      other = level(path)
      if other is not None and other > own and (use.path, path) not in seen:
        seen.add((use.path, path))
        yield violation.Violation(
          use.path,
          use.line,
          target.label,
          f"imports {path}, which is on a higher level of runner/; pass it as"
          " an argument, or move the code.",
          f"order {use.path} {path}",
        )


def _top(path: str) -> str:
  return path.partition("/")[0]

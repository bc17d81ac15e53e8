"""The order of packages, the levels inside runner/, and cycles.

What an order forbids is passed in as an argument: a layer gets its einsum, a
learner its loss function. Tests obey the order of the packages, too.
"""

from collections.abc import Iterator, Mapping

from paxon.tools.dependencies import build_file, violation, workspace

_BLOCKS = ("sharding", "quantization", "layers")

# For every package, the packages below it.
MAY_USE: Mapping[str, tuple[str, ...]] = {
  "sharding": (),
  "quantization": ("sharding",),
  "layers": ("sharding", "quantization"),
  "learners": ("sharding",),
  "pipeline": (*_BLOCKS, "learners"),
  "inputs": (),
  "runner": (*_BLOCKS, "learners", "pipeline", "inputs"),
  "tasks": (*_BLOCKS, "learners", "pipeline", "inputs", "runner"),
  "third_party": (),
  "tools": (*_BLOCKS, "learners", "pipeline", "inputs", "runner"),
}

# Inside runner/, from the lowest level to the highest: an import leads to the
# same level or to a lower one. An entry is a module or a folder; the longest
# match counts. Modules of `runner` itself are on the level of `runner`.
RUNNER_LEVELS = (
  (
    "runner/exit_status",
    "runner/user_error",
    "runner/files",
    "runner/configuration/annotations",
    "runner/knobs",
    "runner/settings",
    "runner/stores",
  ),
  ("runner/configuration", "runner"),
  (
    "runner/checkpoints",
    "runner/devices",
    "runner/hosts",
    "runner/monitoring",
    "runner/plan",
  ),
  ("runner/session",),
  ("runner/generation",),
  ("runner/evaluation",),
  ("runner/training",),
  ("runner/endpoint", "runner/planning"),
  ("runner/main", "runner/command_line", "runner/flag_table"),
)

# The only target that depends on the experiments; no source imports them but
# tests of tools.
MAIN = "//runner:main"

# Whole models, which the layers that they are made of must not import.
_ASSEMBLED = ("layers/models", "layers/decoding")

# The data side runs without an accelerator stack.
_NOT_FOR_INPUTS = ("chex", "flax", "jax", "jaxlib", "optax", "orbax_checkpoint")

# Flags belong to the program, not to a library.
_FLAGS = ("absl.app", "absl.flags")
_FLAG_SOURCES = ("runner/command_line.py",)

Graph = Mapping[str, set[str]]


def check(tree: workspace.Workspace) -> Iterator[violation.Violation]:
  """Yields a violation for each edge against the order, and each cycle."""
  yield from check_packages(tree)
  yield from check_test_support(tree)
  yield from check_levels(tree)
  yield from check_cycles(tree)


def get_top(path: str) -> str:
  """Returns the top-level folder of a path."""
  return path.partition("/")[0]


# --- Packages ----------------------------------------------------------------


def check_packages(
  tree: workspace.Workspace,
) -> Iterator[violation.Violation]:
  """Yields a violation for each edge against the order of the packages."""
  for package in tree.packages():
    if package and get_top(package) not in MAY_USE:
      yield violation.make_for_file(
        f"{package}/BUILD",
        f"{get_top(package)}/ is not in the table of packages; move its targets"
        f" into one of {', '.join(MAY_USE)}.",
      )
  for target in tree.targets.values():
    if not target.is_python or (
      target.package and get_top(target.package) not in MAY_USE
    ):
      continue
    edges = dict.fromkeys(target.edges, (target.build_path, target.line))
    for use in tree.uses(target):
      edges.update((label, (use.path, use.line)) for label in use.labels)
      if use.dotted in _FLAGS and use.path not in _FLAG_SOURCES:
        yield violation.Violation(
          use.path,
          use.line,
          target.label,
          f"imports `{use.dotted}`; flags are defined in {_FLAG_SOURCES[0]}"
          " only. Take the value as an argument.",
        )
    for label, (path, line) in edges.items():
      message = _package_problem(target, label)
      if message:
        yield violation.Violation(path, line, target.label, message)


def check_test_support(
  tree: workspace.Workspace,
) -> Iterator[violation.Violation]:
  """Yields a violation for each library that needs test support, as Bazel."""
  for target in tree.targets.values():
    for label in () if target.testonly else target.edges:
      found = tree.targets.get(label)
      if found is not None and found.testonly:
        yield violation.Violation(
          target.build_path,
          target.line,
          target.label,
          f'uses "{label}", which is testonly; set testonly = True, too.',
        )


def _package_problem(target: build_file.Target, label: str) -> str | None:
  """Returns why `target` may not depend on `label`, or None if it may."""
  repository, _, rest = label.partition("//")
  package, _, name = rest.partition(":")
  importer, importee = get_top(target.package), get_top(package)
  if repository:
    if importer == "inputs" and name in _NOT_FOR_INPUTS:
      return f'"{label}": inputs/ uses numpy only, not {name}.'
    return None
  # The root holds what every library has, and the README's own example.
  if not importee or not target.package:
    return None
  if importee == "tasks" and importer != "tasks":
    if target.label == MAIN or (importer == "tools" and target.testonly):
      return None
    return (
      f'uses "{label}", but only {MAIN} depends on experiments; find them by'
      " name."
    )
  if importee == importer:
    if _is_assembled(package) and not _is_assembled(target.package):
      return (
        f'uses "{label}", but a layer must not import'
        f" {' or '.join(_ASSEMBLED)}; take it as an argument, or move the code."
      )
    return None
  if importee not in MAY_USE[importer]:
    below = ", ".join(f"{name}/" for name in MAY_USE[importer])
    return (
      f'uses "{label}", but {importer}/ may use only {below or "wheels"}; take'
      " it as an argument, or move the code."
    )
  return None


def _is_assembled(package: str) -> bool:
  return any(f"{package}/".startswith(f"{name}/") for name in _ASSEMBLED)


# --- Levels of runner/ -------------------------------------------------------


def check_levels(tree: workspace.Workspace) -> Iterator[violation.Violation]:
  """Yields a violation for each import up the levels of `runner/`."""
  for target in tree.targets.values():
    if target.kind != "py_library" or target.testonly:
      continue
    seen = set()
    for use in tree.uses(target):
      own = runner_level(use.path)
      for label in use.labels:
        if own is None or label in seen or not label.startswith("//runner"):
          continue
        seen.add(label)
        for path in tree.targets[label].source_paths():
          if (runner_level(path) or 0) > own:
            yield violation.Violation(
              use.path,
              use.line,
              target.label,
              f"imports {path}, which is on a higher level of runner/; pass it"
              " as an argument, or move the code.",
              f"order {use.path} {path}",
            )


def runner_level(path: str) -> int | None:
  """Returns the level of a module in `runner/`, None elsewhere."""
  module = path.removesuffix(".py")
  matches = [
    (len(entry), level)
    for level, entries in enumerate(RUNNER_LEVELS)
    for entry in entries
    if f"{module}/".startswith(f"{entry}/")
  ]
  return max(matches)[1] if matches else None


# --- Cycles ------------------------------------------------------------------


def check_cycles(tree: workspace.Workspace) -> Iterator[violation.Violation]:
  """Yields a violation for each cycle of targets or folders.

  A folder and its subfolders count as one: `runner:main` uses
  `runner/training`, which uses `runner:job`. Tests and programs are left out of
  the folders' graph, as nothing depends on them.
  """
  targets = {
    label: _neighbors(tree, target)
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
      " separate target.",
    )
  for cycle in find_cycles(_folders(tree, targets)):
    yield violation.make_for_file(
      f"{cycle[0]}/BUILD",
      f"the folder depends on itself: {' -> '.join(cycle)}; move what both"
      " need into one below them.",
    )


def find_cycles(graph: Graph) -> list[list[str]]:
  """Returns cycles as `[a, b, a]`, at least one for every cyclic component.

  Args:
    graph: The neighbors of each node; unknown nodes are ignored.
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
      for neighbor in sorted(graph[node]):
        visit(neighbor)
      path.pop()
      done.add(node)

  for node in sorted(graph):
    visit(node)
  return cycles


def _neighbors(
  tree: workspace.Workspace, target: build_file.Target
) -> set[str]:
  """Returns the targets of ours that BUILD or an import names."""
  labels = set(target.edges)
  for use in tree.uses(target):
    labels.update(use.labels)
  return {label for label in labels if label.startswith("//")}


def _folders(tree: workspace.Workspace, targets: Graph) -> Graph:
  """Returns the edges between folders of which none contains the other."""
  folders: dict[str, set[str]] = {}
  for label, neighbors in targets.items():
    target = tree.targets[label]
    if target.testonly or target.kind != "py_library":
      continue
    for neighbor in neighbors:
      other = neighbor.removeprefix("//").partition(":")[0]
      inner, outer = f"{target.package}/", f"{other}/"
      if not inner.startswith(outer) and not outer.startswith(inner):
        folders.setdefault(target.package, set()).add(other)
  return folders

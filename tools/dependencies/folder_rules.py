"""Which folder may use which: the order of the packages.

What goes against the order is passed in as an argument instead: a layer gets
its einsum, a learner its loss function. Tests obey the order too.
"""

from collections.abc import Iterator, Mapping

from paxon.tools.dependencies import build_file, violation, workspace

_BLOCKS = ("sharding", "quantization", "layers")

# For every folder, the folders below it. The rest of a folder is its own.
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

# The experiments are edges of this target alone; no source imports them.
MAIN = "//runner:main"

# Whole models, which the blocks they are made of must not know.
_ASSEMBLED = ("layers/models", "layers/decoding")

# The data side runs where no accelerator stack is installed.
_NOT_FOR_INPUTS = ("chex", "flax", "jax", "jaxlib", "optax", "orbax_checkpoint")

# Flags are the program's, not a library's.
_FLAGS = ("absl.app", "absl.flags")
_FLAG_SOURCES = ("runner/main.py", "runner/main_test.py")


def check(tree: workspace.Workspace) -> Iterator[violation.Violation]:
  """Yields a violation for each edge and import against the order."""
  for package in tree.packages():
    if package and top_of(package) not in MAY_USE:
      path = f"{package}/BUILD"
      message = (
        f"{top_of(package)}/ is not in the table of folders; move its targets"
        f" into one of {', '.join(MAY_USE)}."
      )
      yield violation.Violation(path, 0, path, message)
  for target in tree.targets.values():
    if not target.is_python or (
      target.package and top_of(target.package) not in MAY_USE
    ):
      continue
    places = dict.fromkeys(target.edges, (target.build_path, target.line))
    for use in tree.uses(target):
      places.update((label, (use.path, use.line)) for label in use.labels)
      yield from _check_flags(target, use)
    for label, (path, line) in places.items():
      message = _refusal(target, label)
      if message:
        yield violation.Violation(path, line, target.label, message)


def top_of(package: str) -> str:
  """Returns the top-level folder of a package."""
  return package.partition("/")[0]


def _refusal(target: build_file.Target, label: str) -> str | None:
  """Returns why `target` may not use `label`, or None if it may."""
  repository, _, rest = label.partition("//")
  package = rest.partition(":")[0]
  importer, importee = top_of(target.package), top_of(package)
  if repository:
    name = label.rpartition(":")[2]
    if importer == "inputs" and name in _NOT_FOR_INPUTS:
      return f'"{label}": inputs/ is numpy only; no {name} here.'
    return None
  # The root holds what every library has, and the README's own example.
  if not importee or not target.package:
    return None
  if importee == "tasks" and importer != "tasks":
    if target.label == MAIN:
      return None
    return (
      f'uses "{label}", but experiments are edges of {MAIN} alone; ask for'
      " them by name."
    )
  if importee == importer:
    return _assembled_refusal(target.package, package, label)
  if importee not in MAY_USE[importer]:
    below = ", ".join(f"{name}/" for name in MAY_USE[importer])
    return (
      f'uses "{label}", but {importer}/ may use only {below or "wheels"}; take'
      " it as an argument, or move the code."
    )
  return None


def _assembled_refusal(importer: str, importee: str, label: str) -> str | None:
  """Returns why a block may not use an assembled model."""

  def assembled(package: str) -> bool:
    return any(f"{package}/".startswith(f"{name}/") for name in _ASSEMBLED)

  if assembled(importee) and not assembled(importer):
    return (
      f'uses "{label}", but no block imports {" or ".join(_ASSEMBLED)}; take it'
      " as an argument, or move the code."
    )
  return None


def _check_flags(
  target: build_file.Target, use: workspace.Use
) -> Iterator[violation.Violation]:
  if use.dotted in _FLAGS and use.path not in _FLAG_SOURCES:
    yield violation.Violation(
      use.path,
      use.line,
      target.label,
      f"imports `{use.dotted}`; flags live in {_FLAG_SOURCES[0]} only. Take the"
      " value as an argument.",
    )

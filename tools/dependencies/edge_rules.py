"""The deps of a target are exactly the imports of its sources.

Bazel rejects an import from outside the transitive closure. It allows imports
of transitive dependencies and unused deps; this rule rejects both.
"""

from collections.abc import Iterator

from paxon.tools.dependencies import build_file, violation, workspace

# Files that import by name: the experiment of `--exp` and its test, the
# function of an override or of a plan, optional packages, the tokenizer of a
# command, the modules of a test server, and tests of imports that must fail.
COMPUTED_IMPORTS = frozenset(
  {
    "inputs/lingvo_generators/generator_input_test.py",
    "inputs/lingvo_generators/generator_input.py",
    "runner/configuration/find_experiment.py",
    "runner/configuration/find_experiment_test.py",
    "runner/configuration/text_values.py",
    "runner/hosts/warm_python_server.py",
    "runner/monitoring/writers.py",
    "runner/plan/functions/plan_main.py",
    "runner/run_code_test.py",
    "tools/closure_test.py",
    "tools/sweeps/sweep_main.py",
    "tools/sweeps/sweep_study.py",
    "tools/tokenize_main.py",
  }
)

# Added by the macros.
_ADDED = frozenset({workspace.ROOT_TARGET})
_ADDED_TO_TESTS = _ADDED | {"//tools:type_checks", "@pypi//:pytest"}


def check(tree: workspace.Workspace) -> Iterator[violation.Violation]:
  """Yields a violation for each import or edge without a counterpart."""
  for target in tree.targets.values():
    if not target.is_python:
      continue
    added = added_by_macro(target)
    mistaken = list(_check_labels(tree, target, added))
    yield from mistaken
    used: set[str] = set()
    for use in tree.uses(target):
      used.update(use.labels)
      yield from _check_use(tree, target, use, added)
    # A target without sources only groups its deps.
    if target.srcs and not mistaken:
      for label in target.deps:
        if label not in used:
          yield _at(
            target,
            f'"{label}" is in deps but no source imports it; remove it, or'
            " list it in runtime_deps if it is imported by name at run time.",
          )


def added_by_macro(target: build_file.Target) -> frozenset[str]:
  """Returns the labels that a target depends on without listing them."""
  return _ADDED_TO_TESTS if target.is_test else _ADDED


def _check_use(
  tree: workspace.Workspace,
  target: build_file.Target,
  use: workspace.Use,
  added: frozenset[str],
) -> Iterator[violation.Violation]:
  """Yields the problems of one import."""
  if use.problem:
    if use.dotted or use.path not in COMPUTED_IMPORTS:
      yield violation.Violation(use.path, use.line, target.label, use.problem)
    return
  if not use.labels or added.intersection(use.labels):
    return
  if set(use.labels).isdisjoint(target.deps):
    label = use.labels[0]
    transitive = label in tree.closure(target.edges)
    reason = (
      "which is only a transitive dependency"
      if transitive
      else "which is not in deps"
    )
    yield violation.Violation(
      use.path,
      use.line,
      target.label,
      f'imports `{use.dotted}`, {reason}; add "{label}" to its deps in'
      f" {target.build_path}.",
    )


def _check_labels(
  tree: workspace.Workspace, target: build_file.Target, added: frozenset[str]
) -> Iterator[violation.Violation]:
  """Yields labels that are unknown, duplicate, or added by the macro."""
  for index, label in enumerate(target.edges):
    if label in target.edges[:index]:
      yield _at(target, f'"{label}" is listed twice; remove one.')
    elif label in added:
      yield _at(target, f'"{label}" is added by the macro; remove it.')
    elif label.startswith("//") and label not in tree.targets:
      yield _at(
        target, f'the target "{label}" does not exist; check the spelling.'
      )
    elif label.startswith("@") and label not in tree.distributions.labels:
      yield _at(
        target,
        f'"{label}" is in no lock of {workspace.LOCK_FOLDER}; check the'
        " spelling, or add it to a requirements file there.",
      )


def _at(target: build_file.Target, message: str) -> violation.Violation:
  return violation.Violation(
    target.build_path, target.line, target.label, message
  )

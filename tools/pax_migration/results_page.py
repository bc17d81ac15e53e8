"""The page of results of `tools/migrate_pax` on Pax's own experiments.

  tools/python -m paxon.tools.pax_migration.results_page FOLDER [--update]

FOLDER has a checkout of paxml. Its experiments are rewritten, imported, linted
at their full size on their mesh, and their parameters are counted and compared
with Pax's formulas.
"""

from collections.abc import Sequence
import dataclasses
import datetime
import importlib
import math
import os
import pathlib
import re
import sys
import tempfile
from typing import Final

import fiddle as fdl
import jax

from paxon.runner import job as job_lib
from paxon.runner import user_error
from paxon.runner.configuration import find_experiment
from paxon.runner.planning import job_lint
from paxon.sharding import lint, variables
from paxon.sharding import mesh as meshes
from paxon.tools import command_line
from paxon.tools.pax_migration import migrate_main, pax_sizes, project

PAGE: Final = "docs/migrated_experiments.md"
_ROOT: Final = pathlib.Path(__file__).parents[2]
_LM: Final = "paxml/tasks/lm/params"
_GPU: Final = "paxml/contrib/gpu/scripts_gpu"
# Modules that are rewritten together.
FILES: Final = (
  *(
    f"{_LM}/{name}.py"
    for name in (
      "lm_cloud",
      "c4",
      "c4_multislice",
      "optimal_scaling",
      "bert",
      "nvidia",
    )
  ),
  *(
    f"{_GPU}/{name}.py"
    for name in (
      "configs",
      "llama_utils",
      "lora_utils",
      "checkpoint_utils",
      "tasks",
    )
  ),
)
# Modules with layers and inputs of their own, each alone.
ALONE: Final = (
  "paxml/tasks/vision/params/imagenet_resnets.py",
  "paxml/tasks/vision/params/mnist.py",
  "paxml/tasks/test/synthetic.py",
)
_PACKAGE: Final = "migrated"


@dataclasses.dataclass(frozen=True)
class Result:
  """The result of one registered class.

  Attributes:
    module: Its module.
    name: Its name.
    problem: Why it does not plan; empty if it does.
    parameters: Parameters after the rewriting, or None.
    expected: Parameters by Pax's formula, or None.
    left: Number of marked constructs in its body.
  """

  module: str
  name: str
  problem: str
  parameters: int | None
  expected: int | None
  left: int

  @property
  def is_equal(self) -> bool:
    """Whether both numbers of parameters are known and equal."""
    return self.parameters is not None and self.parameters == self.expected


def measure(root: pathlib.Path) -> list[Result]:
  """Rewrites all modules and returns the results of registered classes.

  Raises:
    user_error.UserError: A module does not exist.
  """
  found = []
  with tempfile.TemporaryDirectory() as folder:
    sys.path.append(folder)
    try:
      for group in (FILES, *((each,) for each in ALONE)):
        found += _measure_group(root, group, pathlib.Path(folder))
    finally:
      sys.path.remove(folder)
  return found


def _measure_group(
  root: pathlib.Path, names: Sequence[str], folder: pathlib.Path
) -> list[Result]:
  package = f"{_PACKAGE}{len(list(folder.iterdir()))}"
  (folder / package).mkdir()
  texts, _ = migrate_main.migrate([root / each for each in names], package)
  for path, text in texts.items():
    (folder / package / path.name).write_text(text)
  importlib.invalidate_caches()
  modules = {
    name: name.removesuffix(".py").replace("/", ".")
    for name in names
    if name in FILES
  }
  expected = pax_sizes.count_all(root, list(modules.values()))
  found = []
  for name in names:
    registered = re.findall(
      r"^@experiment_registry\.register.*\nclass (\w+)",
      (root / name).read_text(),
      re.MULTILINE,
    )
    counts = expected.get(modules.get(name, ""), {})
    for cls in registered:
      module = f"{package}.{pathlib.Path(name).stem}"
      found.append(
        _measure_class(module, cls, texts[root / name], counts.get(cls))
      )
  return found


def count_parameters(job: job_lib.Job) -> int:
  """Returns the number of trainable parameters of a job."""
  specs = job_lint.get_shapes(job).specs
  leaves = jax.tree.leaves(
    specs, is_leaf=lambda x: isinstance(x, variables.VariableSpec)
  )
  return sum(math.prod(one.shape) for one in leaves if one.trainable)


def _measure_class(
  module: str, name: str, text: str, expected: int | None
) -> Result:
  body = re.search(rf"^class {name}\b.*?(?=^\S|\Z)", text, re.M | re.S)
  left = 0 if body is None else body[0].count(f"# {project.MARKER}:")
  parameters, problem = None, ""
  try:
    cls = find_experiment.find_experiment(f"{module}.{name}")
    config = cls().job()
    job = fdl.build(config)
    parameters = count_parameters(job)
    mesh = meshes.MeshSpec.parse(config.mesh)
    devices = math.prod((*mesh.ici.values(), *mesh.dcn.values()))
    findings = job_lint.check(job, num_devices=devices)
    # Large models do not fit if no size of their weights divides.
    errors = [
      each.message
      for each in findings
      if each.is_error or each.rule is lint.Rule.STORED_WHOLE
    ]
    problem = errors[0] if errors else ""
  except (AttributeError, TypeError, ValueError, user_error.UserError) as error:
    problem = str(error)
  module = module.partition(".")[2]
  return Result(
    module, name, user_error.one_line(problem), parameters, expected, left
  )


def page(results: Sequence[Result], date: datetime.date) -> str:
  """Returns the text of the page."""
  plan = [each for each in results if not each.problem]
  equal = [each for each in plan if each.is_equal]
  lines = [
    "# Pax's experiments, rewritten by `tools/migrate_pax`",
    "",
    f"Measured on {date.isoformat()} with the public experiments of paxml:"
    f" {len(plan)} of {len(results)} registered classes plan after the rewrite"
    f" ({len(plan) / len(results):.0%}), and {len(equal)} of them have the"
    " number of parameters that the formulas of Praxis's layers give.",
    "",
    "A class plans if its job builds and the sharding lint has no error at full"
    " size, on its mesh, and no large variable is whole on every device. `Left`"
    " is the number of constructs in the class that are marked with MIGRATE. A"
    " dash stands for a class that cannot be built, or whose model has no"
    " formula here. The command, with a checkout of paxml:",
    "",
    "```",
    "tools/python -m paxon.tools.pax_migration.results_page FOLDER --update",
    "```",
    "",
  ]
  for module in dict.fromkeys(each.module for each in results):
    mine = [each for each in results if each.module == module]
    lines += [
      f"## {module}",
      "",
      "| Class | Plans | Parameters | By Praxis's formula | Left |",
      "| --- | --- | --- | --- | --- |",
    ]
    lines += [_row(each) for each in mine]
    lines.append("")
  return "\n".join(lines)


def _row(result: Result) -> str:
  numbers = [
    "-" if each is None else f"{each:,}"
    for each in (result.parameters, result.expected)
  ]
  if result.is_equal:
    numbers[1] = "equal"
  plans = (
    f"no: {result.problem.partition('; ')[0]}" if result.problem else "yes"
  )
  cells = (f"`{result.name}`", plans, *numbers, str(result.left))
  return f"| {' | '.join(cells)} |"


def main(argv: Sequence[str]) -> int:
  """Prints or writes the page; returns the exit status."""
  parser = command_line.Parser("results_page", __doc__ or "", program="python")
  parser.add_argument("folder", type=pathlib.Path)
  parser.add_argument("--update", action="store_true")
  given = parser.parse_args(list(argv))
  # Pax's module of The Pile reads it when it is imported.
  os.environ.setdefault("VOCAB_PATH", "unset")
  text = page(measure(given.folder), datetime.date.today())
  if given.update:
    (_ROOT / PAGE).write_text(text)
  else:
    print(text, end="")
  return 0


if __name__ == "__main__":
  command_line.run(main)

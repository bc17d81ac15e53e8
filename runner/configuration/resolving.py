"""From an experiment's name and its overrides to a configuration and a job.

What the command line of programs and `tools/configs` have in common. Whatever
a user can get wrong here is a `UserError` of one line.
"""

from collections.abc import Sequence
import dataclasses
import re
from typing import TYPE_CHECKING, Any

from paxon.runner import user_error
from paxon.runner.configuration import (
  annotations,
  find_experiment,
  overrides,
  text_values,
  tree,
)
from paxon.sharding import suggestions

if TYPE_CHECKING:
  import fiddle as fdl

  from paxon.runner import experiment as experiment_lib
  from paxon.runner import job as job_lib

# What a part says of a value that it does not take. Arithmetic, because an
# experiment divides by its knobs.
REFUSALS = (ValueError, TypeError, ArithmeticError)

# The field of a job that evaluation and decoding find its class by.
_MADE_BY = "experiment"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Resolved:
  """An experiment with its overrides.

  Attributes:
    experiment: With its knobs set.
    config: The whole configuration of a run.
    notes: Remarks on the overrides, one line each.
  """

  experiment: "experiment_lib.Experiment"
  config: "fdl.Config[job_lib.Job]"
  notes: tuple[str, ...]


def resolve(
  name: str,
  given: Sequence[overrides.Override],
  *,
  packages: Sequence[str] = (),
) -> Resolved:
  """Returns the configuration of an experiment.

  Args:
    name: As `--exp` takes it.
    given: Knobs, which are set first, and paths in the configuration.
    packages: Where names close to a misspelled one are sought.

  Raises:
    user_error.UserError: There is no such experiment, knob or path, a value
      does not fit, or the experiment gives no configuration.
  """
  experiment, paths = _make_experiment(name, given, packages)
  config, notes = _configure(experiment, paths)
  return Resolved(experiment=experiment, config=config, notes=notes)


def build(config: "fdl.Buildable") -> "job_lib.Job":
  """Makes the job.

  Args:
    config: The root; no part is made in two places unless it is shared.

  Raises:
    user_error.UserError: A part refused its values; the message ends with the
      part's place in the configuration.
  """
  import fiddle as fdl

  try:
    return fdl.build(config)
  except REFUSALS as error:
    # Fiddle adds the place in the configuration to the text.
    message, _, context = str(error).partition("\n\nFiddle context:")
    found = re.search(r" at <root>\.?(.*?) with positional", context)
    path = re.sub(r"\['(\w+)'\]", r".\1", found[1]) if found else ""
    if path:
      message = f"{message.rstrip('.')} (at {path})."
    raise user_error.UserError(message) from error


def _make_experiment(
  name: str, given: Sequence[overrides.Override], packages: Sequence[str]
) -> tuple["experiment_lib.Experiment", list[overrides.Override]]:
  """Returns the experiment with its knobs set, and the overrides of paths."""
  cls = find_experiment.find_experiment(name, packages=packages)
  from paxon.runner import knobs

  known = cls.knobs()
  values: dict[str, Any] = {}
  paths = []
  for override in given:
    knob = known.get(override.path)
    if knob is None:
      paths.append(override)
      continue
    try:
      values[knob.name] = text_values.parse(
        override.text, knob.annotation, current=knob.default
      )
    except annotations.MismatchError as error:
      raise user_error.UserError(
        user_error.sentence(f"{override}: {error}")
      ) from error
  try:
    return cls(**values), paths
  except knobs.KnobError as error:
    raise user_error.UserError(str(error)) from error


def _configure(
  experiment: "experiment_lib.Experiment",
  paths: Sequence[overrides.Override],
) -> tuple["fdl.Config[job_lib.Job]", tuple[str, ...]]:
  """Returns the resolved configuration, and remarks on its overrides."""
  from paxon.runner import job as job_lib
  from paxon.runner import knobs
  from paxon.runner.configuration import rewrites

  try:
    config = experiment.job()
  except knobs.KnobError as error:
    raise user_error.UserError(str(error)) from error
  except REFUSALS as error:
    raise user_error.UserError(
      f"{type(experiment).__name__} gives no configuration: {error}"
      f" ({user_error.place_of(error)})"
    ) from error
  notes = []
  for override in paths:
    steps = overrides.steps_of(override)
    fields = [*tree.field_names(config), *type(experiment).knobs()]
    if steps[0] not in fields:
      hint = suggestions.suggest(str(steps[0]), fields)
      raise user_error.UserError(
        f"{override}: {type(experiment).__name__} has no knob and"
        f" {job_lib.Job.__name__} no field {steps[0]!r}{hint}"
      )
    if steps[0] == _MADE_BY:
      raise user_error.UserError(
        f"{override}: {_MADE_BY} is the class that made this configuration;"
        " --exp names another one."
      )
    notes.append(overrides.apply(config, override))
  rewrites.check_dtypes(config)
  return config, tuple(note for note in notes if note)

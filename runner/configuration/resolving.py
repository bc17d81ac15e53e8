"""Resolves an experiment and its overrides to a configuration and a job.

Every user mistake becomes a `UserError` of one line; bugs keep their traceback.
"""

from collections.abc import Iterator, Sequence
import contextlib
import dataclasses
import linecache
import os
import re
import traceback
import types
from typing import TYPE_CHECKING, Any

from paxon.runner import exit_status, user_error
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

# Errors that invalid values cause while a configuration is made and built.
# Arithmetic, because experiments divide by knobs.
_VALUE_ERRORS = (ValueError, TypeError, ArithmeticError)

# Field of a job that names its experiment.
_EXPERIMENT = "experiment"
# Fields of a job that the number of batches of an epoch depends on.
_COUNTED = ("batch_ramp", "train_input")

_MAX_PATHS = 3
_OURS = __name__.partition(".")[0]
# Listed, because not all installations put them into site-packages.
_LIBRARIES = frozenset(
  (
    *("beartype", "chex", "einops", "etils", "fiddle", "flax", "jax", "jaxlib"),
    *("jaxtyping", "numpy", "opt_einsum", "optax", "orbax", "tensorstore"),
  )
)
_INSTALLED = frozenset({"site-packages", "dist-packages"})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Resolved:
  """A resolved experiment.

  Attributes:
    experiment: The experiment with its knobs set.
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

  Overrides of knobs are applied before those of paths.

  Raises:
    user_error.UserError: The experiment, a knob or a path does not exist, a
      value is not valid, or the experiment fails.
  """
  experiment, paths = _make_experiment(name, given, packages)
  config, notes = _configure(experiment, paths)
  return Resolved(experiment=experiment, config=config, notes=notes)


def to_overrides(
  experiment: "experiment_lib.Experiment",
) -> list[overrides.Override]:
  """Returns the knobs that an experiment was given as assignments.

  Raises:
    user_error.UserError: The text of a value is not that value.
  """
  found = []
  for name, value in experiment.given_knobs().items():
    text = value if isinstance(value, str) else repr(value)
    if isinstance(value, types.FunctionType | type):
      text = f"{value.__module__}.{value.__qualname__}"
    annotation = type(experiment).knobs()[name].annotation
    try:
      is_same = text_values.parse(text, annotation) == value
    except annotations.MismatchError:
      is_same = False
    if not is_same:
      raise user_error.UserError(
        f"{type(experiment).__name__}({name}={value!r}) cannot be written as"
        " text; set the knob in a subclass instead."
      )
    found.append(overrides.Override(name, text))
  return found


def build(config: "fdl.Buildable") -> "job_lib.Job":
  """Builds the job.

  Raises:
    user_error.UserError: A node rejects its values; the message ends with the
      node's path.
  """
  import fiddle as fdl

  try:
    return fdl.build(config)
  except _VALUE_ERRORS as error:
    # Fiddle appends the path to the message.
    message, _, context = str(error).partition("\n\nFiddle context:")
    found = re.search(r" at <root>\.?(.*?) with positional", context)
    path = re.sub(r"\['(\w+)'\]", r".\1", found[1]) if found else ""
    if path:
      message = f"{message.rstrip('.')} (at {path})."
    raise user_error.UserError(message) from error


@contextlib.contextmanager
def user_errors(config: "fdl.Buildable") -> Iterator[None]:
  """Turns errors about the configuration into `UserError` (`explain_error`)."""
  try:
    yield
  except user_error.UserError:
    raise
  except Exception as error:
    message = explain_error(error, config)
    if message is None:
      raise
    raise user_error.UserError(message).with_status(
      _find_status(error)
    ) from error


def explain_error(error: BaseException, config: "fdl.Buildable") -> str | None:
  """Returns an error about a running configuration as one line.

  Some constraints are only checked when a model is traced or an input is
  opened. An error is about the configuration if a method of a configured class
  was running, and the error is

  * a ValueError or TypeError of a `raise` statement outside the libraries, or
  * an OSError or OverflowError, which depend on values only.

  Returns:
    The message with the path of the innermost node that was running; None for a
    bug.
  """
  depends_on_values = isinstance(error, OSError | OverflowError)
  if not depends_on_values and not isinstance(error, ValueError | TypeError):
    return None
  steps = list(traceback.walk_tb(error.__traceback__))
  if not depends_on_values and not _is_raised_outside_libraries(*steps[-1]):
    return None
  paths = _find_paths([frame for frame, _ in steps], config)
  if not paths:
    return None
  shown = " or ".join(paths[:_MAX_PATHS])
  if len(paths) > _MAX_PATHS:
    shown += f" or {len(paths) - _MAX_PATHS} more"
  what = str(error).partition("\n")[0].rstrip(".") or type(error).__name__
  if isinstance(error, OverflowError):
    what = f"A number is too large ({what})"
  return f"{what} (at {shown})."


def _find_status(error: BaseException) -> exit_status.ExitStatus:
  """Returns the exit status of an error that `explain_error` explains."""
  status = exit_status.find(error)
  if status is not exit_status.ExitStatus.ERROR:
    return status
  frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
  # The settings of an input are checked before it is asked for a batch.
  if any(frame.f_code.co_name == "get_next" for frame in frames):
    return exit_status.ExitStatus.DATA
  return exit_status.ExitStatus.USAGE


def _is_raised_outside_libraries(frame: types.FrameType, line: int) -> bool:
  """Whether a line outside the libraries with a `raise` raised the error."""
  file, scope = frame.f_code.co_filename, frame.f_globals
  root = str(scope.get("__name__", "")).partition(".")[0]
  if root != _OURS and (
    root in _LIBRARIES or not _INSTALLED.isdisjoint(file.split(os.sep))
  ):
    return False
  return (
    re.search(r"\braise\b", linecache.getline(file, line, scope)) is not None
  )


def _find_paths(
  frames: Sequence[types.FrameType], config: "fdl.Buildable"
) -> list[str]:
  """Returns the paths of the innermost running node.

  Several, because nodes are found by class: linen copies its modules. The class
  of a configured function is its return annotation.
  """
  import fiddle as fdl

  places: dict[type, list[str]] = {}
  for path, node in tree.nodes(config):
    if not path:
      continue
    cls: Any = fdl.get_callable(node)
    if not isinstance(cls, type):
      cls = tree.get_annotations(node).get("return")
    # Every frame would match those two, having no `self` or any.
    if isinstance(cls, type) and cls not in (object, types.NoneType):
      places.setdefault(cls, []).append(path)
  for frame in reversed(frames):
    for cls in type(frame.f_locals.get("self")).__mro__:
      if cls in places:
        return places[cls]
  return []


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
        override.text,
        knob.annotation,
        current=knob.default,
        packages=override.packages,
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
  from paxon.runner import knobs
  from paxon.runner.configuration import rewrites

  name = type(experiment).__name__
  try:
    config = experiment.job()
  except knobs.KnobError as error:
    raise user_error.UserError(str(error)) from error
  except _VALUE_ERRORS as error:
    raise user_error.UserError(
      f"{name} has no valid configuration: {error}"
      f" ({user_error.find_location(error)})"
    ) from error
  notes = []
  for override in paths:
    first = overrides.parse_steps(override)[0]
    known = [*tree.field_names(config), *type(experiment).knobs()]
    if first not in known:
      raise user_error.UserError(
        f"{override}: {name} has no knob and Job no field {first!r}"
        f"{_suggest_path(config, override, str(first), known)}"
      )
    if first == _EXPERIMENT:
      raise user_error.UserError(
        f"{override}: {_EXPERIMENT!r} cannot be overridden; use --exp."
      )
    if first in _COUNTED and experiment.num_epochs is not None:
      raise user_error.UserError(
        f"{override}: {name}.{knobs.EPOCHS} counts the batches without it;"
        f" set {knobs.STEPS} instead."
      )
    notes.append(overrides.apply(config, override))
  rewrites.check_dtypes(config)
  return config, tuple(note for note in notes if note)


def _suggest_path(
  config: "fdl.Config[job_lib.Job]",
  override: overrides.Override,
  first: str,
  known: Sequence[str],
) -> str:
  """Returns the end of an error: where such a field is, or similar names."""
  places = [
    path for path, node in tree.nodes(config) if first in tree.field_names(node)
  ]
  if not places:
    return suggestions.suggest(first, known)
  return f"; did you mean '{min(places, key=len)}.{override.path}'?"

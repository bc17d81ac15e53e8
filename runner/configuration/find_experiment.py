"""From the name of an experiment, `tasks.lm.params.c4.C4`, to its class."""

from collections.abc import Sequence
import difflib
import importlib
import importlib.util
import inspect
import types
from typing import TYPE_CHECKING

from paxon.runner import user_error
from paxon.runner.configuration import experiment_index
from paxon.sharding import suggestions

if TYPE_CHECKING:
  from paxon.runner import experiment

_PREFIXES = ("paxon.", "")
# No import path is longer, and a message that quotes one stays readable.
_MAX_NAME = 250


def find_experiment(
  name: str, *, packages: Sequence[str] = ()
) -> type["experiment.Experiment"]:
  """Imports an experiment.

  `a.b.C` is the class `C` of the module `paxon.a.b` or, where there is no such
  class, of `a.b`.

  Args:
    name: The dotted name.
    packages: Packages whose experiments are proposed for a wrong name.

  Raises:
    user_error.UserError: There is no such module or class, its module cannot
      be imported, or it is no experiment that can run.
  """
  if len(name) > _MAX_NAME:
    raise user_error.UserError(
      f"--exp={name[:20]}... has {len(name)} characters; write it as a.b.C."
    )
  module_name, _, class_name = name.rpartition(".")
  modules = [f"{p}{module_name}" for p in _PREFIXES if _exists(module_name, p)]
  for module in modules:
    found = getattr(_import(module), class_name, None)
    if found is not None and not isinstance(found, types.ModuleType):
      return _checked(found, f"{module}.{class_name}", packages)
  for prefix in _PREFIXES:
    if _exists(name, prefix):
      # A package may hold anything, such as another checkout's worth of
      # folders; a module is read in no time.
      spec = importlib.util.find_spec(f"{prefix}{name}")
      is_package = spec is not None and spec.submodule_search_locations
      hint = _hint(name, packages if is_package else [f"{prefix}{name}"])
      raise user_error.UserError(
        f"--exp={name} is a module; name a class in it{hint}"
      )
  if modules:
    raise _no_class(name, class_name, modules, packages)
  what = f"there is no module {module_name!r}" if module_name else "no module"
  if not module_name:
    what = "it has no module; write it as a.b.C"
  raise user_error.UserError(f"--exp={name}: {what}{_hint(name, packages)}")


def _exists(module: str, prefix: str) -> bool:
  """Whether a module can be found; packages above it are imported for that."""
  if not module or not all(p.isidentifier() for p in module.split(".")):
    return False
  parts = (prefix + module).split(".")
  for end in range(1, len(parts) + 1):
    name = ".".join(parts[:end])
    try:
      if importlib.util.find_spec(name) is None:
        return False
    except ModuleNotFoundError as error:
      # `a.b` does not exist, or `a` is no package: not found. A package whose
      # own imports are missing is broken, which is another message.
      if error.name is not None and name.startswith(error.name):
        return False
      raise _broken(".".join(parts[: end - 1]), error) from error
    except Exception as error:
      raise _broken(".".join(parts[: end - 1]), error) from error
  return True


def _import(module: str) -> object:
  try:
    return importlib.import_module(module)
  except Exception as error:
    raise _broken(module, error) from error


def _broken(module: str, error: Exception) -> user_error.UserError:
  """Says why a module failed to import, and in which line."""
  reason = error.msg if isinstance(error, SyntaxError) else str(error)
  return user_error.UserError(
    f"--exp: the module {module} failed to import because of"
    f" {type(error).__name__}: {reason}"
    f" ({user_error.place_of(error)})"
  )


def _checked(
  found: object, name: str, packages: Sequence[str]
) -> type["experiment.Experiment"]:
  from paxon.runner import experiment

  is_class = isinstance(found, type)
  if not is_class or not issubclass(found, experiment.Experiment):
    raise user_error.UserError(
      f"--exp={name} is no experiment, but a"
      f" {'class' if is_class else type(found).__name__} of another kind"
      f"{_hint(name, packages)}"
    )
  if inspect.isabstract(found):
    missing = ", ".join(sorted(found.__abstractmethods__))
    raise user_error.UserError(
      f"--exp={name} is only a base of experiments: it lacks {missing}"
      f"{_hint(name, packages)}"
    )
  return found


def _no_class(
  name: str, class_name: str, modules: list[str], packages: Sequence[str]
) -> user_error.UserError:
  listed = experiment_index.list_experiments(modules)
  inside = [
    entry.name.rpartition(".")[2]
    for entry in listed
    if entry.name.rpartition(".")[0] in modules
  ]
  if not inside:
    return user_error.UserError(
      f"--exp={name}: the module {modules[0]} has no experiment"
      f"{_hint(name, packages)}"
    )
  return user_error.UserError(
    f"--exp={name}: the module {modules[0]} has no experiment {class_name!r}"
    f"{suggestions.suggest(class_name, inside)}"
  )


def _hint(name: str, packages: Sequence[str]) -> str:
  """Returns `; did you mean 'x'?` for the closest of all experiments."""
  try:
    entries = experiment_index.list_experiments(packages)
  except ImportError:
    return "."
  full = [entry.name.removeprefix("paxon.") for entry in entries]
  if not full:
    return "."
  # The class weighs as much as the path to it: either may be misspelled.
  wanted, last = name.removeprefix("paxon.").lower(), name.rpartition(".")[2]

  def likeness(candidate: str) -> float:
    own = candidate.rpartition(".")[2].lower()
    return (
      difflib.SequenceMatcher(None, wanted, candidate.lower()).ratio()
      + difflib.SequenceMatcher(None, last.lower(), own).ratio()
    )

  best = max(full, key=likeness)
  if likeness(best) > 0.8:
    return f"; did you mean {best!r}?"
  return f"; --list prints all {len(full)}, such as {best!r}."

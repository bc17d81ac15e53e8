"""The knobs of an experiment class: annotated class attributes, checked.

In Pax a misspelled knob was a new attribute that nobody read, and the run
trained the wrong model in silence. Here every public name in the body of an
experiment is either a method, a constant annotated as `ClassVar`, or a knob
that the class or one of its bases declares by an annotation; anything else is
an error at class creation.
"""

from collections.abc import Callable, Generator, Mapping
import contextlib
import copy
import dataclasses
import functools
import inspect
import re
import typing
from typing import Any, ClassVar, Final, TypeVar

from paxon.runner import user_error
from paxon.runner.configuration import annotations
from paxon.sharding import suggestions

# Not `typing.Self`, which the shape checker of the tests cannot read.
_Group = TypeVar("_Group", bound="Group")

REQUIRED: Any = object()

STEPS: Final = "num_train_steps"
EPOCHS: Final = "num_epochs"
BATCH: Final = "global_batch_size"
PER_DEVICE: Final = "per_device_batch_size"
# Pairs of a knob and another one that sets it.
EXCLUSIVE: Final = ((BATCH, PER_DEVICE), (STEPS, EPOCHS))
# `name` is the experiment's name in reports; every class may set it.
_FREE_NAMES = frozenset({"name"})
_COMPUTED = (property, functools.cached_property)
_MUTABLE = (list, dict, set)


class KnobError(TypeError):
  """A knob that does not exist, has another type, or that nothing reads."""


@dataclasses.dataclass(frozen=True)
class Knob:
  """One knob of an experiment class.

  Attributes:
    name: Its name.
    annotation: Its evaluated type.
    owner: The name of the class that declares it.
    default: Its value in the class, `REQUIRED` if it has none. A property
      computes the default of each instance from other knobs.
  """

  name: str
  annotation: Any
  owner: str
  default: Any


class Group:
  """The knobs of a feature, declared as annotated attributes.

  An experiment that has a group as a base has its knobs: they are set and read
  as if it had declared them. Code of the feature takes the group:

  ```python
  class OptimizerKnobs(knobs.Group):
    learning_rate: float = 1e-3


  class Mine(OptimizerKnobs, experiment.Experiment):
    def task(self):
      learner = make_learner(self.get_group(OptimizerKnobs))
  ```

  A group can also be made by itself, `OptimizerKnobs(learning_rate=0.1)`.
  """

  _knobs: ClassVar[Mapping[str, Knob]] = {}
  _given: dict[str, Any]
  # The knobs read so far, while reads are recorded.
  _read: set[str] | None = None
  # The experiment whose values this group has.
  _viewed: "Group | None" = None

  def __init_subclass__(cls, **kwargs: object) -> None:
    """Checks the knobs of a new class; raises KnobError."""
    super().__init_subclass__(**kwargs)
    cls._knobs = collect(cls, root=Group)

  def __init__(self, **given: object) -> None:
    """Creates an instance with these values of knobs; raises KnobError."""
    cls, known = type(self), type(self)._knobs
    values = {}
    for name, given_value in given.items():
      if name not in known:
        raise unknown(cls, name, known)
      values[name] = value(cls, known[name], given_value)
    derived = _resolve_exclusive(cls, known, values)
    for name, knob in known.items():
      if name in derived:
        continue
      if knob.default is REQUIRED and name not in values:
        raise KnobError(
          f"{cls.__name__}.{name} has no value; set it in a subclass, or pass"
          f" {name}=..."
        )
    object.__setattr__(self, "_given", values)

  def __getattribute__(self, name: str) -> Any:
    """Returns an attribute; records reads of knobs."""
    if name.startswith("_") or name not in type(self)._knobs:
      return object.__getattribute__(self, name)
    if self._viewed is not None:
      return getattr(self._viewed, name)
    if self._read is not None:
      self._read.add(name)
    found = self._get_knob(name)
    # A list that a caller changes must not change the class.
    return copy.deepcopy(found) if isinstance(found, _MUTABLE) else found

  def _get_knob(self, name: str) -> Any:
    """Returns the value of a knob, which the caller must not change."""
    knob = type(self)._knobs[name]
    if name in self._given:
      return self._given[name]
    if isinstance(knob.default, property):
      return value(type(self), knob, object.__getattribute__(self, name))
    return knob.default

  def __setattr__(self, name: str, value: object) -> None:
    """Raises AttributeError: knobs are immutable."""
    raise AttributeError(
      f"{type(self).__name__} is immutable; use replace({name}=...)."
    )

  def __repr__(self) -> str:
    given = ", ".join(f"{name}={v!r}" for name, v in self._given.items())
    return f"{type(self).__name__}({given})"

  @classmethod
  def knobs(cls) -> Mapping[str, Knob]:
    """Returns the knobs by name, knobs of bases first."""
    return cls._knobs

  def given_knobs(self) -> dict[str, Any]:
    """Returns the knobs that this object was given, by name."""
    return dict(self._given)

  def get_group(self, group: type[_Group]) -> _Group:
    """Returns the knobs of one group; reading one of them reads it here.

    Raises:
      KnobError: The group is not a base of the class.
    """
    if not isinstance(self, group):
      raise make_error(self, f" has no group {group.__name__}; make it a base.")
    made = object.__new__(group)
    names = self._given.keys() & group._knobs.keys()
    object.__setattr__(made, "_given", {n: self._given[n] for n in names})
    object.__setattr__(made, "_viewed", self)
    return made

  def _peek(self, name: str) -> Any:
    """Returns a knob's value without recording a read."""
    read = self._read
    object.__setattr__(self, "_read", None)
    try:
      return getattr(self, name)
    finally:
      object.__setattr__(self, "_read", read)

  @contextlib.contextmanager
  def _tracked_reads(self) -> Generator[set[str], None, None]:
    read: set[str] = set()
    object.__setattr__(self, "_read", read)
    try:
      yield read
    finally:
      object.__setattr__(self, "_read", None)


def collect(cls: type, *, root: type) -> dict[str, Knob]:
  """Checks a new class and returns its knobs, knobs of bases first.

  Args:
    cls: The class, just created.
    root: The class whose subclasses were checked when they were made.

  Raises:
    KnobError: The class has a public attribute that no base declares, a
      default of another type, or a method where a knob is, or the reverse.
  """
  declared: dict[str, tuple[Any, str]] = {}
  for klass in reversed(cls.__mro__):
    # Skip knobs already checked on a base class; mixins are checked here.
    checked = klass is not cls and issubclass(klass, root)
    own = {} if klass is object else _own_annotations(klass)
    if not checked and klass.__module__ not in ("builtins", "abc", "typing"):
      _check_body(cls, klass, own, declared)
    for name, annotation in own.items():
      if not _is_class_variable(annotation):
        declared[name] = annotation, klass.__name__
  return {
    name: _knob(cls, name, annotation, owner)
    for name, (annotation, owner) in declared.items()
  }


def describe(cls: type) -> dict[str, str]:
  """Returns the descriptions of attributes, each one line, by name.

  They are those of the section `Attributes` of the class's docstring, or of the
  nearest base that describes the attribute.
  """
  found: dict[str, str] = {}
  for klass in reversed(cls.__mro__):
    doc = klass.__dict__.get("__doc__") or ""
    _, _, section = inspect.cleandoc(doc).partition("Attributes:\n")
    name = None
    for line in section.splitlines():
      if line and not line.startswith(" "):
        break
      started = re.match(r"  (\w+): (.*)", line)
      if started is not None:
        name, found[started[1]] = started[1], started[2]
      elif name is not None and line:
        found[name] += f" {line.strip()}"
  return found


def value(cls: type, knob: Knob, given: Any) -> Any:
  """Returns a value as the knob's type, or raises KnobError."""
  try:
    return annotations.coerce(given, knob.annotation)
  except annotations.MismatchError as error:
    text = f"{cls.__name__}.{knob.name}: {error}"
    raise KnobError(user_error.sentence(text)) from None


def _resolve_exclusive(
  cls: type, known: Mapping[str, Knob], values: dict[str, Any]
) -> set[str]:
  """Unsets knobs of a class that the values given to an instance replace.

  Args:
    cls: The class.
    known: Its knobs.
    values: The given values, to which unset knobs are added as None.

  Returns:
    The knobs that others of `EXCLUSIVE` set.

  Raises:
    KnobError: Both knobs of a pair are given, or set by the class itself, or a
      number of epochs is not positive.
  """
  derived = set()
  for name, other in EXCLUSIVE:
    if other not in known:
      continue
    of_class = known[other].default
    if values.get(other, of_class) is None:
      continue
    pair = {name, other}
    is_of_class = pair <= vars(cls).keys() and pair.isdisjoint(values)
    if pair <= values.keys() or is_of_class:
      raise KnobError(
        f"{cls.__name__}.{other} and {name} are both set; set one."
      )
    values.setdefault(other, None if name in values else of_class)
    if values[other] is not None:
      derived.add(name)
  if (count := values.get(EPOCHS)) is not None and count < 1:
    raise KnobError(f"{cls.__name__}.{EPOCHS} must be positive, got {count}.")
  return derived


def make_error(group: Group, text: str) -> KnobError:
  """Returns an error whose text begins with the name of the experiment."""
  return KnobError(f"{type(group._viewed or group).__name__}{text}")


def unknown(cls: type, name: str, known: Mapping[str, Knob]) -> KnobError:
  """Returns the error for a knob that does not exist."""
  return KnobError(
    f"{cls.__name__} has no knob {name!r}{suggestions.suggest(name, known)}"
  )


def _knob(cls: type, name: str, annotation: Any, owner: str) -> Knob:
  default = inspect.getattr_static(cls, name, REQUIRED)
  knob = Knob(name=name, annotation=annotation, owner=owner, default=default)
  if default is REQUIRED or isinstance(default, _COMPUTED):
    return knob
  checked = value(cls, knob, default)
  return dataclasses.replace(knob, default=checked)


def _own_annotations(klass: type) -> dict[str, Any]:
  """Returns the evaluated public annotations of one class body."""
  try:
    found = inspect.get_annotations(klass, eval_str=True)
  except Exception as error:
    raise KnobError(
      f"{klass.__name__} has an annotation that cannot be evaluated: {error}."
      " Knobs need types that exist at run time."
    ) from error
  return {
    name: annotation
    for name, annotation in found.items()
    if not name.startswith("_") and name not in _FREE_NAMES
  }


def _is_class_variable(annotation: Any) -> bool:
  return annotation is ClassVar or typing.get_origin(annotation) is ClassVar


def _check_body(
  cls: type,
  klass: type,
  own: Mapping[str, Any],
  declared: Mapping[str, tuple[Any, str]],
) -> None:
  """Checks the names that one class body binds or annotates."""
  for name in own:
    if _method_of_bases(klass, name):
      raise KnobError(
        f"{klass.__name__}.{name} is annotated as a knob, but"
        f" {_method_of_bases(klass, name)} has a method of that name."
      )
  for name, bound in vars(klass).items():
    if name.startswith("_") or name in _FREE_NAMES or name in own:
      continue
    method_owner = _method_of_bases(klass, name)
    is_method = _is_defined_in(bound, klass)
    if name in declared:
      if is_method and not isinstance(bound, _COMPUTED):
        raise KnobError(
          f"{klass.__name__}.{name} is a method, but {declared[name][1]}"
          f" declares a knob of that name; assign a value, or make it a"
          " property."
        )
    elif method_owner and (not is_method or isinstance(bound, _COMPUTED)):
      raise KnobError(
        f"{klass.__name__}.{name} must be a method, as in {method_owner}, but"
        f" is a {type(bound).__name__}."
      )
    elif not is_method and not _is_constant_of_bases(klass, name):
      known = {*declared, *own, *_knobs_below(cls, klass)}
      close = suggestions.suggest(name, known)
      raise KnobError(
        f"{klass.__name__}.{name} is assigned, but no class declares a knob"
        f" {name!r}{close} A new knob needs an annotation, such as '{name}:"
        f" {type(bound).__name__} = ...', a constant ClassVar."
      )


def _knobs_below(cls: type, klass: type) -> set[str]:
  """Returns annotated names of all of `cls`, for suggestions to a mixin."""
  return {
    name
    for base in cls.__mro__
    if base not in (klass, object)
    for name in inspect.get_annotations(base)
    if not name.startswith("_")
  }


def _is_defined_in(bound: Any, klass: type) -> bool:
  """Whether a value is a method, property or class written in this body.

  A function from elsewhere that is assigned to a name is a value, not a method.
  """
  if isinstance(bound, classmethod | staticmethod | functools.partialmethod):
    return True
  if isinstance(bound, _COMPUTED):
    return True
  qualname = getattr(bound, "__qualname__", "")
  return (
    isinstance(bound, Callable)
    and getattr(bound, "__module__", None) == klass.__module__
    and qualname.startswith(f"{klass.__qualname__}.")
  )


def _method_of_bases(klass: type, name: str) -> str | None:
  """Returns the name of the base that has a plain method of this name."""
  for base in klass.__mro__[1:]:
    bound = vars(base).get(name)
    if bound is not None:
      is_method = isinstance(
        bound, classmethod | staticmethod
      ) or inspect.isfunction(bound)
      return base.__name__ if is_method and base is not object else None
  return None


def _is_constant_of_bases(klass: type, name: str) -> bool:
  """Whether a base declares the name as `ClassVar`."""
  for base in klass.__mro__[1:]:
    annotation = inspect.get_annotations(base).get(name)
    if annotation is not None:
      return "ClassVar" in str(annotation)
  return False

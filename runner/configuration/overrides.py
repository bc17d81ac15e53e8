"""Assignments from the command line: `--fdl.<path>=<value>`.

A path leads through configuration nodes, dictionaries and sequences. Fields
must exist: an error suggests the closest name. A value is checked against the
annotation of its field.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import re
import typing
from typing import Any

import fiddle as fdl

from paxon.runner import user_error
from paxon.runner.configuration import annotations, text_values, tree
from paxon.sharding import suggestions

PREFIX = "fdl."

# A name, or [0], or ['any text'], with the dot before a name.
_STEP = re.compile(
  r"""(?P<dot>\.)?(?P<name>[^\W\d]\w*)|\[(?P<index>-?\d+)\]"""
  r"""|\[(?P<quote>['"]?)(?P<key>[^'"\[\]]+)(?P=quote)\]"""
)


@dataclasses.dataclass(frozen=True)
class Override:
  """One assignment, as typed.

  Attributes:
    path: The name of a knob, or a path in the configuration.
    text: The value.
    packages: Top-level packages whose functions it may name; None for any.
  """

  path: str
  text: str
  packages: frozenset[str] | None = dataclasses.field(
    default=None, compare=False, repr=False
  )

  def __str__(self) -> str:
    text = self.text if len(self.text) <= 60 else self.text[:60] + "..."
    return f"--{PREFIX}{self.path}={text}"


def parse_argument(argument: str) -> Override | None:
  """Returns the assignment in a command-line argument, None if it has none.

  Raises:
    user_error.UserError: The assignment is malformed.
  """
  body = argument.removeprefix("-").removeprefix("-")
  if body == argument or not body.startswith(PREFIX):
    return None
  path, equals, text = body.removeprefix(PREFIX).partition("=")
  if not equals:
    raise user_error.UserError(
      f"{argument} has no value; write --{PREFIX}{path or 'NAME'}=VALUE."
    )
  override = Override(path=path, text=text)
  parse_steps(override)
  return override


def split_arguments(
  arguments: Sequence[str],
) -> tuple[list[Override], list[str]]:
  """Returns the assignments among command-line arguments, and the rest.

  Raises:
    user_error.UserError: An assignment is malformed.
  """
  found, rest = [], []
  for argument in arguments:
    override = parse_argument(argument)
    if override is None:
      rest.append(argument)
    else:
      found.append(override)
  return found, rest


def parse_steps(override: Override) -> list[str | int]:
  """Returns the names, keys and indices of the path, or raises UserError."""
  steps: list[str | int] = []
  position = 0
  while position < len(override.path):
    match = _STEP.match(override.path, position)
    named = match is not None and match["name"] is not None
    if match is None or (named and bool(match["dot"]) != bool(steps)):
      bad = override.path[position:]
      raise user_error.UserError(
        f"{override}: cannot read {bad!r} in the path; write it like"
        " 'task.model.blocks[0].dropout'."
      )
    if match["index"] is not None:
      # Digits beyond any sequence, and beyond what int() takes, stay one step.
      steps.append(int(match["index"][:19]))
    else:
      steps.append(match["name"] or match["key"])
    position = match.end()
  if not steps:
    raise user_error.UserError(
      f"{override} has no name; write --{PREFIX}NAME=VALUE."
    )
  return steps


def apply(config: fdl.Buildable, override: Override) -> str | None:
  """Sets one value in a configuration, in place.

  Returns:
    A note if the value belongs to a node that is used at several paths.

  Raises:
    user_error.UserError: The path does not exist, or the value does not fit.
  """
  setter = _Setter(override)
  setter.set(config, parse_steps(override), annotation=Any, path="")
  if setter.owner is None:
    return None
  path, node = setter.owner
  others = [place for place in tree.places(config, node) if place != path]
  if not others:
    return None
  return (
    f"{override} also changes {', '.join(others)}, because it is the same node"
    f" as {path}."
  )


class _Setter:
  """Sets one value; `owner` is then the innermost node and its path."""

  def __init__(self, override: Override):
    self.override = override
    self.owner: tuple[str, fdl.Buildable] | None = None

  def set(
    self, value: Any, steps: Sequence[str | int], *, annotation: Any, path: str
  ) -> Any:
    """Returns `value` with the new value set; nodes change in place."""
    if not steps:
      return self._leaf(value, annotation, path)
    step, rest = steps[0], steps[1:]
    if isinstance(value, fdl.Buildable):
      return self._in_node(value, step, rest, path)
    if isinstance(value, Mapping):
      key = self._key(value, step, path)
      child = self.set(
        value[key],
        rest,
        annotation=_element(annotation, 1),
        path=tree.join(path, key),
      )
      return {**value, key: child}
    if isinstance(value, list | tuple):
      return self._in_sequence(value, step, rest, annotation, path)
    raise self._no_entry(value, step, path)

  def _leaf(self, value: Any, annotation: Any, path: str) -> Any:
    try:
      return text_values.parse(
        self.override.text,
        annotation,
        current=value,
        packages=self.override.packages,
      )
    except annotations.MismatchError as error:
      if isinstance(value, fdl.Buildable):
        name = tree.join(path, next(iter(tree.field_names(value)), "FIELD"))
        raise self._error(
          f"{path} is a node ({_name(value)}); set one of its fields, such as"
          f" {name}"
        ) from None
      raise self._error(str(error)) from None

  def _in_node(
    self,
    node: fdl.Buildable,
    step: str | int,
    rest: Sequence[str | int],
    path: str,
  ) -> fdl.Buildable:
    names = tree.field_names(node)
    if step not in names:
      hint = suggestions.suggest(str(step), names)
      place = f" at {path}" if path else ""
      raise self._error(f"{_name(node)}{place} has no field {step!r}{hint}")
    name = str(step)
    self.owner = path, node
    value = tree.get_value(node, name)
    if rest and not tree.is_set(node, name):
      value = _configure_default(value)
    child = self.set(
      value,
      rest,
      annotation=tree.get_annotations(node).get(name, Any),
      path=tree.join(path, name),
    )
    setattr(node, name, child)
    return node

  def _key(self, value: Mapping[Any, Any], step: str | int, path: str) -> Any:
    if step in value:
      return step
    hint = suggestions.suggest(str(step), map(str, value))
    raise self._error(f"{path} has no key {step!r}{hint}")

  def _in_sequence(
    self,
    value: list | tuple,
    step: str | int,
    rest: Sequence[str | int],
    annotation: Any,
    path: str,
  ) -> list | tuple:
    count = len(value)
    if not isinstance(step, int):
      raise self._error(
        f"{path} is a sequence of {count}; write an index, such as {path}[0],"
        f" instead of {step!r}"
      )
    if not 0 <= step < count:
      valid = f"valid are 0 to {count - 1}" if count else "it is empty"
      raise self._error(f"{path} has no element {step}; {valid}")
    items = list(value)
    items[step] = self.set(
      value[step],
      rest,
      annotation=_element(annotation, step),
      path=tree.join(path, step),
    )
    if isinstance(value, list):
      return items
    make = getattr(value, "_make", tuple)  # A named tuple keeps its class.
    return make(items)

  def _no_entry(
    self, value: Any, step: str | int, path: str
  ) -> user_error.UserError:
    if value is None or value is fdl.NO_VALUE:
      what = "is not set"
    elif callable(value):
      what = "is a function or class, which cannot be changed from here"
    elif isinstance(value, bool | int | float | str):
      what = f"is a {type(value).__name__}"
    else:
      what = f"is an instance of {type(value).__name__}, not a configuration"
    return self._error(f"{path} {what}; it has no field {step!r}")

  def _error(self, what: str) -> user_error.UserError:
    text = user_error.sentence(f"{self.override}: {what}")
    return user_error.UserError(text)


def _configure_default(value: Any) -> Any:
  """Returns a default dataclass as a configuration, others unchanged."""
  if not dataclasses.is_dataclass(value) or isinstance(value, type):
    return value
  return tree.to_config(value)


def _name(node: fdl.Buildable) -> str:
  target = fdl.get_callable(node)
  return getattr(target, "__name__", type(target).__name__)


def _element(annotation: Any, index: int) -> Any:
  """Returns the annotation of an element, or Any where none is written."""
  for part in annotations.members(annotation):
    args = typing.get_args(part)
    if not args:
      continue
    if len(args) == 2 and args[1] is Ellipsis:
      return args[0]
    if typing.get_origin(part) in (list, set, frozenset):
      return args[0]
    return args[index] if index < len(args) else args[0]
  return Any

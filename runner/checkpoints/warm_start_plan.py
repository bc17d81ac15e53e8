r"""Plan of a warm start: the source array of each target, by names and shapes.

Patterns map the names of a model's variables to those in a checkpoint. A
pattern is a pair: a regular expression that must match a target's whole name,
and a template of the source's name, in which `\1` and `\g<word>` stand for
groups. A template `None` keeps the target's initial value. The first matching
pattern wins, and a name without a match keeps its name:

  (r"params/encoder/(.*)", r"params/decoder/\1"),
  (r"params/head/.*", None),

A template may end with a numpy index or slice of the source's first axis. It
takes layers of a stack, for a model with another pattern of layers:

  (r"(.*)/blocks_1/(.*)", r"\1/blocks_0/\2[1::2]"),

Optimizer and average state follows its variable: if `params/a` is read from
`params/b`, `opt_state/0/mu/params/a` is read from `opt_state/0/mu/params/b`. No
array is read here.
"""

from collections.abc import Iterable, Mapping, Sequence
import dataclasses
import os
import re
from typing import Any

import jax.numpy as jnp

from paxon.runner import user_error
from paxon.runner.checkpoints import stored_checkpoint
from paxon.runner.settings import training
from paxon.sharding import suggestions

_AVERAGE = "average/"
_COUNT = "average/count"
# The end of a template.
_ENTRIES = re.compile(r"\[(-?\d+|-?\d*:-?\d*(?::-?[1-9]\d*)?)\]$")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Matching:
  """The source of each target.

  Attributes:
    sources: The source's name by target, for existing sources.
    absent: The source's name by target, for missing sources.
    initial: Targets that a pattern leaves at their initial values.
    unused: Sources that no target reads.
    uses: Number of targets that each pattern was the first to match.
    entries: Index or slice of the source's first axis by target, if any.
  """

  sources: Mapping[str, str]
  absent: Mapping[str, str]
  initial: tuple[str, ...]
  unused: tuple[str, ...]
  uses: tuple[int, ...]
  entries: Mapping[str, int | slice] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
  """The arrays that a warm start reads.

  Attributes:
    start: The settings.
    checkpoint: The source.
    matching: The sources of the model's variables.
    reads: The source's name by target for all arrays to read: variables, and
      the training state if requested.
    kept: Names of the training state that keep their initial values although
      the training state was requested.
    entries: Index or slice of the source's first axis by target, if any.
    repeats: Axes of a target, by name, along which its source is repeated.
    averages: Averaged parameters by target, read in place of `reads`.
    targets: All specs of the model's state, by name.
  """

  start: training.WarmStart
  checkpoint: stored_checkpoint.StoredCheckpoint
  matching: Matching
  reads: Mapping[str, str]
  entries: Mapping[str, int | slice]
  repeats: Mapping[str, tuple[int, ...]]
  kept: tuple[str, ...]
  averages: Mapping[str, str]
  targets: Mapping[str, Any]


def make(
  start: training.WarmStart,
  *,
  checkpoint: stored_checkpoint.StoredCheckpoint,
  targets: Iterable[Any],
) -> Plan:
  """Returns the plan of a warm start; `targets` are specs of the whole state.

  Raises:
    user_error.UserError: A pattern is invalid, a variable has no source and may
      not be missing, nothing matches, or a shape or dtype differs.
  """
  wanted = {spec.name: spec for spec in targets}
  try:
    matching = match(
      [name for name in wanted if stored_checkpoint.is_variable(name)],
      checkpoint.variables(),
      patterns=start.patterns,
      field="WarmStart.patterns",
    )
  except training.PatternError as error:
    raise user_error.UserError(str(error)) from error
  if not matching.sources:
    raise user_error.UserError(
      f"The warm start from {os.fspath(checkpoint.path)} would read nothing:"
      " it contains none of the requested variables. It has"
      f" {_some(checkpoint.variables())}; the model has"
      f" {_some(filter(stored_checkpoint.is_variable, wanted))}."
    )
  _check_missing(start, checkpoint, matching.absent, list(wanted))
  reads, entries = dict(matching.sources), dict(matching.entries)
  kept: list[str] = []
  if start.training_state:
    others, missing, kept = _training_state(wanted, checkpoint, matching)
    kept += _check_missing(start, checkpoint, missing, list(wanted))
    reads |= others
    for name in others:
      _, owner = _split_owner(name, set(matching.sources))
      if owner in entries:
        entries[name] = entries[owner]
  repeats = _check_arrays(start, checkpoint, reads, entries, wanted)
  for index, axis in enumerate(start.repeated_axes):
    if not any(axis in wanted[name].axes for name in repeats):
      axes = {a for n in reads for a in wanted[n].axes if a}
      raise user_error.UserError(
        f"WarmStart.repeated_axes[{index}] ({axis!r}) has no effect: it is no"
        " axis of a variable whose source lacks it"
        + suggestions.suggest(axis, sorted(axes))
      )
  return Plan(
    start=start,
    checkpoint=checkpoint,
    matching=matching,
    reads=reads,
    entries=entries,
    repeats=repeats,
    kept=tuple(kept),
    averages=_averages(checkpoint, matching) if start.averaged else {},
    targets=wanted,
  )


def split(
  start: training.WarmStart, targets: Iterable[Any]
) -> list[tuple[training.WarmStart, list[Any]]]:
  """Returns each source with the specs that it initializes, `start` first."""
  found: list[tuple[training.WarmStart, list[Any]]] = [
    (each, []) for each in (start, *start.others)
  ]
  for spec in targets:
    index = 0
    for number, other in enumerate(start.others, start=1):
      if any(
        re.fullmatch(expression, spec.name) for expression, _ in other.patterns
      ):
        index = number
        break
    found[index][1].append(spec)
  return found


def match(
  targets: Sequence[str],
  sources: Iterable[str],
  *,
  patterns: Sequence[training.Pattern],
  field: str,
) -> Matching:
  """Finds the source of each target; `field` names the patterns in messages.

  Raises:
    training.PatternError: A pattern has no effect: it matches no target, or
      only targets that an earlier pattern matches.
  """
  training.check_patterns(patterns, field=field)
  compiled = [re.compile(expression) for expression, _ in patterns]
  known = list(sources)
  known_set = set(known)
  uses = [0] * len(patterns)
  found: dict[str, str] = {}
  absent: dict[str, str] = {}
  initial = []
  entries: dict[str, int | slice] = {}
  for target in targets:
    source: str | None = target
    for index, expression in enumerate(compiled):
      matched = expression.fullmatch(target)
      if matched:
        uses[index] += 1
        template = patterns[index][1]
        source = None if template is None else matched.expand(template)
        if source is not None and (taken := _ENTRIES.search(source)):
          source = source[: taken.start()]
          entries[target] = _parse_entries(taken[1])
        break
    if source is None:
      initial.append(target)
    elif source in known_set:
      found[target] = source
    else:
      absent[target] = source
  for index, count in enumerate(uses):
    if not count:
      raise _no_effect(targets, patterns, index, f"{field}[{index}]")
  read = set(found.values())
  return Matching(
    sources=found,
    absent=absent,
    initial=tuple(initial),
    unused=tuple(name for name in known if name not in read),
    uses=tuple(uses),
    entries=entries,
  )


def _parse_entries(text: str) -> int | slice:
  if ":" not in text:
    return int(text)
  return slice(*(int(part) if part else None for part in text.split(":")))


def _no_effect(
  targets: Sequence[str],
  patterns: Sequence[training.Pattern],
  index: int,
  place: str,
) -> training.PatternError:
  expression = patterns[index][0]
  shadowed = [name for name in targets if re.fullmatch(expression, name)]
  if shadowed:
    earlier = next(
      i for i in range(index) if re.fullmatch(patterns[i][0], shadowed[0])
    )
    return training.PatternError(
      f"{place} ({expression!r}) has no effect: every variable that it matches,"
      f" such as {shadowed[0]!r}, is matched by an earlier pattern, such as"
      f" {patterns[earlier][0]!r}; put the more specific one first."
    )
  return training.PatternError(
    f"{place} ({expression!r}) matches no variable of the model"
    + _suggest(expression, targets)
  )


def _suggest(expression: str, names: Iterable[str]) -> str:
  """Returns names close to a regular expression, for the end of an error."""
  plain = re.sub(r"\(\?P?<\w+>|[\\^$()\[\]{}?+*|]|\.(?=[*+])", "", expression)
  return suggestions.suggest(plain.strip("/"), names)


def _check_missing(
  start: training.WarmStart,
  checkpoint: stored_checkpoint.StoredCheckpoint,
  absent: Mapping[str, str],
  wanted: Sequence[str],
) -> list[str]:
  """Checks that all names of `absent` may be missing, and returns them."""
  for index, expression in enumerate(start.may_be_missing):
    if not any(re.fullmatch(expression, name) for name in wanted):
      raise user_error.UserError(
        f"WarmStart.may_be_missing[{index}] ({expression!r}) matches no"
        " variable of the model" + _suggest(expression, wanted)
      )
  problems = [
    _missing(name, source, checkpoint)
    for name, source in absent.items()
    if not any(re.fullmatch(e, name) for e in start.may_be_missing)
  ]
  if problems:
    names = "name" if len(problems) == 1 else "names"
    raise user_error.UserError(
      f"The warm start from {os.fspath(checkpoint.path)} lacks"
      f" {len(problems)} required {names}: {suggestions.limit(problems)};"
      " add a pattern, or list them in WarmStart.may_be_missing."
    )
  return list(absent)


def _missing(
  name: str, source: str, checkpoint: stored_checkpoint.StoredCheckpoint
) -> str:
  text = source if name == source else f"{source} (for {name})"
  close = suggestions.find_closest(source, checkpoint.arrays)
  return text + (f" (did you mean {close[0]}?)" if close else "")


def _training_state(
  wanted: Iterable[str],
  checkpoint: stored_checkpoint.StoredCheckpoint,
  matching: Matching,
) -> tuple[dict[str, str], dict[str, str], list[str]]:
  """Returns existing and missing sources by target, and targets to keep.

  The latter belong to variables that are not read.
  """
  variables = {*matching.sources, *matching.absent, *matching.initial}
  reads: dict[str, str] = {}
  missing: dict[str, str] = {}
  kept = []
  for name in wanted:
    if stored_checkpoint.is_variable(name):
      continue
    prefix, owner = _split_owner(name, variables)
    if owner is not None and owner not in matching.sources:
      kept.append(name)
      continue
    source = name if owner is None else prefix + matching.sources[owner]
    (reads if source in checkpoint.arrays else missing)[name] = source
  return reads, missing, kept


def _split_owner(name: str, variables: set[str]) -> tuple[str, str | None]:
  """Splits a name into a prefix and the name of its variable, if any."""
  parts = name.split("/")
  for start in range(1, len(parts)):
    rest = "/".join(parts[start:])
    if rest in variables:
      return name.removesuffix(rest), rest
  return name, None


def _check_arrays(
  start: training.WarmStart,
  checkpoint: stored_checkpoint.StoredCheckpoint,
  reads: Mapping[str, str],
  entries: Mapping[str, int | slice],
  wanted: Mapping[str, Any],
) -> dict[str, tuple[int, ...]]:
  """Returns the axes of each target along which its source is repeated."""
  problems = []
  repeats: dict[str, tuple[int, ...]] = {}
  for name, source in reads.items():
    spec, stored = wanted[name], checkpoint.arrays[source]
    taken = format_entries(entries[name]) if name in entries else ""
    source += taken
    shown = name if name == source else f"{name} (from {source})"
    dtype = jnp.dtype(spec.dtype)
    shape = _taken_shape(stored.shape, entries.get(name))
    missing = None
    if shape is not None:
      missing = _missing_axes(spec, shape, start.repeated_axes)
    named = () if missing is None else tuple(spec.axes[i] for i in missing)
    if missing is None or not set(named) <= set(start.repeated_axes):
      hint = ""
      if named:
        hint = f"; WarmStart.repeated_axes={named} makes copies along that axis"
      problems.append(
        f"{shown} has shape {stored.shape} in the checkpoint and"
        f" {tuple(spec.shape)} in the model (axes {spec.axes}){hint}"
      )
    elif dtype.name != stored.dtype:
      floats = all(
        jnp.issubdtype(each, jnp.floating)
        for each in (dtype, jnp.dtype(stored.dtype))
      )
      if not (floats and start.cast):
        hint = "; WarmStart.cast=True allows that" if floats else ""
        problems.append(
          f"{shown} has dtype {stored.dtype} in the checkpoint and"
          f" {dtype.name} in the model{hint}"
        )
    if missing:
      repeats[name] = missing
  if problems:
    raise user_error.UserError(
      f"The warm start from {os.fspath(checkpoint.path)} does not fit the"
      f" model: {suggestions.limit(problems)}."
    )
  return repeats


def format_entries(entries: int | slice) -> str:
  """Returns an index or slice as at the end of a template."""
  if isinstance(entries, int):
    return f"[{entries}]"
  parts = (entries.start, entries.stop, entries.step)
  return "[" + ":".join("" if p is None else str(p) for p in parts) + "]"


def _taken_shape(
  shape: tuple[int, ...], entries: int | slice | None
) -> tuple[int, ...] | None:
  """Returns the shape of an index or slice; `None` if it does not exist."""
  if entries is None:
    return shape
  if not shape:
    return None
  if isinstance(entries, int):
    return shape[1:] if -shape[0] <= entries < shape[0] else None
  return (len(range(shape[0])[entries]), *shape[1:])


def _missing_axes(
  spec: Any, shape: tuple[int, ...], repeated: Sequence[str]
) -> tuple[int, ...] | None:
  """Returns the axis of a target that a source lacks, `()` for equal shapes.

  `None` if the shapes differ otherwise. Only axes with names can be missing;
  of several that fit, one in `repeated` is preferred.
  """
  wanted = tuple(spec.shape)
  if wanted == shape:
    return ()
  fitting = [
    axis
    for axis, name in enumerate(spec.axes)
    if name and wanted[:axis] + wanted[axis + 1 :] == shape
  ]
  fitting.sort(key=lambda axis: spec.axes[axis] not in repeated)
  return tuple(fitting[:1]) or None


def _averages(
  checkpoint: stored_checkpoint.StoredCheckpoint, matching: Matching
) -> dict[str, str]:
  if _COUNT not in checkpoint.arrays:
    raise user_error.UserError(
      f"WarmStart.averaged is set, but {os.fspath(checkpoint.path)} has no"
      " averaged parameters: its learner has no `average`."
    )
  named = {name: _AVERAGE + source for name, source in matching.sources.items()}
  # Non-trainable variables have no average and are read directly.
  return {n: array for n, array in named.items() if array in checkpoint.arrays}


def _some(names: Iterable[str]) -> str:
  names = list(names)
  shown = ", ".join(names[:3]) or "none"
  return shown + (f" and {len(names) - 3} more" if len(names) > 3 else "")

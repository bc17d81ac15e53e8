"""What a warm start reads, decided from names, shapes and dtypes alone.

Patterns speak of the variables of the model. What an optimizer or an average
keeps for a variable, such as `opt_state/0/mu/params/a`, goes its variable's
way: it is read from `opt_state/0/mu/params/b` where `params/a` is read from
`params/b`, and left alone where `params/a` is.
"""

from collections.abc import Iterable, Mapping, Sequence
import dataclasses
import os
from typing import Any

import jax.numpy as jnp

from paxon.runner import user_error
from paxon.runner.checkpoints import (
  name_patterns,
  stored_checkpoint,
)
from paxon.runner.settings import training

# More than these would bury the message.
_MAX_PROBLEMS = 5
_AVERAGE = "average/"
_COUNT = "average/count"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
  """What is read and what is not.

  Attributes:
    start: What was asked for.
    checkpoint: The source.
    matching: The sources of the model's variables, by name.
    reads: The source's array by the target's name, for all that is read: the
      variables of `matching.sources`, and what else of the state.
    kept: Names of the rest of the state that keep their initial values
      although the training state was asked for.
    averages: The arrays of averaged parameters by target, where those are
      read in place of `reads`.
    targets: All specs of the model's state, by name.
  """

  start: training.WarmStart
  checkpoint: stored_checkpoint.StoredCheckpoint
  matching: name_patterns.Matching
  reads: Mapping[str, str]
  kept: tuple[str, ...]
  averages: Mapping[str, str]
  targets: Mapping[str, Any]


def make(
  start: training.WarmStart,
  *,
  checkpoint: stored_checkpoint.StoredCheckpoint,
  targets: Iterable[Any],
) -> Plan:
  """Decides what is read.

  Args:
    start: What is asked for.
    checkpoint: The source.
    targets: All of the state that is to be started: anything with a `name`, a
      `shape`, a `dtype` and `axes`, such as a `VariableSpec`.

  Raises:
    user_error.UserError: A pattern is wrong, a variable has no source and may
      not be missing, nothing matches, or a shape or dtype differs.
  """
  wanted = {spec.name: spec for spec in targets}
  matching = _match(start, checkpoint, list(wanted))
  if not matching.sources:
    raise user_error.UserError(
      f"The warm start from {_place(checkpoint)} would read nothing: none of"
      f" the model's variables is in it or asked for; it has"
      f" {_some(checkpoint.variables())}, and the model has"
      f" {_some(filter(stored_checkpoint.is_variable, wanted))}."
    )
  _check_missing(start, checkpoint, matching.absent, list(wanted))
  reads = dict(matching.sources)
  kept: list[str] = []
  if start.training_state:
    others, missing, kept = _training_state(wanted, checkpoint, matching)
    kept += _check_missing(start, checkpoint, missing, list(wanted))
    reads |= others
  _check_arrays(start, checkpoint, reads, wanted)
  return Plan(
    start=start,
    checkpoint=checkpoint,
    matching=matching,
    reads=reads,
    kept=tuple(kept),
    averages=_averages(checkpoint, matching) if start.averaged else {},
    targets=wanted,
  )


def _match(
  start: training.WarmStart,
  checkpoint: stored_checkpoint.StoredCheckpoint,
  wanted: Sequence[str],
) -> name_patterns.Matching:
  try:
    return name_patterns.match(
      [name for name in wanted if stored_checkpoint.is_variable(name)],
      checkpoint.variables(),
      patterns=start.patterns,
      field="WarmStart.patterns",
    )
  except training.PatternError as error:
    raise user_error.UserError(str(error)) from error


def _check_missing(
  start: training.WarmStart,
  checkpoint: stored_checkpoint.StoredCheckpoint,
  absent: Mapping[str, str],
  wanted: Sequence[str],
) -> list[str]:
  """Returns the names of `absent`, all of which may be missing."""
  for index, expression in enumerate(start.may_be_missing):
    if not any(
      name_patterns.matches_any(name, [expression]) for name in wanted
    ):
      raise user_error.UserError(
        f"WarmStart.may_be_missing[{index}] ({expression!r}) matches no"
        " variable of the model" + name_patterns.closest(expression, wanted)
      )
  refused = [
    (name, source)
    for name, source in absent.items()
    if not name_patterns.matches_any(name, start.may_be_missing)
  ]
  if refused:
    problems = [_missing(name, source, checkpoint) for name, source in refused]
    raise user_error.UserError(
      f"The warm start from {_place(checkpoint)} lacks"
      f" {len(refused)} of the names it needs: {_limited(problems)}; give a"
      " pattern for them, or name them in WarmStart.may_be_missing."
    )
  return list(absent)


def _missing(
  name: str, source: str, checkpoint: stored_checkpoint.StoredCheckpoint
) -> str:
  text = source if name == source else f"{source} (for {name})"
  close = name_patterns.closest_name(source, checkpoint.arrays)
  return text + (f", the closest is {close}" if close else "")


def _training_state(
  wanted: Iterable[str],
  checkpoint: stored_checkpoint.StoredCheckpoint,
  matching: name_patterns.Matching,
) -> tuple[dict[str, str], dict[str, str], list[str]]:
  """Returns what is read, what is missing, and what goes with left variables.

  The first two have the source's name by the target's.
  """
  variables = {*matching.sources, *matching.absent, *matching.initial}
  reads: dict[str, str] = {}
  missing: dict[str, str] = {}
  kept = []
  for name in wanted:
    if stored_checkpoint.is_variable(name):
      continue
    prefix, owner = _owner(name, variables)
    if owner is not None and owner not in matching.sources:
      kept.append(name)
      continue
    source = name if owner is None else prefix + matching.sources[owner]
    (reads if source in checkpoint.arrays else missing)[name] = source
  return reads, missing, kept


def _owner(name: str, variables: set[str]) -> tuple[str, str | None]:
  """Splits a name into what comes before a variable's name, and that name."""
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
  wanted: Mapping[str, Any],
) -> None:
  problems = []
  for name, source in reads.items():
    spec, stored = wanted[name], checkpoint.arrays[source]
    called = name if name == source else f"{name} (from {source})"
    to = jnp.dtype(spec.dtype)
    if tuple(spec.shape) != stored.shape:
      problems.append(
        f"{called} has shape {stored.shape} there and {tuple(spec.shape)} in"
        f" the model (axes {spec.axes})"
      )
    elif to.name != stored.dtype:
      floats = all(
        jnp.issubdtype(dtype, jnp.floating)
        for dtype in (to, jnp.dtype(stored.dtype))
      )
      if not (floats and start.cast):
        hint = "; WarmStart.cast=True allows that" if floats else ""
        problems.append(
          f"{called} has dtype {stored.dtype} there and {to.name} in the"
          f" model{hint}"
        )
  if problems:
    raise user_error.UserError(
      f"The warm start from {_place(checkpoint)} does not fit the model:"
      f" {_limited(problems)}."
    )


def _averages(
  checkpoint: stored_checkpoint.StoredCheckpoint,
  matching: name_patterns.Matching,
) -> dict[str, str]:
  if _COUNT not in checkpoint.arrays:
    raise user_error.UserError(
      f"WarmStart.averaged is set, but {_place(checkpoint)} has no averaged"
      " parameters; its learner kept none."
    )
  named = {name: _AVERAGE + source for name, source in matching.sources.items()}
  # What no optimizer changes has no average, and is itself.
  return {n: array for n, array in named.items() if array in checkpoint.arrays}


def _place(checkpoint: stored_checkpoint.StoredCheckpoint) -> str:
  return os.fspath(checkpoint.path)


def _limited(problems: Sequence[str]) -> str:
  shown = list(problems[:_MAX_PROBLEMS])
  if len(problems) > len(shown):
    shown.append(f"and {len(problems) - len(shown)} more")
  return "; ".join(shown)


def _some(names: Iterable[str]) -> str:
  names = list(names)
  shown = ", ".join(names[:3]) or "none"
  return shown + (f" and {len(names) - 3} more" if len(names) > 3 else "")

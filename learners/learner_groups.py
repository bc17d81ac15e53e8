"""Several learners in one task, each of some of the variables.

  LearnerGroups(
    groups=(
      LearnerGroup(
        name="generator",
        pattern="params/generator/.*",
        learner=Learner(optimizer=..., losses={"generator_loss": 1.0}),
      ),
      LearnerGroup(name="discriminator", ..., every_steps=2),
    ),
    program=InTurn(simultaneous=True),
  )

The model's metrics are their losses. Each learner has its optimizer, schedule,
clipping, average and gradients (of its variables only); its state is in
checkpoints under its name. The `program` defines a step of the training loop in
terms of their updates. A program of a single learner has one group, of `.*`.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import math
import re
from typing import Any, Protocol, TypeAlias, runtime_checkable

import jax
from jax.typing import ArrayLike

from paxon.learners import learner as learner_lib
from paxon.learners import skipping, variable_groups
from paxon.sharding import checks

# A `train_state.TrainState`.
State: TypeAlias = Any
Batch: TypeAlias = Mapping[str, jax.Array]
# Pairs (sum, weight).
Metrics: TypeAlias = dict[str, tuple[jax.Array, jax.Array]]
# Metrics by the name of a learner, or another first part of their names.
StepMetrics: TypeAlias = dict[str, Metrics]


@runtime_checkable
class Update(Protocol):
  """Updates the variables of one learner, once."""

  def __call__(
    self,
    state: State,
    batch: Batch,
    *,
    index: ArrayLike = 0,
    at: State | None = None,
  ) -> tuple[State, Metrics]:
    """Returns the state after the update, and metrics as of `make_train_step`.

    Args:
      state: The state to update; its step stays the same.
      batch: A batch of any size.
      index: Number of this update of the learner in the step, on which random
        keys depend; may be traced.
      at: A state at whose variables the gradients are computed; by default
        those of `state`.
    """
    ...


@runtime_checkable
class TrainProgram(Protocol):
  """Defines a step of the training loop."""

  def run_step(
    self,
    updates: Mapping[str, Update],
    state: State,
    batch: Batch,
  ) -> tuple[State, StepMetrics]:
    """Returns the state after a step, and metrics.

    It is traced once for each batch size. The caller advances the state's step.

    Args:
      updates: The updates of the learners, by name, in their order.
      state: The state before the step.
      batch: The batch of the step.
    """
    ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class InTurn:
  """Updates the variables of all learners once, one learner after the other.

  Attributes:
    simultaneous: Whether all gradients are those at the variables before the
      step; otherwise a learner sees the updates of those before it.
  """

  simultaneous: bool = False

  def run_step(
    self,
    updates: Mapping[str, Update],
    state: State,
    batch: Batch,
  ) -> tuple[State, StepMetrics]:
    """Makes a step (`TrainProgram`)."""
    before = state if self.simultaneous else None
    metrics = {}
    for name, update in updates.items():
      state, metrics[name] = update(state, batch, at=before)
    return state, metrics


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearnerGroup:
  """A learner and its variables.

  Attributes:
    name: Name of the learner in metrics and checkpoints.
    pattern: Regular expression that must match the whole logical name.
    learner: The learner; its `losses` are those of the model to minimize.
    every_steps: Interval of steps with updates of these variables.
  """

  name: str
  pattern: str
  learner: learner_lib.Learner
  every_steps: int = 1

  def __post_init__(self) -> None:
    checks.check_positive(self, "every_steps")
    if not re.fullmatch(r"\w+", self.name):
      raise ValueError(
        "LearnerGroup.name must consist of letters, digits and underscores, got"
        f" {self.name!r}."
      )
    checks.check_pattern("LearnerGroup.pattern", self.pattern)
    if self.learner.privacy is not None:
      raise ValueError(
        "LearnerGroup.learner must have no privacy, which is accounted for a"
        f" task with one learner; unset that of {self.name!r}."
      )
    if self.every_steps > 1 and self.learner.offload_state:
      raise ValueError(
        "LearnerGroup.learner must not offload_state if every_steps"
        f" ({self.every_steps}) is more than 1; unset that of {self.name!r}."
      )


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearnerGroups:
  """Several learners, in place of one `Learner` in a task.

  Attributes:
    groups: The learners; each optimized variable belongs to one.
    program: Defines a step of the training loop.
  """

  groups: Sequence[LearnerGroup]
  program: TrainProgram = InTurn()

  def __post_init__(self) -> None:
    names = [group.name for group in self.groups]
    if not names or len(set(names)) < len(names):
      raise ValueError(
        "LearnerGroups.groups must hold groups of different names, got"
        f" {', '.join(names) or 'none'}."
      )
    if not isinstance(self.program, TrainProgram):
      raise ValueError(
        "LearnerGroups.program must have a method `run_step`, got"
        f" {type(self.program).__name__}."
      )

  @property
  def num_microbatches(self) -> int:
    """A number of which a batch must have a multiple for all learners."""
    return math.lcm(*(g.learner.num_microbatches for g in self.groups))

  @property
  def offload_state(self) -> bool:
    """Whether any learner keeps optimizer state in host memory."""
    return any(group.learner.offload_state for group in self.groups)

  @property
  def privacy(self) -> None:
    """Always None."""

  @property
  def skip(self) -> skipping.SkipUpdates | None:
    """The condition of the first learner; None unless all have one."""
    found = [group.learner.skip for group in self.groups]
    return None if None in found else found[0]


AnyLearner: TypeAlias = learner_lib.Learner | LearnerGroups


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
  """A learner with specs in which only its variables are optimized.

  Attributes:
    name: Name of the learner; None if it is the only one.
    learner: The learner.
    specs: A `VariableSpec` for each variable of the model.
  """

  name: str | None
  learner: learner_lib.Learner
  specs: variable_groups.Specs


def split(learner: AnyLearner, specs: variable_groups.Specs) -> list[Part]:
  """Returns each learner with its variables.

  Raises:
    ValueError: A variable has no group or several, or a group no variable.
  """
  if isinstance(learner, learner_lib.Learner):
    return [Part(name=None, learner=learner, specs=specs)]
  optimized = [
    spec.name
    for spec in jax.tree.leaves(specs)
    if variable_groups.find_group(spec) is variable_groups.Group.OPTIMIZED
  ]
  owned: dict[str, set[str]] = {
    group.name: {n for n in optimized if re.fullmatch(group.pattern, n)}
    for group in learner.groups
  }
  for name in optimized:
    owners = [group for group, names in owned.items() if name in names]
    if len(owners) != 1:
      found = f"belongs to {' and '.join(owners)}" if owners else "has no group"
      raise ValueError(
        f"LearnerGroups.groups: {name} {found}, but must belong to one; change"
        " the patterns, or freeze the variable."
      )
  for group in learner.groups:
    if not owned[group.name]:
      raise ValueError(
        f"LearnerGroups.groups: the pattern {group.pattern!r} of"
        f" {group.name!r} matches no variable; it must match a whole name, such"
        f" as {optimized[0] if optimized else 'params/decoder/kernel'}."
      )
  return [
    Part(
      name=group.name,
      learner=group.learner,
      specs=_freeze_others(specs, owned[group.name]),
    )
    for group in learner.groups
  ]


def _freeze_others(
  specs: variable_groups.Specs, owned: set[str]
) -> variable_groups.Specs:
  """Returns specs without other optimized variables."""

  def freeze(spec: Any) -> Any:
    group = variable_groups.find_group(spec)
    if group is variable_groups.Group.OPTIMIZED and spec.name not in owned:
      return dataclasses.replace(spec, trainable=False)
    return spec

  return jax.tree.map(freeze, specs)


def collect(
  parts: Sequence[Part], make: Callable[[Part], Mapping[str, Any]]
) -> dict[str, Any]:
  """Returns the fields that `make` returns for each learner.

  With several learners a field holds values by the names of those whose value
  is not None, or is None without any.
  """
  if parts[0].name is None:
    return dict(make(parts[0]))
  found = {str(part.name): make(part) for part in parts}
  first = next(iter(found.values()))
  return {
    field: {n: x[field] for n, x in found.items() if x[field] is not None}
    or None
    for field in first
  }


def pick(field: Any, part: Part) -> Any:
  """Returns the value of one learner in a field of a state."""
  if part.name is None or field is None:
    return field
  return field.get(part.name)

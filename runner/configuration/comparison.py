"""Differences between configurations, and the effect of each.

Compares texts of `dump.to_text`, so that stored runs can be compared without
importing their classes. Effects are listed by class and field; fields that are
not listed change numerics.
"""

from collections.abc import Iterator, Mapping
import dataclasses
import enum
import types

ROOT = "<root>"


class Effect(enum.Enum):
  """What differs, the gravest first."""

  NUMERICS = "numerics: the trained values differ"
  THROUGHPUT = "throughput: the same numbers, up to rounding"
  EVALUATION = "evaluation: what is measured and sampled, not what is trained"
  BOOKKEEPING = "bookkeeping: when things are saved and shown, and names"


@dataclasses.dataclass(frozen=True)
class Rule:
  """What is known of a field and of all that is below it.

  Attributes:
    effect: What another value does.
    may_change: Whether a run that goes on may have another value: what it has
      computed so far would have been the same.
  """

  effect: Effect
  may_change: bool = False


_DEFAULT_RULE = Rule(Effect.NUMERICS)
_JOB = "paxon.runner.job.Job"

RULES: Mapping[str, Rule] = types.MappingProxyType(
  {
    f"{_JOB}.experiment": Rule(Effect.BOOKKEEPING),
    f"{_JOB}.eval_inputs": Rule(Effect.EVALUATION),
    f"{_JOB}.generation": Rule(Effect.EVALUATION, may_change=True),
    f"{_JOB}.baselines": Rule(Effect.EVALUATION, may_change=True),
    # Both say when training ends, not what a step does.
    f"{_JOB}.num_train_steps": Rule(Effect.NUMERICS, may_change=True),
    f"{_JOB}.early_stopping": Rule(Effect.NUMERICS, may_change=True),
    f"{_JOB}.checkpoint_every_steps": Rule(Effect.BOOKKEEPING, may_change=True),
    f"{_JOB}.eval_every_steps": Rule(Effect.BOOKKEEPING, may_change=True),
    f"{_JOB}.summary_every_steps": Rule(Effect.BOOKKEEPING, may_change=True),
    f"{_JOB}.retention": Rule(Effect.BOOKKEEPING, may_change=True),
    f"{_JOB}.observability": Rule(Effect.BOOKKEEPING, may_change=True),
    f"{_JOB}.expected_kernels": Rule(Effect.BOOKKEEPING, may_change=True),
    f"{_JOB}.mesh": Rule(Effect.THROUGHPUT, may_change=True),
    f"{_JOB}.rules": Rule(Effect.THROUGHPUT, may_change=True),
    f"{_JOB}.decode_mesh": Rule(Effect.EVALUATION, may_change=True),
    f"{_JOB}.decode_rules": Rule(Effect.EVALUATION, may_change=True),
    f"{_JOB}.weights": Rule(Effect.EVALUATION, may_change=True),
    f"{_JOB}.pgle": Rule(Effect.THROUGHPUT, may_change=True),
    "paxon.runner.task.Task.name": Rule(Effect.BOOKKEEPING),
    "paxon.runner.task.Task.metrics": Rule(Effect.EVALUATION),
    "paxon.layers.stack.Stack.scan": Rule(Effect.THROUGHPUT, may_change=True),
    "paxon.layers.stack.Stack.remat_policy": Rule(
      Effect.THROUGHPUT, may_change=True
    ),
    **{
      f"paxon.pipeline.{owner}.{field}": Rule(
        Effect.THROUGHPUT, may_change=True
      )
      for owner in (
        "spmd_pipeline.PipelinedStack",
        "schedules.scheduled_stack.ScheduledStack",
      )
      for field in (
        "scan",
        "remat_policy",
        "num_stages",
        "num_microbatches",
        "microbatch_size",
        "circular_repeats",
        "streaming",
        "iteration_policy",
      )
    },
    **{
      f"paxon.pipeline.schedules.scheduled_stack.ScheduledStack.{field}": Rule(
        Effect.THROUGHPUT, may_change=True
      )
      for field in ("schedule", "residuals")
    },
    "paxon.layers.softmax_loss.SoftmaxLoss.chunk_length": Rule(
      Effect.THROUGHPUT
    ),
    # Used while decoding only.
    **{
      f"paxon.layers.attention.{owner}.cache": Rule(
        Effect.EVALUATION, may_change=True
      )
      for owner in (
        "cross_attention.CrossAttention",
        "grouped_query.GroupedQueryAttention",
        "latent.LatentAttention",
      )
    },
  }
)


# Classes that compute the same with the same variables.
_SAME = {
  "paxon.layers.stack.Stack",
  "paxon.pipeline.spmd_pipeline.PipelinedStack",
  "paxon.pipeline.schedules.scheduled_stack.ScheduledStack",
}


def rule_of_parts(before: str, after: str) -> Rule | None:
  """Returns what another class of a part does, where that is known."""
  if {before, after} <= _SAME:
    return Rule(Effect.THROUGHPUT, may_change=True)
  return None


def rule_of(path: str, values: Mapping[str, str]) -> Rule:
  """Returns what is known of a field."""
  for owner, field in _owners(path):
    name = values.get(owner or ROOT)
    # A node that is called later, or is shared, is written with a mark.
    known = RULES.get(f"{str(name).removeprefix('partial ')}.{field}")
    if known is not None:
      return known
  return _DEFAULT_RULE


def _owners(path: str) -> Iterator[tuple[str, str]]:
  """Yields each part that the path leads through, with the field it takes.

  For `a.b[0].c`: the root and `a`, `a` and `b`, `a.b[0]` and `c`.
  """
  depth, start = 0, 0
  owner = ""
  for position, char in enumerate(path + "."):
    depth += (char == "[") - (char == "]")
    if char == "." and not depth:
      field = path[start:position].partition("[")[0]
      yield owner, field
      owner, start = path[:position], position + 1


_NOTHING = "nothing"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Difference:
  """One place where two configurations differ.

  Attributes:
    path: The place.
    before: What stands there in the first, `nothing` if there is no such place.
    after: The same of the second.
    rule: What the difference does; where the owners are of two classes, the
      graver of both.
  """

  path: str
  before: str
  after: str
  rule: Rule

  def __str__(self) -> str:
    return f"{self.path}: {self.before} -> {self.after}"


def differences(before: str, after: str) -> list[Difference]:
  """Returns all differences in the order of the dumps."""
  old, new = values(before), values(after)
  return [
    Difference(
      path=path,
      before=old.get(path, _NOTHING),
      after=new.get(path, _NOTHING),
      rule=_graver(path, old, new),
    )
    for path in old | new
    if old.get(path) != new.get(path)
  ]


def grouped(
  found: list[Difference],
) -> dict[Effect, list[Difference]]:
  """Returns the differences by effect, the gravest effect first."""
  groups = {
    effect: [each for each in found if each.rule.effect is effect]
    for effect in Effect
  }
  return {effect: group for effect, group in groups.items() if group}


def values(text: str) -> dict[str, str]:
  """Returns what a dump says, by path; parts have the name of their class."""
  result = {}
  for line in text.splitlines():
    path, equals, value = line.partition(" = ")
    if not equals:
      path, _, value = line.partition(": ")
    result[path] = value
  return result


def _graver(path: str, old: dict[str, str], new: dict[str, str]) -> Rule:
  order = list(Effect)
  if path in old and path in new:
    known = rule_of_parts(old[path], new[path])
    if known is not None:
      return known
  rules = [rule_of(path, each) for each in (old, new) if path in each]
  return min(
    rules, key=lambda rule: (order.index(rule.effect), rule.may_change)
  )

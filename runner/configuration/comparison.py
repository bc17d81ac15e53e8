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
  """What a difference changes, the most severe first."""

  NUMERICS = "numerics: the trained values differ"
  THROUGHPUT = "throughput: the same numbers, up to rounding"
  EVALUATION = "evaluation: what is measured and sampled, not what is trained"
  BOOKKEEPING = "bookkeeping: when things are saved and shown, and names"


@dataclasses.dataclass(frozen=True)
class Rule:
  """The effect of a field and of all below it.

  Attributes:
    effect: The effect of another value.
    may_change: Whether a run may resume with another value, because its past
      steps would have been the same.
  """

  effect: Effect
  may_change: bool = False


_DEFAULT_RULE = Rule(Effect.NUMERICS)


def _rules(
  owners: str, fields: str, effect: Effect, *, may_change: bool = True
) -> dict[str, Rule]:
  return {
    f"paxon.{owner}.{field}": Rule(effect, may_change)
    for owner in owners.split()
    for field in fields.split()
  }


_JOB = "runner.job.Job"
_STACKS = (
  "pipeline.spmd_pipeline.PipelinedStack"
  " pipeline.schedules.scheduled_stack.ScheduledStack"
)

RULES: Mapping[str, Rule] = types.MappingProxyType(
  {
    # When training ends, and what follows a NaN: not what a step does.
    **_rules(
      _JOB, "num_train_steps early_stopping non_finite", Effect.NUMERICS
    ),
    **_rules(_JOB, "mesh rules pgle", Effect.THROUGHPUT),
    **_rules(
      _JOB,
      "generation baselines programs decode_mesh decode_rules weights",
      Effect.EVALUATION,
    ),
    **_rules(
      _JOB,
      "checkpoint_every_steps eval_every_steps summary_every_steps retention"
      " observability expected_kernels",
      Effect.BOOKKEEPING,
    ),
    **_rules(_JOB, "eval_inputs", Effect.EVALUATION, may_change=False),
    **_rules(_JOB, "experiment", Effect.BOOKKEEPING, may_change=False),
    **_rules("runner.task.Task", "name", Effect.BOOKKEEPING, may_change=False),
    **_rules(
      "runner.task.Task", "metrics", Effect.EVALUATION, may_change=False
    ),
    **_rules("runner.task.Task", "predictions", Effect.EVALUATION),
    **_rules("learners.learner.Learner", "offload_state", Effect.THROUGHPUT),
    **_rules(
      f"layers.stack.Stack {_STACKS}", "scan remat_policy", Effect.THROUGHPUT
    ),
    **_rules(
      _STACKS,
      "num_stages num_microbatches microbatch_size circular_repeats streaming"
      " iteration_policy",
      Effect.THROUGHPUT,
    ),
    **_rules(_STACKS.split()[1], "schedule residuals", Effect.THROUGHPUT),
    **_rules(
      "layers.softmax_loss.SoftmaxLoss",
      "chunk_length",
      Effect.THROUGHPUT,
      may_change=False,
    ),
    # Used while decoding only.
    **_rules(
      "layers.attention.cross_attention.CrossAttention"
      " layers.attention.grouped_query.GroupedQueryAttention"
      " layers.attention.latent.LatentAttention",
      "cache",
      Effect.EVALUATION,
    ),
  }
)


# Classes that compute the same with the same variables.
_SAME = {
  "paxon.layers.stack.Stack",
  "paxon.pipeline.spmd_pipeline.PipelinedStack",
  "paxon.pipeline.schedules.scheduled_stack.ScheduledStack",
}


def rule_of_parts(before: str, after: str) -> Rule | None:
  """Returns the effect of replacing a class by another; None if unknown."""
  if {before, after} <= _SAME:
    return Rule(Effect.THROUGHPUT, may_change=True)
  return None


def rule_of(path: str, values: Mapping[str, str]) -> Rule:
  """Returns the effect of the field at a path of a dump."""
  for owner, field in _owners(path):
    name = values.get(owner or ROOT)
    # A node that is called later, or is shared, is written with a mark.
    known = RULES.get(f"{str(name).removeprefix('partial ')}.{field}")
    if known is not None:
      return known
  return _DEFAULT_RULE


def _owners(path: str) -> Iterator[tuple[str, str]]:
  """Yields the path of each node on a path, with the next field.

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
  """One path at which two configurations differ.

  Attributes:
    path: The path.
    before: The value in the first, `nothing` if the path does not exist.
    after: The value in the second.
    rule: The effect; if the owners have two classes, the more severe one.
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
      rule=_more_severe(path, old, new),
    )
    for path in old | new
    if old.get(path) != new.get(path)
  ]


def grouped(
  found: list[Difference],
) -> dict[Effect, list[Difference]]:
  """Returns the differences by effect, the most severe first."""
  groups = {
    effect: [each for each in found if each.rule.effect is effect]
    for effect in Effect
  }
  return {effect: group for effect, group in groups.items() if group}


def values(text: str) -> dict[str, str]:
  """Returns the values of a dump by path; those of nodes are class names."""
  result = {}
  for line in text.splitlines():
    path, equals, value = line.partition(" = ")
    if not equals:
      path, _, value = line.partition(": ")
    result[path] = value
  return result


def _more_severe(path: str, old: dict[str, str], new: dict[str, str]) -> Rule:
  order = list(Effect)
  if path in old and path in new:
    known = rule_of_parts(old[path], new[path])
    if known is not None:
      return known
  rules = [rule_of(path, each) for each in (old, new) if path in each]
  return min(
    rules, key=lambda rule: (order.index(rule.effect), rule.may_change)
  )

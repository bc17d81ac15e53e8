"""What a difference between two configurations means: one table by field.

A run that comes back to its folder may differ in some fields, and two
configurations that are compared should say what each difference does. Both
read this table. It names fields by their class, so that a layer of one's own
that happens to have a field `scan` is not taken for harmless: what is not in
the table changes the numbers.
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


_DEFAULT = Rule(Effect.NUMERICS)
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
    f"{_JOB}.max_checkpoints": Rule(Effect.BOOKKEEPING, may_change=True),
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
  """Returns what another class of a part does, where that is known.

  Args:
    before: The import path of the class that stood there.
    after: Of the one that stands there.
  """
  if {before, after} <= _SAME:
    return Rule(Effect.THROUGHPUT, may_change=True)
  return None


def rule_of(path: str, values: Mapping[str, str]) -> Rule:
  """Returns what is known of a field.

  Args:
    path: The field's place, as in a dump.
    values: All paths of the dump with what stands there; for a part, the
      import path of its class.
  """
  for owner, field in _owners(path):
    name = values.get(owner or ROOT)
    # A node that is called later, or is shared, is written with a mark.
    known = RULES.get(f"{str(name).removeprefix('partial ')}.{field}")
    if known is not None:
      return known
  return _DEFAULT


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

"""Differences between configurations, and the effect of each.

Compares texts of `dump.to_text`, so that stored runs can be compared without
importing their classes. The effect of a field, and whether a run may resume
with another value, are listed by class and field (`RULES`) or by path
(`PATTERNS`). Fields that are not listed change numerics, and a run cannot
resume with another value. docs/launching.md has the same table for users.
"""

from collections.abc import Iterator, Mapping
import dataclasses
import enum
import re
import types

from paxon.runner.configuration import moved_modules

ROOT = "<root>"


class Effect(enum.Enum):
  """Effects of a difference, the most severe first."""

  NUMERICS = "numerics: the trained values differ"
  THROUGHPUT = "throughput: the same numbers, up to rounding"
  EVALUATION = "evaluation: what is measured and sampled, not what is trained"
  BOOKKEEPING = "bookkeeping: when things are saved and shown, and names"


class Change(enum.Enum):
  """Whether a run may resume with another value of a field.

  FREE: The steps of the past would have been the same, up to rounding.
  MOVED: A path, whose content is compared instead.
  ASK: Later steps differ, but the state and the position in the data keep their
    meaning. Requires `--allow_changes`.
  NEVER: The state or the position in the data would lose its meaning.
  """

  FREE = "free"
  MOVED = "moved"
  ASK = "ask"
  NEVER = "never"


@dataclasses.dataclass(frozen=True)
class Rule:
  """The effect of a field and of all below it.

  Attributes:
    effect: The effect of another value.
    change: Whether a run may resume with another value.
    why: Why it never may, the end of a sentence.
  """

  effect: Effect
  change: Change = Change.NEVER
  why: str = "the steps of the past would have been others"


_DEFAULT_RULE = Rule(Effect.NUMERICS)


def _rules(
  owners: str, fields: str, effect: Effect, change: Change = Change.FREE
) -> dict[str, Rule]:
  return {
    f"paxon.{owner}.{field}": Rule(effect, change)
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
    **_rules(
      _JOB,
      "mesh rules pgle compiler_options compiler_option_sets",
      Effect.THROUGHPUT,
    ),
    **_rules(
      _JOB,
      "generation baselines programs decode_mesh decode_rules weights",
      Effect.EVALUATION,
    ),
    **_rules(
      _JOB,
      "checkpoint_every_steps local_checkpoint_every_steps eval_every_steps"
      " summary_every_steps retention observability expected_kernels notes",
      Effect.BOOKKEEPING,
    ),
    # Other values of the same metrics: they cannot be compared with those of
    # before, which decide about early stopping and the best checkpoints.
    **_rules(_JOB, "eval_inputs", Effect.EVALUATION, Change.ASK),
    **_rules(_JOB, "experiment", Effect.BOOKKEEPING, Change.ASK),
    **_rules("runner.task.Task", "name", Effect.BOOKKEEPING, Change.ASK),
    **_rules("runner.task.Task", "metrics", Effect.EVALUATION, Change.ASK),
    **_rules("runner.task.Task", "predictions", Effect.EVALUATION),
    **_rules("runner.task.Task", "exported_config", Effect.BOOKKEEPING),
    **_rules("learners.learner.Learner", "offload_state", Effect.THROUGHPUT),
    **_rules(
      f"layers.stacks.stack.Stack {_STACKS}",
      "scan remat_policy",
      Effect.THROUGHPUT,
    ),
    **_rules(
      _STACKS,
      "num_stages num_microbatches microbatch_size circular_repeats streaming"
      " iteration_policy",
      Effect.THROUGHPUT,
    ),
    **_rules(_STACKS.split()[1], "schedule residuals", Effect.THROUGHPUT),
    **_rules(
      "layers.losses.softmax_loss.SoftmaxLoss",
      "chunk_length",
      Effect.THROUGHPUT,
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


_ASK = Rule(Effect.NUMERICS, Change.ASK)
_FREE = Rule(Effect.THROUGHPUT, Change.FREE)
_STATE = Rule(
  Effect.NUMERICS, why="the checkpoint's training state is that of the old one"
)
_MODEL = Rule(
  Effect.NUMERICS, why="the checkpoint's parameters belong to the old model"
)
_DATA = Rule(
  Effect.NUMERICS, why="the position in the data would mean other documents"
)
_INPUT = r"(train_input|eval_inputs\.\w+)\.(.*\.)?"

# Paths of a job that contain the place of a file, not its content.
_PLACES = (
  # Of the formats and sources in `inputs`, and of most others.
  _INPUT + r"(files?|path|folder|data_dir|\w+_(files?|path|folder))(\[.*\])?",
  r"task\.(.*\.)?tokenizer\.path",
  # Of weights that are read beside a checkpoint.
  r"task\.model\.(.*\.)?(file|folder)",
  r"warm_start\.(others\[\d+\]\.)?checkpoint",
  r"generation\.chat_template\.folder",
  "run_files",
)

# By path, for any class; the first pattern that matches the whole path counts,
# after `RULES`.
PATTERNS: tuple[tuple[str, Rule], ...] = (
  (r"task\.learner\.num_microbatches", _FREE),
  (r"task\.learner\.measure_noise", Rule(Effect.EVALUATION, Change.FREE)),
  (r"task\.learner\.(privacy|average|skip|count_tokens)(\..*)?", _STATE),
  (r"task\.learner\.(.*\.)?schedule([.\[].*)?", _ASK),
  (
    r"task\.learner\.(.*\.)?(optimizer|\w*dtype|factoring|pattern|block_size"
    r"|min_size|max_dim|min_dim_to_factor)",
    _STATE,
  ),
  (r"task\.learner\..*", _ASK),
  (r"task\.model\.(.*\.)?(dtype|\w*dropout\w*(\.\w+)?)", _ASK),
  (r"task\.model\.(.*\.)?(attention|mixer)\.kernel(\..*)?", _ASK),
  (r"task\.(model|tokenizer|reward)([.\[].*)?", _MODEL),
  (
    r"batch_ramp|train_input\.(global_batch_size|length|packing|max_waiting)",
    _ASK,
  ),
  (r"train_input\.(num_workers|worker_processes)", _FREE),
  (
    # Of conversations, whose examples are cut or dropped by it.
    r"train_input\..+\.length",
    Rule(
      Effect.NUMERICS,
      why="its position is only valid for examples cut to the same length",
    ),
  ),
  (r"(train_input|seed)([.\[].*)?", _DATA),
  ("trainable|frozen|frozen_dtype", _STATE),
  (
    r"warm_start(\..*)?",
    Rule(Effect.NUMERICS, why="it is read only when a run starts"),
  ),
)

# Classes that compute the same with the same variables.
_SAME = {
  "paxon.layers.stacks.stack.Stack",
  "paxon.pipeline.spmd_pipeline.PipelinedStack",
  "paxon.pipeline.schedules.scheduled_stack.ScheduledStack",
}
_CLASS = re.compile(r"(partial )?[A-Za-z_]\w*(\.\w+)+")
_OPTIMIZER = re.compile(r"task\.learner\.(?!.*\bschedule\b).*")


def rule_of_parts(path: str, before: str, after: str) -> Rule | None:
  """Returns the effect of replacing a class by another; None if unknown."""
  if {before, after} <= _SAME:
    return _FREE
  is_class = _CLASS.fullmatch(before) and _CLASS.fullmatch(after)
  return _STATE if is_class and _OPTIMIZER.fullmatch(path) else None


def find_rule(path: str, values: Mapping[str, str]) -> Rule:
  """Returns the effect of the field at a path of a dump."""
  for owner, field in _owners(path):
    name = values.get(owner or ROOT)
    # A node that is called later, or is shared, is written with a mark.
    known = RULES.get(f"{str(name).removeprefix('partial ')}.{field}")
    if known is not None:
      return known
  matching = (rule for text, rule in PATTERNS if re.fullmatch(text, path))
  return next(matching, _DEFAULT_RULE)


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
_UNSET = ("None", "<required>", "<default>")


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


def group_by_effect(
  found: list[Difference],
) -> dict[Effect, list[Difference]]:
  """Returns the differences by effect, the most severe first."""
  groups = {
    effect: [each for each in found if each.rule.effect is effect]
    for effect in Effect
  }
  return {effect: group for effect, group in groups.items() if group}


def values(text: str) -> dict[str, str]:
  """Returns the values of a dump by path; a node has the name of its class."""
  result = {}
  for line in moved_modules.update_names(text).splitlines():
    path, equals, value = line.partition(" = ")
    if not equals:
      path, _, value = line.partition(": ")
    result[path] = value
  return result


def _more_severe(path: str, old: dict[str, str], new: dict[str, str]) -> Rule:
  effects, changes = list(Effect), list(Change)
  if path in old and path in new:
    known = rule_of_parts(path, old[path], new[path])
    if known is not None:
      return known
  rules = [find_rule(path, each) for each in (old, new) if path in each]
  rule = min(
    rules,
    key=lambda rule: (
      effects.index(rule.effect),
      -changes.index(rule.change),
    ),
  )
  # A place that is new, or is none any more, has no other to compare with.
  if all(each.get(path, "None") not in _UNSET for each in (old, new)) and any(
    re.fullmatch(pattern, path) for pattern in _PLACES
  ):
    return dataclasses.replace(rule, change=Change.MOVED)
  return rule

"""Tests for differences of configurations and the table of their effects."""

import inspect

import pytest

from paxon.layers.attention import cross_attention, grouped_query, latent
from paxon.layers.losses import softmax_loss
from paxon.layers.stacks import stack
from paxon.learners import learner
from paxon.pipeline import spmd_pipeline
from paxon.pipeline.schedules import scheduled_stack
from paxon.runner import job, task, toy_experiment
from paxon.runner.configuration import comparison, dump

_JOB = "<root>: paxon.runner.job.Job\n"
_NUMERICS, _THROUGHPUT, _EVALUATION, _BOOKKEEPING = comparison.Effect


def _text(**knobs) -> str:
  return dump.to_text(toy_experiment.Toy(**knobs).job())


def test_equal_configurations_have_no_difference():
  assert comparison.differences(_text(), _text()) == []


def test_differences_are_grouped_by_what_they_do():
  found = comparison.differences(
    _text(), _text(width=16, mesh="fsdp=-1", summary_every_steps=3)
  )
  groups = comparison.group_by_effect(found)
  assert list(groups) == [_NUMERICS, _THROUGHPUT, _BOOKKEEPING]
  assert [str(each) for each in groups[_NUMERICS]] == [
    "task.model.layers[0].width: 8 -> 16"
  ]
  assert [each.path for each in groups[_THROUGHPUT]] == ["mesh"]
  assert [each.path for each in groups[_BOOKKEEPING]] == ["summary_every_steps"]


def test_lines_that_only_one_side_has():
  old, new = _JOB + "a = 1\nb: m.C\n", _JOB + "a = 1\nc = 2\n"
  assert [str(each) for each in comparison.differences(old, new)] == [
    "b: m.C -> nothing",
    "c: nothing -> 2",
  ]


_STACK = (
  "task: paxon.runner.task.Task\ntask.m: paxon.layers.stacks.stack.Stack\n"
)


@pytest.mark.parametrize(
  ("path", "lines", "effect"),
  [
    pytest.param("seed", "", _NUMERICS, id="field-not-listed"),
    pytest.param("new_field", "", _NUMERICS, id="unknown-field"),
    pytest.param("observability.x[0].y", "", _BOOKKEEPING, id="below"),
    pytest.param("eval_inputs.validation.length", "", _EVALUATION, id="dict"),
    pytest.param("task.m.scan", _STACK, _THROUGHPUT, id="of-its-class"),
    pytest.param("task.m.blocks[0].scan", _STACK, _NUMERICS, id="of-another"),
    pytest.param("task.m.mesh", _STACK, _NUMERICS, id="name-of-another-class"),
    pytest.param("task.name", _STACK, _BOOKKEEPING, id="nested"),
  ],
)
def test_effect_of_a_field(path, lines, effect):
  values = comparison.values(_JOB + lines)
  assert comparison.find_rule(path, values).effect is effect


def test_the_graver_of_two_classes_counts():
  old = _JOB + _STACK + "task.m.scan = True\n"
  new = old.replace("paxon.layers.stacks.stack.Stack", "mine.Stack")
  new = new.replace("scan = True", "scan = False")
  found = {each.path: each for each in comparison.differences(old, new)}
  assert found["task.m.scan"].rule.effect is _NUMERICS
  assert found["task.m.scan"].rule.change is comparison.Change.NEVER


def test_a_stack_may_get_stages_and_lose_them():
  plain = _JOB + _STACK + "task.m.scan = True\n"
  name = "paxon.pipeline.spmd_pipeline.PipelinedStack"
  staged = plain.replace("paxon.layers.stacks.stack.Stack", name)
  staged += "task.m.num_stages = 2\n"
  for pair in ((plain, staged), (staged, plain)):
    found = comparison.differences(*pair)
    assert [each.path for each in found] == ["task.m", "task.m.num_stages"]
    assert {each.rule.effect for each in found} == {_THROUGHPUT}
    assert {e.rule.change for e in found} == {comparison.Change.FREE}
  other = comparison.differences(
    plain, plain.replace("layers.stacks.stack", "mine")
  )
  assert other[0].rule.change is comparison.Change.NEVER


# Gone from the code, but in the folders of older runs.
_OLD = {"paxon.runner.job.Job.max_checkpoints"}
_OWNERS = {
  f"{cls.__module__}.{cls.__qualname__}": cls
  for cls in (
    cross_attention.CrossAttention,
    grouped_query.GroupedQueryAttention,
    job.Job,
    latent.LatentAttention,
    learner.Learner,
    scheduled_stack.ScheduledStack,
    softmax_loss.SoftmaxLoss,
    spmd_pipeline.PipelinedStack,
    stack.Stack,
    task.Task,
  )
}


@pytest.mark.parametrize("name", sorted(set(comparison.RULES) - _OLD))
def test_every_rule_is_of_a_field_that_exists(name):
  owner, _, field = name.rpartition(".")
  assert field in inspect.signature(_OWNERS[owner]).parameters


def test_whatever_may_change_changes_no_number():
  for name, rule in comparison.RULES.items():
    # Later steps may differ, those of the past would not have.
    is_later = name.endswith(
      (".num_train_steps", ".early_stopping", ".non_finite")
    )
    is_free = rule.change is comparison.Change.FREE
    assert not (is_free and rule.effect is _NUMERICS) or is_later


def test_partial_parts_are_known_by_their_class():
  values = {"<root>": "partial paxon.runner.job.Job"}
  assert comparison.find_rule("mesh", values).effect is _THROUGHPUT

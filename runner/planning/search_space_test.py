"""Tests for what can be changed, and that it can be typed."""

import fiddle as fdl
import pytest

from paxon.layers import remat
from paxon.runner.configuration import overrides, resolving
from paxon.runner.planning import search_space
from paxon.runner.training import testing

_TINY = "runner.training.testing.TinyLm"


def _config(**knobs):
  return testing.make(**knobs)[1]


def _choices(config):
  return [
    *search_space.remat_choices(config, only_thriftier=False),
    *search_space.microbatch_choices(config, rows=8),
    *search_space.dtype_choices(config),
    *search_space.mesh_choices(["fsdp=8", "fsdp=4,dcn.data=2"]),
  ]


def test_every_choice_can_be_typed_and_does_what_it_says():
  config = _config()
  values = {}
  for choice in _choices(config):
    given = [
      overrides.parse_argument(f"--fdl.{text}") for text in choice.assignments
    ]
    resolved = resolving.resolve(_TINY, given)
    job = resolving.build(resolved.config)
    values.setdefault(choice.kind.name, []).append(
      (
        job.task.model.stack.remat_policy,
        job.task.learner.num_microbatches,
        str(job.task.learner.optimizer.momentum_dtype),
        job.mesh,
      )
    )
  names = (
    *(remat.ATTENTION_QUERY, remat.ATTENTION_KEY, remat.ATTENTION_VALUE),
    remat.ATTENTION_CONTEXT,
  )
  assert [policy for policy, *_ in values["REMAT"]] == [
    remat.save_projections,
    remat.SaveOnly(names),
    remat.SaveOnly(names[-1:]),
    remat.save_nothing,
  ]
  assert [parts for _, parts, *_ in values["MICROBATCHES"]] == [2, 4, 8]
  assert [dtype for *_, dtype, _ in values["DTYPE"]] == ["bfloat16"]
  assert [mesh for *_, mesh in values["MESH"]] == [
    "fsdp=8",
    "fsdp=4,dcn.data=2",
  ]


@pytest.mark.parametrize(
  ("policy", "only_thriftier", "number"),
  [
    (None, True, 4),
    (None, False, 4),
    (remat.SaveOnly((remat.ATTENTION_CONTEXT,)), True, 1),
    (remat.SaveOnly((remat.ATTENTION_CONTEXT,)), False, 4),
    (remat.save_nothing, True, 0),
    # Nobody knows what it saves.
    (remat.SaveOnly(("mine",)), True, 5),
  ],
)
def test_policies_other_than_the_one_in_use(policy, only_thriftier, number):
  config = _config()
  config.task.model.stack.remat_policy = policy
  found = search_space.remat_choices(config, only_thriftier=only_thriftier)
  assert len(found) == number
  if policy == remat.SaveOnly((remat.ATTENTION_CONTEXT,)) and only_thriftier:
    assert found[0].assignments == (
      "task.model.stack.remat_policy=layers.remat.save_nothing",
    )


def test_what_is_chosen_already_is_left_out():
  config = _config(num_microbatches=2)
  config.task.learner.optimizer.momentum_dtype = "bfloat16"
  parts = search_space.microbatch_choices(config, rows=8)
  assert [c.assignments for c in parts] == [
    ("task.learner.num_microbatches=4",),
    ("task.learner.num_microbatches=8",),
  ]
  assert search_space.dtype_choices(config) == ()


def test_a_configuration_without_such_fields_has_no_choices():
  config = fdl.Config(dict)
  assert search_space.remat_choices(config, only_thriftier=True) == ()
  assert search_space.microbatch_choices(config, rows=8) == ()
  assert search_space.dtype_choices(config) == ()

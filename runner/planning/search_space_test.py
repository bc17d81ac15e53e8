"""Tests for what can be changed, and that it can be typed."""

import dataclasses

import fiddle as fdl
import pytest

from paxon.layers import remat
from paxon.runner.configuration import overrides, resolving
from paxon.runner.plan import layouts
from paxon.runner.plan import target as targets
from paxon.runner.planning import search_space, subject
from paxon.runner.training import testing
from paxon.sharding import rule_sets

_TINY = "runner.training.testing.TinyLm"


def _config(**knobs):
  return testing.make(**knobs)[1]


def _choices(config):
  return [
    *(("remat", c) for c in search_space.remat_choices(config)),
    *(
      ("microbatches", c)
      for c in search_space.microbatch_choices(config, batch_size=8)
    ),
  ]


def test_every_choice_can_be_typed_and_does_what_it_says():
  config = _config()
  values = {}
  for kind, choice in _choices(config):
    given = [
      overrides.parse_argument(f"--fdl.{text}") for text in choice.assignments
    ]
    resolved = resolving.resolve(_TINY, given)
    job = resolving.build(resolved.config)
    values.setdefault(kind, []).append(
      (job.task.model.stack.remat_policy, job.task.learner.num_microbatches)
    )
  names = (
    *(remat.ATTENTION_QUERY, remat.ATTENTION_KEY, remat.ATTENTION_VALUE),
    remat.ATTENTION_CONTEXT,
  )
  assert [policy for policy, _ in values["remat"]] == [
    remat.save_projections_and_attention,
    remat.save_projections,
    remat.SaveOnly((*names[:3], remat.ATTENTION_RESIDUALS)),
    remat.SaveOnly(names),
    remat.SaveOnly(names[-1:]),
    remat.SaveOnly((remat.ATTENTION_RESIDUALS,)),
    remat.save_nothing,
  ]
  assert [parts for _, parts in values["microbatches"]] == [2, 4, 8]


@pytest.mark.parametrize(
  ("policy", "number"),
  [
    (None, 7),
    (remat.SaveOnly((remat.ATTENTION_CONTEXT,)), 7),
    (remat.save_nothing, 7),
    (remat.SaveOnly(("mine",)), 8),
  ],
)
def test_policies_other_than_the_one_in_use(policy, number):
  config = _config()
  config.task.model.stack.remat_policy = policy
  assert len(search_space.remat_choices(config)) == number


def test_what_is_chosen_already_is_left_out():
  config = _config(num_microbatches=2)
  parts = search_space.microbatch_choices(config, batch_size=8)
  assert [c.assignments for c in parts] == [
    ("task.learner.num_microbatches=4",),
    ("task.learner.num_microbatches=8",),
  ]


def test_a_configuration_without_such_fields_has_no_choices():
  config = fdl.Config(dict)
  assert search_space.remat_choices(config) == ()
  assert search_space.microbatch_choices(config, batch_size=8) == ()


def _space(target, *assignments):
  given = [overrides.parse_argument(text) for text in assignments]
  return search_space.Space(
    subject.resolve(_TINY, given, targets.parse(target))
  )


@pytest.mark.parametrize(
  ("kernel", "kind"),
  [
    ("kernels.auto", layouts.Attention.PLAIN),
    ("kernels.plain", layouts.Attention.PLAIN),
    ("kernels.fused", layouts.Attention.FUSED),
  ],
)
def test_the_kernel_tells_what_attention_saves(kernel, kind):
  space = _space(
    "h200:1x2",
    f"--fdl.task.model.stack.blocks[0].attention.kernel=layers.attention.{kernel}",
  )
  assert space.current.layout.attention is kind


def _typed(candidate):
  return [str(override) for override in candidate.overrides]


def test_candidates_differ_from_the_job_in_what_they_say():
  space = _space("h200:1x2", "--fdl.mesh=fsdp=2")
  found = space.candidates()
  assert search_space.Candidate(space.current.layout) in found
  texts = [" ".join(_typed(c)) for c in found]
  assert len(set(texts)) == len(texts)
  (changed,) = [
    c
    for c, text in zip(found, texts, strict=True)
    if text == "--fdl.mesh=data=2 --fdl.task.learner.num_microbatches=2"
  ]
  assert changed.layout.mesh == "data=2"
  assert changed.layout.microbatches == 2
  assert changed.words == (
    "split over data=2 and compute a batch in 2 microbatches"
  )
  only = space.candidates(only_meshes=True)
  assert [c.layout.mesh for c in only] == [
    "fsdp=2",
    "tensor=2",
    "sequence=2",
    "data=2",
  ]


def test_a_state_that_does_not_fit_is_no_candidate():
  # 86 GiB by float32 Adam: on each of two devices, or on one.
  space = _space("h200:1x2", "--fdl.mesh=fsdp=2", "--fdl.embed_dim=30720")
  usable = targets.parse("h200:1x2").hardware.usable_bytes
  found = space.candidates()
  meshes = {c.layout.mesh for c in found if not c.layout.is_offloaded}
  assert meshes == {m for m in meshes if space.layouts.state_bytes(m) <= usable}
  assert space.layouts.state_bytes("data=2") > usable
  assert "data=2" not in meshes
  # Two thirds of it are moments, which the hosts can hold.
  assert "data=2" in {c.layout.mesh for c in found if c.layout.is_offloaded}


def test_rules_are_varied_where_the_mesh_splits_tensor():
  found = _space("h200:1x8", "--fdl.mesh=fsdp=8").candidates()
  varied = [c for c in found if c.layout.rules]
  assert varied
  assert all("tensor" in c.layout.mesh for c in varied)
  (typed,) = {
    str(o) for c in varied for o in c.overrides if o.path == "rules"
  } - {"--fdl.rules=megatron_sequence"}
  job = resolving.build(
    resolving.resolve(_TINY, [overrides.parse_argument(typed)]).config
  )
  assert job.rules == rule_sets.find_rules("2d")


def test_less_of_a_layer_is_saved_by_rules_that_split_its_width():
  estimates = _space("h200:1x8", "--fdl.global_batch_size=65536").layouts
  layout = layouts.Layout(mesh="fsdp=4,tensor=2")
  split = dataclasses.replace(layout, rules="2d")
  before, after = estimates.predict(layout), estimates.predict(split)
  assert after.peak < before.peak
  assert after.step == before.step


def test_compilers_can_overlap_more():
  space = _space("h200:1x8", "--fdl.mesh=fsdp=8")
  (override,) = space.overlap(space.current).overrides
  resolved = resolving.resolve(_TINY, [override])
  job = resolving.build(resolved.config)
  assert job.compiler_option_sets == ("async_collectives",)


def test_an_idle_axis_of_the_mesh_is_dropped():
  space = _space("h200:1x8", "--fdl.mesh=data=4,stage=2")
  assert space.layouts.predict(space.current.layout).step > 0
  meshes = {c.layout.mesh for c in space.candidates(only_meshes=True)}
  assert "data=8" in meshes
  assert not any("stage" in mesh for mesh in meshes)


class _Scheduled:
  def make_gradient_fn(self):
    """Marks a stack with a pipeline schedule."""


def test_a_pipeline_schedule_has_no_microbatches_of_the_learner():
  config = _config()
  config.task.model.stack = fdl.Config(_Scheduled)
  assert search_space.microbatch_choices(config, batch_size=8) == ()

"""Tests that runs with a pipeline and without are one run.

Checkpoints do not know of stages: a run that was pipelined goes on without, and
back. And the compiled program sends between stages what it must, and no more.
"""

import dataclasses
import shutil
from typing import Any

from etils import epath
import fiddle as fdl
from flax import linen as nn
import jax
import numpy as np
import pytest

from paxon.layers import testing as layers_testing
from paxon.layers.models import testing as models_testing
from paxon.pipeline import spmd_pipeline, stage_sharding
from paxon.runner import user_error
from paxon.runner.checkpoints import checkpointer
from paxon.runner.monitoring import metrics_file
from paxon.runner.plan.program_text import collectives, hlo
from paxon.runner.session import compiled_steps
from paxon.runner.session import session as session_lib
from paxon.runner.settings import training
from paxon.runner.training import pipelined_testing, testing, train
from paxon.sharding import axes, layout, mesh, variables
from paxon.sharding import rules as rules_lib


class Pipelined(pipelined_testing.PipelinedLm):
  """The tiny model in two stages, or in none."""

  num_train_steps = 8
  checkpoint_every_steps = 1
  eval_every_steps = None

  def retention(self):
    """Returns that all checkpoints are kept."""
    return fdl.Config(training.Retention, newest=8)


STAGES = {"num_stages": 2, "mesh": "stage=2,data=2,tensor=2"}
# Nothing is computed twice.
SCHEDULED = STAGES | {"schedule": "1f1b", "residuals": "save"}
PLAIN = {"num_stages": None, "mesh": "data=2,fsdp=2,tensor=2"}


def _train(folder, **layout_knobs):
  config = Pipelined(**layout_knobs).job()
  train.run(fdl.build(config), config, epath.Path(folder))
  records = metrics_file.read(folder / "metrics.jsonl")
  losses = {r.step: r.values["loss"] for r in records if r.split == "train"}
  return np.asarray([losses[step] for step in sorted(losses)])


def _copy_until(source, target, *, step):
  """A run as it was at a step, without figures."""
  shutil.copytree(source, target)
  (target / "metrics.jsonl").unlink()
  for path in (target / "checkpoints").iterdir():
    if int(path.name) > step:
      shutil.rmtree(path)
  return target


def _digest(folder, step, **knobs):
  """The sha256 of what a job reads from a checkpoint onto its mesh."""
  session = session_lib.open_session(fdl.build(Pipelined(**knobs).job()))
  with checkpointer.Checkpointer(
    epath.Path(folder / "checkpoints"), read_only=True
  ) as checkpoints:
    restored = checkpoints.restore(
      step, specs=session.state_specs, shardings=session.state_shardings
    )
  return testing.digest(restored.tree)


@pytest.mark.nightly
def test_a_pipelined_run_resumes_without_stages_and_back(tmp_path):
  """Without, then by a schedule; what that writes is the same again."""
  expected = _train(tmp_path / "a", **STAGES)
  assert len(expected) == 8
  before, own = tmp_path / "a", STAGES
  for folder, step, knobs in (
    ("b", 3, PLAIN),
    ("c", 4, SCHEDULED),
  ):
    # Parameters and moments are the same bits for both.
    assert _digest(before, step, **own) == _digest(before, step, **knobs)
    there = _copy_until(before, tmp_path / folder, step=step)
    losses = _train(there, **knobs)
    np.testing.assert_allclose(losses, expected[step:], rtol=1e-6)
    before, own = there, knobs
  assert _digest(before, 6, **own) == _digest(before, 6, **PLAIN)


def test_a_schedule_rejects_microbatches_of_the_learner():
  job = fdl.build(Pipelined(**SCHEDULED, num_microbatches=2).job())
  session = session_lib.open_session(job)
  with pytest.raises(
    user_error.UserError,
    match=r"Learner.num_microbatches \(2\) must be 1 with a pipeline schedule",
  ):
    compiled_steps.trace_train_step(session)


class _Outer(nn.Module):
  """A model of another one."""

  inner: nn.Module

  def loss(self, batch, *, deterministic):
    """Returns the other one's loss."""
    return self.inner.loss(batch, deterministic=deterministic)


def test_a_schedule_in_a_submodule_is_rejected():
  job = fdl.build(Pipelined(**SCHEDULED).job())
  task = dataclasses.replace(job.task, model=_Outer(job.task.model))
  with pytest.raises(
    user_error.UserError,
    match=r"^model\.inner\.stack is a ScheduledStack, whose schedule works",
  ):
    compiled_steps.scheduled_gradient_fn(
      dataclasses.replace(job, task=task), {}
    )


def test_a_step_that_would_deadlock_is_rejected():
  """A permute in a branch, where stages run others."""
  job = fdl.build(Pipelined(**SCHEDULED).job())
  spec = jax.sharding.PartitionSpec(("data", "stage"))

  def shifted(x):
    return jax.lax.ppermute(x, "data", [(0, 1), (1, 0)])

  def branch(x):
    stage = jax.lax.axis_index("stage")
    return jax.lax.cond(stage == 0, shifted, lambda x: 2 * x, x)

  kinds = (jax.sharding.AxisType.Auto,) * 2
  devices = jax.devices()[:4]
  pairs = jax.make_mesh((2, 2), ("data", "stage"), kinds, devices=devices)
  with jax.set_mesh(pairs):
    run = jax.shard_map(branch, in_specs=spec, out_specs=spec, check_vma=False)
    compiled = jax.jit(run).lower(np.ones((4, 3), np.float32)).compile()
  with pytest.raises(
    user_error.UserError,
    match=r"With mesh 'stage=2,data=2,tensor=2' the compiler puts ",
  ):
    compiled_steps.check_schedule(job, compiled)
  compiled_steps.check_schedule(fdl.build(Pipelined(**STAGES).job()), compiled)


def _communication(*, num_layers=2, **fields):
  """What the step of a small model sends over `stage`: in the loop, and not.

  The head is tied to the embedding, so there is one shared part.
  """
  plain = models_testing.tiny_decoder(num_layers=num_layers)
  stack = spmd_pipeline.PipelinedStack(
    plain.stack.blocks[:1],
    num_layers,
    num_stages=2,
    num_microbatches=4,
    **fields,
  )
  model = plain.clone(stack=stack)
  sizes = {"stage": 2, "data": 2, "tensor": 2}
  made = layout.Layout(
    mesh.make_mesh(mesh.MeshSpec(ici=sizes)),
    stage_sharding.with_stages(
      rules_lib.DEFAULT_RULES,
      num_stages=2,
      num_groups=num_layers,
      **fields,
    ),
  )
  batch = models_testing.packed_batch([[2, 3], [5]] * 8, 6)
  args = models_testing.token_args(batch)
  specs = layers_testing.specs(model, *args)
  abstract = variables.abstract(specs, made.shardings(specs))

  def loss(values, batch):
    made: Any = model.apply(values, batch, method="loss")
    (total, weight), _, _ = made
    return total / weight

  compiled = made.jit(
    jax.value_and_grad(loss),
    in_shardings=(
      made.shardings(specs),
      jax.tree.map(lambda x: made.batch_sharding(x.ndim), batch),
    ),
    out_shardings=(made.replicated, made.shardings(specs)),
  ).lower(abstract, batch)
  text = compiled.compile().as_text()
  shape = {name: sizes.get(name, 1) for name in axes.MESH_AXES}
  found = collectives.find(hlo.parse(text), mesh=shape).collectives
  over = [each for each in found if axes.STAGE in each.axes]
  # A tick is a turn of the loop.
  inside = [each for each in over if each.count > 1]
  return inside, [each for each in over if each.count == 1]


def _all_kinds(found):
  return {(each.kind, each.axes) for each in found}


def test_only_neighbours_talk_in_the_loop():
  inside, outside = _communication(streaming=True)
  assert _all_kinds(inside) == {("collective-permute", (axes.STAGE,))}
  # Outside are loss and weight, and gradients of what all stages share, the
  # tied embedding and the last norm.
  assert {each.kind for each in outside} == {"all-reduce"}
  width, numbers = models_testing.EMBED, 2
  shared = (models_testing.VOCAB + 1) * width
  assert sum(each.payload_bytes for each in outside) <= 4 * (numbers + shared)


def test_repeats_move_weights_outside_of_the_loop_only():
  inside, outside = _communication(num_layers=4, circular_repeats=2)
  assert _all_kinds(inside) == {("collective-permute", (axes.STAGE,))}
  assert "all-to-all" in {each.kind for each in outside}

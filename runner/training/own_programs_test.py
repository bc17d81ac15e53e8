"""Tests of own gradients, learners, train programs and partitions in runs."""

import dataclasses
from typing import Any

from etils import epath
import fiddle as fdl
from flax import linen as nn
import jax
from jax import numpy as jnp
import numpy as np
import pytest

from paxon.inputs import base_input
from paxon.learners import (
  gradients,
  learner,
  learner_groups,
  parameter_average,
  schedules,
)
from paxon.learners.optimizers import adamw, sgd
from paxon.runner import experiment, task, user_error
from paxon.runner.session import compiled_steps
from paxon.runner.session import session as session_lib
from paxon.runner.training import testing, train
from paxon.sharding import axes, logical

DIM, WIDTH = 8, 16


class _Net(nn.Module):
  """A dense network of two layers."""

  output_dim: int

  @nn.compact
  def __call__(self, x):
    init = nn.initializers.lecun_normal()
    for name, shape, names in (
      ("up", (x.shape[-1], WIDTH), (axes.EMBED, axes.MLP)),
      ("down", (WIDTH, self.output_dim), (axes.MLP, axes.EMBED)),
    ):
      kernel = self.param(name, logical.partitioned(init, names), shape)
      x = jnp.tanh(x @ kernel) if name == "up" else x @ kernel
    return x


class Gan(nn.Module):
  """A generator of points and a discriminator."""

  random_streams = ("noise",)

  def setup(self):
    """Makes both networks."""
    self.generator = _Net(DIM)
    # Its first output is the score.
    self.discriminator = _Net(DIM)

  def loss(self, batch, *, deterministic):
    """Returns both losses, and their sum as the loss."""
    real = batch["real"]
    noise = jnp.ones_like(real)
    if not deterministic:
      noise = jax.random.normal(self.make_rng("noise"), real.shape)
    fake = self.generator(noise)
    score_real, score_fake = (self.discriminator(x)[:, 0] for x in (real, fake))
    weight = jnp.float32(len(real))
    d = jnp.sum(nn.softplus(-score_real) + nn.softplus(score_fake))
    g = jnp.sum(nn.softplus(-score_fake))
    metrics = {"d": (d, weight), "g": (g, weight)}
    return (d + g, weight), metrics, {}


@dataclasses.dataclass(kw_only=True, eq=False)
class Points(base_input.BaseInput):
  """Random points, by the number of the batch."""

  index: int = dataclasses.field(default=0, init=False)

  @property
  def unit(self):
    """Points."""
    return "examples"

  def get_next(self):
    """Returns the next batch."""
    random = np.random.default_rng([7, self.index])
    self.index += 1
    shape = self.global_batch_size, DIM
    return self.host_rows({"real": np.float32(random.normal(2, 1, shape))})

  def reset(self):
    """Goes to the first batch."""
    self.index = 0

  def get_state(self):
    """Returns the position."""
    return {"index": self.index}

  def set_state(self, state):
    """Goes to a position."""
    self.index = state["index"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Critic:
  """Some updates of the discriminator for one of the generator."""

  repeats: int = 2

  def run_step(self, updates, state, batch):
    """Makes a step."""
    metrics = {}
    for index in range(self.repeats):
      state, metrics["discriminator"] = updates["discriminator"](
        state, batch, index=index
      )
    state, metrics["generator"] = updates["generator"](state, batch)
    return state, metrics


class Adversarial(experiment.Experiment):
  """A GAN of two learners."""

  num_train_steps = 6
  global_batch_size = 16
  checkpoint_every_steps = 3
  summary_every_steps = 1
  repeats: int = 2
  every_steps: int = 2

  def task(self):
    """Returns the model and both learners."""
    rate = fdl.Config(schedules.Constant, value=0.05)
    return fdl.Config(
      task.Task,
      name="gan",
      model=fdl.Config(Gan),
      learner=fdl.Config(
        learner_groups.LearnerGroups,
        groups=[
          fdl.Config(
            learner_groups.LearnerGroup,
            name="discriminator",
            pattern="params/discriminator/.*",
            learner=fdl.Config(
              learner.Learner,
              optimizer=fdl.Config(adamw.AdamW, schedule=rate),
              losses={"d": 1.0},
            ),
          ),
          fdl.Config(
            learner_groups.LearnerGroup,
            name="generator",
            pattern="params/generator/.*",
            every_steps=self.every_steps,
            learner=fdl.Config(
              learner.Learner,
              optimizer=fdl.Config(sgd.Sgd, schedule=rate, momentum=0.9),
              losses={"g": 1.0},
              average=fdl.Config(parameter_average.ParameterAverage, decay=0.5),
            ),
          ),
        ],
        program=fdl.Config(Critic, repeats=self.repeats),
      ),
    )

  def datasets(self) -> dict[str, fdl.Config[base_input.BaseInput]]:
    """Returns random points."""
    shared: dict[str, Any] = {
      "global_batch_size": self.global_batch_size,
      "length": DIM,
    }
    return {
      "train": fdl.Config(Points, **shared),
      "validation": fdl.Config(Points, eval_loop_num_batches=2, **shared),
    }


def _run(folder, **knobs):
  config = Adversarial(**knobs).job()
  folder.mkdir(exist_ok=True)
  return train.run(fdl.build(config), config, epath.Path(folder))


def test_a_run_resumes_bitwise(tmp_path):
  whole = _run(tmp_path / "whole")
  _run(tmp_path / "resumed", num_train_steps=3)
  resumed = _run(tmp_path / "resumed")
  assert testing.digest(resumed.state) == testing.digest(whole.state)
  records = [r for r in whole.history() if r.split == "train"]
  assert [r.step for r in records] == [1, 2, 3, 4, 5, 6]
  # The generator is updated, and has metrics, at every second step.
  has = ["generator/loss" in r.values for r in records]
  assert has == [False, True] * 3
  for record in records:
    parts = [record.values[f"{n}/loss"] for n in ("discriminator",)]
    parts += [record.values.get("generator/loss", 0.0)]
    np.testing.assert_allclose(record.values["loss"], sum(parts), rtol=1e-6)
  assert whole.evaluations[6]["validation"].keys() >= {"loss", "d", "g"}


def _train(mesh, steps=20, config=None):
  job = fdl.build(config or Adversarial(mesh=mesh, every_steps=1).job())
  devices = jax.devices()[:1] if mesh == "data=1" else None
  session = session_lib.open_session(job, devices=devices)
  step = compiled_steps.compile_train_step(session)
  job.train_input.reset()
  # Initial values do not depend on the mesh.
  state, losses = session.initial_state(), []
  for _ in range(steps):
    batch = session.place(job.train_input.get_next())
    state, metrics = step(state, batch)
    losses.append(
      [
        float(metrics[f"{n}/loss"][0] / metrics[f"{n}/loss"][1])
        for n in ("discriminator", "generator")
        if f"{n}/loss" in metrics
      ]
      or float(metrics["loss"][0] / metrics["loss"][1])
    )
  return state, np.array(losses)


def test_sharded_learners_train_as_on_one_device():
  _, whole = _train("data=1")
  state, sharded = _train("fsdp=4,tensor=2")
  np.testing.assert_allclose(sharded, whole, rtol=1e-5)
  for value in (
    state.opt_state["discriminator"][0].mu["params"]["discriminator"]["up"],
    state.average["generator"].average["params"]["generator"]["up"],
  ):
    assert tuple(value.sharding.spec) == ("fsdp", "tensor")


def test_a_skip_of_non_finite_updates_is_that_of_all_learners():
  config = Adversarial(non_finite="skip").job()
  job = fdl.build(config)
  assert job.task.learner.skip is not None
  session = session_lib.open_session(job)
  assert session.state_specs.skipped.keys() == {"discriminator", "generator"}


def _by_dimension(spec, mesh):
  """Splits generator kernels by columns over `fsdp`, their moments too."""
  if spec.name.endswith("generator/up") and mesh["fsdp"] > 1:
    return (None, "fsdp")
  return None


class Partitioned(Adversarial):
  """The experiment with a partitioner."""

  mesh = "fsdp=8"

  def partitioner(self):
    """Returns a function of the user."""
    return _by_dimension


def test_a_partitioner_chooses_shardings_and_changes_no_value():
  config = Partitioned(every_steps=1).job()
  state, found = _train("fsdp=8", steps=5, config=config)
  _, whole = _train("data=1", steps=5)
  np.testing.assert_allclose(found, whole, rtol=1e-5)
  kernels = state.variables["params"]
  assert tuple(kernels["generator"]["up"].sharding.spec) == (None, "fsdp")
  assert tuple(kernels["generator"]["down"].sharding.spec) == ("tensor", "fsdp")
  # By the rules: the first dimension is the embedding.
  assert kernels["discriminator"]["up"].sharding.spec[0] == "fsdp"
  average = state.average["generator"].average["params"]["generator"]["up"]
  assert tuple(average.sharding.spec) == (None, "fsdp")


@pytest.mark.parametrize(
  ("result", "error"),
  [
    (("fsdp",), r"params/generator/up: partitioner .* shape \(8, 16\)"),
    ((None, "model"), r"generator/up: partitioner must return mesh axes .*"),
    (("fsdp", "fsdp"), r"a mesh axis once, got 'fsdp' twice"),
  ],
  ids=["rank", "unknown", "twice"],
)
def test_rejects_wrong_partitions(result, error):
  config = Adversarial(mesh="fsdp=8").job()
  config.partitioner = lambda spec, mesh: (
    result if spec.name == "params/generator/up" else None
  )
  with pytest.raises(user_error.UserError, match=error):
    session_lib.open_session(fdl.build(config))


def test_wrong_groups_are_an_error_of_the_learner():
  config = Adversarial().job()
  config.task.learner.groups[0].pattern = "params/.*"
  with pytest.raises(
    user_error.UserError,
    match=r"task.learner: .*generator/down belongs to discriminator and",
  ):
    session_lib.open_session(fdl.build(config))


def test_gradients_of_a_rule_are_those_of_the_step():
  _, config = testing.make(max_new_tokens=0)
  config.task.learner.gradient_rule = fdl.Config(
    gradients.SharpnessAware, radius=0.1
  )
  job = fdl.build(config)
  session = session_lib.open_session(job)
  step = compiled_steps.compile_train_step(session)
  batch = session.place(job.train_input.get_next())
  _, metrics = step(session.initial_state(), batch)
  # The first-order estimate of the rise over the ball.
  loss, before = (
    float(metrics[n][0] / metrics[n][1]) for n in ("loss", "unperturbed_loss")
  )
  assert before < loss

"""Tests for jobs, tasks and what to generate."""

import dataclasses

import fiddle as fdl
from flax import linen as nn
import pytest

from paxon.runner import job, task, toy_experiment
from paxon.runner.settings import generation, training
from paxon.sharding import rules


def _job():
  return fdl.build(toy_experiment.Toy().job())


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"checkpoint_every_steps": 0}, r"checkpoint_every_steps must be .*got 0"),
    (
      {"local_checkpoint_every_steps": 5, "checkpoint_every_steps": 5},
      r"Job.local_checkpoint_every_steps must be less than .* \(5\), got 5",
    ),
    ({"eval_every_steps": -1}, r"eval_every_steps must be positive, got -1"),
    ({"summary_every_steps": 0}, r"summary_every_steps must be positive, got"),
    (
      {"retention": training.Retention(best=1, metric="validation/loss")},
      r"Retention.best requires evaluations; set Job.eval_every_steps",
    ),
    (
      {
        "retention": training.Retention(best=1, metric="validatoin/loss"),
        "eval_every_steps": 2,
      },
      r"no split 'validatoin'; did you mean 'validation'",
    ),
    (
      {"early_stopping": training.EarlyStopping()},
      r"Job.early_stopping requires evaluations; set Job.eval_every_steps",
    ),
    (
      {
        "early_stopping": training.EarlyStopping(metric="valid/loss"),
        "eval_every_steps": 2,
      },
      r"early_stopping uses the metric 'valid/loss', but .*mean 'validation'",
    ),
    ({"num_train_steps": -1}, r"num_train_steps must not be negative, got -1"),
    (
      {"compiler_options": {"--xla_x": True}},
      r"Job.compiler_options: '--xla_x' is not .* use 'xla_x'\.",
    ),
    (
      {"decode_mesh": "fsdp=-1"},
      r"Job.decode_mesh requires Job.generation",
    ),
    (
      {"decode_rules": rules.DEFAULT_RULES},
      r"Job.decode_rules requires Job.generation",
    ),
    ({"mesh": "fsdp"}, r"mesh 'fsdp': 'fsdp' is not axis=size"),
    ({"mesh": "fdsp=2"}, r"unknown axis 'fdsp'; did you mean 'fsdp'"),
  ],
)
def test_a_job_rejects(fields, message):
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(_job(), **fields)


def test_intervals_may_be_unset():
  changed = dataclasses.replace(
    _job(), checkpoint_every_steps=None, eval_every_steps=None
  )
  assert isinstance(changed, job.Job)


def test_a_split_cannot_be_called_train():
  one = _job()
  with pytest.raises(ValueError, match=r"the split name .train. is reserved"):
    dataclasses.replace(one, eval_inputs={"train": one.train_input})


def test_generation_needs_a_model_that_generates():
  one = _job()
  assert not one.task.generates
  with pytest.raises(
    ValueError, match=r"Job.generation requires a model.*Model is not one"
  ):
    dataclasses.replace(
      one,
      generation=generation.GenerationSettings(prompts=("a",)),
    )


def test_a_task_needs_a_name():
  with pytest.raises(ValueError, match=r"Task.name must not be empty"):
    dataclasses.replace(_job().task, name="")


def test_a_model_needs_a_loss():
  with pytest.raises(TypeError, match=r"`loss`, and Dense has none"):
    task.Task(name="x", model=nn.Dense(3), learner=_job().task.learner)

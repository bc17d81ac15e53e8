"""Tests for the quickstart experiment."""

import fiddle as fdl
import pytest

from paxon.runner import knobs
from paxon.tasks.lm.params import quickstart


def _job(**given):
  return quickstart.PythonStdlibLm(**given).job()


def test_vocabulary_holds_every_id_and_divides():
  job = _job()
  size = job.task.model.embedding.vocab_size
  assert size >= fdl.build(job.task.tokenizer).vocab_size
  assert size % 8 == 0


def test_knobs_reach_the_configuration():
  job = _job(num_layers=2, mlp_dim=8, seed=5, dtype="bfloat16")
  stack = job.task.model.stack
  assert stack.num_layers == 2
  assert stack.blocks[0].feed_forward.mlp_dim == 8
  assert stack.blocks[0].feed_forward.dtype == "bfloat16"
  assert job.train_input.shuffle_seed == job.seed == 5


def test_warm_up_is_no_longer_than_a_short_run():
  schedule = _job(num_train_steps=3).task.learner.optimizer.schedule
  assert fdl.build(schedule).warmup_steps == 3


def test_misspelled_knob():
  with pytest.raises(knobs.KnobError, match=r"num_layer.*num_layers"):
    quickstart.PythonStdlibLm(num_layer=2)

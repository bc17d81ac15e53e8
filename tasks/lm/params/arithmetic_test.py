"""Tests of GRPO on sums: runs, resuming, bad input."""

import json

from etils import epath
import fiddle as fdl
import numpy as np
import pytest

from paxon.runner import user_error
from paxon.runner.checkpoints import stored_checkpoint
from paxon.runner.training import train
from paxon.tasks.lm.params import arithmetic

_SIZES = {
  "num_layers": 1,
  "num_heads": 2,
  "embed_dim": 32,
  "mlp_dim": 64,
  "head_dim": 8,
}


def _train(folder, experiment, *, until=None):
  """Trains to a step, as a run that is interrupted there."""
  config = experiment.job()
  if until is not None:
    config.num_train_steps = until
  folder.mkdir(exist_ok=True)
  return train.run(fdl.build(config), config, epath.Path(folder))


def _read(folder):
  found = stored_checkpoint.find_checkpoint(epath.Path(folder))
  return stored_checkpoint.read_numpy(found, list(found.arrays))


def _rewards(folder):
  lines = (folder / "metrics.jsonl").read_text().splitlines()
  found = [json.loads(line) for line in lines]
  return [line["reward"] for line in found if "reward" in line]


def _begins_with_one(prompt, answer):
  del prompt
  return float(answer.startswith("1"))


class _Ones(arithmetic.ArithmeticGrpo):
  """Is rewarded for what a model of few steps can learn."""

  def adjust(self, config):
    """Sets the reward."""
    config.task.reward = _begins_with_one


def _grpo(tmp_path, **knobs):
  return _Ones(
    **{
      "weights": str(tmp_path / "sums"),
      "num_train_steps": 16,
      "checkpoint_every_steps": 8,
      "summary_every_steps": 1,
      "beta": 0.01,
      **_SIZES,
      **knobs,
    }
  )


def test_rewards_rise_and_a_resumed_run_equals_the_whole(tmp_path):
  sums = arithmetic.ArithmeticLm(num_train_steps=60, prompts=None, **_SIZES)
  sums = sums.replace(max_new_tokens=None, temperature=None)
  _train(tmp_path / "sums", sums)
  _train(tmp_path / "whole", _grpo(tmp_path))
  _train(tmp_path / "parts", _grpo(tmp_path), until=8)
  _train(tmp_path / "parts", _grpo(tmp_path))
  whole, parts = _read(tmp_path / "whole"), _read(tmp_path / "parts")
  assert whole.keys() == parts.keys()
  for name, value in whole.items():
    np.testing.assert_array_equal(value, parts[name], err_msg=name)
  start = _read(tmp_path / "sums")
  for name in start:
    if not name.startswith("params/"):
      continue
    assert not np.array_equal(whole[name], start[name]), name
    frozen = name.replace("params/", "frozen/reference/")
    np.testing.assert_array_equal(whole[frozen], start[name], err_msg=frozen)
    assert not any(n.startswith("opt") and n.endswith(frozen) for n in whole)
  rewards = _rewards(tmp_path / "whole")
  assert len(rewards) == 16
  assert np.mean(rewards[-4:]) > np.mean(rewards[:4]) + 0.1


def test_rewards_are_those_of_right_sums():
  assert arithmetic.reward_sum("7+8=", "15") == 1
  assert arithmetic.reward_sum("7+8=", "1") == 0
  assert arithmetic.reward_sum("7+8=", "15 ") == 0


@pytest.mark.parametrize(
  ("knobs", "error"),
  [
    ({"temperature": 0.5}, "temperature must be 1"),
    ({"num_samples": 1}, "PolicyLm.group_size must be at least 2"),
  ],
)
def test_invalid_settings(tmp_path, knobs, error):
  with pytest.raises((user_error.UserError, ValueError), match=error):
    fdl.build(_grpo(tmp_path, **knobs).job())

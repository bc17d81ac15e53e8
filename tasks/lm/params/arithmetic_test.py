"""Tests of GRPO on sums: runs, resuming, bad input."""

import json
import time

from etils import epath
import fiddle as fdl
import numpy as np
import pytest

from paxon.runner import user_error
from paxon.runner.checkpoints import stored_checkpoint
from paxon.runner.hosts import testing as forks_lib
from paxon.runner.training import process_programs, train
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


@pytest.fixture(name="forks", scope="module")
def _forks(tmp_path_factory):
  folder = tmp_path_factory.mktemp("processes")
  with forks_lib.Forks(process_programs.__name__, folder) as made:
    yield made


def count_digits(prompt, answer):
  """A reward that the samples of an untrained model differ in."""
  del prompt
  return float(sum(each.isdigit() for each in answer))


def _start(forks, folder, count):
  """Starts processes that have four devices together."""
  knobs = {
    **_SIZES,
    "num_kv_heads": 2,
    "num_train_steps": 8,
    "checkpoint_every_steps": 2,
    "summary_every_steps": 1,
    "mesh": "data=2,tensor=2",
  }
  flags = [
    f"--exp={arithmetic.ArithmeticGrpo.import_path()}",
    f"--job_log_dir={folder}",
    *(f"--fdl.{k}={v}" for k, v in knobs.items()),
    f"--fdl.task.reward=tasks.lm.params.arithmetic_test.{count_digits.__name__}",
  ]
  if count > 1:
    port = forks_lib.free_port()
    flags += [
      f"--coordinator_address=localhost:{port}",
      f"--num_processes={count}",
    ]
  return [
    forks.start(
      "command_line",
      [*flags, *([f"--process_id={i}"] if count > 1 else ())],
      devices=4 // count,
    )
    for i in range(count)
  ]


def _is_saved(folder):
  # The name of an incomplete checkpoint is longer.
  files = folder.glob("checkpoints/*/commit_success.txt")
  return any(file.parent.name.isdigit() for file in files)


@pytest.mark.parametrize("count", [2, 4])
def test_processes_that_are_killed_are_rewarded_as_one(tmp_path, forks, count):
  for number in (1, count):
    folder = tmp_path / str(number)
    processes = _start(forks, folder, number)
    if number > 1:
      last = processes[-1]
      while not _is_saved(folder):
        assert last.poll() is None, last.output()
        time.sleep(0.01)
      last.kill()
      assert 0 not in [process.wait() for process in processes]
      processes = _start(forks, folder, number)
    for process in processes:
      assert process.wait() == 0, process.output()
  one, found = _read(tmp_path / "1"), _read(tmp_path / str(count))
  assert one.keys() == found.keys()
  for name, value in one.items():
    # Sums over devices of another process are added in another order.
    np.testing.assert_allclose(
      value, found[name], rtol=1e-4, atol=1e-6, err_msg=name
    )
  # Samples of the same prompts, from the same draws.
  rewards = _rewards(tmp_path / "1")
  assert len(rewards) == 8
  assert len(set(rewards)) > 1
  assert _rewards(tmp_path / str(count)) == rewards


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

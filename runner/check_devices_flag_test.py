"""Tests of `--check_devices` and `--mode=check_devices` of the command line."""

import types

import pytest

from paxon.runner import main
from paxon.runner.devices import device_check
from paxon.runner.training import train

_TOY = "--exp=runner.toy_experiment.Toy"
_MODE = "--mode=check_devices"


@pytest.fixture(name="call")
def _call(capsys, tmp_path, monkeypatch):
  """Runs the command line here; returns status and errors."""
  monkeypatch.chdir(tmp_path)

  def call(*arguments):
    with pytest.raises(SystemExit) as caught:
      main.run(("paxon.runner",), ["main", *arguments])
    return caught.value.code, capsys.readouterr().err

  return call


@pytest.fixture(name="order")
def _order(monkeypatch):
  """Replaces the check and the training; returns what was called."""
  order = []

  def run(*_, **__):
    order.append("train")
    return types.SimpleNamespace(stopped_by=None)

  monkeypatch.setattr(train, "run", run)
  monkeypatch.setattr(device_check, "run", lambda **given: order.append(given))
  return order


def test_mode_checks_without_an_experiment(call, order):
  assert call(_MODE, "--host_timeout=9") == (0, "")
  assert call(_MODE, "--check_devices=strict") == (0, "")
  assert order == [
    {"is_strict": False, "timeout_seconds": 9},
    {"is_strict": True, "timeout_seconds": 300},
  ]


def test_flag_checks_before_training(call, order):
  assert call(_TOY, "--check_devices=warn")[0] == 0
  assert call(_TOY)[0] == 0
  check = {"is_strict": False, "timeout_seconds": 300}
  assert order == [check, "train", "train"]


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    (
      [_TOY, "--check_devices=maybe"],
      "--check_devices=maybe must be warn or strict.",
    ),
    ([_TOY, "--check_devices="], "--check_devices= must be warn or strict."),
    (
      ["--mode=eval", "--job_log_dir=a", "--check_devices=warn"],
      "--check_devices requires --mode=train or check_devices (got",
    ),
    ([_TOY, _MODE], "--exp requires --mode=train or eval or "),
    ([_MODE, "--job_log_dir=a"], "--job_log_dir requires --mode=train or "),
    ([_MODE, "--fdl.seed=3"], "--fdl.seed requires a --mode with an experi"),
    (
      [_MODE, "--num_processes=2"],
      "--num_processes=2 requires --coordinator_address and --process_id",
    ),
  ],
)
def test_wrong_flags_are_one_line(call, order, arguments, message):
  status, err = call(*arguments)
  assert (status, err.count("\n")) == (2, 1)
  assert err.startswith(message)
  assert not order

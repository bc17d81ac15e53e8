"""Tests for the settings of processes."""

import pytest

from paxon.runner import user_error
from paxon.runner.hosts import detection, process_settings


def _settings(address=None, count=None, index=None, seconds=300):
  return process_settings.ProcessSettings(
    coordinator_address=address,
    num_processes=count,
    process_id=index,
    timeout_seconds=seconds,
  )


@pytest.mark.parametrize(
  ("given", "message"),
  [
    ((None, None, None, 0), "--host_timeout must be positive, got 0"),
    (("a:1", 0, 0), "--num_processes must be positive, got 0"),
    (
      ("a:1", 4, 4),
      "--process_id=4 is out of range: with --num_processes=4 it must be 0 to"
      " 3.",
    ),
    (("a:1", 4, -1), "--process_id=-1 is out of range"),
    ((None, None, -1), "--process_id=-1 is out of range: it must be 0 or more"),
    (("a", 2, 0), "--coordinator_address=a must be HOST:PORT"),
    ((":80", 2, 0), "--coordinator_address=:80 must be HOST:PORT"),
    (("a:b", 2, 0), "--coordinator_address=a:b must be HOST:PORT"),
    (("a:65536", 2, 0), "=a:65536 must be HOST:PORT"),
    (
      (None, 4, 0),
      "--num_processes=4 --process_id=0 needs --coordinator_address too",
    ),
    (
      (None, 4, None),
      "--num_processes=4 needs --coordinator_address and --process_id too",
    ),
    (
      ("a:1", None, None),
      "--coordinator_address=a:1 needs --num_processes and --process_id too",
    ),
  ],
)
def test_what_is_wrong_is_said(given, message):
  with pytest.raises(user_error.UserError) as raised:
    _settings(*given).check(None)
  assert message in str(raised.value)


@pytest.mark.parametrize(
  ("given", "cluster"),
  [
    ((), None),
    ((None, 1), None),
    (("a:1", 2, 0), None),
    (("[::1]:65535", 2, 1), None),
    ((), detection.Cluster.SLURM),
    # The environment says the rest.
    (("a:1",), detection.Cluster.SLURM),
  ],
)
def test_what_is_right_passes(given, cluster):
  _settings(*given).check(cluster)


def test_is_given():
  assert not _settings().is_given
  assert _settings(count=1).is_given
  assert _settings(index=0).is_given


@pytest.mark.parametrize(
  ("settings", "mode", "folder", "message"),
  [
    ({"num_processes": 1}, "plan", None, "are not for --mode=plan, which is"),
    ({"max_restarts": -1}, "train", None, "must not be negative, got -1"),
    ({"max_restarts": 1}, "eval", "a", "--max_restarts is for --mode=train,"),
    ({"max_restarts": 1}, "train", None, "--max_restarts needs --job_log_dir"),
    (
      {"num_processes": 2, "process_id": 0, "coordinator_address": "a:1"},
      "train",
      None,
      "--num_processes needs --job_log_dir, one folder",
    ),
    ({"process_id": -1}, "train", "a", "--process_id=-1 is out of range"),
  ],
)
def test_what_does_not_go_together_is_said(settings, mode, folder, message):
  with pytest.raises(user_error.UserError) as raised:
    process_settings.ProcessSettings(**settings).check_command(
      None, mode=mode, job_log_dir=folder
    )
  assert message in str(raised.value)


def test_what_goes_together_passes():
  process_settings.ProcessSettings().check_command(
    None, mode="plan", job_log_dir=None
  )
  process_settings.ProcessSettings(max_restarts=2).check_command(
    None, mode="train", job_log_dir="a"
  )

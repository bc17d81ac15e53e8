"""Tests for joining that one process can run; see also `runner/training`."""

import json

import jax
import pytest

from paxon.runner import user_error
from paxon.runner.hosts import agreement, joining, process_settings


def _settings(index, address="far:1234"):
  return process_settings.ProcessSettings(
    coordinator_address=address,
    num_processes=4,
    process_id=index,
    timeout_seconds=7,
  )


def test_timeout_names_the_missing_process():
  first = joining.describe_missing(_settings(0), answers=lambda address: True)
  assert first.startswith(
    "Process 0 waited 7 s (--host_timeout) at far:1234, but not all of the 4"
    " processes connected; start every process with the same"
  )
  alone = joining.describe_missing(_settings(2), answers=lambda address: False)
  assert alone.startswith("The coordinator far:1234 did not answer within 7 s")
  some = joining.describe_missing(_settings(2), answers=lambda address: True)
  assert some.startswith("The coordinator far:1234 answers, but not all of the")
  found = joining.describe_missing(
    process_settings.ProcessSettings(timeout_seconds=9)
  )
  assert "did not connect within 9 s (--host_timeout)" in found


def test_one_process_does_not_join(tmp_path):
  path = tmp_path / "joined"
  joining.join(
    process_settings.ProcessSettings(num_processes=1),
    # As in a task of SLURM: the flag takes precedence.
    {
      process_settings.JOINED_FILE: str(path),
      "SLURM_JOB_ID": "7",
      "SLURM_STEP_NODELIST": "a",
      "SLURM_PROCID": "0",
      "SLURM_LOCALID": "0",
      "SLURM_NTASKS": "2",
    },
  )
  assert not jax.distributed.is_initialized()
  assert json.loads(path.read_text()) == {"process": 0, "processes": 1}


def test_invalid_settings_are_rejected():
  with pytest.raises(user_error.UserError, match="--process_id=4 is out of"):
    joining.join(_settings(4), {})


def test_joining_after_devices_are_used_is_an_error():
  jax.devices()
  with pytest.raises(
    user_error.UserError, match=r"Joining the processes failed.*before"
  ):
    joining.join(_settings(1), {})


def test_one_process_raises_its_errors():
  with pytest.raises(ValueError, match="a bug"), joining.exit_together():
    raise ValueError("a bug")


def test_one_process_agrees_with_itself():
  assert agreement.is_alone()
  assert agreement.is_first()
  value = object()
  assert agreement.from_first(lambda: value) is value
  assert agreement.gather(value) == [value]
  assert agreement.share([1, 2, 3]) == [1, 2, 3]

"""Tests for flags of multi-process runs and detection of clusters."""

import pytest

from paxon.runner import user_error
from paxon.runner.hosts import process_settings


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
      "--num_processes=4 --process_id=0 requires --coordinator_address:",
    ),
    (
      (None, 4, None),
      "--num_processes=4 requires --coordinator_address and --process_id:",
    ),
    (
      ("a:1", None, None),
      "--coordinator_address=a:1 requires --num_processes and --process_id:",
    ),
  ],
)
def test_invalid_settings(given, message):
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
    ((), process_settings.Cluster.SLURM),
    # The cluster provides the rest.
    (("a:1",), process_settings.Cluster.SLURM),
  ],
)
def test_valid_settings(given, cluster):
  _settings(*given).check(cluster)


def test_is_given():
  assert not _settings().is_given
  assert _settings(count=1).is_given
  assert _settings(index=0).is_given


@pytest.mark.parametrize(
  ("settings", "folder", "message"),
  [
    ({"max_restarts": -1}, None, "must not be negative, got -1"),
    ({"max_restarts": 1}, None, "--max_restarts requires --job_log_dir"),
    (
      {"num_processes": 2, "process_id": 0, "coordinator_address": "a:1"},
      None,
      "--num_processes requires --job_log_dir, a directory",
    ),
    ({"process_id": -1}, "a", "--process_id=-1 is out of range"),
    ({"min_processes": 2}, "a", "--min_processes=2 requires --max_restarts: a"),
  ],
)
def test_invalid_combinations(settings, folder, message):
  with pytest.raises(user_error.UserError) as raised:
    process_settings.ProcessSettings(**settings).check_command(
      None, job_log_dir=folder
    )
  assert message in str(raised.value)


def test_valid_combinations():
  process_settings.ProcessSettings().check_command(None, job_log_dir=None)
  process_settings.ProcessSettings(max_restarts=2).check_command(
    None, job_log_dir="a"
  )
  # The command of a process that a supervisor starts.
  process_settings.ProcessSettings(
    coordinator_address="a:1", num_processes=2, process_id=0, min_processes=1
  ).check_command(None, job_log_dir="a", is_supervised=True)


Cluster = process_settings.Cluster
SLURM = {
  "SLURM_JOB_ID": "7",
  "SLURM_STEP_NODELIST": "node[1-2]",
  "SLURM_PROCID": "1",
  "SLURM_LOCALID": "0",
  "SLURM_NTASKS": "2",
}
POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "1"}


def _detect(environ, *, modules=(), tpu=False):
  return process_settings.detect(
    environ, has_module=lambda name: name in modules, has_tpu=lambda: tpu
  )


@pytest.mark.parametrize(
  ("environ", "modules", "tpu", "expected"),
  [
    ({}, (), False, None),
    (SLURM, (), False, Cluster.SLURM),
    # One task, and the script of a job, which is no step.
    (SLURM | {"SLURM_NTASKS": "1"}, (), False, None),
    (
      {k: v for k, v in SLURM.items() if k != "SLURM_PROCID"},
      (),
      False,
      None,
    ),
    ({"OMPI_COMM_WORLD_SIZE": "4"}, (), False, Cluster.OPEN_MPI),
    ({"OMPI_COMM_WORLD_SIZE": "1"}, (), False, None),
    ({"OMPI_COMM_WORLD_SIZE": "x"}, (), False, None),
    (POD, ("kubernetes",), False, Cluster.KUBERNETES),
    (POD, (), False, None),
    ({"KUBERNETES_SERVICE_HOST": "a"}, ("kubernetes",), False, None),
    ({}, ("libtpu",), True, Cluster.TPU),
    ({}, ("libtpu",), False, None),
    ({}, (), True, None),
    ({"JAX_PLATFORMS": "cpu"}, ("libtpu",), True, None),
    ({"JAX_PLATFORMS": "tpu,cpu"}, ("libtpu",), True, Cluster.TPU),
    # A pod of a TPU slice: JAX asks the TPU.
    (POD, ("libtpu", "kubernetes"), True, Cluster.TPU),
  ],
)
def test_detected_cluster(environ, modules, tpu, expected):
  assert _detect(environ, modules=modules, tpu=tpu) is expected


def test_this_machine_is_no_cluster():
  assert process_settings.detect({"JAX_PLATFORMS": "cpu"}) is None


@pytest.mark.parametrize(
  ("least", "given", "message"),
  [
    (1, {}, "--min_processes=1 requires --coordinator_address, --num_proc"),
    (0, None, "--min_processes=0 must be from 1 to --num_processes, which is"),
    (3, None, "--min_processes=3 must be from 1 to --num_processes, which is"),
  ],
)
def test_fewer_processes_are_numbered_by_flags(least, given, message):
  if given is None:
    given = {"coordinator_address": "a:1", "num_processes": 2, "process_id": 0}
  settings = process_settings.ProcessSettings(
    max_restarts=1, min_processes=least, **given
  )
  with pytest.raises(user_error.UserError) as raised:
    settings.check_command(None, job_log_dir="a")
  assert message in str(raised.value)

"""Tests for the signs of several processes."""

import pytest

from paxon.runner.hosts import detection

Cluster = detection.Cluster
SLURM = {
  "SLURM_JOB_ID": "7",
  "SLURM_STEP_NODELIST": "node[1-2]",
  "SLURM_PROCID": "1",
  "SLURM_LOCALID": "0",
  "SLURM_NTASKS": "2",
}
POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "1"}


def _detect(environ, *, modules=(), tpu=False):
  return detection.detect(
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
def test_signs(environ, modules, tpu, expected):
  assert _detect(environ, modules=modules, tpu=tpu) is expected


def test_signs_of_this_machine_can_be_asked():
  assert detection.detect({"JAX_PLATFORMS": "cpu"}) is None

"""Tests that linting the largest experiment is fast and needs no hardware."""

import re
import subprocess
import sys
import time

import pytest

from paxon.runner.configuration import resolving
from paxon.runner.plan import child_process
from paxon.runner.plan import target as targets
from paxon.runner.planning import job_lint

_LARGEST = "tasks.lm.params.lm_cloud.LmCloudSpmd1024B"
_PLATFORM = {"JAX_PLATFORMS": "no_such_platform"}


def _run(folder, code_or_module, *arguments):
  target = targets.parse("v4:8x16x16")
  return subprocess.run(
    [sys.executable, *code_or_module, *arguments],
    # A missing platform raises when a backend is initialized.
    env=child_process.environment(target, is_compiled=True) | _PLATFORM,
    cwd=folder,
    capture_output=True,
    text=True,
    check=False,
  )


def test_training_fails_without_the_platform(tmp_path):
  done = _run(tmp_path, ["-c"], "import jax; jax.devices()")
  assert "no_such_platform" in done.stderr
  assert done.returncode == 1


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize(
  ("mesh", "message"),
  [
    (
      "tensor=2048",
      r"axis 'heads' of size \d+ does not divide by tensor=2048; make num_heads"
      r" a multiple of 2048, such as 2048, or the mesh smaller along tensor",
    ),
    ("fsdp=512", r"The mesh 'fsdp=512' needs exactly 512 devices.* are 2048"),
  ],
)
def test_rejects_mesh_before_initializing_a_backend(tmp_path, mesh, message):
  done = _run(
    tmp_path,
    ["-m", "paxon.runner.main"],
    *(f"--exp={_LARGEST}", "--mode=plan", "--target=v4:8x16x16"),
    f"--fdl.mesh={mesh}",
  )
  assert done.returncode == 2, done.stderr
  assert re.search(message, done.stderr)
  assert done.stderr.count("\n") == 1


def test_lint_takes_seconds():
  job = resolving.build(resolving.resolve(_LARGEST, []).config)
  begin = time.process_time()
  findings = job_lint.check(job, num_devices=2048)
  assert time.process_time() - begin < 10
  assert not any(finding.is_error for finding in findings)

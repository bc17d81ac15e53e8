"""Tests that a failed save is one line and keeps other checkpoints."""

import os
import subprocess

from etils import epath
import pytest

from paxon.runner.checkpoints import checkpointer, golden
from paxon.runner.hosts import warm_python

# Run in a process of its own, which must come to its end by itself.
PROGRAM = """
import resource, sys
import jax.numpy as jnp
from etils import epath
from paxon.runner.checkpoints import checkpointer, golden
from paxon.sharding import variables

float32 = jnp.dtype("float32")
specs = [variables.VariableSpec("params/a", (300_000,), float32, (None,))]
tree = [jnp.arange(300_000, dtype=jnp.float32)]
folder = epath.Path(sys.argv[1])
try:
  with checkpointer.Checkpointer(folder) as checkpoints:
    checkpoints.save(1, tree, specs=specs, data={})
    checkpoints.wait()
    limit = int(sys.argv[2])
    # As on a full disk, a file cannot grow any more.
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    checkpoints.save(2, tree, specs=specs, data={})
    if sys.argv[3] == "wait":
      checkpoints.wait()
    if sys.argv[3] == "raise":
      raise OSError("another file failed first")
except (checkpointer.SaveError, OSError) as error:
  print(error, file=sys.stderr)
  sys.exit(2)
"""


@pytest.fixture(name="python", scope="module")
def _python(tmp_path_factory):
  folder = tmp_path_factory.mktemp("python")
  with warm_python.WarmPython([golden.__name__], folder) as warm:
    yield warm.executable


@pytest.mark.nightly(keep=2)
@pytest.mark.parametrize(
  ("limit", "then"),
  [
    pytest.param(100_000, "wait", id="arrays"),
    pytest.param(30, "wait", id="everything"),
    # The failure is found when the checkpointer is closed.
    pytest.param(100_000, "close", id="close"),
    # What failed first is reported, not the save that failed later.
    pytest.param(100_000, "raise", id="another-error"),
  ],
)
def test_a_full_disk(python, tmp_path, limit, then):
  ended = subprocess.run(
    [python, "-c", PROGRAM, os.fspath(tmp_path), str(limit), then],
    stderr=subprocess.PIPE,
    text=True,
    check=False,
  )
  assert ended.returncode == 2, ended.stderr
  lines = ended.stderr.splitlines()
  assert len(lines) == 1, ended.stderr
  if then == "raise":
    assert lines[0] == "another file failed first"
  else:
    assert lines[0].startswith(
      f"Writing a checkpoint to {os.fspath(tmp_path)} failed:"
    )
    assert "File too large" in lines[0]

  # What is half written is taken for no checkpoint, and is cleaned up.
  with checkpointer.Checkpointer(
    epath.Path(tmp_path), read_only=True
  ) as checkpoints:
    assert checkpoints.steps() == [1]
    checkpoints.verify(1)
  with checkpointer.Checkpointer(epath.Path(tmp_path)) as checkpoints:
    checkpoints.save(2, golden.values(), specs=golden.specs(), data={})
    checkpoints.wait()
    assert checkpoints.steps() == [1, 2]
    checkpoints.verify(2)
  assert {path.name for path in tmp_path.iterdir()} == {"1", "2"}

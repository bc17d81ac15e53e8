"""Tests that an interrupted run ends as an undisturbed one, bit by bit."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time

from etils import epath
import jax
import pytest

from paxon.runner.checkpoints import checkpointer
from paxon.runner.programs import session as session_lib
from paxon.runner.programs import testing

# Slow enough that a signal hits the middle of a run.
KNOBS = (
  "num_train_steps=16",
  "checkpoint_every_steps=3",
  # Also at a checkpoint. One split goes on where it was.
  "eval_every_steps=6",
  "rolling_batches=2",
  "delay=0.15",
)
# Figures of the machine, which differ from run to run.
_MEASURED = re.compile("_second|goodput|mfu|tflops|memory").search
_SPLITS = ("train", "validation", "rolling")
CONTINUING = r"continuing from the checkpoint of step (\d+)"


def _start(folder, *knobs):
  program = [sys.executable, "-W", "error", "-m", testing.__name__]
  return subprocess.Popen(
    [*program, os.fspath(folder), *KNOBS, *knobs],
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
    env=os.environ | {"JAX_NUM_CPU_DEVICES": "1"},
  )


def _finish(process):
  output, _ = process.communicate(timeout=200)
  assert process.returncode == 0, output
  return output


def _wait_for_checkpoint(folder, process):
  limit = time.monotonic() + 120
  while not list((folder / "checkpoints").glob("[0-9]*/commit_success.txt")):
    assert process.poll() is None, process.communicate()[0]
    assert time.monotonic() < limit
    time.sleep(0.02)


def _digest(folder):
  """The step and the sha256 of everything in the newest checkpoint."""
  job, _ = testing.make(num_train_steps=16)
  session = session_lib.open_session(job, devices=jax.devices()[:1])
  job.train_input.reset()
  with checkpointer.Checkpointer(
    epath.Path(folder / "checkpoints"), read_only=True
  ) as checkpoints:
    step = checkpoints.latest_step()
    restored = checkpoints.restore(
      step, specs=session.state_specs, shardings=session.state_shardings
    )
  return step, testing.digest(restored.tree), restored.data


def _train_metrics(folder):
  """Everything written of training, without what depends on the clock."""
  lines = (folder / "metrics.jsonl").read_text().splitlines()
  records = [json.loads(line) for line in lines]
  records = [
    {name: value for name, value in record.items() if not _MEASURED(name)}
    for record in records
  ]
  records = [r for r in records if r["split"] in _SPLITS]
  return {(r["step"], r["split"]): r for r in records}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
  folder = tmp_path_factory.mktemp("undisturbed")
  output = _finish(_start(folder, "delay=0.0"))
  assert "continuing" not in output
  return folder


def test_killed_and_restarted(undisturbed, tmp_path):
  process = _start(tmp_path)
  _wait_for_checkpoint(tmp_path, process)
  # Random on purpose: any moment must do.
  time.sleep(random.random())
  process.send_signal(signal.SIGKILL)
  process.communicate()
  assert process.returncode == -signal.SIGKILL

  output = _finish(_start(tmp_path))
  step = int(re.search(CONTINUING, output).group(1))
  assert 3 <= step < 16
  assert _digest(tmp_path) == _digest(undisturbed)
  assert _digest(tmp_path)[0] == 16
  assert _train_metrics(tmp_path) == _train_metrics(undisturbed)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_stopped_by_a_signal_and_restarted(undisturbed, tmp_path, name):
  process = _start(tmp_path, "checkpoint_every_steps=2")
  _wait_for_checkpoint(tmp_path, process)
  process.send_signal(signal.Signals[name])
  output = _finish(process)
  assert f"{name}: stopping after this step and a checkpoint" in output
  stopped = re.search(rf"stopped by {name} at step (\d+) of 16; .*", output)
  assert f"--job_log_dir={tmp_path}" in stopped.group(0)
  assert not (tmp_path / "report.html").exists()

  output = _finish(_start(tmp_path))
  assert re.search(CONTINUING, output).group(1) == stopped.group(1)
  assert _digest(tmp_path) == _digest(undisturbed)
  assert _train_metrics(tmp_path) == _train_metrics(undisturbed)


def test_killed_before_it_ends_early(tmp_path):
  # The first evaluation is the best one, so the third one ends the run.
  knobs = ("patience=2", "eval_every_steps=3")
  folders = [tmp_path / name for name in ("undisturbed", "killed")]
  output = _finish(_start(folders[0], *knobs, "delay=0.0"))
  assert "training ends early, at step 9: validation/bits_per_byte" in output

  process = _start(folders[1], *knobs)
  _wait_for_checkpoint(folders[1], process)
  time.sleep(random.random())
  process.send_signal(signal.SIGKILL)
  process.communicate()
  output = _finish(_start(folders[1], *knobs))
  assert re.search(CONTINUING, output)
  assert "training ends early, at step 9: validation/bits_per_byte" in output
  assert _digest(folders[1]) == _digest(folders[0])
  assert _digest(folders[1])[0] == 9
  assert _train_metrics(folders[1]) == _train_metrics(folders[0])

  # It is finished: once more, nothing is trained.
  output = _finish(_start(folders[1], *knobs))
  assert "training ends early, at step 9: validation/bits_per_byte" in output
  assert _digest(folders[1])[0] == 9

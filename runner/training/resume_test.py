"""Tests that an interrupted run ends as an undisturbed one, bit by bit."""

import json
import os
import random
import re
import signal
import time

from etils import epath
import jax
import pytest

from paxon.runner.checkpoints import checkpointer
from paxon.runner.hosts import testing as forks_lib
from paxon.runner.session import session as session_lib
from paxon.runner.training import process_programs, testing

TRAIN = "train"

# Slow enough that a signal hits the middle of a run.
KNOBS = (
  "num_train_steps=16",
  "checkpoint_every_steps=3",
  # Also at a checkpoint. One split goes on where it was.
  "eval_every_steps=6",
  "rolling_batches=2",
  "delay=0.15",
  # Samples are no part of the state.
  "max_new_tokens=0",
)
# Figures of the machine, which differ from run to run.
_MEASURED = re.compile("_second|goodput|mfu|tflops|memory").search
_SPLITS = ("train", "validation", "rolling")
RESUMING = r"resuming from the checkpoint of step (\d+)"


@pytest.fixture(name="forks", scope="module")
def _forks(tmp_path_factory):
  folder = tmp_path_factory.mktemp("processes")
  with forks_lib.Forks(process_programs.__name__, folder) as made:
    yield made


def _start(forks, folder, *knobs):
  arguments = [os.fspath(folder), *KNOBS, *knobs]
  return forks.start(TRAIN, arguments, devices=1)


def _finish(forks, process, *, status=0):
  assert forks.wait(process) == status, process.output()
  return process.output()


def _wait_until(is_so, process):
  while not is_so():
    assert process.poll() is None or is_so(), process.output()
    time.sleep(0.02)


def _wait_for_checkpoint(folder, process):
  def is_saved():
    # A folder that is not complete has a longer name.
    files = (folder / "checkpoints").glob("*/commit_success.txt")
    return any(file.parent.name.isdigit() for file in files)

  _wait_until(is_saved, process)


def _wait_for_a_step(process):
  _wait_until(lambda: re.search(r"^step \d", process.output(), re.M), process)


def _kill(forks, folder, process, *, seconds):
  """Kills a process within some seconds after its first checkpoint."""
  _wait_for_checkpoint(folder, process)
  # Random on purpose: any moment must do. pytest shows it where a test fails.
  moment = random.uniform(0.0, seconds)
  print(f"killed {moment:.3f} s after the first checkpoint")
  time.sleep(moment)
  process.kill()
  assert forks.wait(process) == -signal.SIGKILL


@pytest.fixture(name="session", scope="module")
def _session():
  job, _ = testing.make(num_train_steps=16)
  return session_lib.open_session(job, devices=jax.devices()[:1])


def _digest(session, folder):
  """The step and the sha256 of everything in the newest checkpoint."""
  session.job.train_input.reset()
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


@pytest.fixture(name="undisturbed", scope="module")
def _undisturbed(forks, session, tmp_path_factory):
  """What an undisturbed run leaves: its last checkpoint, and its figures."""
  folder = tmp_path_factory.mktemp("undisturbed")
  output = _finish(forks, _start(forks, folder, "delay=0.0"))
  assert "continuing" not in output
  return _digest(session, folder), _train_metrics(folder)


@pytest.mark.nightly
def test_killed_and_restarted(forks, session, undisturbed, tmp_path):
  _kill(forks, tmp_path, _start(forks, tmp_path), seconds=1.0)

  output = _finish(forks, _start(forks, tmp_path))
  step = int(re.search(RESUMING, output).group(1))
  assert 3 <= step < 16
  found = _digest(session, tmp_path)
  assert found[0] == 16
  assert (found, _train_metrics(tmp_path)) == undisturbed


def test_stopped_by_signals_and_restarted(
  forks, session, undisturbed, tmp_path
):
  stopped = None
  for name in ("SIGTERM", "SIGINT"):
    process = _start(forks, tmp_path, "checkpoint_every_steps=2")
    _wait_for_checkpoint(tmp_path, process)
    _wait_for_a_step(process)
    os.kill(process.pid, signal.Signals[name])
    status = 128 + signal.Signals[name]
    output = _finish(forks, process, status=status)
    assert re.findall(RESUMING, output) == ([stopped] if stopped else [])
    assert f"{name}: stopping after this step and a checkpoint" in output
    found = re.search(rf"stopped by {name} at step (\d+) of 16; .*", output)
    assert f"--job_log_dir={tmp_path}" in found.group(0)
    assert f"{found.group(1)} steps" in (tmp_path / "report.html").read_text()
    stopped = found.group(1)

  output = _finish(forks, _start(forks, tmp_path))
  assert re.findall(RESUMING, output) == [stopped]
  found = _digest(session, tmp_path), _train_metrics(tmp_path)
  assert found == undisturbed


@pytest.mark.nightly
def test_killed_before_it_ends_early(forks, session, tmp_path):
  # The first evaluation is the best one, so the third one ends the run.
  knobs = ("patience=2", "eval_every_steps=3")
  folders = [tmp_path / name for name in ("undisturbed", "killed")]
  output = _finish(forks, _start(forks, folders[0], *knobs, "delay=0.0"))
  assert "early stopping at step 9: validation/bits_per_byte" in output

  _kill(forks, folders[1], _start(forks, folders[1], *knobs), seconds=0.5)
  output = _finish(forks, _start(forks, folders[1], *knobs))
  assert re.search(RESUMING, output)
  assert "early stopping at step 9: validation/bits_per_byte" in output
  expected, found = (_digest(session, folder) for folder in folders)
  assert found == expected
  assert found[0] == 9
  assert _train_metrics(folders[1]) == _train_metrics(folders[0])

  # It is finished: once more, nothing is trained.
  output = _finish(forks, _start(forks, folders[1], *knobs))
  assert "early stopping at step 9: validation/bits_per_byte" in output
  assert _digest(session, folders[1])[0] == 9

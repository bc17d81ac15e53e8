"""Tests of runs with checkpoints on the disks of their hosts."""

import errno
import os
import re
import shutil
import signal
import time

from etils import epath
import jax
import pytest

from paxon.runner import run_dir
from paxon.runner.checkpoints import shard_files
from paxon.runner.hosts import testing as forks_lib
from paxon.runner.monitoring import launch, metrics_file
from paxon.runner.session import session as session_lib
from paxon.runner.training import hooks, process_programs, testing, train

KNOBS = {
  "num_train_steps": 12,
  "checkpoint_every_steps": 8,
  "local_checkpoint_every_steps": 2,
  "eval_every_steps": 6,
  "max_new_tokens": 0,
  "mesh": "fsdp=4",
}
# Of the machine; they differ between runs.
_MEASURED = re.compile("_second|goodput|mfu|tflops|memory|straggler").search


@pytest.fixture(scope="module")
def forks(tmp_path_factory):
  folder = tmp_path_factory.mktemp("processes")
  with forks_lib.Forks(process_programs.__name__, folder) as made:
    yield made


@pytest.fixture(scope="module")
def session():
  knobs = {k: v for k, v in KNOBS.items() if not k.startswith("local")}
  job, _ = testing.make(**knobs)
  return session_lib.open_session(job, devices=jax.devices()[:4])


class _Run:
  """A run of several processes, each with its local directory."""

  def __init__(self, forks, folder, *, count=2, is_local=True, **knobs):
    self.forks, self.folder, self.count = forks, folder, count
    self.is_local, self.knobs = is_local, knobs

  @property
  def place(self):
    return self.folder / "run"

  def disk(self, index):
    return self.folder / f"host-{index}"

  def start(self, *, count=None, **knobs):
    count = count or self.count
    port = forks_lib.free_port()
    flags = KNOBS | self.knobs | knobs
    if not self.is_local:
      del flags["local_checkpoint_every_steps"]
    return [
      self.forks.start(
        "command_line",
        [
          "--exp=runner.training.testing.TinyLm",
          f"--job_log_dir={os.fspath(self.place)}",
          *(f"--fdl.{name}={value}" for name, value in flags.items()),
          f"--coordinator_address=localhost:{port}",
          f"--num_processes={count}",
          f"--process_id={index}",
          "--host_timeout=60",
          *([f"--local_checkpoint_dir={self.disk(index)}"] * self.is_local),
        ],
        devices=4 // count,
      )
      for index in range(count)
    ]

  def finish(self, processes):
    statuses = [process.wait() for process in processes]
    assert statuses == [0] * len(processes), [p.output() for p in processes]
    return processes[0].output()

  def kill_after(self, step):
    """Kills all processes when a local checkpoint is complete."""
    processes = self.start()
    while self.local_step() < step:
      for process in processes:
        assert process.poll() is None, process.output()
      time.sleep(0.02)
    for process in processes:
      process.send_signal(signal.SIGKILL)
    for process in processes:
      process.wait()
    return self.local_step()

  def saves(self, index):
    """Returns the indices of the local checkpoints of a process, by step."""
    found = self.disk(index).glob("*/*.*/*/index.json")
    return {int(p.parent.parent.name.partition(".")[0]): p for p in found}

  def local_step(self):
    """Returns the newest step that all processes have saved."""
    steps = [set(self.saves(index)) for index in range(self.count)]
    return max(set.intersection(*steps), default=0)

  def results(self, session):
    path = epath.Path(self.place) / run_dir.CHECKPOINTS
    figures = {
      (record.step, record.split, name): value
      for record in metrics_file.read(self.place / run_dir.METRICS)
      for name, value in record.values.items()
      if not _MEASURED(name)
    }
    return process_programs.digest(session, path), figures


@pytest.fixture(scope="module")
def undisturbed(forks, session, tmp_path_factory):
  folder = tmp_path_factory.mktemp("undisturbed")
  run = _Run(forks, folder, is_local=False)
  run.finish(run.start())
  return run.results(session)


@pytest.mark.nightly
def test_a_lost_host_reads_the_copy_of_its_shards(
  forks, session, undisturbed, tmp_path
):
  run = _Run(forks, tmp_path, delay=0.3)
  step = run.kill_after(4)
  shutil.rmtree(run.disk(1))
  said = run.finish(run.start())
  assert f"reading the local checkpoint of step {step}; 1 of 2" in said
  assert f"resuming from the checkpoint of step {step}\n" in said
  assert run.results(session) == undisturbed
  # The last checkpoint is in the run directory.
  assert not run.saves(0)
  assert not run.saves(1)


@pytest.mark.nightly
def test_each_tier_is_used_if_the_other_is_damaged(
  forks, session, undisturbed, tmp_path
):
  run = _Run(forks, tmp_path / "first", delay=0.3)
  step = run.kill_after(10)
  second = _Run(forks, tmp_path / "second", delay=0.3)
  shutil.copytree(run.folder, second.folder)
  # A copy would be another run.
  name = second.place / run_dir.LOCAL_CHECKPOINTS
  name.write_text(name.read_text().replace("/first/", "/second/"))
  # Of the newest checkpoint in the run directory.
  for path in run.place.glob("checkpoints/8/data/*"):
    path.write_bytes(b"{")
  said = run.finish(run.start())
  assert f"resuming from the checkpoint of step {step}\n" in said
  assert run.results(session) == undisturbed
  # On both hosts, so that there are no copies.
  for index in range(2):
    for path in second.saves(index).values():
      path.with_name("data.bin").write_bytes(b"")
  said = second.finish(second.start())
  assert "resuming from the checkpoint of step 8\n" in said
  assert second.results(session) == undisturbed


class _Crash(hooks.Hook):
  """Fails after a step."""

  def __init__(self, step):
    self._step = step

  def wrap(self, step, train_step):
    if step > self._step:
      raise RuntimeError("crash")
    return train_step


def _train(folder, *more_hooks, is_local=True):
  knobs = {
    **{
      "num_train_steps": 7,
      "checkpoint_every_steps": 4,
      "mesh": "data=2,fsdp=4",
    },
    **{"eval_every_steps": 2, "rolling_batches": 2, "max_new_tokens": 0},
  }
  disk = None
  if is_local:
    disk = str(folder / "disk")
    knobs["local_checkpoint_every_steps"] = 2
  job, config = testing.make(**knobs)
  place = epath.Path(folder / "run")
  place.mkdir(exist_ok=True, parents=True)
  result = train.run(
    job,
    config,
    place,
    launch=launch.Launch(local_checkpoint_dir=disk),
    more_hooks=more_hooks,
  )
  values = [
    (record.step, record.split, name, value)
    for record in result.history()
    for name, value in record.values.items()
    if not _MEASURED(name)
  ]
  return testing.digest(result.state), sorted(values)


@pytest.fixture(scope="module", name="alone")
def _alone(tmp_path_factory):
  return _train(tmp_path_factory.mktemp("alone"), is_local=False)


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize(
  ("last", "resumed"),
  [pytest.param(3, 2, id="first"), pytest.param(6, 6, id="newer")],
)
def test_a_run_resumes_from_its_local_checkpoint(
  last, resumed, alone, tmp_path, capsys
):
  with pytest.raises(RuntimeError, match="crash"):
    _train(tmp_path, _Crash(last))
  capsys.readouterr()
  assert _train(tmp_path) == alone
  said = capsys.readouterr().out
  assert f"reading the local checkpoint of step {resumed}\n" in said
  assert not list((tmp_path / "disk").iterdir())


def test_a_full_local_disk_does_not_end_the_run(
  alone, tmp_path, capsys, monkeypatch
):
  def write(folder, shards, *, header):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

  monkeypatch.setattr(shard_files, "write", write)
  assert _train(tmp_path) == alone
  said = capsys.readouterr().err
  assert "checkpoint of step 2 could not be written (No space left on" in said
  assert said.count("could not be written") == 1

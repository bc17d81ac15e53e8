"""Tests that several processes train as one does, and what if one dies."""

import json
import os
import pathlib
import re
import shlex
import signal
import subprocess
import sys
import time

from etils import epath
import jax
import numpy as np
import pytest

from paxon.runner import run_dir
from paxon.runner.hosts import testing as forks_lib
from paxon.runner.hosts import warm_python
from paxon.runner.monitoring import metrics_file
from paxon.runner.session import session as session_lib
from paxon.runner.training import process_programs, stragglers, testing

MAIN, TOUR = "command_line", "tour"
EXP = "--exp=runner.training.testing.TinyLm"
PIPELINED = "--exp=runner.training.pipelined_testing.PipelinedLm"
# Each step is dozens of messages, for which all processes wait in turns.
KNOBS = {
  "num_train_steps": 12,
  "checkpoint_every_steps": 6,
  "eval_every_steps": 6,
  "max_new_tokens": 2,
  "mesh": "data=2,fsdp=2",
}
# Figures of the machine, which differ from run to run.
_MEASURED = re.compile("_second|goodput|mfu|tflops|memory|straggler").search
# `python -m paxon.runner.main`, whose children are started with another Python.
_SUPERVISOR = """
import runpy, sys
sys.executable = sys.argv.pop(1)
sys.orig_argv[1:] = ["-m", "paxon.runner.main", *sys.argv[1:]]
runpy.run_module("paxon.runner.main", run_name="__main__", alter_sys=True)
"""


@pytest.fixture(scope="module")
def forks(tmp_path_factory):
  folder = tmp_path_factory.mktemp("processes")
  with forks_lib.Forks(process_programs.__name__, folder) as made:
    yield made


def _flags(folder, *, exp=EXP, **knobs):
  return [
    exp,
    f"--job_log_dir={os.fspath(folder)}",
    *(f"--fdl.{name}={value}" for name, value in (KNOBS | knobs).items()),
  ]


def _start(forks, count, flags, *, devices=4, timeout=60):
  port = forks_lib.free_port()
  return [
    forks.start(
      MAIN,
      [
        *flags,
        f"--coordinator_address=localhost:{port}",
        f"--num_processes={count}",
        f"--process_id={index}",
        f"--host_timeout={timeout}",
      ],
      devices=devices // count,
    )
    for index in range(count)
  ]


def _finish(forks, processes, *, status=0):
  statuses = [forks.wait(process) for process in processes]
  assert statuses == [status] * len(processes), [p.output() for p in processes]


def _trained(forks, count, folder, **knobs):
  processes = _start(forks, count, _flags(folder, **knobs))
  _finish(forks, processes)
  return processes


@pytest.fixture(scope="module")
def by_two(forks, tmp_path_factory):
  folder = tmp_path_factory.mktemp("by_two") / "run"
  return folder, _trained(forks, 2, folder, max_new_tokens=0)


@pytest.fixture(scope="module")
def by_four(forks, tmp_path_factory):
  folder = tmp_path_factory.mktemp("by_four") / "run"
  return folder, _trained(forks, 4, folder, max_new_tokens=0)


@pytest.fixture(scope="module")
def session():
  job, _ = testing.make(**KNOBS)
  return session_lib.open_session(job, devices=jax.devices()[:4])


def _figures(folder):
  """The figures of a run by step, split and name, but for those of time."""
  return {
    (record.step, record.split, name): value
    for record in metrics_file.read(folder / run_dir.METRICS)
    for name, value in record.values.items()
    if not _MEASURED(name)
  }


def _state(session, folder):
  path = epath.Path(folder) / run_dir.CHECKPOINTS
  return process_programs.digest(session, path)


@pytest.fixture(scope="module")
def by_one(forks, tmp_path_factory):
  folder = tmp_path_factory.mktemp("by_one")
  processes = [forks.start(MAIN, _flags(folder), devices=4)]
  _finish(forks, processes)
  return folder


@pytest.mark.nightly
def test_two_and_four_processes_train_as_one(by_one, by_two, by_four):
  expected = _figures(by_one)
  assert {step for step, _, _ in expected} == set(range(1, 13))
  for folder, _ in (by_two, by_four):
    figures = _figures(folder)
    assert figures.keys() == expected.keys()
    for key, value in expected.items():
      np.testing.assert_allclose(
        figures[key], value, rtol=1e-6, err_msg=str(key)
      )


@pytest.mark.nightly
@pytest.mark.parametrize(
  ("mesh", "knobs"),
  [
    pytest.param("dcn.stage=2,data=2", {}, id="across"),
    pytest.param(
      "stage=2,dcn.data=2", {"schedule": "1f1b_two_slots"}, id="inside"
    ),
    pytest.param(
      "dcn.stage=2,tensor=2",
      {"schedule": "1f1b", "residuals": "save"},
      id="schedule-across",
    ),
  ],
)
def test_stages_of_two_processes_train_as_none(
  forks, by_one, mesh, knobs, tmp_path
):
  flags = _flags(
    tmp_path / "run",
    exp=PIPELINED,
    mesh=mesh,
    num_stages=2,
    max_new_tokens=0,
    **knobs,
  )
  _finish(forks, _start(forks, 2, flags))
  expected, figures = _figures(by_one), _figures(tmp_path / "run")
  assert figures.keys() == expected.keys()
  for key, value in expected.items():
    np.testing.assert_allclose(figures[key], value, rtol=1e-5, err_msg=str(key))


@pytest.mark.nightly
def test_one_process_writes_and_speaks(by_four, by_one):
  folder, (first, *others) = by_four
  assert "[Gloo]" not in first.stdout.read_text()
  assert "step 12/12" in first.stdout.read_text()
  for process in others:
    assert process.output().strip() == ""
  names = {path.name for path in folder.iterdir()}
  assert names | {run_dir.SAMPLES, run_dir.SAMPLES_BY_STEP} == {
    path.name for path in by_one.iterdir()
  }
  assert len(list((folder / run_dir.EVENTS / "train").iterdir())) == 1
  text = (folder / run_dir.GOODPUT).read_text()
  assert len(text.splitlines()) == 1


def test_what_four_wrote_is_read_by_one_and_two(
  forks, by_one, by_four, session, tmp_path
):
  folder, _ = by_four
  address = f"localhost:{forks_lib.free_port()}"
  found = tmp_path / "found"
  processes = [
    forks.start(
      TOUR,
      [os.fspath(folder), os.fspath(found), json.dumps(KNOBS), address, "2", i],
      devices=2,
    )
    for i in "01"
  ]
  _finish(forks, processes)
  batches = process_programs.batch_digests(session, 3)
  assert len(set(batches)) == 3
  expected = {
    # However a mesh spreads its rows, the first batch is the same.
    "first_batches": batches[:1] * len(process_programs.MESHES),
    "batches": batches,
    "state": _state(session, folder),
  }
  for index in "01":
    assert json.loads(pathlib.Path(f"{found}-{index}").read_text()) == expected
  # The follower has evaluated what is there; one process has written it.
  records = metrics_file.read(folder / run_dir.EVAL / run_dir.METRICS)
  trained = _figures(folder)
  assert {r.step for r in records} == {6, 12}
  for record in records:
    key = record.step, record.split, "loss"
    np.testing.assert_allclose(record.values["loss"], trained[key], rtol=1e-6)
  [line] = (folder / run_dir.DECODE / "12.jsonl").read_text().splitlines()
  drawn = json.loads(line)["continuation"]
  text = (by_one / run_dir.SAMPLES).read_text()
  assert text.startswith(f"--- sample 1 ---\ndef {drawn}\n")
  assert processes[1].output().strip() == ""


def _wait_until(is_so, *processes):
  while not is_so():
    if any(process.poll() is not None for process in processes) and not is_so():
      raise AssertionError([process.output() for process in processes])
    time.sleep(0.02)


def _checkpoints(folder):
  """The steps of those that are complete, newest first."""
  marks = (folder / run_dir.CHECKPOINTS).glob("[0-9]*/manifest/files.json")
  steps = [mark.parent.parent.name for mark in marks]
  return sorted((int(s) for s in steps if s.isdigit()), reverse=True)


def _slow(folder):
  """The same training with time between steps to do something to it."""
  return _flags(folder, checkpoint_every_steps=2, delay=0.3, max_new_tokens=0)


@pytest.fixture(scope="module")
def stopped(forks, tmp_path_factory):
  """A run of two of which one has got a signal."""
  folder = tmp_path_factory.mktemp("stopped") / "run"
  first, second = processes = _start(forks, 2, _slow(folder))
  _wait_until(lambda: "step 3/12" in first.stdout.read_text(), *processes)
  os.kill(second.pid, signal.SIGTERM)
  _finish(forks, processes, status=128 + signal.SIGTERM)
  return folder, first.stdout.read_text(), second.output()


@pytest.mark.nightly
def test_signal_to_one_stops_all_after_the_same_step(stopped):
  folder, said, by_others = stopped
  [step] = re.findall(r"stopped by SIGTERM at step (\d+) of 12; the same", said)
  assert 3 < int(step) < 12
  assert by_others.strip() == ""
  # Saved by both, or it would not be complete.
  assert _checkpoints(folder)[0] >= int(step)


@pytest.mark.nightly
@pytest.mark.parametrize("victim", [0, 1], ids=["coordinator", "worker"])
def test_without_supervisor_the_other_ends_soon(forks, victim, tmp_path):
  folder = tmp_path / "run"
  processes = _start(forks, 2, _slow(folder), timeout=12)
  _wait_until(lambda: _checkpoints(folder), *processes)
  processes[victim].kill()
  survivor = processes[1 - victim]
  # JAX may be faster than Python to end it, and aborts.
  assert forks.wait(survivor) in (75, -signal.SIGABRT)
  assert re.search(
    "because another process was lost|another task died",
    survivor.stderr.read_text(),
  )
  assert forks.wait(processes[victim]) == -signal.SIGKILL


@pytest.fixture(scope="module")
def slow_python(tmp_path_factory):
  """A Python whose imports take as long as ever, but no work."""
  folder = tmp_path_factory.mktemp("python")
  modules = [process_programs.__name__]
  with warm_python.WarmPython(modules, folder) as warm:
    program = folder / "slow"
    # Who comes again meets the others when they have noticed the loss.
    program.write_text(
      f'#!/bin/sh\nsleep 2\nexec {shlex.quote(warm.executable)} "$@"\n'
    )
    program.chmod(0o700)
    yield os.fspath(program)


def _children(process):
  path = f"/proc/{process.pid}/task/{process.pid}/children"
  return [int(pid) for pid in pathlib.Path(path).read_text().split()]


@pytest.mark.nightly
def test_supervised_run_ends_as_an_undisturbed_one(
  stopped, by_two, session, slow_python
):
  # It was stopped by a signal, and loses the worker and then the coordinator.
  folder, _, _ = stopped
  address = f"localhost:{forks_lib.free_port()}"
  program = [sys.executable, "-c", _SUPERVISOR, slow_python, *_slow(folder)]
  parents = [
    subprocess.Popen(
      [
        *program,
        f"--coordinator_address={address}",
        "--num_processes=2",
        f"--process_id={index}",
        "--host_timeout=60",
        "--max_restarts=2",
      ],
      stdout=subprocess.DEVNULL,
      stderr=subprocess.PIPE,
      text=True,
      env=os.environ | {"JAX_NUM_CPU_DEVICES": "2"},
    )
    for index in range(2)
  ]
  for victim in (1, 0):
    before = max(_checkpoints(folder), default=0)
    _wait_until(lambda: max(_checkpoints(folder), default=0) > before)  # noqa: B023
    [child] = _children(parents[victim])
    os.kill(child, signal.SIGKILL)
  said = [parent.communicate()[1] for parent in parents]
  assert [parent.returncode for parent in parents] == [0, 0], said
  for number, victim in ((1, 1), (2, 0)):
    for text in said:
      assert re.search(
        rf"supervisor: process {victim} \(.+\) was lost at 20.*: killed"
        rf" by SIGKILL.*; restart {number} of 2, from the latest checkpoint"
        r" \(step \d+\)\n",
        text,
      ), text
  assert _state(session, folder) == _state(session, by_two[0])
  assert _figures(folder) == _figures(by_two[0])
  lines = (folder / run_dir.GOODPUT).read_text().splitlines()
  assert len(lines) == 4


def _start_supervised(python, index, address, flags):
  return subprocess.Popen(
    [
      *(sys.executable, "-c", _SUPERVISOR, python, *flags),
      f"--coordinator_address={address}",
      "--num_processes=2",
      f"--process_id={index}",
      *("--host_timeout=10", "--max_restarts=1", "--min_processes=1"),
    ],
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
    env=os.environ | {"JAX_NUM_CPU_DEVICES": "2"},
  )


def _lose_machine(parent):
  """Kills a supervisor and its child."""
  [child] = _children(parent)
  parent.kill()
  os.kill(child, signal.SIGKILL)
  parent.communicate()


def _assert_close(folder, expected):
  figures, expected = _figures(folder), _figures(expected)
  assert figures.keys() == expected.keys()
  for key, value in expected.items():
    np.testing.assert_allclose(figures[key], value, rtol=1e-5, err_msg=str(key))


@pytest.mark.nightly
def test_a_run_continues_without_a_host_that_does_not_come_back(
  by_one, slow_python, tmp_path
):
  folder = tmp_path / "run"
  address = f"localhost:{forks_lib.free_port()}"
  coordinator, other = (
    _start_supervised(slow_python, index, address, _slow(folder))
    for index in range(2)
  )
  _wait_until(lambda: _checkpoints(folder))
  _lose_machine(coordinator)
  out, err = other.communicate()
  assert other.returncode == 0, err
  assert "not all processes came back within 10 s (--host_timeout);" in err
  assert "starting with 1, from the latest checkpoint (step " in err
  assert "mesh=data=2,fsdp=2: data=1,fsdp=2, for the 2 devices" in out
  assert "resuming from the checkpoint of step" in out
  _assert_close(folder, by_one)


@pytest.mark.nightly
@pytest.mark.parametrize("victim", [0, 1], ids=["coordinator", "worker"])
def test_a_run_takes_a_host_that_comes_back(
  victim, by_one, slow_python, tmp_path
):
  folder = tmp_path / "run"
  # Longer than the first heartbeat of the smaller run.
  flags = [*_slow(folder), "--fdl.delay=2"]
  address = f"localhost:{forks_lib.free_port()}"
  parents = [
    _start_supervised(slow_python, index, address, flags) for index in range(2)
  ]
  _wait_until(lambda: _checkpoints(folder))
  _lose_machine(parents[victim])
  fewer = folder / "hosts" / "fewer.json"
  _wait_until(fewer.exists)
  parents[victim] = _start_supervised(slow_python, victim, address, flags)
  said = [parent.communicate() for parent in parents]
  assert [parent.returncode for parent in parents] == [0, 0], said
  (_, left), (_, returned) = said[1 - victim], said[victim]
  assert "starting with 1, from the latest checkpoint (step " in left
  assert re.search(
    r"processes came back; starting with 2, from the latest checkpoint"
    r" \(step \d+\)",
    left,
  ), left
  assert "the run continues with 1 processes; waiting until it" in returned
  _assert_close(folder, by_one)
  assert not fewer.exists()


@pytest.mark.parametrize(
  ("what", "slow", "count"),
  [
    ("data", 1, 2),
    pytest.param("host", 0, 2, marks=pytest.mark.nightly),
    pytest.param("data", 2, 4, marks=pytest.mark.nightly),
    pytest.param("host", 2, 4, marks=pytest.mark.nightly),
  ],
)
def test_slow_process_is_named_with_the_cause(
  forks, what, slow, count, tmp_path
):
  knobs = KNOBS | {
    "num_train_steps": 6,
    "checkpoint_every_steps": None,
    "eval_every_steps": None,
    "max_new_tokens": 0,
    "summary_every_steps": 3,
    "mesh": "data=-1",
  }
  folder, address = tmp_path / "run", f"localhost:{forks_lib.free_port()}"
  processes = [
    forks.start(
      "train_with_a_slow_process",
      [
        # Far longer than anything else in a step.
        *(what, "1.0", f"{slow}", os.fspath(folder), json.dumps(knobs)),
        *(address, f"{count}", f"{index}"),
      ],
      devices=1,
    )
    for index in range(count)
  ]
  _finish(forks, processes)
  # Batches that are ready before the first step hide a slow reader there.
  *_, values = (
    record.values
    for record in metrics_file.read(folder / run_dir.METRICS)
    if "straggler_process" in record.values
  )
  assert values["straggler_process"] == slow
  assert values["straggler_steps"] >= 2
  by_cause = {
    cause: values[f"straggler_{cause}_seconds"] for cause in stragglers.CAUSES
  }
  assert max(by_cause, key=lambda cause: by_cause[cause]) == what
  assert by_cause[what] > 0.5 * values["straggler_seconds"]
  lines = re.findall(
    r"slowest process (\d) \(.+\): \d+ ms later than the median of the others"
    r" at \d of 3 steps; \d+ ms of it (.+)",
    processes[0].stdout.read_text(),
  )
  assert lines[-1] == (f"{slow}", stragglers.CAUSES[what])


def test_missing_processes_are_reported_in_time(forks, tmp_path):
  port = forks_lib.free_port()
  flags = [*_flags(tmp_path / "run"), "--num_processes=2", "--host_timeout=1"]
  address = f"localhost:{port}"
  for index, said in (
    (
      1,
      f"The coordinator {address} did not answer within 1 s (--host_timeout)",
    ),
    (0, f"Process 0 waited 1 s (--host_timeout) at {address}, but not all"),
  ):
    more = [f"--coordinator_address={address}", f"--process_id={index}"]
    process = forks.start(MAIN, [*flags, *more], devices=1)
    assert forks.wait(process) == 75, process.output()
    assert process.stderr.read_text().startswith(said)
    assert len(process.stderr.read_text().splitlines()) == 1
  assert not (tmp_path / "run").exists()


@pytest.mark.nightly
def test_all_must_train_the_same_in_one_directory(forks, tmp_path):
  port = forks_lib.free_port()
  processes = [
    forks.start(
      MAIN,
      [
        *_flags(tmp_path / "run", learning_rate=rate, max_new_tokens=0),
        f"--coordinator_address=localhost:{port}",
        "--num_processes=2",
        f"--process_id={index}",
      ],
      devices=2,
    )
    for index, rate in enumerate((0.001, 0.002))
  ]
  for process in processes:
    assert forks.wait(process) == 2, process.output()
    assert process.stderr.read_text() == (
      "Process 1 has task.learner.optimizer.schedule.peak 0.002, and process 0"
      " has 0.001; start all processes with the same command and the same"
      " code.\n"
    )
  assert not (tmp_path / "run" / "config.txt").exists()


def test_slurm_joins_them_and_a_batch_must_suit_them(forks, tmp_path):
  port = forks_lib.free_port()
  processes = [
    forks.start(
      MAIN,
      [*_flags(tmp_path / "run", global_batch_size=2), "--host_timeout=60"],
      devices=2,
      environ={
        "JAX_COORDINATOR_PORT": str(port),
        "SLURM_JOB_ID": "1",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_NTASKS": "2",
        "SLURM_PROCID": f"{index}",
        "SLURM_LOCALID": f"{index}",
      },
    )
    for index in range(2)
  ]
  for process in processes:
    assert forks.wait(process) == 2, process.output()
    assert process.stderr.read_text() == (
      "global_batch_size (2) of the split 'train' must be a multiple of 4, the"
      " number of shards into which mesh 'data=2,fsdp=2' splits a batch over 4"
      " devices of 2 processes; it cannot be padded, because half of it or more"
      " would be padding.\n"
    )

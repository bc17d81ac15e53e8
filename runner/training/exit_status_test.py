"""Tests of the exit status of every end of a training, by running processes."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from paxon.runner import exit_status, run_dir
from paxon.runner.hosts import testing as forks_lib
from paxon.runner.training import process_programs

EXP = "--exp=runner.training.testing.TinyLm"
KNOBS = {
  "num_train_steps": 6,
  "checkpoint_every_steps": 2,
  "eval_every_steps": None,
  "max_new_tokens": 0,
  "mesh": "data=-1",
}
Status = exit_status.ExitStatus


@pytest.fixture(scope="module")
def forks(tmp_path_factory):
  folder = tmp_path_factory.mktemp("processes")
  with forks_lib.Forks(process_programs.__name__, folder) as made:
    yield made


def _flags(folder, *more, **knobs):
  return [
    EXP,
    f"--job_log_dir={os.fspath(folder)}",
    *(f"--fdl.{name}={value}" for name, value in (KNOBS | knobs).items()),
    *more,
  ]


def _start(forks, folder, *more, **knobs):
  return forks.start("command_line", _flags(folder, *more, **knobs), devices=1)


def _check(process, status):
  assert process.wait(120.0) == status, process.output()


def _wait_for(text, process):
  while text not in process.output():
    assert process.poll() is None, process.output()
    time.sleep(0.02)


@pytest.fixture(scope="module")
def finished(forks, tmp_path_factory):
  folder = tmp_path_factory.mktemp("finished") / "run"
  process = _start(forks, folder, "--check_devices=strict")
  _check(process, Status.FINISHED)
  # One process has one speed on CPUs, so no device is slow.
  header, device, after = process.output().splitlines()[:3]
  assert header.split()[:3] == ["device", "process", "host"]
  assert device.startswith("cpu:0 ")
  assert device.endswith(" ok")
  assert after.startswith("job_log_dir: ")
  return folder


def test_table_of_the_page_is_that_of_the_code():
  page = pathlib.Path(__file__).parents[2] / "docs" / "launching.md"
  rows = [
    line.split("|")[1].strip()
    for line in page.read_text().split("| Status |")[1].splitlines()[2:]
    if line.startswith("| ")
  ]
  in_page = {int(row) for row in rows if row.isdigit()}
  assert in_page == {*Status}


@pytest.mark.parametrize(
  ("status", "knobs"),
  [
    pytest.param(Status.USAGE, {"global_batch_size": 0}, id="usage"),
    pytest.param(Status.NUMERICS, {"learning_rate": 1e30}, id="numerics"),
  ],
)
def test_failures(forks, tmp_path, status, knobs):
  process = _start(forks, tmp_path / "run", **knobs)
  _check(process, status)


def test_too_little_memory(forks, tmp_path):
  process = forks.start(
    "run_out_of_memory", _flags(tmp_path / "run"), devices=1
  )
  _check(process, Status.MEMORY)
  assert "RESOURCE_EXHAUSTED" in process.output()


@pytest.mark.parametrize(
  "number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]
)
def test_a_stopped_training_has_the_status_of_the_signal(
  forks, tmp_path, number
):
  process = _start(forks, tmp_path / "run", delay=0.2, num_train_steps=50)
  _wait_for("step 2/50", process)
  process.send_signal(number)
  _check(process, 128 + number)


def _start_check(forks, *arguments, count):
  address = f"localhost:{forks_lib.free_port()}"
  return [
    forks.start(
      "check_wrong_device",
      [*arguments, address, f"{count}", f"{index}"],
      devices=2,
    )
    for index in range(count)
  ]


@pytest.mark.parametrize(
  ("wrong", "count"),
  [
    ("matmul", 2),
    pytest.param("memory", 4, marks=pytest.mark.nightly),
    pytest.param("ring", 4, marks=pytest.mark.nightly),
    pytest.param("all-reduce", 4, marks=pytest.mark.nightly),
  ],
)
def test_wrong_device_ends_all_processes(forks, wrong, count):
  processes = _start_check(forks, wrong, count=count)
  for process in processes:
    _check(process, Status.DEVICES)
    error = process.stderr.read_text()
    assert error.startswith("Devices compute wrong values: 1 of 2 devices of")
    assert f" of process {count - 1} (" in error
    assert f": wrong {wrong}" in error
    assert len(error.splitlines()) == 1
  table = processes[0].stdout.read_text().splitlines()
  assert len(table) == 1 + 2 * count
  assert [f"wrong {wrong}" in line for line in table] == [
    *[False] * (2 * count),
    True,
  ]


@pytest.mark.nightly
def test_devices_of_several_processes_are_checked_without_an_experiment(forks):
  address = f"localhost:{forks_lib.free_port()}"
  processes = [
    forks.start(
      "command_line",
      [
        "--mode=check_devices",
        f"--coordinator_address={address}",
        "--num_processes=4",
        f"--process_id={index}",
      ],
      devices=1,
    )
    for index in range(4)
  ]
  for process in processes:
    _check(process, Status.FINISHED)
  table = processes[0].stdout.read_text().splitlines()[1:5]
  assert [line.split()[1] for line in table] == ["0", "1", "2", "3"]


@pytest.mark.nightly
def test_check_of_devices_that_hangs(forks):
  arguments = ["--mode=check_devices", "--host_timeout=1"]
  process = forks.start("check_hanging_device", arguments, devices=1)
  _check(process, Status.HANG)
  assert process.stderr.read_text() == (
    "The devices were not checked within 1 s (--host_timeout): a device or a"
    " link hangs.\n"
  )


def test_damaged_checkpoint(forks, finished, tmp_path):
  copy = tmp_path / "run"
  subprocess.run(["cp", "-r", finished, copy], check=True)
  for path in (copy / run_dir.CHECKPOINTS).rglob("*"):
    if path.is_file() and "manifest" not in path.parts:
      path.write_bytes(b"damaged")
  _check(_start(forks, copy, num_train_steps=8), Status.DATA)


def test_full_disk(forks, tmp_path):
  folder = tmp_path / "small"
  folder.mkdir()
  mount = ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", folder]
  if subprocess.run(mount, capture_output=True).returncode:
    pytest.skip("mounting a small file system requires root")
  try:
    _check(_start(forks, folder / "run"), Status.STORE)
  finally:
    subprocess.run(["umount", "-l", folder], check=True)


def test_a_second_training_in_the_directory(forks, tmp_path):
  first = _start(forks, tmp_path / "run", delay=0.2, num_train_steps=50)
  _wait_for("step 1/50", first)
  second = _start(forks, tmp_path / "run", num_train_steps=50, delay=0.2)
  _check(second, Status.PEERS)
  assert "is in use by another training" in second.output()
  first.send_signal(signal.SIGTERM)
  _check(first, 143)


def test_a_step_that_hangs_ends_every_process(forks, tmp_path):
  address = f"localhost:{forks_lib.free_port()}"
  processes = [
    forks.start(
      "hang_in_a_step",
      [
        os.fspath(tmp_path / "run"),
        json.dumps(KNOBS | {"eval_every_steps": None}),
        *(address, "2", f"{index}"),
      ],
      devices=1,
    )
    for index in range(2)
  ]
  statuses = [process.wait(120.0) for process in processes]
  # The second to end may be told by JAX that it has lost the first.
  assert statuses[1] == Status.HANG, processes[1].output()
  assert statuses[0] in (Status.HANG, Status.PEERS, -signal.SIGABRT)
  said = processes[1].stderr.read_text()
  assert "the process ends with status 76" in said
  assert "process_programs.py" in said
  assert (tmp_path / "run" / "stacks-4-host1.txt").exists()


@pytest.mark.nightly
def test_statuses_of_other_modes(forks, finished):
  run = f"--job_log_dir={os.fspath(finished)}"
  for arguments, status in (
    (["--mode=eval", "--continuous"], Status.FINISHED),
    (["--mode=decode", "--prompt=x"], Status.FINISHED),
    (["--mode=decode", "--prompt=@/nowhere"], Status.USAGE),
    (["--mode=eval", "--checkpoint_step=5"], Status.USAGE),
  ):
    process = forks.start("command_line", [run, *arguments], devices=1)
    _check(process, status)


def test_the_first_process_of_a_container_can_be_stopped_while_it_starts(
  tmp_path,
):
  command = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
  if subprocess.run([*command, "true"], capture_output=True).returncode:
    pytest.skip("a new process namespace requires root")
  # Waits for the named pipe, as a file that is slow to open.
  pipe = tmp_path / "pipe"
  os.mkfifo(pipe)
  code = f"""
import os, signal
from paxon.runner import main, command_line
def check(*arguments):
  print(os.getpid(), flush=True)
  os.kill(os.getpid(), signal.SIGTERM)
  open({os.fspath(pipe)!r}).read()
command_line.check = check
main.run((), ["main", "--exp=a.b.C"])
"""
  done = subprocess.run(
    [*command, sys.executable, "-c", code],
    capture_output=True,
    text=True,
    timeout=60,
  )
  assert done.stdout.startswith("1\n")
  assert done.returncode == 128 + signal.SIGTERM, done.stderr

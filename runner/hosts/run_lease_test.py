"""Tests of the lease of a run directory."""

import dataclasses
import json
import os
import subprocess
import sys
import time

from etils import epath
import pytest

from paxon.runner import user_error
from paxon.runner.hosts import run_lease


def _path(folder):
  return folder / "owner.json"


def _read(folder):
  return run_lease.Owner(**json.loads(_path(folder).read_text()))


def _write(folder, owner):
  _path(folder).write_text(json.dumps(dataclasses.asdict(owner)))


def _lease(folder, **kwargs):
  return run_lease.Lease(epath.Path(folder), **kwargs)


def _elsewhere(folder, **changes):
  """The lease of a process on another machine, as its file says."""
  with _lease(folder):
    own = _read(folder)
  fields = {"id": "b", "host": "b", "machine": "b", "pid": 7} | changes
  other = dataclasses.replace(own, **fields)
  _write(folder, other)
  return other


def test_is_renewed_and_returned(tmp_path):
  with _lease(tmp_path, beat_seconds=0.01) as lease:
    first = _read(tmp_path)
    assert first.pid == os.getpid()
    while _read(tmp_path).count < first.count + 2:
      time.sleep(0.01)
    lease.check()
  assert list(tmp_path.iterdir()) == []


def test_another_training_in_this_process_is_an_error(tmp_path):
  with _lease(tmp_path):
    with pytest.raises(
      user_error.UserError,
      match=rf"in use by another training \(process {os.getpid()} on \S+, since"
      r" 20\S+Z\); stop it, or use another --job_log_dir",
    ):
      _lease(tmp_path).__enter__()
    assert _read(tmp_path).pid == os.getpid()
  with _lease(tmp_path):
    pass


def test_of_many_processes_one_gets_it(tmp_path):
  program = f"""
import sys
from etils import epath
from paxon.runner import user_error
from paxon.runner.hosts import run_lease
print("ready", flush=True)
sys.stdin.readline()
try:
  with run_lease.Lease(epath.Path({os.fspath(tmp_path)!r})):
    print("trained", flush=True)
    sys.stdin.read()
except user_error.UserError as error:
  print(error, flush=True)
"""
  processes = [
    subprocess.Popen(
      [sys.executable, "-c", program],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      text=True,
    )
    for _ in range(4)
  ]
  for process in processes:
    assert process.stdout.readline() == "ready\n"
  for process in processes:
    process.stdin.write("go\n")
    process.stdin.flush()
  # The one that trains ends when its input does, after all have tried.
  said = sorted(process.stdout.readline() for process in processes)
  for process in processes:
    process.communicate()
  assert said[-1] == "trained\n", said
  assert all("in use by another training" in line for line in said[:-1]), said


def test_a_killed_owner_on_this_machine_is_replaced_at_once(tmp_path):
  with _lease(tmp_path):
    own = _read(tmp_path)
  command = [sys.executable, "-c", "input()"]
  with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
    started = run_lease._find_start_time(process.pid)
    other = dataclasses.replace(own, id="b", pid=process.pid, started=started)
    _write(tmp_path, other)
    with pytest.raises(user_error.UserError, match=f"process {process.pid} on"):
      _lease(tmp_path).__enter__()
    process.kill()
    process.wait()
  with _lease(tmp_path):
    assert _read(tmp_path).id != "b"
  # Its number may be that of another process by now.
  _write(tmp_path, dataclasses.replace(own, id="b", started="1"))
  with _lease(tmp_path):
    assert _read(tmp_path).id != "b"


def test_an_owner_elsewhere_is_watched(tmp_path, capsys):
  other, waited = _elsewhere(tmp_path), []

  def beat(seconds):
    waited.append(seconds)
    if len(waited) == 4:
      _write(tmp_path, dataclasses.replace(other, count=1))

  with pytest.raises(user_error.UserError, match="process 7 on b, since 20"):
    _lease(tmp_path, sleep=beat).__enter__()
  assert "waiting up to 30 s" in capsys.readouterr().out
  assert sum(waited) == 4
  # It stands still, so it is lost.
  waited = []
  with _lease(tmp_path, sleep=lambda seconds: waited.append(seconds)):
    assert _read(tmp_path).id != "b"
  assert 30 <= sum(waited) < 31


def test_an_owner_that_ends_meanwhile_leaves_the_lease(tmp_path):
  _elsewhere(tmp_path)

  def end(seconds):
    del seconds
    _path(tmp_path).unlink(missing_ok=True)

  with _lease(tmp_path, sleep=end):
    assert _read(tmp_path).pid == os.getpid()


def test_who_was_replaced_notices(tmp_path):
  with _lease(tmp_path) as lease:
    _elsewhere_text = json.dumps(
      dataclasses.asdict(dataclasses.replace(_read(tmp_path), id="b", pid=7))
    )
    _path(tmp_path).write_text(_elsewhere_text)
    with pytest.raises(user_error.UserError, match="process 7 on"):
      lease.check()
  # Another's file stays.
  assert _read(tmp_path).id == "b"
  _path(tmp_path).unlink()
  with _lease(tmp_path) as lease:
    _path(tmp_path).unlink()
    with pytest.raises(user_error.UserError, match="json was removed"):
      lease.check()


@pytest.mark.parametrize("text", ["", "{}", "null", "[1]", '{"id": 1}', "\xff"])
def test_a_damaged_file_is_replaced(tmp_path, text):
  _path(tmp_path).write_bytes(text.encode("latin-1"))
  with _lease(tmp_path, sleep=lambda _: None) as lease:
    lease.check()

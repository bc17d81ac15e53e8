"""Child processes end in time, with their parent, and say why they failed."""

from concurrent import futures
import pathlib
import signal
import subprocess
import sys
import threading
import time

import pytest

from paxon.runner import user_error
from paxon.runner.plan import child_process
from paxon.runner.plan import target as targets

_CPU = targets.parse("cpu:1")


def _run(worker, *, time_limit):
  return child_process.run_worker(
    worker, b"", _CPU, is_compiled=True, time_limit=time_limit
  )


def _wait_until(is_true):
  while not is_true():
    time.sleep(0.05)


def test_a_process_that_was_killed_tells_of_memory(monkeypatch, tmp_path):
  (tmp_path / "ends_at_once.py").write_text(
    "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n"
  )
  monkeypatch.syspath_prepend(str(tmp_path))
  message = r"cpu:1 was killed \(status -9\); a compiler takes up to 3 GB"
  with pytest.raises(RuntimeError, match=message):
    _run("ends_at_once", time_limit=60.0)


_WAITS = """
import os, pathlib, time
from paxon.runner.plan import child_process
child_process.end_with_parent()
pathlib.Path({file!r}).write_text(str(os.getpid()))
time.sleep(600)
"""

_PARENT = """
from paxon.runner.plan import child_process, target
child_process.run_worker(
  "waits", b"", target.parse("cpu:1"), is_compiled=True, time_limit=600.0
)
"""

_PARALLEL = """
from paxon.runner.plan import child_process, target
child_process.in_parallel(
  lambda text: child_process.run_worker(
    "waits", b"", target.parse(text), is_compiled=True, time_limit=600.0
  ),
  ["cpu:1"] * 3,
)
"""


def _is_running(process):
  try:
    status = pathlib.Path(f"/proc/{process}/stat").read_text()
  except OSError:
    return False
  # Whoever adopted it may not have asked for its status.
  return status.rpartition(")")[2].split()[0] not in "ZX"


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize(
  ("parent", "how"),
  [
    pytest.param(_PARENT, signal.SIGINT, id="SIGINT"),
    pytest.param(_PARENT, signal.SIGTERM, id="SIGTERM"),
    pytest.param(_PARENT, signal.SIGKILL, id="SIGKILL"),
    # As a search does, whose threads an interrupt does not reach.
    pytest.param(_PARALLEL, signal.SIGINT, id="SIGINT-threads"),
  ],
)
def test_the_process_ends_with_the_one_that_waits_for_it(
  tmp_path, monkeypatch, parent, how
):
  file = tmp_path / "number"
  (tmp_path / "waits.py").write_text(_WAITS.format(file=str(file)))
  monkeypatch.syspath_prepend(str(tmp_path))
  process = subprocess.Popen(
    [sys.executable, "-c", parent],
    env=child_process.environment(targets.parse("cpu:1"), is_compiled=True),
    stderr=subprocess.DEVNULL,
  )
  try:
    _wait_until(lambda: file.exists() and file.read_text())
    number = int(file.read_text())
    assert _is_running(number)
    process.send_signal(how)
    assert process.wait() != 0
    _wait_until(lambda: not _is_running(number))
  finally:
    process.kill()
    process.wait()


def test_a_process_gets_the_modules_and_flags_of_this_one(monkeypatch):
  monkeypatch.setenv("XLA_FLAGS", "--xla_mine=1")
  variables = child_process.environment(
    targets.parse("h200:2x8"), is_compiled=False
  )
  # CPU devices stand in for those of the target.
  assert variables["JAX_NUM_CPU_DEVICES"] == "16"
  assert variables["PYTHONSAFEPATH"] == "1"
  assert variables["PYTHONPATH"]
  assert variables["XLA_FLAGS"] == "--xla_mine=1"


def test_a_process_that_dies_shows_its_last_lines():
  with pytest.raises(RuntimeError, match=r"cpu:1 ended with status 1:\n.*not_"):
    _run("not_there", time_limit=60.0)


def test_threads_plan_at_once_as_far_as_the_memory_allows(monkeypatch):
  running, most = [], []

  def run(command, **options):
    running.append(command)
    most.append(len(running))
    time.sleep(0.05)
    running.remove(command)
    raise subprocess.TimeoutExpired(command, 1.0)

  def plan(_):
    with pytest.raises(user_error.UserError, match="more than 1 s"):
      _run("any", time_limit=1.0)

  monkeypatch.setattr(child_process.subprocess, "run", run)
  slots = threading.BoundedSemaphore(2)
  monkeypatch.setattr(child_process, "_slots", lambda: slots)
  with futures.ThreadPoolExecutor(6) as pool:
    list(pool.map(plan, range(6)))
  assert (len(most), max(most)) == (6, 2)
  assert child_process.count_parallel() >= 1


def test_a_process_that_takes_too_long_is_stopped(tmp_path, monkeypatch):
  (tmp_path / "sleeps.py").write_text("import time\ntime.sleep(600)\n")
  monkeypatch.syspath_prepend(str(tmp_path))
  with pytest.raises(user_error.UserError, match=r"cpu:1: the compiler took m"):
    _run("sleeps", time_limit=0.5)


def test_a_worker_reads_its_request_and_writes_its_result(
  tmp_path, monkeypatch
):
  (tmp_path / "reverses.py").write_text(
    "import pathlib, sys\n"
    "request, result = map(pathlib.Path, sys.argv[1:])\n"
    "result.write_bytes(request.read_bytes()[::-1])\n"
  )
  monkeypatch.syspath_prepend(str(tmp_path))
  found = child_process.run_worker(
    "reverses", b"abc", _CPU, is_compiled=True, time_limit=60.0
  )
  assert found == "cba"

"""Tests for the supervisor.

The children here are a few lines of Python; those of
`training/several_processes_test.py` train.
"""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time

from etils import epath
import pytest

from paxon.runner import run_dir
from paxon.runner.hosts import membership as membership_lib
from paxon.runner.hosts import process_failures, supervisor

# Counts its starts, joins if the flag is 1, and exits as the list specifies.
CHILD = """
import os, pathlib, signal, sys, time
folder, joins, *ends = sys.argv[1:]
flags = [end for end in ends if end.startswith("--")]
ends = [end for end in ends if not end.startswith("--")]
with open(pathlib.Path(folder, "flags"), "a") as file:
  print(*flags, file=file)
path = pathlib.Path(folder, "starts")
number = int(path.read_text()) if path.exists() else 0
path.write_text(str(number + 1))
if joins[min(number, len(joins) - 1)] == "1":
  found = '{"process": 1, "processes": 2}'
  pathlib.Path(os.environ["PAXON_JOINED_FILE"]).write_text(found)
end = ends[min(number, len(ends) - 1)]
if end == "wait":
  asked = pathlib.Path(folder, "asked")
  signal.signal(signal.SIGUSR1, lambda *_: asked.touch())
  signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
if end in ("wait", "young"):
  pathlib.Path(folder, "waits").touch()
  time.sleep(600)
if end == "aborted":
  print("a warning", file=sys.stderr)
  print("E1128 17:54:58.7   230 coordination_service_agent.cc:289] Polled.",
        file=sys.stderr)
  print("F1128 17:54:58.7   230 client.h:80] Terminating process because the"
        " JAX distributed service detected fatal errors. status: Socket closed",
        file=sys.stderr)
  print("    @     0x7f9f19440634  absl::LogMessage::SendToLog()",
        file=sys.stderr, flush=True)
  os.kill(os.getpid(), signal.SIGABRT)
if end == "lost":
  sys.exit("UNAVAILABLE: Gloo AllGather failed: Connection closed by peer")
if end == "silent":
  print("tasks are unhealthy (stopped sending heartbeats):\\n3\\n",
        file=sys.stderr, flush=True)
  os.kill(os.getpid(), signal.SIGABRT)
if end == "until":
  while not pathlib.Path(folder, "end").exists():
    time.sleep(0.05)
  sys.exit()
if int(end) < 0:
  os.kill(os.getpid(), -int(end))
sys.exit(int(end))
"""


def _supervisor(folder, *ends, joins="1", max_restarts=2, timeout=60.0):
  return supervisor.Supervisor(
    command=[sys.executable, "-S", "-c", CHILD, str(folder), joins, *ends],
    run_dir=epath.Path(folder),
    max_restarts=max_restarts,
    timeout_seconds=timeout,
    sleep=lambda seconds: None,
  )


def _starts(folder):
  return int((folder / "starts").read_text())


def test_successful_child_is_not_restarted(tmp_path, capfd):
  assert _supervisor(tmp_path, "0").run() == 0
  assert _starts(tmp_path) == 1
  assert capfd.readouterr().err == ""
  assert not (tmp_path / process_failures.FOLDER).exists()


def test_failed_child_is_restarted_and_reported(tmp_path, capfd):
  for step in (5, 10):
    (tmp_path / run_dir.CHECKPOINTS / f"{step}").mkdir(parents=True)
  assert _supervisor(tmp_path, "-9", "3", "0").run() == 0
  assert _starts(tmp_path) == 3
  first, second = capfd.readouterr().err.splitlines()
  assert re.fullmatch(
    r"supervisor: process 1 \(.+\) was lost at [\d :-]+: killed by"
    r" SIGKILL; restart 1 of 2, from the latest checkpoint \(step 10\)",
    first,
  )
  assert "exit status 3; restart 2 of 2" in second


def test_a_report_names_local_checkpoints(tmp_path, capfd):
  (tmp_path / run_dir.LOCAL_CHECKPOINTS).touch()
  assert _supervisor(tmp_path, "-9", "0").run() == 0
  assert capfd.readouterr().err.endswith(
    "from the beginning (no checkpoint yet), or from a newer local checkpoint\n"
  )


def test_gives_up_with_a_message(tmp_path, capfd):
  assert _supervisor(tmp_path, "-9", max_restarts=1).run() == 128 + 9
  assert _starts(tmp_path) == 2
  assert re.search(
    r"supervisor: gave up after 1 restarts \(--max_restarts\): process 1"
    r" \(.+\) was lost at .+; the same command resumes from the"
    r" beginning \(no checkpoint yet\)\n",
    capfd.readouterr().err,
  )


@pytest.mark.parametrize("status", [2, 65, 70, 74])
def test_what_a_restart_repeats_is_not_restarted(tmp_path, capfd, status):
  assert _supervisor(tmp_path, f"{status}").run() == status
  assert _supervisor(tmp_path, f"{status}", joins="0").run() == status
  assert _starts(tmp_path) == 2
  [recorded] = process_failures.read(epath.Path(tmp_path), since=0.0)
  assert recorded.status == status


@pytest.mark.parametrize("status", [1, 69, 71, 75, 76])
def test_what_a_restart_may_cure_is_restarted(tmp_path, capfd, status):
  assert _supervisor(tmp_path, f"{status}", "0").run() == 0
  assert _starts(tmp_path) == 2
  # The status of the last start.
  (tmp_path / "starts").unlink()
  assert _supervisor(tmp_path, f"{status}", max_restarts=1).run() == status
  assert _starts(tmp_path) == 2


def test_a_lost_process_is_reported_without_restarts(tmp_path, capfd):
  assert _supervisor(tmp_path, "aborted", max_restarts=0).run() == 75
  assert _starts(tmp_path) == 1
  warning, reported = capfd.readouterr().err.splitlines()
  assert warning == "a warning"
  assert re.fullmatch(
    r"supervisor: process 0 was lost before [\d :-]+ and left no record;"
    r" process 1 \(.+\) exited with it; the same command resumes from the"
    r" beginning \(no checkpoint yet\)",
    reported,
  )


def test_child_dies_with_a_killed_supervisor(tmp_path):
  program = (
    "import sys\n"
    "from etils import epath\n"
    "from paxon.runner.hosts import supervisor\n"
    "supervisor.Supervisor(command=sys.argv[2:], timeout_seconds=60,\n"
    "  run_dir=epath.Path(sys.argv[1]), max_restarts=0).run()\n"
  )
  child = "import os, sys, time; print(os.getpid(), flush=True); time.sleep(99)"
  command = [sys.executable, "-c", program, os.fspath(tmp_path)]
  parent = subprocess.Popen(
    [*command, sys.executable, "-S", "-c", child], stdout=subprocess.PIPE
  )
  pid = int(parent.stdout.readline())
  parent.kill()
  parent.wait()
  while os.path.exists(f"/proc/{pid}"):
    time.sleep(0.02)
  parent.stdout.close()


@pytest.mark.parametrize("number", [2, 15, 1, 10])
def test_stopped_child_is_not_restarted(tmp_path, capfd, number):
  assert _supervisor(tmp_path, f"{128 + number}").run() == 128 + number
  assert _starts(tmp_path) == 1
  assert capfd.readouterr().err == ""
  assert not (tmp_path / process_failures.FOLDER).exists()


def test_child_that_never_joined_is_not_restarted(tmp_path, capfd):
  assert _supervisor(tmp_path, "-6", joins="0").run() == 128 + 6
  assert _starts(tmp_path) == 1
  assert "exited before it joined the others" in capfd.readouterr().err


def test_rejoining_may_take_several_starts(tmp_path, capfd):
  ends = ("-9", "-6", "-6", "0")
  assert _supervisor(tmp_path, *ends, joins="1001", max_restarts=1).run() == 0
  assert _starts(tmp_path) == 4
  assert "restart 1 of 1" in capfd.readouterr().err


def test_rejoining_has_a_timeout(tmp_path, capfd):
  made = _supervisor(tmp_path, "-9", "-6", joins="10", timeout=0.0)
  assert made.run() == 128 + 6
  assert "exited before it joined" in capfd.readouterr().err


def _member(folder, process, *, restarts, host="other"):
  text = json.dumps({"restarts": restarts, "host": host})
  path = folder / process_failures.FOLDER / f"member-{process}.json"
  path.parent.mkdir(exist_ok=True)
  path.write_text(text)


def _membership(folder, process, least=1):
  return membership_lib.Membership(
    run_dir=epath.Path(folder),
    coordinator_address="first:123",
    process_id=process,
    num_processes=4,
    min_processes=least,
  )


def test_continues_with_the_processes_that_are_left(tmp_path, capfd):
  # Process 0 was lost with its host, and 1 and 3 have restarted once.
  for process, restarts in ((0, 0), (1, 1), (3, 1)):
    _member(tmp_path, process, restarts=restarts)
  made = _supervisor(tmp_path, "-9", "75", "0", joins="101", max_restarts=1)
  made.membership = _membership(tmp_path, 2)
  assert made.run() == 0
  first, second, third = (tmp_path / "flags").read_text().splitlines()
  assert first == second == ""
  assert third == (
    "--num_processes=3 --process_id=1 --coordinator_address=other:123"
  )
  *_, line = capfd.readouterr().err.splitlines()
  assert line == (
    "supervisor: not all processes came back within 60 s (--host_timeout);"
    " starting with 3, from the beginning (no checkpoint yet)"
  )


def test_too_few_processes_do_not_continue(tmp_path, capfd):
  made = _supervisor(tmp_path, "-9", "75", "0", joins="101", timeout=0.0)
  made.membership = _membership(tmp_path, 1, least=2)
  assert made.run() == 75
  assert _starts(tmp_path) == 2
  # Nor does a wrong command, which no other process explains.
  (tmp_path / "starts").unlink()
  made = _supervisor(tmp_path, "2", joins="0")
  made.membership = _membership(tmp_path, 1)
  assert made.run() == 2
  assert _starts(tmp_path) == 1


def test_a_process_that_comes_back_waits_for_its_admission(tmp_path, capfd):
  left, back = _membership(tmp_path, 0), _membership(tmp_path, 1)
  left.announce(3)
  left.note_fewer(3, {0: "first"})
  made = _supervisor(tmp_path, "0")
  made.membership = back
  # Each poll; the other admits it when it has been seen to wait.
  made.sleep = lambda seconds: left.admit(3)
  assert made.run() == 0
  assert (tmp_path / "flags").read_text() == (
    "--num_processes=2 --process_id=1 --coordinator_address=first:123\n"
  )
  assert list(back.find_present(4)) == [1]
  assert "the run continues with 1 processes" in capfd.readouterr().err


def test_a_process_that_comes_back_to_a_finished_run_ends(tmp_path):
  left = _membership(tmp_path, 0)
  left.note_fewer(1, {0: "first"})
  made = _supervisor(tmp_path, "0")
  made.membership = _membership(tmp_path, 1)

  def finish(seconds):
    (tmp_path / run_dir.FINISHED).touch()
    left.withdraw(is_first=True)

  made.sleep = finish
  assert made.run() == 0
  assert not (tmp_path / "starts").exists()


def test_a_process_starts_if_nobody_trains(tmp_path):
  _membership(tmp_path, 0).note_fewer(1, {0: "first"})
  made = _supervisor(tmp_path, "0", timeout=0.0)
  made.membership = _membership(tmp_path, 1)
  assert made.run() == 0
  assert (tmp_path / "flags").read_text() == "\n"


def test_a_process_waits_however_long_the_smaller_run_starts(tmp_path):
  left, back = _membership(tmp_path, 0), _membership(tmp_path, 1)
  left.announce(1)
  left.note_fewer(1, {0: "first"})
  made = _supervisor(tmp_path, "0", timeout=0.0)
  made.membership = back
  polls = iter([left.refresh_fewer] * 3)
  made.sleep = lambda seconds: next(polls, lambda: left.admit(1))()
  assert made.run() == 0
  assert "--num_processes=2" in (tmp_path / "flags").read_text()


def test_the_supervisor_of_a_smaller_run_shows_that_it_lives(tmp_path):
  for process in (0, 1):
    _member(tmp_path, process, restarts=0)
  made = _supervisor(tmp_path, "-9", "75", "until", joins="101", timeout=0.0)
  made.membership = _membership(tmp_path, 0)
  thread = threading.Thread(target=_finish_when_refreshed, args=(tmp_path,))
  thread.start()
  assert made.run() == 0
  thread.join()


def _finish_when_refreshed(folder):
  """Ends the child of a smaller run once `fewer.json` was written again."""
  view = _membership(folder, 1)
  while True:
    found = view.find_fewer()
    if found is not None and found.count > 1:
      break
    time.sleep(0.05)
  (folder / "end").touch()


def test_a_stopped_run_continues_with_more(tmp_path, capfd):
  # It lost process 1, which comes back while the second child runs.
  for process in (0, 1):
    _member(tmp_path, process, restarts=0)
  made = _supervisor(tmp_path, "-9", "75", "138", "0", joins="1011")

  class Other(membership_lib.Membership):
    """Admits when the smaller run starts."""

    def note_fewer(self, generation, hosts):
      super().note_fewer(generation, hosts)
      _membership(tmp_path, 1).ask()
      assert self.admit(generation)

  made.membership = Other(
    run_dir=epath.Path(tmp_path),
    coordinator_address="first:123",
    process_id=0,
    num_processes=2,
    min_processes=1,
  )
  assert made.run() == 0
  flags = (tmp_path / "flags").read_text().splitlines()
  assert flags == [
    "",
    "",
    "--num_processes=1 --process_id=0 --coordinator_address=first:123",
    "",
  ]
  assert "processes came back; starting with 2," in capfd.readouterr().err


def test_the_coordinator_stays_if_it_is_left(tmp_path):
  for process in (0, 2):
    _member(tmp_path, process, restarts=3)
  found = _membership(tmp_path, 2)
  assert found.make_flags(found.find_present(3)) == [
    *("--num_processes=2", "--process_id=1", "--coordinator_address=first:123")
  ]
  # A damaged file is no member.
  (tmp_path / process_failures.FOLDER / "member-0.json").write_text("{")
  assert list(found.find_present(3)) == [2]


def test_lost_process_is_read_from_other_records(tmp_path, capfd):
  other = process_failures.ProcessExit(
    process=4, host="far", time=time.time() + 60, status=-9, is_secondary=False
  )
  process_failures.write(epath.Path(tmp_path), other)
  assert _supervisor(tmp_path, "lost", "0").run() == 0
  *_, line = capfd.readouterr().err.splitlines()
  assert re.search(
    r"process 4 \(far\) was lost at .+ SIGKILL; process 1 \(.+\) exited with"
    " it",
    line,
  )


def test_lost_process_is_read_from_jax(tmp_path, capfd):
  assert _supervisor(tmp_path, "silent", "0").run() == 0
  *_, line = capfd.readouterr().err.splitlines()
  assert "process 3 was lost before" in line
  assert "and left no record; process 1 (" in line
  (tmp_path / "starts").unlink()
  assert _supervisor(tmp_path, "lost", "0").run() == 0
  assert "another process was lost before" in capfd.readouterr().err


def _signal_at(paths, number):
  """Signals this process, the parent, each time that one of the paths comes."""

  def work():
    for path in paths:
      while not path.exists():
        time.sleep(0.01)
      os.kill(os.getpid(), number)

  thread = threading.Thread(target=work)
  thread.start()
  return thread


@pytest.mark.parametrize(
  # The child has a handler for one of them and Python's own for the other.
  ("number", "expected"),
  [(signal.SIGTERM, 7), (signal.SIGINT, 130)],
)
def test_first_signal_requests_stop_and_second_is_forwarded(
  tmp_path, number, expected, capfd
):
  pauses = []
  made = _supervisor(tmp_path, "wait")
  # What a cluster sends to the child itself comes before the request.
  made.sleep = lambda seconds: pauses.append((tmp_path / "asked").exists())
  thread = _signal_at([tmp_path / "waits", tmp_path / "asked"], number)
  assert made.run() == expected
  thread.join()
  assert pauses == [False]
  assert _starts(tmp_path) == 1
  err = capfd.readouterr().err
  assert f"supervisor: {number.name}: stopping the training\n" in err
  assert "restart" not in err


def test_child_without_handler_ends_by_the_signal(tmp_path):
  thread = _signal_at([tmp_path / "waits"], signal.SIGTERM)
  assert _supervisor(tmp_path, "young").run() == 128 + signal.SIGTERM
  thread.join()
  assert _starts(tmp_path) == 1


def test_child_command():
  original = ["python3", "-X", "dev", "-m", "paxon.runner.main", "--exp=a"]
  assert supervisor.child_command(original, "--max_restarts=0") == [
    *(sys.executable, "-X", "dev", "-m", "paxon.runner.main", "--exp=a"),
    "--max_restarts=0",
  ]


def test_supervisor_imports_no_jax():
  code = (
    "import sys\nfrom paxon.runner.hosts import supervisor\n"
    "assert 'jax' not in sys.modules"
  )
  environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
  subprocess.run([sys.executable, "-c", code], env=environ, check=True)

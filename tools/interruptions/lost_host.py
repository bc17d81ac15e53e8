"""A run of two processes that loses one of them, and restarts by itself.

Both run under a supervisor (`--max_restarts`), as on two machines. The training
process of one is killed at a random step; the run must end without another
command, with the arrays and metrics of an undisturbed run of two processes.
"""

from collections.abc import Sequence
import os
import pathlib
import random
import shutil
import signal
import time

from paxon.inputs.store_servers import servers
from paxon.runner.hosts import testing as forks_lib
from paxon.tools.interruptions import disturbed_run, tiny_run

KIND = "lost host"
_HOSTS = 2
_TIMEOUT = "--host_timeout=120"


class Hosts:
  """Starts the processes of a run with two hosts."""

  def __init__(
    self, launch: tiny_run.Launch, *, more: Sequence[str] = ()
  ) -> None:
    """Prepares.

    Args:
      launch: Starts a supervisor or a training process.
      more: Further arguments for each.
    """
    self._launch, self._more = launch, list(more)

  def start(self, run: tiny_run.TinyRun) -> list[tiny_run.Process]:
    """Starts both; their logs are next to the folder of the run."""
    address = f"localhost:{forks_lib.free_port()}"
    return [
      self._launch(
        [
          *run.flags(index),
          f"--coordinator_address={address}",
          f"--num_processes={_HOSTS}",
          f"--process_id={index}",
          _TIMEOUT,
          *self._more,
        ],
        self.log(run, index),
        devices=1,
        environ=run.store.environ if run.store else {},
      )
      for index in range(_HOSTS)
    ]

  def log(self, run: tiny_run.TinyRun, index: int) -> pathlib.Path:
    """Returns the file of the output of a process."""
    return run.folder.parent / f"host-{index}.log"


def run_undisturbed(
  folder: pathlib.Path,
  *,
  launch: tiny_run.Launch,
  num_steps: int,
  training: Sequence[str] = tiny_run.TINY_LM,
  store: servers.Store | None = None,
  has_tiers: bool = False,
) -> disturbed_run.Expected:
  """Runs two processes to the end.

  Raises:
    UndisturbedError: The run failed.
  """
  run = tiny_run.TinyRun(
    folder / "run",
    launch=launch,
    num_steps=num_steps,
    training=training,
    store=store,
    has_tiers=has_tiers,
  )
  hosts = Hosts(launch)
  start = time.monotonic()
  statuses = [
    process.wait(tiny_run.LIMIT_SECONDS) for process in hosts.start(run)
  ]
  if any(statuses):
    text = hosts.log(run, 0).read_text(errors="replace")
    raise disturbed_run.UndisturbedError(
      f"The undisturbed run of two hosts failed:\n{text}"
    )
  return disturbed_run.Expected(
    run=run, digest=run.digest(), seconds=time.monotonic() - start
  )


def lose(
  folder: pathlib.Path,
  *,
  supervised: tiny_run.Launch,
  expected: disturbed_run.Expected,
  choice: random.Random,
) -> disturbed_run.Struck:
  """Kills one of two hosts at a random step; waits for the end of the run.

  Args:
    folder: An empty folder.
    supervised: Starts a supervisor with its training process.
    expected: The undisturbed run.
    choice: Source of the moment and of the host.
  """
  run = tiny_run.TinyRun(
    folder / "run",
    launch=supervised,
    num_steps=expected.run.num_steps,
    training=expected.run.training,
    store=expected.run.store,
    has_tiers=expected.run.has_tiers,
  )
  hosts = Hosts(supervised, more=["--max_restarts=3"])
  begin = time.monotonic()
  processes = hosts.start(run)
  step = choice.randrange(1, run.num_steps)
  limit = begin + tiny_run.LIMIT_SECONDS
  while run.last_begun_step() < step and time.monotonic() < limit:
    time.sleep(0.02)
  victim = choice.randrange(_HOSTS)
  moment = time.monotonic()
  for child in _children(processes[victim].pid):
    os.kill(child, signal.SIGKILL)
  # The machine comes back with an empty disk.
  shutil.rmtree(run.disk(victim), ignore_errors=True)
  log = hosts.log(run, 0)
  before = len(log.read_text(errors="replace"))
  recovery, problems, status = None, [], -1
  while any(process.poll() is None for process in processes):
    text = log.read_text(errors="replace")[before:]
    resumed = text.find("resuming from") if recovery is None else -1
    if resumed >= 0 and tiny_run.has_stepped(text[resumed:]):
      recovery = time.monotonic() - moment
    if time.monotonic() > limit:
      problems = [f"{KIND}: the processes did not end"]
      for process in processes:
        process.kill()
      break
    time.sleep(0.02)
  else:
    status = max(process.wait(1.0) for process in processes)
    ended = tiny_run.Ended(status=status, output="")
    problems = disturbed_run.find_problems(
      ended, run, expected, newest=None, exact=True
    )
  return disturbed_run.Struck(
    kind=KIND,
    moment=moment - begin,
    status=status,
    newest=max(run.whole_steps(), default=None),
    problems=tuple(problems),
    recovery=recovery,
  )


def _children(pid: int) -> list[int]:
  path = pathlib.Path(f"/proc/{pid}/task/{pid}/children")
  return [int(child) for child in path.read_text().split()]

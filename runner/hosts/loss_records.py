"""`hosts/process-<i>.json`: how the processes of a run ended, if not well.

Each supervisor writes about its own process and reads what the others wrote, so
that everyone can say who went first. A machine that is gone writes nothing.
"""

from collections.abc import Sequence
import dataclasses
import datetime
import json
import signal

from etils import epath

from paxon.runner import files

FOLDER = "hosts"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loss:
  """The end of one process.

  Attributes:
    process: Its number.
    host: The name of its machine.
    time: When it ended, in seconds since the epoch.
    status: Its exit status; minus the number of the signal that ended it.
    follows: Whether it ended because another one was lost.
  """

  process: int
  host: str
  time: float
  status: int
  follows: bool

  def sentence(self) -> str:
    """Returns who was lost, when and how."""
    return (
      f"process {self.process} ({self.host}) was lost at {clock(self.time)}:"
      f" {how(self.status)}"
    )


def clock(seconds: float) -> str:
  """Returns a time as a person on this machine reads it.

  Args:
    seconds: Since the epoch.
  """
  return f"{datetime.datetime.fromtimestamp(seconds):%Y-%m-%d %H:%M:%S}"


def how(status: int) -> str:
  """Returns how a process ended, in words.

  Args:
    status: As `subprocess` gives it.
  """
  if status >= 0:
    return f"it ended with status {status}"
  try:
    name = signal.Signals(-status).name
  except ValueError:
    name = f"signal {-status}"
  return f"it was ended by {name}"


def write(run_dir: epath.Path, loss: Loss) -> None:
  """Writes how a process ended, in place of what was written before."""
  text = json.dumps(dataclasses.asdict(loss))
  files.write_text(run_dir / FOLDER / f"process-{loss.process}.json", text)


def read(run_dir: epath.Path, *, since: float) -> list[Loss]:
  """Returns the ends that were written, those that followed none first.

  Args:
    run_dir: The folder of the run.
    since: Earlier ones are left out, in seconds since the epoch.
  """
  folder = run_dir / FOLDER
  losses = []
  for path in folder.iterdir() if folder.exists() else ():
    try:
      loss = Loss(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
      continue  # Of another version, or being written.
    if loss.time >= since:
      losses.append(loss)
  return sorted(losses, key=lambda loss: (loss.follows, loss.time))


def cause(losses: Sequence[Loss]) -> Loss | None:
  """Returns the first that ended by itself, if there is one.

  Args:
    losses: As `read` returns them.
  """
  return next((loss for loss in losses if not loss.follows), None)

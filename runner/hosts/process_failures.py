"""Failed processes: records of how processes ended, and signs of a lost peer.

Each supervisor writes `hosts/process-<i>.json` for its own
process and reads the records of the others, so that all of them report which
process failed first. A machine that vanishes writes nothing; then the error
messages of JAX are the only source.
"""

from collections.abc import Sequence
import dataclasses
import datetime
import json
import re
import signal

from etils import epath

from paxon.runner import files

FOLDER = "hosts"

# Messages of gloo, NCCL, the coordination service and gRPC about a lost peer.
_SIGNS = (
  "connection closed by peer",
  "connection closed by remote peer",
  "connection reset by peer",
  "connection refused",
  "socket closed",
  "ncclremoteerror",
  "ncclsystemerror",
  "coordination service",
  "coordination_service",
  "distributed service detected fatal errors",
  "stopped sending heartbeats",
  "unavailable:",
  "unexpectedly tried to connect with a different incarnation",
)
# At startup gloo also prints its number of connections, which is no error.
_GLOO = re.compile(
  r"^(?=.*gloo).*(fail|error|timed out|timeout|closed|reset|refused|broken)",
  re.MULTILINE,
)
# Begins the last message of JAX's native code, followed by a stack.
TERMINATION = b"because the JAX distributed service detected fatal errors"
# Its messages before that one.
_PEER_LOG = re.compile(
  rb"[IWEF]\d{4} \S+ +\d+ (preemption_sync_manager|coordination_service\w*)\."
  rb"|Additional GRPC error information from remote target coordination_service"
  rb"|:UNKNOWN:Error received from peer"
)
_SILENT = re.compile(r"stopped sending heartbeats\):\n((?:.*\d+\n)+)")
_LEADER = re.compile(r"leader task was preempted/died|Socket closed")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProcessExit:
  """The exit of one process.

  Attributes:
    process: Its index.
    host: The name of its machine.
    time: When it exited, in seconds since the epoch.
    status: Its exit status, or minus the number of the signal that killed it.
    is_secondary: Whether it exited because another process was lost.
  """

  process: int
  host: str
  time: float
  status: int
  is_secondary: bool

  def describe(self) -> str:
    """Returns which process was lost, when and how."""
    return (
      f"process {self.process} ({self.host}) was lost at"
      f" {format_time(self.time)}: {describe_status(self.status)}"
    )


def write(run_dir: epath.Path, process_exit: ProcessExit) -> None:
  """Writes the record of a process and replaces its previous one."""
  path = run_dir / FOLDER / f"process-{process_exit.process}.json"
  files.write_text(path, json.dumps(dataclasses.asdict(process_exit)))


def read(run_dir: epath.Path, *, since: float) -> list[ProcessExit]:
  """Returns the exits since a time, first those that caused the others."""
  folder = run_dir / FOLDER
  found = []
  for path in folder.iterdir() if folder.exists() else ():
    try:
      process_exit = files.read_json(
        path, lambda value: files.to_record(ProcessExit, value), kind="an exit"
      )
    except (OSError, files.DamagedFileError):
      continue  # Damaged, or being written.
    if process_exit.time >= since:
      found.append(process_exit)
  return sorted(found, key=lambda each: (each.is_secondary, each.time))


def find_cause(exits: Sequence[ProcessExit]) -> ProcessExit | None:
  """Returns the root-cause exit, or None."""
  return next((each for each in exits if not each.is_secondary), None)


def format_time(seconds: float) -> str:
  """Returns seconds since the epoch as a local date and time."""
  return f"{datetime.datetime.fromtimestamp(seconds):%Y-%m-%d %H:%M:%S}"


def describe_status(status: int) -> str:
  """Returns how a process exited, in words, from the status of `subprocess`."""
  if status >= 0:
    return f"exit status {status}"
  try:
    name = signal.Signals(-status).name
  except ValueError:
    name = f"signal {-status}"
  return f"killed by {name}"


def is_peer_failure(text: str) -> bool:
  """Returns whether an error message or stderr reports a lost process."""
  lower = text.lower()
  return any(sign in lower for sign in _SIGNS) or bool(_GLOO.search(lower))


def is_peer_log(line: bytes) -> bool:
  """Returns whether a line is JAX's native log of a lost process."""
  return _PEER_LOG.match(line) is not None


def find_lost_processes(text: str) -> tuple[int, ...]:
  """Returns the indices of lost processes from the stderr of a process."""
  found: set[int] = set()
  for match in _SILENT.finditer(text):
    for line in match.group(1).splitlines():
      # `1`, or `/job:jax_worker/replica:0/task:1` in earlier versions.
      found.add(int(re.findall(r"\d+", line)[-1]))
  if not found and _LEADER.search(text):
    found.add(0)
  return tuple(sorted(found))

"""Which processes make up a run, as the command line says it."""

import dataclasses

from paxon.runner import user_error
from paxon.runner.hosts import detection

# Modes that several processes can run together.
MODES = ("train", "eval", "decode")

_MAX_PORT = 65535


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProcessSettings:
  """The processes of a run; those that are None are the environment's.

  Attributes:
    coordinator_address: `HOST:PORT` of process 0, which the others reach.
    num_processes: How many there are; 1 is this one alone, whatever the
      environment says.
    process_id: The number of this one, from 0.
    timeout_seconds: How long one waits for the others when it starts and when
      it ends.
    max_restarts: How often a parent starts the process again; 0 for no parent.
  """

  coordinator_address: str | None = None
  num_processes: int | None = None
  process_id: int | None = None
  timeout_seconds: int = 300
  max_restarts: int = 0

  @property
  def is_given(self) -> bool:
    """Whether the command line says anything of processes."""
    return any(value is not None for value in self._given().values())

  def check_command(
    self,
    cluster: detection.Cluster | None,
    *,
    mode: str,
    job_log_dir: str | None,
  ) -> None:
    """Checks the settings and what else the command line says.

    Args:
      cluster: What the environment has, which may complete the settings.
      mode: Of the program.
      job_log_dir: The folder of the run; None where each process makes one.

    Raises:
      user_error.UserError: A value is wrong, or one is missing.
    """
    self.check(cluster)
    if self.is_given and mode not in MODES:
      raise user_error.UserError(
        "--coordinator_address, --num_processes and --process_id are not for"
        f" --mode={mode}, which is one process."
      )
    if self.max_restarts < 0:
      raise user_error.UserError(
        f"--max_restarts must not be negative, got {self.max_restarts}."
      )
    if self.max_restarts and mode != "train":
      raise user_error.UserError(
        f"--max_restarts is for --mode=train, and the mode is {mode}."
      )
    is_one = self.num_processes in (None, 1) and not self.max_restarts
    if not is_one and not job_log_dir:
      flag = "--max_restarts" if self.max_restarts else "--num_processes"
      raise user_error.UserError(
        f"{flag} needs --job_log_dir, one folder that every process, also one"
        " that is started again, reaches."
      )

  def check(self, cluster: detection.Cluster | None) -> None:
    """Checks what can be known before any other process is asked.

    Args:
      cluster: What the environment has, which may complete the settings.

    Raises:
      user_error.UserError: A value is wrong, or one is missing.
    """
    count, index = self.num_processes, self.process_id
    if self.timeout_seconds <= 0:
      raise user_error.UserError(
        f"--host_timeout must be positive, got {self.timeout_seconds}."
      )
    if count is not None and count <= 0:
      raise user_error.UserError(
        f"--num_processes must be positive, got {count}."
      )
    if index is not None and (index < 0 or (count and index >= count)):
      allowed = f"0 to {count - 1}" if count else "0 or more"
      with_count = f" with --num_processes={count}" if count else ""
      raise user_error.UserError(
        f"--process_id={index} is out of range:{with_count} it must be"
        f" {allowed}."
      )
    if self.coordinator_address is not None:
      _check_address(self.coordinator_address)
    if count == 1 or cluster is not None or not self.is_given:
      return
    missing = [f"--{name}" for name, v in self._given().items() if v is None]
    if missing:
      given = [f"--{n}={v}" for n, v in self._given().items() if v is not None]
      raise user_error.UserError(
        f"{' '.join(given)} needs {' and '.join(missing)} too: the address"
        " HOST:PORT of process 0, the number of processes and the number of"
        " this one, from 0; the environment (SLURM, Open MPI, Kubernetes, TPU)"
        " does not say them."
      )

  def _given(self) -> dict[str, str | int | None]:
    return {
      "coordinator_address": self.coordinator_address,
      "num_processes": self.num_processes,
      "process_id": self.process_id,
    }


def _check_address(address: str) -> None:
  host, colon, port = address.rpartition(":")
  is_port = port.isascii() and port.isdigit() and 0 < int(port) <= _MAX_PORT
  if not (host and colon and is_port):
    raise user_error.UserError(
      f"--coordinator_address={address} must be HOST:PORT, the address of"
      " process 0 and a free port there, such as 10.0.0.1:1234."
    )

"""Flags of multi-process runs, and detection of clusters that start them.

On a cluster JAX finds the addresses and process numbers by itself. Without one,
`jax.distributed.initialize()` raises, warns, or waits for a server that does
not exist; so it is called without arguments only if `detect` finds a cluster.
"""

from collections.abc import Callable, Mapping
import dataclasses
import enum
import glob
import importlib.util

from paxon.runner import user_error

# The modes that several processes can run together.
MODES = ("train", "eval", "decode", "infer", "serve", "check_devices")
# Path of a file that is written once this process has joined the others. A
# supervisor sets this variable for the processes that it starts.
JOINED_FILE = "PAXON_JOINED_FILE"

_MAX_PORT = 65535
# `srun` sets these for the tasks of a step. The script of a job has only some
# of them, and is one process.
_SLURM = (
  "SLURM_JOB_ID",
  "SLURM_STEP_NODELIST",
  "SLURM_PROCID",
  "SLURM_LOCALID",
)
_TPU_FILES = ("/dev/accel*", "/dev/vfio/[0-9]*")


class Cluster(enum.Enum):
  """The system that started the processes; the values are shown to users."""

  OPEN_MPI = "Open MPI"
  SLURM = "SLURM"
  TPU = "TPU"
  KUBERNETES = "Kubernetes"


def detect(
  environ: Mapping[str, str],
  *,
  has_module: Callable[[str], bool] | None = None,
  has_tpu: Callable[[], bool] | None = None,
) -> Cluster | None:
  """Returns the cluster of this process; None for a single process."""
  has_module = has_module or _has_module
  has_tpu = has_tpu or _has_tpu
  if _number(environ, "OMPI_COMM_WORLD_SIZE") > 1:
    return Cluster.OPEN_MPI
  is_step = all(name in environ for name in _SLURM)
  if is_step and _number(environ, "SLURM_NTASKS") > 1:
    return Cluster.SLURM
  platforms = environ.get("JAX_PLATFORMS", "")
  uses_tpu = not platforms or "tpu" in platforms.split(",")
  if uses_tpu and has_module("libtpu") and has_tpu():
    return Cluster.TPU
  # An indexed job numbers its pods. JAX needs the package `kubernetes` for the
  # rest; without it each pod is a separate run.
  is_pod = "KUBERNETES_SERVICE_HOST" in environ
  if is_pod and "JOB_COMPLETION_INDEX" in environ and has_module("kubernetes"):
    return Cluster.KUBERNETES
  return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProcessSettings:
  """The processes of a run; the cluster provides values that are None.

  Attributes:
    coordinator_address: `HOST:PORT` of process 0, reachable from the others.
    num_processes: Number of processes; 1 ignores any cluster.
    process_id: Index of this process, from 0.
    timeout_seconds: Longest wait for other processes at start and exit.
    max_restarts: How often a supervisor restarts the process; 0 for no
      supervisor.
    min_processes: Least number of processes to continue with when others are
      lost; None waits for all.
  """

  coordinator_address: str | None = None
  num_processes: int | None = None
  process_id: int | None = None
  timeout_seconds: int = 300
  max_restarts: int = 0
  min_processes: int | None = None

  @property
  def is_given(self) -> bool:
    """Whether any of the three flags that describe processes is set."""
    return any(value is not None for value in self._flags().values())

  def check_command(
    self,
    cluster: Cluster | None,
    *,
    job_log_dir: str | None,
    is_supervised: bool = False,
  ) -> None:
    """Raises UserError unless the settings fit the other flags.

    Args:
      cluster: The cluster that was detected.
      job_log_dir: The run directory.
      is_supervised: Whether a supervisor started this process.
    """
    self.check(cluster)
    if self.max_restarts < 0:
      raise user_error.UserError(
        f"--max_restarts must not be negative, got {self.max_restarts}."
      )
    self._check_min_processes(is_supervised=is_supervised)
    is_one = self.num_processes in (None, 1) and not self.max_restarts
    if not is_one and not job_log_dir:
      flag = "--max_restarts" if self.max_restarts else "--num_processes"
      raise user_error.UserError(
        f"{flag} requires --job_log_dir, a directory that all processes can"
        " reach, including restarted ones."
      )

  def _check_min_processes(self, *, is_supervised: bool) -> None:
    least, count = self.min_processes, self.num_processes
    if least is None:
      return
    flag = f"--min_processes={least}"
    if not self.max_restarts and not is_supervised:
      raise user_error.UserError(
        f"{flag} requires --max_restarts: a run continues with fewer processes"
        " only after a restart."
      )
    if any(value is None for value in self._flags().values()):
      raise user_error.UserError(
        f"{flag} requires --coordinator_address, --num_processes and"
        " --process_id, because clusters start a fixed number of processes."
      )
    assert count is not None
    if not 0 < least <= count:
      raise user_error.UserError(
        f"{flag} must be from 1 to --num_processes, which is {count}."
      )

  def check(self, cluster: Cluster | None) -> None:
    """Raises UserError if a value is invalid or missing; contacts nobody."""
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
    missing = [f"--{name}" for name, v in self._flags().items() if v is None]
    if missing:
      given = [f"--{n}={v}" for n, v in self._flags().items() if v is not None]
      raise user_error.UserError(
        f"{' '.join(given)} requires {' and '.join(missing)}: HOST:PORT of"
        " process 0, the number of processes and the index of this one, from"
        " 0. No cluster (SLURM, Open MPI, Kubernetes, TPU) was detected that"
        " provides them."
      )

  def _flags(self) -> dict[str, str | int | None]:
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


def _number(environ: Mapping[str, str], name: str) -> int:
  value = environ.get(name, "")
  return int(value) if value.isascii() and value.isdigit() else 0


def _has_module(name: str) -> bool:
  return importlib.util.find_spec(name) is not None


def _has_tpu() -> bool:
  return any(glob.glob(pattern) for pattern in _TPU_FILES)

"""Whether the environment says that several processes make up this run.

JAX itself finds out their addresses and numbers, when it is asked to join them
without arguments. Asked on a machine with no cluster it raises, warns, or waits
for a server that is not there; so it is asked only where one of these signs is
seen.
"""

from collections.abc import Callable, Mapping
import enum
import glob
import importlib.util


class Cluster(enum.Enum):
  """What started the processes; the values are shown to users."""

  OPEN_MPI = "Open MPI"
  SLURM = "SLURM"
  TPU = "TPU"
  KUBERNETES = "Kubernetes"


# SLURM sets them for the tasks of a step, which `srun` starts; the script of a
# job has some of them, and is one process.
_SLURM = (
  "SLURM_JOB_ID",
  "SLURM_STEP_NODELIST",
  "SLURM_PROCID",
  "SLURM_LOCALID",
)
_TPU_FILES = ("/dev/accel*", "/dev/vfio/[0-9]*")


def detect(
  environ: Mapping[str, str],
  *,
  has_module: Callable[[str], bool] | None = None,
  has_tpu: Callable[[], bool] | None = None,
) -> Cluster | None:
  """Returns what JAX shall be asked about; None for one process.

  Args:
    environ: The environment.
    has_module: Whether a Python module can be imported; another one in tests.
    has_tpu: Whether this machine has TPUs; another one in tests.
  """
  has_module = has_module or _has_module
  has_tpu = has_tpu or _has_tpu
  if _number(environ, "OMPI_COMM_WORLD_SIZE") > 1:
    return Cluster.OPEN_MPI
  is_step = all(name in environ for name in _SLURM)
  if is_step and _number(environ, "SLURM_NTASKS") > 1:
    return Cluster.SLURM
  platforms = environ.get("JAX_PLATFORMS", "")
  wants_tpu = not platforms or "tpu" in platforms.split(",")
  if wants_tpu and has_module("libtpu") and has_tpu():
    return Cluster.TPU
  # An indexed job gives each pod its number. JAX asks the cluster for the rest
  # by the package `kubernetes`; without it the pods are runs of their own.
  is_pod = "KUBERNETES_SERVICE_HOST" in environ
  if is_pod and "JOB_COMPLETION_INDEX" in environ and has_module("kubernetes"):
    return Cluster.KUBERNETES
  return None


def _number(environ: Mapping[str, str], name: str) -> int:
  value = environ.get(name, "")
  return int(value) if value.isascii() and value.isdigit() else 0


def _has_module(name: str) -> bool:
  return importlib.util.find_spec(name) is not None


def _has_tpu() -> bool:
  return any(glob.glob(pattern) for pattern in _TPU_FILES)

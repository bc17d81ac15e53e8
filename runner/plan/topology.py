"""Abstract device topologies for ahead-of-time compilation.

Everything here but `environment` and `missing` runs in a process of its own:
two vendors' plugins do not go together, and their variables must be set before
JAX starts.
"""

from collections.abc import Mapping, Sequence
import importlib.util
import pathlib
import shutil
from typing import Any, Final

import jax
from jax.experimental import topologies

from paxon.runner.plan import compiler_options, hardware
from paxon.runner.plan import target as targets

_Platform = hardware.Platform

# From the vendor's whitepapers and CUDA's device properties, by kind: compute
# capability, multiprocessors, L2 cache in MiB, clock in GHz, shared memory of
# each multiprocessor in KiB. Those of GB200, GB300, B300, H100 PCIe, A100 40GB
# and RTX PRO 6000 are also XLA's (xla/backends/gpu/target_config/specs).
_GPUS: Final[Mapping[str, tuple[tuple[int, int], int, float, float, int]]] = {
  "a100": ((8, 0), 108, 40, 1.41, 164),
  "a100-40gb": ((8, 0), 108, 40, 1.41, 164),
  "a10g": ((8, 6), 80, 6, 1.71, 100),
  "h100": ((9, 0), 132, 50, 1.98, 228),
  "h100-pcie": ((9, 0), 114, 50, 1.755, 228),
  "h100-nvl": ((9, 0), 132, 50, 1.785, 228),
  "h200": ((9, 0), 132, 50, 1.98, 228),
  "h20": ((9, 0), 78, 60, 1.98, 228),
  "b200": ((10, 0), 148, 126.5, 1.965, 228),
  "gb200": ((10, 0), 152, 129.25, 2.062, 228),
  "b300": ((10, 3), 158, 129.25, 1.965, 228),
  "gb300": ((10, 3), 152, 129.25, 2.07, 228),
  "l40s": ((8, 9), 142, 96, 2.52, 100),
  "rtx5090": ((12, 0), 170, 96, 2.407, 100),
  "rtx-pro-6000": ((12, 0), 188, 128, 2.617, 100),
}
# CUDA programming guide, "Compute Capabilities": fewer threads fit.
_FEWER_THREADS: Final = ((8, 6), (8, 9), (12, 0))

# GpuTargetConfigProto. CUDA reserves 1 KiB of each block's shared memory.
_GPU_CONFIG: Final = """
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {shared}
  threads_per_core_limit: {threads}
  core_count: {cores}
  fpus_per_core: {fpus}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth:.0f}
  l2_cache_size: {l2}
  clock_rate_ghz: {clock}
  device_memory_size: {memory:.0f}
  shared_memory_per_block_optin: {optin}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
runtime_version {{ major: 12 minor: 9 }}
device_description_str: "{description}"
"""


def environment(target: targets.Target) -> dict[str, str]:
  """Returns the variables to set before JAX starts."""
  variables = dict(_QUIET)
  platform = target.hardware.platform
  if platform is _Platform.CPU:
    variables["JAX_NUM_CPU_DEVICES"] = str(target.num_devices)
  return variables


# JAX loads all plugins that are installed, whatever they are wanted for. None
# shall look for its hardware.
_QUIET: Final = {
  "JAX_PLATFORMS": "cpu",
  "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
  # A program from a cache is not compiled, so nothing is known of its buffers.
  "JAX_ENABLE_COMPILATION_CACHE": "false",
  "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
  "TPU_ACCELERATOR_TYPE": "v5e-8",
  "TPU_SKIP_MDS_QUERY": "1",
  "TPU_WORKER_HOSTNAMES": "localhost",
  "TPU_LOG_DIR": "disabled",
  "TPU_MIN_LOG_LEVEL": "3",
  "TPU_STDERR_LOG_LEVEL": "3",
}


def missing(target: targets.Target) -> tuple[str, ...]:
  """Returns the distributions, or devices, that the compiler lacks here."""
  platform = target.hardware.platform
  if platform.needs_device:
    return (f"a machine with {target.hardware.name} devices",)
  if platform is _Platform.TPU:
    return () if importlib.util.find_spec("libtpu") else ("libtpu",)
  if platform is _Platform.CUDA:
    names = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")
    if not any(map(_is_module, names)):
      return ("jax-cuda13-plugin", "jax-cuda13-pjrt")
    if not _has_toolkit():
      return tuple(_TOOLKIT)
  return ()


def missing_for_cudnn() -> tuple[str, ...]:
  """Returns the distributions that cuDNN attention lacks here."""
  return _without(_CUDNN)


# Distributions without modules: JAX and XLA look for their files, which stand
# below the package `nvidia`.
_TOOLKIT: Final = {
  "nvidia-cuda-nvcc": "cu13/bin/ptxas",
  "nvidia-nvvm": "cu13/nvvm/libdevice/libdevice.10.bc",
}
_TOOLKIT_FOLDER: Final = pathlib.Path("/usr/local/cuda")
_CUDNN: Final = {
  "nvidia-cudnn-cu13": "cudnn/lib/libcudnn.so.9",
  "nvidia-cuda-nvrtc": "cu13/lib/libnvrtc.so.13",
  "nvidia-cuda-runtime": "cu13/lib/libcudart.so.13",
}


def _without(files: Mapping[str, str]) -> tuple[str, ...]:
  """Returns the distributions whose file is not there."""
  spec = importlib.util.find_spec("nvidia")
  folders = list(spec.submodule_search_locations or ()) if spec else []
  return tuple(
    name
    for name, file in files.items()
    if not any(pathlib.Path(folder, file).exists() for folder in folders)
  )


def _has_toolkit() -> bool:
  """Returns whether XLA finds CUDA's assembler and device functions.

  The wheels of JAX's plugin hold neither. They may be the machine's own.
  """
  own = shutil.which("ptxas") or (_TOOLKIT_FOLDER / "bin" / "ptxas").exists()
  return bool(own) or not _without(_TOOLKIT)


def devices(target: targets.Target) -> list[jax.Device]:
  """Returns devices that programs can be compiled for, not run on.

  Raises:
    ValueError: Their number is not the target's.
  """
  platform = target.hardware.platform
  if platform is _Platform.CPU:
    found = jax.devices("cpu")
  elif platform is _Platform.CUDA:
    hosts, gpus = target.shape
    found = topologies.get_topology_desc(
      "any",
      platform="cuda",
      topology=f"{target.slices}x{hosts}x{gpus}",
      target_config=_gpu_config(target.hardware),
    ).devices
  else:
    found = topologies.get_topology_desc(
      platform="tpu", **_tpu_topology(target)
    ).devices
  if len(found) != target.num_devices:
    raise ValueError(
      f"{target} has {target.num_devices} devices, but its compiler shows"
      f" {len(found)}."
    )
  return list(found)


def compile_for(
  target: targets.Target,
  traced: jax.stages.Traced,
  mesh: jax.sharding.Mesh,
  *,
  given: compiler_options.Options | None = None,
  sets: Sequence[str] = (),
  dump: pathlib.Path | None = None,
) -> jax.stages.Compiled:
  """Compiles a traced function whose mesh has the target's devices.

  Args:
    target: Target to compile for.
    traced: The function.
    mesh: The target's devices.
    given: The compiler options of the job, as a run would be given them.
    sets: The sets of options that the job names.
    dump: Where the compiler writes its texts, see `buffer_assignment`.

  Raises:
    UserError: The compiler does not know an option, or refuses its value.
  """
  platform = target.hardware.platform
  device = mesh.devices.flat[0]
  options = compiler_options.resolve_options(
    given or {}, device, num_devices=mesh.size, sets=sets
  )
  options |= compiler_options.plan_options(platform)
  if dump is not None:
    options |= {"xla_dump_to": str(dump), "xla_dump_hlo_as_text": True}
  with jax.set_mesh(mesh):
    lowered = traced.lower(lowering_platforms=(platform.value,))
  with compiler_options.refusals(device):
    return lowered.compile(compiler_options=options)


def _is_module(name: str) -> bool:
  try:
    return importlib.util.find_spec(name) is not None
  except ModuleNotFoundError:
    return False


def _tpu_topology(target: targets.Target) -> dict[str, Any]:
  names = {"v7x": "tpu7x"}
  name = names.get(target.hardware.name, target.hardware.name)
  options: dict[str, Any] = {
    "topology_name": f"{name}:{'x'.join(map(str, target.shape))}"
  }
  if target.slices > 1:
    options["num_slices"] = target.slices
  if target.hardware.name == "v4":
    # One device a chip, as on a real v4; the default is one a core.
    options["chip_config_name"] = "megacore"
  if target.shape == (1, 1):
    options["chips_per_host_bounds"] = (1, 1, 1)
  return options


def _gpu_config(kind: hardware.Hardware) -> str:
  capability, cores, l2, clock, shared = _GPUS[kind.name]
  return _GPU_CONFIG.format(
    description=kind.device_kinds[0],
    major=capability[0],
    minor=capability[1],
    cores=cores,
    fpus=64 if capability == (8, 0) else 128,
    threads=1536 if capability in _FEWER_THREADS else 2048,
    l2=round(l2 * 2**20),
    clock=clock,
    shared=shared * 2**10,
    optin=(shared - 1) * 2**10,
    memory=kind.memory_bytes,
    bandwidth=kind.memory_bandwidth,
  )

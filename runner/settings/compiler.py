"""Named sets of compiler options, by hardware.

None is enabled by default: each costs memory, compile time or another order of
sums, and only timing a run shows which one pays off. A plan shows the effect on
memory and overlap without hardware.

Names were checked with the CUDA compiler of JAX 0.10.2 (`gpu`) and with libtpu
0.0.42 (`tpu`); compilers reject unknown names. Sources:

  A   docs.jax.dev, GPU performance tips
  B   github.com/NVIDIA/JAX-Toolbox, docs/GPU_performance.md
  C   github.com/AI-Hypercomputer/maxtext, benchmarks/xla_flags_library.py
  D   github.com/apple/axlearn, axlearn/common/compiler_options.py
"""

from collections.abc import Mapping, Sequence
import dataclasses
import re
import types
from typing import Final

from paxon.runner import knobs
from paxon.sharding import suggestions

Value = bool | int | float | str

_NAME: Final = re.compile(r"[a-z][a-z0-9_]*")

_GPUS: Final = (
  *(
    "a100",
    "a100-40gb",
    "a10g",
    "h100",
    "h100-pcie",
    "h100-nvl",
    "h200",
    "h20",
  ),
  *("b200", "b300", "gb200", "gb300", "l40s", "rtx5090", "rtx-pro-6000"),
)
_TPUS: Final = ("v4", "v5e", "v5p", "v6e", "v7x")


class CompilerKnobs(knobs.Group):
  """Options and profiles of the compiler.

  Attributes:
    compiler_options: XLA options by name, see `Job.compiler_options`.
    compiler_option_sets: Names of `SETS`, such as `async_collectives`.
    pgle: `auto` or the path of a profile, see `Job.pgle`.
  """

  compiler_options: Mapping[str, Value] = types.MappingProxyType({})
  compiler_option_sets: tuple[str, ...] = ()
  pgle: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptionSet:
  """Options that belong together.

  Attributes:
    name: As in `Job.compiler_option_sets`.
    hardware: Names of `hardware.Hardware`; the set is empty on others.
    options: Values by XLA's names.
    purpose: Effect and cost.
    source: Letters of the sources above.
  """

  name: str
  hardware: tuple[str, ...]
  options: Mapping[str, Value]
  purpose: str
  source: str


# By the same name on other hardware, a set has that hardware's options.
SETS: Final = (
  OptionSet(
    name="async_collectives",
    hardware=("v4", "v5p", "v6e", "v7x"),
    options={
      "xla_enable_async_all_gather": True,
      "xla_tpu_enable_async_collective_fusion": True,
      "xla_tpu_enable_async_collective_fusion_fuse_all_gather": True,
      "xla_tpu_enable_async_collective_fusion_multiple_steps": True,
      "xla_tpu_overlap_compute_collective_tc": True,
    },
    purpose=(
      "FSDP all-gathers overlap with matmuls, in chunks; v5e does so by itself;"
      " more memory and longer compilation"
    ),
    source="C",
  ),
  OptionSet(
    name="async_collectives",
    hardware=_GPUS,
    options={
      "xla_gpu_enable_pipelined_all_gather": True,
      "xla_gpu_enable_pipelined_reduce_scatter": True,
      "xla_gpu_enable_pipelined_all_reduce": True,
      "xla_gpu_enable_while_loop_double_buffering": True,
    },
    purpose=(
      "the gathers of a layer run while the layer before computes, across the"
      " steps of a scanned stack; two layers' weights are held at a time"
    ),
    source="A, B",
  ),
  OptionSet(
    name="combined_collectives",
    hardware=_GPUS,
    options={
      "xla_gpu_all_gather_combine_threshold_bytes": 128 * 2**20,
      "xla_gpu_reduce_scatter_combine_threshold_bytes": 128 * 2**20,
      "xla_gpu_all_reduce_combine_threshold_bytes": 128 * 2**20,
    },
    purpose=(
      "collectives of a layer become one, for fewer and larger messages;"
      " choose the size of one layer's weights; that of sums changes their"
      " order"
    ),
    source="B",
  ),
  OptionSet(
    name="collective_matmul",
    hardware=_GPUS,
    options={
      "xla_gpu_threshold_for_windowed_einsum_mib": 0,
      "xla_gpu_multi_streamed_windowed_einsum": True,
    },
    purpose=(
      "with tensor parallelism, an all-gather and its matmul overlap in chunks;"
      " pays off for large matmuls"
    ),
    source="A, B",
  ),
  OptionSet(
    name="collective_matmul",
    hardware=_TPUS,
    options={"xla_jf_spmd_threshold_for_windowed_einsum_mib": 0},
    purpose=(
      "the same on TPUs; D disables it on v6e, where matmuls are too fast to"
      " hide a ring of transfers"
    ),
    source="C, D",
  ),
  OptionSet(
    name="no_collective_matmul",
    hardware=_TPUS,
    options={"xla_jf_spmd_threshold_for_windowed_einsum_mib": 1_000_000},
    purpose="collectives stay whole; see collective_matmul",
    source="C, D",
  ),
  OptionSet(
    name="data_parallel_overlap",
    hardware=_TPUS,
    options={
      "xla_tpu_enable_data_parallel_all_reduce_opt": True,
      "xla_tpu_data_parallel_opt_different_sized_ops": True,
    },
    purpose="gradients are reduced between slices while others are computed",
    source="C",
  ),
  OptionSet(
    name="large_vmem",
    hardware=("v6e", "v7x"),
    options={"xla_tpu_scoped_vmem_limit_kib": 98_304},
    purpose="larger matmul tiles, of the 128 MiB of a core",
    source="C",
  ),
  OptionSet(
    name="sparse_core_collectives",
    hardware=("v7x",),
    options={
      "xla_tpu_enable_sparse_core_collective_offload_all_gather": True,
      "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter": True,
      "xla_tpu_enable_sparse_core_collective_offload_all_reduce": True,
    },
    purpose="collectives run on SparseCores and leave TensorCores alone",
    source="C",
  ),
  OptionSet(
    name="cublas_products",
    hardware=_GPUS,
    options={"xla_gpu_enable_triton_gemm": False},
    purpose=(
      "matmuls use cuBLAS instead of autotuned kernels, so that a plan knows"
      " that fp8 and int8 matmuls run as such"
    ),
    source="A",
  ),
)

NAMES: Final = tuple(dict.fromkeys(each.name for each in SETS))


def get_options(name: str, hardware: str | None) -> dict[str, Value]:
  """Returns the options of a set on one kind of hardware.

  Unknown hardware (None) has none.
  """
  return {
    option: value
    for each in SETS
    if each.name == name and hardware in each.hardware
    for option, value in each.options.items()
  }


def check_options(options: Mapping[str, object]) -> None:
  """Raises ValueError for a malformed name or a value of another type."""
  for name, value in options.items():
    if not _NAME.fullmatch(name):
      close = f"; use {name.lstrip('-')!r}" if name.startswith("-") else ""
      raise ValueError(
        f"Job.compiler_options: {name!r} is not a valid name; names look like"
        f" 'xla_gpu_autotune_level', without dashes{close}."
      )
    if not isinstance(value, bool | int | float | str):
      raise ValueError(
        f"Job.compiler_options[{name!r}] must be a bool, a number or a string,"
        f" got {value!r}."
      )


def check_sets(names: Sequence[str]) -> None:
  """Raises ValueError for the name of a set that does not exist."""
  for name in names:
    if name not in NAMES:
      raise ValueError(
        f"Job.compiler_option_sets: unknown set {name!r}"
        f"{suggestions.suggest(name, NAMES)}"
      )

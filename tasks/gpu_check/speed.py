"""Speeds that are wanted: tokens/s of GPT-2, MFU of a dense model, fp8."""

import pathlib
import re
from typing import Any, Final

import jax

from paxon.tasks.gpu_check import isolation, runs

GPT2: Final = "tasks.lm.params.gpt2.Gpt2Small124M"
DENSE: Final = "tasks.lm.params.llama.Llama2_7B"
_ONE_DOCUMENT: Final = "layers.attention.cudnn_attention.one_document"
# 1.7 B parameters of Llama 2's shape; they and Adam's moments take 21 GB.
DENSE_KNOBS: Final = (
  ("num_layers", "24"),
  ("embed_dim", "2048"),
  ("mlp_dim", "8192"),
  ("num_heads", "16"),
  ("num_kv_heads", "16"),
  ("global_batch_size", "4"),
  ("mesh", "fsdp=-1"),
  ("attention_kernel", _ONE_DOCUMENT),
  ("remat_policy", "None"),
  ("loss_chunk_length", "1024"),
  # A loop over the layers copies what each saves.
  ("task.model.stack.scan", "False"),
)
_TINY: Final = (
  ("global_batch_size", "8"),
  ("num_layers", "2"),
  ("embed_dim", "64"),
  ("mlp_dim", "128"),
  ("num_heads", "4"),
  ("head_dim", "16"),
  ("vocab_size", "512"),
  ("length", "64"),
  ("attention_kernel", "layers.attention.kernels.plain"),
)
_TINY_DENSE: Final = (*_TINY, ("num_kv_heads", "4"), ("mesh", "fsdp=-1"))
_FP8: Final = (("quantization", "fp8"),)
# Wanted on one H200.
_TOKENS: Final = 550_000.0
_MFU: Final = 0.6
_PROFILED_STEPS: Final = 3
_TOP: Final = 25
# First match decides.
_KINDS: Final = (
  # The last two are steps of cuDNN's backward pass.
  ("attention", r"fmha|flash|attention|sdpa|dot_do_o|convert_dq"),
  ("matmul", r"gemm|cublas|cutlass|nvjet|xmma|dot|triton_gemm|matmul|ynn"),
  ("copy", r"memcpy|memset|copy|transpose"),
  ("collective", r"nccl|all-?reduce|all-?gather|reduce-?scatter"),
  ("loop", r"loop|fusion|elementwise|broadcast|input_|reduce|convert"),
)


def check_gpt2(settings: isolation.Settings) -> isolation.Facts:
  """Measures tokens/s of GPT-2 124M as its experiment has it."""
  knobs = _TINY if settings.is_dry else ()
  facts = _measure("gpt2", runs.start(GPT2, knobs), settings)
  if settings.is_dry:
    return facts
  return facts | _judge(facts["tokens_per_second"], _TOKENS)


def check_dense(
  settings: isolation.Settings, *, is_fp8: bool
) -> isolation.Facts:
  """Measures the MFU of a dense model, in bfloat16 or with fp8 matmuls.

  The FLOPs of both are counted as those of bfloat16, so the ratio of their
  MFUs is that of their speeds.

  Args:
    settings: Of all checks.
    is_fp8: Whether to quantize.
  """
  knobs = _TINY_DENSE if settings.is_dry else DENSE_KNOBS
  steps = runs.start(DENSE, (*knobs, *(_FP8 if is_fp8 else ())))
  name = "dense_fp8" if is_fp8 else "dense_bf16"
  facts = _measure(name, steps, settings)
  if is_fp8 or facts["mfu"] is None:
    return facts
  return facts | _judge(facts["mfu"], _MFU)


def compare_dense(
  low: isolation.Facts, high: isolation.Facts
) -> dict[str, float]:
  """Returns the speed of fp8 over that of bfloat16."""
  return {"fp8_over_bf16": low["tokens_per_second"] / high["tokens_per_second"]}


def _measure(
  name: str, steps: runs.Steps, settings: isolation.Settings
) -> dict[str, Any]:
  """Returns the speed of steps, their memory and the time of their kernels."""
  seconds = steps.measure(blocks=3, steps=1 if settings.is_dry else 8)
  facts = {
    "tokens_per_second": steps.tokens / seconds,
    "step_seconds": seconds,
    "mfu": runs.mfu(steps.flops, seconds),
    "flops_per_step": steps.flops,
    "compile_seconds": steps.compile_seconds,
    "peak_bytes": runs.peak_memory(steps.step),
    "loss": steps.loss,
  }
  return facts | {"profile": _profile(name, steps, settings)}


def _judge(value: float, wanted: float) -> dict[str, Any]:
  return {"wanted": wanted, "is_reached": value >= wanted}


def _profile(
  name: str, steps: runs.Steps, settings: isolation.Settings
) -> dict[str, Any]:
  """Traces steps into `profile/<name>`; returns the time of their kernels.

  XProf and Perfetto show the trace.
  """
  folder = settings.folder / "profile" / name
  with jax.profiler.trace(str(folder)):
    steps.advance(steps=_PROFILED_STEPS)
  files = sorted(folder.glob("**/*.xplane.pb"))
  if not files:
    return {"error": "the profiler wrote no trace"}
  return {
    "file": str(files[-1].relative_to(settings.folder)),
    **sum_kernels(files[-1], steps=_PROFILED_STEPS),
  }


def sum_kernels(path: pathlib.Path, *, steps: int) -> dict[str, Any]:
  """Returns milliseconds of kernels in a step, by kind and the longest.

  Args:
    path: A file of JAX's profiler.
    steps: Number of steps in it.
  """
  planes = list(jax.profiler.ProfileData.from_file(str(path)).planes)
  devices = [plane for plane in planes if plane.name.startswith("/device:GPU")]
  times: dict[str, float] = {}
  # On CPUs instructions are on lines of the host's threads.
  for plane in devices or planes:
    for line in plane.lines:
      if devices and not line.name.startswith("Stream"):
        continue
      for event in line.events:
        if devices or _is_instruction(event):
          name = event.name
          spent = event.duration_ns / 1e6 / steps
          times[name] = times.get(name, 0.0) + spent
  kinds: dict[str, float] = {}
  for name, time in times.items():
    kind = find_kind(name)
    kinds[kind] = kinds.get(kind, 0.0) + time
  longest = sorted(times.items(), key=lambda item: -item[1])[:_TOP]
  return {
    "milliseconds_by_kind": dict(
      sorted(kinds.items(), key=lambda item: -item[1])
    ),
    "longest": [
      {"kernel": name[:120], "milliseconds": t} for name, t in longest
    ],
    "device_milliseconds": sum(times.values()),
  }


def _is_instruction(event: Any) -> bool:
  return any(name == "hlo_op" for name, _ in event.stats)


def find_kind(name: str) -> str:
  """Returns the kind of a kernel by its name; `other` if none is known."""
  for kind, pattern in _KINDS:
    if re.search(pattern, name, re.IGNORECASE):
      return kind
  return "other"

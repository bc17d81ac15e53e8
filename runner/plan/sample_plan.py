"""A plan with a value in every field, for tests.

The values are made up, and all different.
"""

from typing import Any

from paxon.runner.plan import result

_GIB = 2**30


def memory(**fields: Any) -> result.Memory:
  """Returns the memory of one H200 that the program fits.

  Args:
    **fields: Fields to replace.
  """
  base: dict[str, Any] = {
    "parameters": 10 * _GIB,
    "other_variables": 3 * 2**20,
    "optimizer": 20 * _GIB,
    "host_optimizer": 3 * _GIB,
    "host": 4 * _GIB,
    "batch": 5 * 2**20,
    "gradients": 9 * _GIB,
    "arguments": 31 * _GIB,
    "temporaries": 41 * _GIB,
    "peak": 72 * _GIB,
    "usable": 118.0 * _GIB,
    "capacity": 131.0 * _GIB,
    "saved": {"layer inputs": 12 * _GIB, "mlp": 17 * _GIB, "unnamed": _GIB},
    "at_peak": (
      result.Buffers(
        type="bf16[32,8,2048,4096]",
        module="DecoderLm/stack/layers",
        reason="saved for the backward pass",
        count=2,
        num_bytes=11 * _GIB,
      ),
    ),
  }
  return result.Memory(**base | fields)


def estimate(**fields: Any) -> result.Estimate:
  """Returns an estimate.

  Args:
    **fields: Fields to replace.
  """
  base: dict[str, Any] = {
    "step": 0.9,
    "compute": 0.61,
    "memory": 0.12,
    "overhead": 0.007,
    "exposed": {"fsdp": 0.143, "data,fsdp": 0.02},
    "tokens_per_second": 72_816.0,
    "mfu": 0.364,
    "band": (0.8, 1.25),
    "source": "h200.json, measured 2026-11-01 on one NVIDIA H200",
    "slowdown": 1.125,
    "datasheet_step": 0.732,
    "datasheet_mfu": 0.447,
    "ceiling_mfu": 0.768,
  }
  return result.Estimate(**base | fields)


def plan(**fields: Any) -> result.Plan:
  """Returns a plan for eight H200s.

  Args:
    **fields: Fields to replace.
  """
  shape = (16, 4096)
  base: dict[str, Any] = {
    "experiment": "tasks.a.B",
    "overrides": ("--fdl.mesh=fsdp=8",),
    "target": "h200:1x8",
    "device_kind": "h200",
    "num_devices": 8,
    "num_chips": 8,
    "mesh": {"fsdp": 8},
    "batch": {"inputs": shape, "weights": shape},
    "compiled": True,
    "memory": memory(),
    "flops": result.Flops(
      model=3_210 * 10**12,
      causal_model=2_987e12,
      hardware=4_012 * 10**12,
      recomputed=802 * 10**12,
      bubble=113 * 10**12,
      by_module={
        "DecoderLm/stack/layers/blocks_0/feed_forward": 2_501 * 10**12,
        "DecoderLm/stack/layers/blocks_0/attention": 1_305 * 10**12,
        "DecoderLm/Embedding": 206 * 10**12,
      },
      by_dtype={"bfloat16": 4_009 * 10**12, "float32": 3 * 10**12},
    ),
    "collectives": _collectives(),
    "hbm_bytes": 777 * _GIB,
    "compiled_flops": 4_011 * 10**12,
    "warnings": ("gathers wait for each other",),
    "kernels": {"__cudnn$fmhaSoftmax": 32},
    "kernel_choices": (
      result.KernelChoice(
        part="attention forward",
        kernel="cudnn",
        is_final=True,
        count=33,
        dtype="bf16",
      ),
      result.KernelChoice(
        part="matmuls",
        kernel="cublas or triton",
        is_final=False,
        count=451,
        dtype="bf16",
      ),
    ),
    "quantized_matmuls": (
      result.QuantizedMatmul(
        module="DecoderLm/stack/layers/blocks_0/feed_forward/einsum/gate",
        role="weight gradient",
        traced_dtype="float8_e5m2",
        dtype="float8_e4m3fn",
        kernel="cublas fp8",
        is_final=True,
        count=34,
        flops=1_203 * 10**12,
        is_quantized=True,
      ),
      result.QuantizedMatmul(
        module="DecoderLm/Unembedding/einsum/kernel",
        role="input gradient",
        traced_dtype="int8",
        dtype="float16",
        kernel="triton",
        is_final=False,
        count=35,
        flops=207 * 10**12,
        is_quantized=False,
        reason="such a thing is not there",
      ),
    ),
    "compiler_options": {"xla_gpu_some_option": "true"},
    "bound": result.Bound(
      compute=0.522,
      memory=0.0132,
      fast_link=0.217,
      network=0.0043,
      step=0.522,
      tokens_per_second=125_548.0,
      mfu=0.723,
    ),
    "estimate": estimate(),
    "training_cost": result.TrainingCost(
      tokens=1.5e12, days=238.0, device_hours=45_777.0, money=114_442.0
    ),
    "num_parameters": 7_504_924_672,
    "num_layouts": 123,
    "other_programs": (
      result.OtherProgram(
        name="evaluation", temporaries=6 * _GIB, peak=37 * _GIB
      ),
      result.OtherProgram(name="saving", host=240 * _GIB, note="all devices"),
    ),
    "decode_steps": (
      result.DecodeStep(
        batch=63,
        length=4095,
        parameters=15 * _GIB,
        cache=8 * _GIB,
        read=22 * _GIB,
        peak=24 * _GIB,
        fit="fits",
        bound=result.Bound(
          compute=0.0012,
          memory=0.0061,
          fast_link=0.0003,
          network=0.0001,
          step=0.0061,
          tokens_per_second=10_328.0,
          mfu=0.013,
        ),
        estimate=estimate(step=0.0093),
        note="a remark",
      ),
    ),
    "fit": "fits",
    "advice": (),
    "findings": ("a table is left whole",),
    "notes": ("a loop is counted once",),
    "fingerprint": "0123456789abcdef" * 4,
    "versions": {"jax": "0.10.2"},
    "compile_seconds": 4.5,
    "made_at": "2026-11-21T10:41:09Z",
  }
  return result.Plan(**base | fields)


def change(**fields: Any) -> result.Change:
  """Returns a change that makes a program fit.

  Args:
    **fields: Fields to replace.
  """
  base: dict[str, Any] = {
    "overrides": ("--fdl.num_microbatches=2",),
    "words": "two microbatches",
    "compiled": True,
    "fit": "fits",
    "peak": 88 * _GIB,
    "recomputed_share": 0.253,
    "bound": 0.583,
    "estimate": 0.95,
  }
  return result.Change(**base | fields)


def _collectives() -> tuple[result.Collectives, ...]:
  return (
    result.Collectives(
      kind="all-gather",
      axes=("fsdp",),
      link="fast",
      count=129,
      asynchronous=127,
      payload_bytes=61 * _GIB,
      wire_bytes=53.375 * _GIB,
      dtype_bytes={"bfloat16": 44 * _GIB, "float8_e4m3fn": 17 * _GIB},
      module_bytes={
        "DecoderLm/stack/layers/blocks_0/feed_forward": 47 * _GIB,
        "DecoderLm/Unembedding": 14 * _GIB,
      },
      seconds=0.1275,
    ),
    result.Collectives(
      kind="all-reduce",
      axes=("data", "fsdp"),
      link="network",
      count=3,
      asynchronous=0,
      payload_bytes=812,
      wire_bytes=1421.0,
      seconds=0.0043,
      gathers=True,
    ),
  )

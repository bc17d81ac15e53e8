"""Sentences of a plan, shared by the terminal report and the web page."""

import re
from typing import Final

from paxon.runner import units
from paxon.runner.plan import hardware, result

_GIB: Final = 2.0**30

# Whose programs a distribution compiles; all others are for all.
_COMPILERS: Final = {
  "libtpu": hardware.Platform.TPU,
  "jax-cuda13-plugin": hardware.Platform.CUDA,
}

# What JAX takes of a GPU's memory by default.
_RESERVED: Final = 0.75


def devices(plan: result.Plan) -> str:
  """Returns how many devices there are, and on how many chips.

  Args:
    plan: Of a known kind of hardware.
  """
  kind = hardware.named(plan.device_kind)
  of_chips = f"{plan.num_devices:,} devices on {plan.num_chips:,}"
  if kind.platform is hardware.Platform.CPU:
    text = f"{plan.num_devices:,} CPU devices"
  elif kind.platform is hardware.Platform.CUDA:
    text = f"{of_chips} GPUs"
  elif kind.devices_per_chip > 1:
    text = f"{of_chips} chips ({kind.devices_per_chip} per chip)"
  elif kind.name == "v4":
    # Without megacore, each of its two cores would be a device.
    text = f"{of_chips} chips (megacore: one device per chip)"
  else:
    text = f"{of_chips} chips"
  # Of one there is no plural.
  return re.sub(r"\b1 (devices|GPUs|chips)\b", lambda m: m[0][:-1], text)


def verdict(plan: result.Plan) -> str:
  """Returns whether the program fits, and how full the memory is."""
  memory = plan.memory
  if memory.peak is not None and memory.usable:
    share = units.share(memory.peak / memory.usable)
    return f"{plan.fit}, {share} of usable memory"
  if memory.fit is not result.Fit.UNKNOWN:
    return plan.fit
  text = "unknown whether it fits (not compiled)"
  if memory.usable:
    share = units.share(memory.state_and_batch / memory.usable)
    text += f"; state and batch take {share} of usable memory"
  return text


def capacity(plan: result.Plan) -> str:
  """Returns what a program may use of a device's memory, and who says so."""
  memory = plan.memory
  if memory.usable is None or memory.capacity is None:
    return "usable memory is that of the host, which is not checked"
  sizes = f"{memory.usable / _GIB:.2f} of {memory.capacity / _GIB:.2f} GiB"
  platform = hardware.named(plan.device_kind).platform
  if platform is hardware.Platform.TPU:
    return f"{sizes} are usable; the TPU compiler enforces this limit"
  text = (
    f"{sizes} are usable; the CUDA compiler enforces no limit, so the plan"
    " compares the peak with it"
  )
  if memory.peak is not None and (
    _RESERVED * memory.capacity < memory.peak <= memory.usable
  ):
    text += (
      "; JAX preallocates 75 % of a GPU by default, so run it with"
      " XLA_PYTHON_CLIENT_MEM_FRACTION=0.9"
    )
  return text


def decision(choice: result.KernelChoice) -> str:
  """Returns whether the run will have a kernel too."""
  return "decided" if choice.is_final else "autotuned at run time"


def executions(choice: result.KernelChoice) -> str:
  """Returns how often something runs in a step, and what is counted.

  Args:
    choice: `plain` attention has no kernel of its own: its products are
      counted, two in a forward pass, and again where they are recomputed.
  """
  is_product = choice.kernel == "plain" or choice.part in (
    "matmuls",
    "quantized matmuls",
  )
  return f"{choice.count:,} {'matmuls' if is_product else 'calls'}"


def origin(plan: result.Plan) -> str:
  """Returns when, by what and in what time the plan was made."""
  platform = hardware.named(plan.device_kind).platform
  by = ", ".join(
    f"{name} {number}"
    for name, number in plan.versions.items()
    if _COMPILERS.get(name, platform) is platform
  )
  if plan.compile_seconds is None:
    what = "traced, not compiled"
  elif plan.compiled:
    what = f"compiled in {plan.compile_seconds:.1f} s"
  else:
    what = f"rejected by the compiler after {plan.compile_seconds:.1f} s"
  when = f" on {plan.made_at}" if plan.made_at else ""
  cached = "from cache, " if plan.is_from_cache else ""
  return f"{cached}{what}{when} by {by}"


def dtypes(collectives: result.Collectives) -> str:
  """Returns what collectives move, most bytes first."""
  found = collectives.dtype_bytes
  return ", ".join(sorted(found, key=lambda dtype: -found[dtype])) or "-"


def quantized(plan: result.Plan) -> str:
  """Returns the shares of FLOPs that are covered and run in low precision.

  Args:
    plan: One with quantized matmuls.
  """
  covered = sum(p.flops for p in plan.quantized_matmuls)
  narrow = sum(p.flops for p in plan.quantized_matmuls if p.is_quantized)
  whole = max(plan.flops.hardware, 1)
  return (
    f"{units.share(covered / whole)} of the executed FLOPs are covered,"
    f" {units.share(narrow / whole)} run in low precision"
  )


def runs_as(product: result.QuantizedMatmul) -> str:
  """Returns what a covered product runs as, such as `cublas fp8`."""
  dtype = "fp8" if product.dtype.startswith("float8") else product.dtype
  if not product.kernel:
    return dtype or "not found"
  # The names of some kernels say it.
  name = product.kernel
  text = name if name.endswith(dtype) else f"{name} {dtype}"
  return text if product.is_final else f"{text} (may change by autotuning)"

"""Versions, devices and measured rates of this machine.

Rates as shares of those of the datasheet are the efficiency factors of plans.
They are written as a file that a shell reads:

  . gpu_check/calibration.sh   # sets PAXON_PLAN_EFFICIENCY
"""

from collections.abc import Callable
import datetime
import functools
import importlib.metadata
import platform
import shutil
import statistics
import subprocess
import time
from typing import Any, Final

import jax
import jax.numpy as jnp

from paxon.layers.attention import cudnn_attention
from paxon.layers.attention import mask as attention_mask
from paxon.runner.plan import hardware
from paxon.runner.plan.estimate import efficiency
from paxon.tasks.gpu_check import isolation

CALIBRATION: Final = "calibration.sh"
_PACKAGES: Final = (
  "jax",
  "jaxlib",
  "jax-cuda13-plugin",
  "jax-cuda12-plugin",
  "nvidia-cudnn-cu13",
  "nvidia-cudnn-cu12",
  "flax",
  "optax",
  "orbax-checkpoint",
)
_QUERY: Final = "name,driver_version,memory.total,clocks.sm"
_BLOCKS, _CALLS = 5, 8


def describe_devices(settings: isolation.Settings) -> isolation.Facts:
  """Returns versions and devices.

  Raises:
    CheckError: There is no accelerator, and it is no dry run.
  """
  versions = {"python": platform.python_version()}
  for name in _PACKAGES:
    try:
      versions[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
      continue
  device = jax.devices()[0]
  kind = hardware.find_by_device_kind(device.device_kind)
  stats = device.memory_stats() or {}
  facts = {
    "device": device.device_kind,
    "kind": kind.name if kind else None,
    "count": jax.device_count(),
    "platform": device.platform,
    "memory_bytes": stats.get("bytes_limit"),
    "versions": versions,
    "runtime": str(device.client.platform_version),
    "driver": _find_driver(),
  }
  if device.platform == "cpu" and not settings.is_dry:
    raise isolation.CheckError(
      "JAX finds no accelerator; use --dry_run on CPUs", facts
    )
  return facts


def _find_driver() -> str | None:
  """Returns name, driver and memory as `nvidia-smi` prints them."""
  if not shutil.which("nvidia-smi"):
    return None
  done = subprocess.run(
    ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader"],
    capture_output=True,
    text=True,
    timeout=20,
    check=False,
  )
  return done.stdout.strip() or done.stderr.strip()[:200]


def calibrate(settings: isolation.Settings) -> isolation.Facts:
  """Measures rates and writes the calibration file.

  The file exists only where the datasheet's rates are known.
  """
  size = 256 if settings.is_dry else 8192
  kind = hardware.find_by_device_kind(jax.devices()[0].device_kind)
  rates = measure(size)
  factors = {
    name: round(rate / sheet, 3)
    for name, rate in rates.items()
    if (sheet := find_datasheet_rate(kind, name))
  }
  facts: dict[str, Any] = {"rates": rates, "factors": factors}
  if factors:
    path = settings.folder / CALIBRATION
    path.write_text(format_calibration(factors))
    facts["file"] = path.name
  return facts


def format_calibration(factors: dict[str, float]) -> str:
  """Returns the text of the calibration file.

  Args:
    factors: Efficiency factors by name, as plans read them.
  """
  day = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
  device = jax.devices()[0].device_kind
  text = ",".join(f"{name}={x:g}" for name, x in factors.items())
  return (
    f"# Measured by tools/gpu_check on {jax.device_count()} x {device},"
    f" {day}, jax {jax.__version__}.\n"
    f"export {efficiency.VARIABLE}={text}\n"
  )


def measure(size: int) -> dict[str, float]:
  """Returns rates of this machine in FLOP/s or bytes/s.

  Args:
    size: Rows and columns of the matrices.
  """
  x = jax.random.normal(jax.random.key(0), (size, size), jnp.bfloat16)
  flops = 2.0 * size**3
  found = {"matmul": flops / _seconds(_multiply, x, x)}
  y = jnp.ones((64 * size, size // 2), jnp.bfloat16)
  found["memory"] = 2.0 * y.nbytes / _seconds(jax.jit(lambda y: y + 1), y)
  number = jax.device_count()
  if number > 1:
    mesh = jax.make_mesh((number,), ("all",))
    split = jax.NamedSharding(mesh, jax.P("all"))
    whole = jax.NamedSharding(mesh, jax.P())
    z = jax.device_put(jnp.ones((16 * size, size), jnp.bfloat16), split)
    gather = jax.jit(lambda z: z, out_shardings=whole)
    found["fast_link"] = z.nbytes * (number - 1) / number / _seconds(gather, z)
  attention = functools.partial(_measure_attention, size)
  for name, function in (
    ("attention", functools.partial(attention, 128, packed=False)),
    ("attention_128_packed", functools.partial(attention, 128, packed=True)),
    ("attention_64", functools.partial(attention, 64, packed=False)),
    ("attention_64_packed", functools.partial(attention, 64, packed=True)),
    ("matmul.float8", functools.partial(_measure_fp8, x, flops)),
  ):
    try:
      found[name] = function()
    except Exception:  # Not supported by this device.
      continue
  return found


def find_datasheet_rate(
  kind: hardware.Hardware | None, name: str
) -> float | None:
  """Returns a datasheet rate in FLOP/s or bytes/s, or None without a factor.

  Args:
    kind: The devices.
    name: As `measure` names it.
  """
  if kind is None:
    return None
  return {
    "matmul": kind.peak_flops(),
    "matmul.float8": kind.peak_flops("float8_e4m3fn"),
    "attention": kind.peak_flops(),
    "memory": kind.memory_bandwidth,
    # Between hosts a gather uses the network.
    "fast_link": kind.link_bandwidth if jax.process_count() == 1 else None,
  }.get(name)


@jax.jit
def _multiply(x: jax.Array, y: jax.Array) -> jax.Array:
  return jax.lax.dot(x, y, preferred_element_type=jnp.bfloat16)


def _measure_fp8(x: jax.Array, flops: float) -> float:
  low = x.astype(jnp.float8_e4m3fn)
  return flops / _seconds(_multiply, low, low)


def _measure_attention(size: int, head_dim: int, *, packed: bool) -> float:
  """Returns FLOP/s of causal cuDNN attention with its gradients.

  Packed documents are masked by a bias; pairs of tokens of different documents
  are counted.
  """
  length, heads = size // 2, 2048 // head_dim
  shape = (4, length, heads, head_dim)
  keys = jax.random.split(jax.random.key(1), 3)
  arrays = tuple(jax.random.normal(k, shape, jnp.bfloat16) for k in keys)
  segments = (
    jnp.arange(length) * 4 // length + 1 if packed else jnp.ones(length)
  )
  positions = jnp.broadcast_to(jnp.arange(length), shape[:2])
  segments = jnp.broadcast_to(segments.astype(jnp.int32), shape[:2])

  def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    mask = attention_mask.AttentionMask(
      q_positions=positions,
      kv_positions=positions,
      q_segment_ids=segments,
      kv_segment_ids=segments,
    )
    out = cudnn_attention.cudnn(query, key, value, mask, packed=packed)
    return jnp.sum(out.astype(jnp.float32))

  # Two matmuls forward, five backward; half of the pairs are masked.
  flops = 7 * shape[0] * heads * length**2 * head_dim
  gradient = jax.jit(jax.grad(attend, (0, 1, 2)))
  return flops / _seconds(gradient, *arrays)


def _seconds(function: Callable[..., Any], *arguments: jax.Array) -> float:
  """Returns the median time of a call, over blocks of calls.

  Only the last call of a block is waited for: a program that starts while the
  device is idle takes a few tenths of a millisecond longer.
  """
  jax.block_until_ready(function(*arguments))
  times = []
  for _ in range(_BLOCKS):
    begin = time.perf_counter()
    out: Any = None
    for _ in range(_CALLS):
      # The call after the next one reuses the memory of this result.
      out = function(*arguments)
    jax.block_until_ready(out)
    times.append((time.perf_counter() - begin) / _CALLS)
  return statistics.median(times)

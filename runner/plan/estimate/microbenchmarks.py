"""Microbenchmarks of this machine's devices.

All devices work at once, as they do in a training step:

  products   a chain of square products, by dtype; the mean over sizes
  memory     x + 1 over an array that fits no cache
  link       a sum over all devices
  attention  forward and backward of the causal cuDNN kernel, on GPUs
  overhead   a chain of tiny products, each a kernel of its own
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
import statistics
import time

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from paxon.runner.plan import hardware

_AXIS = "device"
_TINY = 16
_HEADS, _HEAD_DIM = 16, 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
  """How large the programs are.

  Attributes:
    products: Widths of square products.
    memory_bytes: Of the array that is read and written.
    link_bytes: Of what each device brings to a sum.
    attention_length: Of the rows of attention.
    repetitions: Of each measurement; the fastest counts.
    chain: Products that follow each other in one program.
  """

  products: tuple[int, ...]
  memory_bytes: int
  link_bytes: int
  attention_length: int = 4096
  repetitions: int = 5
  chain: int = 8


LARGE = Sizes(products=(2048, 4096, 8192), memory_bytes=2**30, link_bytes=2**28)
# For a CPU, where a product of 8192 takes seconds.
SMALL = Sizes(products=(256, 512, 1024), memory_bytes=2**25, link_bytes=2**22)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measurements:
  """Per second and device.

  Attributes:
    products: FLOPs by dtype, the mean over sizes.
    best_products: FLOPs by dtype, of the best size.
    memory: Bytes read and written.
    link: Bytes sent in a sum over all devices; None of one device.
    attention: FLOPs of an attention kernel, masked ones left out; None where
      there is none.
    overhead: Seconds of a tiny kernel.
  """

  products: Mapping[str, float]
  best_products: Mapping[str, float]
  memory: float
  link: float | None
  attention: float | None
  overhead: float


def measure(
  devices: Sequence[jax.Device],
  *,
  sizes: Sizes,
  dtypes: Sequence[str] = ("bfloat16", "float32"),
) -> Measurements:
  """Measures; takes seconds on an accelerator.

  Args:
    devices: Of one kind, all that a training would use.
    sizes: Of the programs.
    dtypes: Of the products.
  """
  mesh = jax.sharding.Mesh(list(devices), (_AXIS,))
  timer = functools.partial(_fastest, repetitions=sizes.repetitions)
  by_size = {
    dtype: [
      _products(mesh, n, dtype, sizes.chain, timer) for n in sizes.products
    ]
    for dtype in dtypes
  }
  is_gpu = devices[0].platform == "gpu"
  return Measurements(
    products={d: statistics.fmean(found) for d, found in by_size.items()},
    best_products={d: max(found) for d, found in by_size.items()},
    memory=_memory(mesh, sizes.memory_bytes, timer),
    link=None if len(devices) < 2 else _link(mesh, sizes.link_bytes, timer),
    attention=_attention(mesh, sizes.attention_length, timer)
    if is_gpu
    else None,
    overhead=_overhead(mesh, timer),
  )


def kind_of(devices: Sequence[jax.Device]) -> hardware.Hardware | None:
  """Returns the kind of the devices, None for one that is not in the table."""
  return hardware.for_device_kind(devices[0].device_kind)


_Timer = Callable[[Callable[[], jax.Array]], float]


def _fastest(run: Callable[[], jax.Array], *, repetitions: int) -> float:
  """Seconds of the fastest of some runs, after one that compiles."""
  jax.block_until_ready(run())
  times = []
  for _ in range(repetitions):
    begin = time.perf_counter()
    jax.block_until_ready(run())
    times.append(time.perf_counter() - begin)
  return min(times)


def _on_each(
  mesh: jax.sharding.Mesh, shape: tuple[int, ...], dtype: DTypeLike
) -> jax.Array:
  """Ones of this shape on each device, stacked."""
  sharding = jax.NamedSharding(mesh, jax.P(_AXIS))
  make = jax.jit(
    lambda: jnp.ones((mesh.size, *shape), dtype), out_shardings=sharding
  )
  return make()


def _per_device(
  mesh: jax.sharding.Mesh, function: Callable[..., jax.Array]
) -> Callable[..., jax.Array]:
  """Runs a function on each device's part, without the leading axis."""

  def body(*parts: jax.Array) -> jax.Array:
    return function(*(part[0] for part in parts))[None]

  mapped = jax.shard_map(
    body, mesh=mesh, in_specs=jax.P(_AXIS), out_specs=jax.P(_AXIS)
  )
  return jax.jit(mapped)


def _products(
  mesh: jax.sharding.Mesh, size: int, dtype: str, chain: int, timer: _Timer
) -> float:
  x = _on_each(mesh, (size, size), dtype)

  def multiply(x: jax.Array) -> jax.Array:
    y = x
    for _ in range(chain):
      # Scaled, so that the numbers stay ones.
      y = (y @ x) * jnp.asarray(1 / size, dtype)
    return y

  run = _per_device(mesh, multiply)
  return chain * 2 * size**3 / timer(lambda: run(x))


def _memory(mesh: jax.sharding.Mesh, size: int, timer: _Timer) -> float:
  x = _on_each(mesh, (size // 4,), jnp.float32)
  run = _per_device(mesh, lambda x: x + 1)
  return 2 * size / timer(lambda: run(x))


def _link(mesh: jax.sharding.Mesh, size: int, timer: _Timer) -> float:
  x = _on_each(mesh, (size // 4,), jnp.float32)
  run = _per_device(
    mesh,
    # Marked as different on each device, as all results here are.
    lambda x: jax.lax.pcast(jax.lax.psum(x, _AXIS), _AXIS, to="varying"),
  )
  n = mesh.size
  return 2 * (n - 1) / n * size / timer(lambda: run(x))


def _attention(mesh: jax.sharding.Mesh, length: int, timer: _Timer) -> float:
  shape = (4, length, _HEADS, _HEAD_DIM)
  x = _on_each(mesh, shape, jnp.bfloat16)

  def loss(x: jax.Array) -> jax.Array:
    out = jax.nn.dot_product_attention(
      x, x, x, is_causal=True, implementation="cudnn"
    )
    return jnp.sum(out.astype(jnp.float32))

  run = _per_device(mesh, jax.grad(loss))
  # Two products forward and five backward, half of each masked.
  product = 2 * shape[0] * _HEADS * length**2 * _HEAD_DIM
  return 7 * product / 2 / timer(lambda: run(x))


def _overhead(mesh: jax.sharding.Mesh, timer: _Timer) -> float:
  short, long = 8, 264

  def chain(times: int) -> float:
    x = _on_each(mesh, (_TINY, _TINY), jnp.float32)

    def multiply(x: jax.Array) -> jax.Array:
      y = x
      for _ in range(times):
        y = y @ x
      return y

    run = _per_device(mesh, multiply)
    return timer(lambda: run(x))

  # The difference leaves out what starting a program costs.
  return max(chain(long) - chain(short), 0.0) / (long - short)

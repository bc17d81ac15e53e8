"""Speeds of devices, from programs whose results are known exactly.

All devices work at the same time, as in training, and a thread for each of this
process waits for it. Four programs run a few times; the shortest time counts.

  matmul      x y of small integers, bfloat16 with float32 sums (float32 on
              CPUs). x and y repeat two blocks of 64 x 64, so x y repeats a
              multiple of their product, which numpy computes in int64.
  memory      reads an array and writes its bits, half of them flipped
  ring        each device sends an array to the next, and the last to the first
  all-reduce  the sum of an array of each device, modulo 2^32

Devices of CPUs share the cores of their process, so each of them gets the time
after which all of them are done.
"""

from collections.abc import Callable, Mapping
from concurrent import futures
import dataclasses
import functools
import os
import time

import jax
from jax.experimental import multihost_utils
import jax.numpy as jnp
import numpy as np

MATMUL, MEMORY, RING, ALL_REDUCE = "matmul", "memory", "ring", "all-reduce"

_AXIS = "all"
_BLOCK = 64
_ROUNDS = 10
# Odd, so that the elements of an array differ; half of the bits are ones.
_FACTOR, _MASK = np.uint32(2654435761), np.uint32(0x55555555)

# Changes the result of a program on a device, given the name of the program.
Alter = Callable[[str, jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
  """Amounts of work.

  Attributes:
    matmul: Rows and columns of the matrices, a multiple of 64.
    memory: Elements of 4 bytes that are read and written.
    ring: Elements of 4 bytes that are sent, and that are summed.
    calls: Calls that are timed together: a program that starts while the device
      is idle takes a few tenths of a millisecond longer.
  """

  matmul: int
  memory: int
  ring: int
  calls: int


_ACCELERATOR = Sizes(matmul=8192, memory=2**28, ring=2**24, calls=3)
_CPU = Sizes(matmul=512, memory=2**20, ring=2**16, calls=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measurement:
  """A device that was measured.

  Attributes:
    device: Platform and id, such as `cuda:3`.
    kind: JAX's name of its kind.
    process: Index of its process.
    host: Name of the machine.
    matmul: FLOP/s.
    memory: Bytes per second, read and written.
    ring: Bytes per second from the device before it; None for one device.
    is_across: Whether that device belongs to another process.
    wrong: Programs whose result was wrong.
  """

  device: str
  kind: str
  process: int
  host: str
  matmul: float
  memory: float
  ring: float | None = None
  is_across: bool = False
  wrong: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class _Program:
  """A program of all devices.

  Attributes:
    make: Returns its arguments on a device.
    run: Returns its result on a device.
    expect: Returns the expected result on a device.
    amount: FLOPs, or bytes, of a call on a device.
  """

  make: Callable[[], tuple[jax.Array, ...]]
  run: Callable[..., jax.Array]
  expect: Callable[[], jax.Array]
  amount: float


def measure(
  sizes: Sizes | None = None, *, alter: Alter = lambda _, result: result
) -> list[Measurement]:
  """Measures the devices of this process; all processes call it.

  Args:
    sizes: Amounts of work; None for those of the platform.
    alter: Applied to each result, for tests of wrong devices.

  Returns:
    A measurement for each local device, in JAX's order.
  """
  devices = jax.devices()
  is_cpu = devices[0].platform == "cpu"
  sizes = sizes or (_CPU if is_cpu else _ACCELERATOR)
  rates: dict[str, dict[jax.Device, float]] = {}
  wrong: dict[jax.Device, list[str]] = {d: [] for d in jax.local_devices()}
  mesh = jax.sharding.Mesh(
    np.asarray(devices), (_AXIS,), axis_types=(jax.sharding.AxisType.Auto,)
  )
  for name, program in _make_programs(sizes, is_cpu, len(devices)).items():
    if jax.process_count() > 1:
      # They may share a machine, so they begin together.
      multihost_utils.sync_global_devices(name)
    seconds, counts = _time(
      dataclasses.replace(
        program, run=lambda *x, f=program.run, n=name: alter(n, f(*x))
      ),
      mesh,
      sizes.calls,
    )
    rates[name] = {d: program.amount / s for d, s in seconds.items()}
    for device, count in counts.items():
      wrong[device] += [name] * bool(count)
  before = dict(zip(devices, [devices[-1], *devices[:-1]], strict=True))
  return [
    Measurement(
      device=f"{device.platform}:{device.id}",
      kind=device.device_kind,
      process=device.process_index,
      host=os.uname().nodename,
      matmul=rates[MATMUL][device],
      memory=rates[MEMORY][device],
      ring=rates[RING][device] if RING in rates else None,
      is_across=before[device].process_index != device.process_index,
      wrong=tuple(wrong[device]),
    )
    for device in jax.local_devices()
  ]


def _make_programs(
  sizes: Sizes, is_cpu: bool, count: int
) -> Mapping[str, _Program]:
  """Returns the programs by name; with one device, those without a link."""
  programs = {
    MATMUL: _make_matmul(sizes.matmul, jnp.float32 if is_cpu else jnp.bfloat16),
    MEMORY: _Program(
      make=lambda: (_count(sizes.memory),),
      run=lambda x: x ^ _MASK,
      expect=lambda: _count(sizes.memory) ^ _MASK,
      amount=2.0 * 4 * sizes.memory,
    ),
  }
  if count == 1:
    return programs

  def number(shift: int = 0) -> jax.Array:
    index = jax.lax.axis_index(_AXIS) + shift
    return (index % count).astype(jnp.uint32)

  def make() -> tuple[jax.Array]:
    return (_count(sizes.ring) + number(),)

  ring = [(index, (index + 1) % count) for index in range(count)]
  return programs | {
    RING: _Program(
      make=make,
      run=lambda x: jax.lax.ppermute(x, _AXIS, ring),
      expect=lambda: _count(sizes.ring) + number(-1),
      amount=4.0 * sizes.ring,
    ),
    ALL_REDUCE: _Program(
      make=make,
      run=lambda x: jax.lax.psum(x, _AXIS),
      expect=lambda: (
        _count(sizes.ring) * np.uint32(count)
        + np.uint32(count * (count - 1) // 2 % 2**32)
      ),
      amount=4.0 * sizes.ring,
    ),
  }


def _make_matmul(size: int, dtype: jax.typing.DTypeLike) -> _Program:
  # Sums are below 9 * 2^20, so float32 has them exactly.
  x, y = np.random.default_rng(0).integers(-3, 4, (2, _BLOCK, _BLOCK))
  times = size // _BLOCK
  exact = times * (x @ y)

  def tile(block: np.ndarray, dtype: jax.typing.DTypeLike) -> jax.Array:
    return jnp.tile(jnp.asarray(block, dtype), (times, times))

  return _Program(
    make=lambda: (tile(x, dtype), tile(y, dtype)),
    run=lambda x, y: jnp.matmul(x, y, preferred_element_type=jnp.float32),
    expect=lambda: tile(exact, jnp.float32),
    amount=2.0 * size**3,
  )


def _count(size: int) -> jax.Array:
  """Returns different numbers, uint32 [size]."""
  return jnp.arange(size, dtype=jnp.uint32) * _FACTOR


def _time(
  program: _Program, mesh: jax.sharding.Mesh, calls: int
) -> tuple[dict[jax.Device, float], dict[jax.Device, int]]:
  """Returns the shortest time of a call, and the number of wrong elements."""
  spread = functools.partial(
    jax.shard_map, mesh=mesh, out_specs=jax.P(_AXIS), check_vma=False
  )
  make = jax.jit(spread(program.make, in_specs=()))
  run = jax.jit(spread(program.run, in_specs=jax.P(_AXIS)))
  differ = jax.jit(
    spread(
      lambda x: jnp.sum(x != program.expect(), dtype=jnp.int32)[None],
      in_specs=jax.P(_AXIS),
    )
  )
  local = [d for d in mesh.devices.flat if d in set(mesh.local_devices)]
  seconds = dict.fromkeys(local, float("inf"))
  wrong = dict.fromkeys(local, 0)
  with (
    jax.set_mesh(mesh),
    futures.ThreadPoolExecutor(max_workers=len(local)) as pool,
  ):
    arguments = make()
    jax.block_until_ready(differ(run(*arguments)))
    for _ in range(_ROUNDS):
      begin = time.perf_counter()
      results = [run(*arguments) for _ in range(calls)]
      ends = dict(pool.map(_wait, results[-1].addressable_shards))
      if local[0].platform == "cpu":
        ends = dict.fromkeys(local, max(ends.values()))
      for device in local:
        took = (ends[device] - begin) / calls
        seconds[device] = min(seconds[device], took)
      for shard in (s for x in results for s in differ(x).addressable_shards):
        wrong[shard.device] += int(np.asarray(shard.data)[0])
  return seconds, wrong


def _wait(shard: jax.Shard) -> tuple[jax.Device, float]:
  """Returns the device of a shard, and when the shard was computed."""
  jax.block_until_ready(shard.data)
  return shard.device, time.perf_counter()

"""Lower bounds of a job's memory, checked before any is allocated.

Without this check, a width with one digit too many would end with the operating
system killing the process, without a message. A job that passes may still not
fit.
"""

from collections.abc import Iterator, Mapping
import math
import os
from typing import Any

import jax
from jax.extend import core

from paxon.inputs import base_input
from paxon.runner import units, user_error
from paxon.sharding import host_memory

_LOOPS = ("scan", "while")
# `inputs` and `targets`, both int32, are in every batch.
_BYTES_PER_TOKEN = 8


def check(
  needs: Mapping[str, int],
  *,
  advice: str,
  limit: int | None = None,
) -> None:
  """Checks that the bytes needed at once on every device, by use, fit.

  By default the limit is the memory of the first device of this process.

  Raises:
    user_error.UserError: They do not fit.
  """
  device = jax.local_devices()[0]
  limit = device_bytes(device) if limit is None else limit
  if limit is None or sum(needs.values()) <= limit:
    return
  shown = " and ".join(
    f"{units.size(n)} for {name}" for name, n in needs.items()
  )
  raise user_error.UserError(
    f"The job does not fit: each device needs {shown}, but has"
    f" {units.size(limit)} ({device.device_kind}); {advice}."
  )


def check_batch(source: base_input.BaseInput) -> None:
  """Raises UserError if a batch does not fit into the memory of the host."""
  limit = host_bytes()
  size = source.per_host_batch_size * source.length * _BYTES_PER_TOKEN
  if limit is not None and size > limit:
    raise user_error.UserError(
      f"global_batch_size ({source.global_batch_size}) times length"
      f" ({source.length}) does not fit: a batch takes at least"
      f" {units.size(size)}, but this machine has {units.size(limit)}."
    )


def shard_bytes(tree: Any) -> int:
  """Returns the bytes of a pytree of shapes and shardings on one device.

  Arrays in the memory of the host take none.
  """
  total = 0
  for leaf in jax.tree.leaves(tree):
    shape = leaf.shape
    if leaf.sharding is not None:
      if leaf.sharding.memory_kind == host_memory.KIND:
        continue
      shape = leaf.sharding.shard_shape(shape)
    total += math.prod(shape) * leaf.dtype.itemsize
  return total


def loop_bytes(jaxpr: core.Jaxpr | core.ClosedJaxpr) -> int:
  """Returns the bytes of the results of the largest loop of a program.

  A loop's results, such as a decoding cache or the residuals of all layers,
  exist in memory at once, whatever the compiler does.
  """
  sizes = (
    sum(_bytes(variable.aval) for variable in equation.outvars)
    for equation in iterate_equations(jaxpr)
    if equation.primitive.name in _LOOPS
  )
  return max(sizes, default=0)


def iterate_equations(
  jaxpr: core.Jaxpr | core.ClosedJaxpr,
) -> Iterator[core.JaxprEqn]:
  """Yields the equations of a program, with those of inner programs."""
  body = jaxpr.jaxpr if isinstance(jaxpr, core.ClosedJaxpr) else jaxpr
  for equation in body.eqns:
    yield equation
    for inner in jax.tree.leaves(
      list(equation.params.values()), is_leaf=_is_jaxpr
    ):
      if _is_jaxpr(inner):
        yield from iterate_equations(inner)


def device_bytes(device: jax.Device) -> int | None:
  """Returns the memory of a device in bytes, None if unknown.

  Fake CPU devices share the machine's memory equally.
  """
  if device.platform == "cpu":
    total = host_bytes()
    return total // len(jax.local_devices()) if total else None
  return (device.memory_stats() or {}).get("bytes_limit")


def host_bytes() -> int | None:
  """Returns the memory of this machine in bytes, None if unknown."""
  try:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
  except (ValueError, OSError):
    return None


def _is_jaxpr(value: object) -> bool:
  return isinstance(value, core.Jaxpr | core.ClosedJaxpr)


def _bytes(aval: Any) -> int:
  # The extended dtypes of random keys have no item size here.
  itemsize = getattr(aval.dtype, "itemsize", 0)
  return math.prod(aval.shape) * itemsize

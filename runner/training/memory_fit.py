"""Whether a job fits into the memory of its devices, before any is taken.

A width with a digit too many would otherwise be found by the operating system,
which kills the process, or the machine, without a word. What is counted is
only what a job needs in any case: a job that passes may still not fit.
"""

from collections.abc import Mapping
import math
import os
from typing import Any

import jax

from paxon.inputs import base_input
from paxon.runner import user_error

_UNITS = ("bytes", "kB", "MB", "GB", "TB", "PB", "EB")
_LOOPS = ("scan", "while")
# `inputs` and `targets`, both int32, are in every batch.
_BYTES_PER_TOKEN = 8


def check(
  needs: Mapping[str, int],
  *,
  advice: str,
  device: jax.Device | None = None,
  limit: int | None = None,
) -> None:
  """Checks what is needed at the same time on every device.

  Args:
    needs: Bytes on one device, by what they are for.
    advice: What to change if they do not fit.
    device: One of the devices; by default the first of this process.
    limit: The memory of a device in bytes; by default what it says.

  Raises:
    user_error.UserError: They do not fit.
  """
  device = jax.local_devices()[0] if device is None else device
  limit = device_bytes(device) if limit is None else limit
  if limit is None or sum(needs.values()) <= limit:
    return
  shown = " and ".join(f"{in_words(n)} of {name}" for name, n in needs.items())
  raise user_error.UserError(
    f"The job does not fit: each device would hold {shown}, and has"
    f" {in_words(limit)} ({device.device_kind}); {advice}."
  )


def check_batch(source: base_input.BaseInput) -> None:
  """Checks that one batch fits into the memory of this machine.

  Args:
    source: About to be read.

  Raises:
    user_error.UserError: It does not.
  """
  limit = host_bytes()
  size = source.per_host_batch_size * source.length * _BYTES_PER_TOKEN
  if limit is not None and size > limit:
    raise user_error.UserError(
      f"global_batch_size ({source.global_batch_size}) times length"
      f" ({source.length}) does not fit: a batch would take"
      f" {in_words(size)} or more, and this machine has {in_words(limit)}."
    )


def shard_bytes(tree: Any) -> int:
  """Returns the bytes that a pytree takes on one device.

  Args:
    tree: `jax.ShapeDtypeStruct`s; those without a sharding lie whole on each.
  """
  total = 0
  for leaf in jax.tree.leaves(tree):
    shape = leaf.shape
    if leaf.sharding is not None:
      shape = leaf.sharding.shard_shape(shape)
    total += math.prod(shape) * leaf.dtype.itemsize
  return total


def loop_bytes(jaxpr: Any) -> int:
  """Returns the bytes that the largest loop of a program hands on.

  A loop's results, such as a decoding cache or what each layer saves for the
  backward pass, exist as a whole, whatever the compiler does.

  Args:
    jaxpr: Of a traced function; the sizes are those of global arrays.
  """
  largest = 0
  for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
    if equation.primitive.name in _LOOPS:
      size = sum(_bytes(variable.aval) for variable in equation.outvars)
      largest = max(largest, size)
    for inner in jax.tree.leaves(
      list(equation.params.values()), is_leaf=_is_jaxpr
    ):
      if _is_jaxpr(inner):
        largest = max(largest, loop_bytes(inner))
  return largest


def device_bytes(device: jax.Device) -> int | None:
  """Returns the memory of a device, or None where it is not known.

  Fake CPU devices share the machine's memory, each with its part.

  Args:
    device: Of this process.
  """
  if device.platform == "cpu":
    total = host_bytes()
    return total // len(jax.local_devices()) if total else None
  return (device.memory_stats() or {}).get("bytes_limit")


def host_bytes() -> int | None:
  """Returns the memory of this machine, or None where it is not known."""
  try:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
  except (ValueError, OSError):
    return None


def in_words(size: int) -> str:
  """Returns a number of bytes as a person writes it: `3.2 TB`."""
  value, unit = float(size), 0
  while value >= 1000 and unit < len(_UNITS) - 1:
    value, unit = value / 1000, unit + 1
  return f"{value:,.1f} {_UNITS[unit]}" if unit else f"{size} bytes"


def _is_jaxpr(value: object) -> bool:
  return hasattr(value, "eqns") or hasattr(value, "jaxpr")


def _bytes(aval: Any) -> int:
  # Random keys have a dtype of their own, of no account here.
  itemsize = getattr(aval.dtype, "itemsize", 0)
  return math.prod(aval.shape) * itemsize

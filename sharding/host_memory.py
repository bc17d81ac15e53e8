"""Arrays in the memory of the host between the steps that use them.

Such an array keeps its sharding: each device has its shard in pinned memory of
its host, from which programs copy it. A `VariableSpec` with `on_host` lies
there.
"""

from collections.abc import Iterable
from typing import Any, Final

import jax

# The kind of memory, as JAX calls it.
KIND: Final = "pinned_host"


def check(devices: Iterable[jax.Device]) -> None:
  """Checks that all devices can read pinned memory of their host.

  Raises:
    ValueError: One cannot; the message names it and the memories it has.
  """
  for device in devices:
    kinds = [memory.kind for memory in device.addressable_memories()]
    # Devices that programs are only compiled for list none.
    if kinds and KIND not in kinds:
      raise ValueError(
        f"{device} ({device.platform}) has no memory of the kind {KIND!r}, only"
        f" {', '.join(kinds)}"
      )


def place(sharding: jax.sharding.NamedSharding) -> jax.sharding.NamedSharding:
  """Returns the sharding of an array in the memory of the host."""
  found = sharding.with_memory_kind(KIND)
  if found.memory_kind is None:
    # JAX drops the kind for GPUs that programs are only compiled for. It keeps
    # it for an abstract mesh, whose devices it takes from other arguments.
    mesh = sharding.mesh.abstract_mesh
    found = jax.sharding.NamedSharding(mesh, sharding.spec, memory_kind=KIND)
  return found


def to_device(tree: Any) -> Any:
  """Returns a pytree of traced arrays with those on the host copied."""
  return jax.device_put(tree, jax.memory.Space.Device)

"""Replayed steps: a search for devices that compute wrong values silently.

Now and then a step is computed twice, from copies of the same state and batch,
by the same program. All bits of both results must be equal; the first result is
used, so that a run trains the same with and without. A replayed step needs
memory for a second state and twice the time; other steps cost nothing.

A device that writes wrong values only into its own shards is named. A wrong
gradient reaches all devices by the next reduction; then all differ, and the
message says so. Programs must be deterministic: on GPUs that excludes kernels
with atomic additions (`--xla_gpu_exclude_nondeterministic_ops=true`).
"""

from collections.abc import Sequence
import functools
from typing import Any

import jax
import jax.numpy as jnp

from paxon.learners import train_state
from paxon.runner import exit_status, user_error
from paxon.runner.hosts import agreement
from paxon.runner.session import session as session_lib
from paxon.runner.training import hooks
from paxon.sharding import host_memory

_BITS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}
_MAX_NAMED = 4


class CorruptionError(user_error.UserError):
  """A step that differs when it is replayed; the message names the devices."""

  status = exit_status.ExitStatus.DEVICES


class Replay(hooks.Hook):
  """Replays every n-th step of a training."""

  def __init__(self, session: session_lib.Session, *, every_steps: int) -> None:
    """Prepares; the copy and the comparison are compiled at the first use."""
    self._interval = every_steps
    self._names = [spec.name for spec in jax.tree.leaves(session.state_specs)]
    self._devices = session.layout.mesh.devices.size
    self._copy = session.layout.jit(
      lambda state: jax.tree.map(jnp.copy, host_memory.to_device(state)),
      out_shardings=session.state_shardings,
    )

  def wrap(self, step: int, train_step: hooks.Step) -> hooks.Step:
    """Returns a step that is computed twice, if its number is due.

    It raises CorruptionError in all processes if the results differ.
    """
    if step % self._interval:
      return train_step
    return functools.partial(self._compute_twice, step, train_step)

  def _compute_twice(
    self,
    step: int,
    train_step: hooks.Step,
    state: train_state.TrainState,
    batch: hooks.Batch,
  ) -> hooks.Outputs:
    """Returns the first result."""
    copy = self._copy(state)
    first = train_step(state, batch)
    second = train_step(copy, batch)
    found = find_differences(first, second)
    metrics = [
      f"the metric {path[0].key}"
      for path, _ in jax.tree_util.tree_leaves_with_path(first[1])
    ]
    names = [*self._names, *metrics]
    here = [
      [f"{device} of process {device.process_index}", names[index]]
      for device, index in found
    ]
    differing = [each for one in agreement.gather(here) for each in one]
    if differing:
      raise CorruptionError(self._describe(step, differing))
    return first

  def _describe(self, step: int, differing: Sequence[Sequence[str]]) -> str:
    """Returns the message for pairs of a device and its first value."""
    where = [device for device, _ in differing[:_MAX_NAMED]]
    if len(differing) > _MAX_NAMED:
      where.append(f"{len(differing) - _MAX_NAMED} more")
    text = f"device {' and '.join(where)}"
    if len(differing) == self._devices > 1:
      text = f"all {len(differing)} devices ({' and '.join(where)}), one of"
      text += " which spread it by a reduction"
    return (
      f"Step {step}, computed twice from the same state and batch, has other"
      f" bits the second time on {text}; the first value that differs is"
      f" {differing[0][1]}. Check the hardware, and resume from the newest"
      " checkpoint without it."
    )


def find_differences(first: Any, second: Any) -> list[tuple[jax.Device, int]]:
  """Compares the bits of two trees, shard by shard on the devices.

  Args:
    first: A tree of arrays.
    second: A tree with the same shapes, dtypes and shardings.

  Returns:
    The devices of this process whose shards differ, each with the index of its
    first leaf that does.
  """
  shards: dict[jax.Device, list[tuple[int, jax.Array, jax.Array]]] = {}
  leaves = zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
  for index, (a, b) in enumerate(leaves):
    others = {shard.device: shard.data for shard in b.addressable_shards}
    for shard in a.addressable_shards:
      here = shards.setdefault(shard.device, [])
      here.append((index, shard.data, others[shard.device]))
  # All devices compare before the first result is read.
  differ = {
    device: _differ([a for _, a, _ in here], [b for _, _, b in here])
    for device, here in shards.items()
  }
  found = []
  for device, flags in differ.items():
    for (index, _, _), flag in zip(shards[device], flags.tolist(), strict=True):
      if flag:
        found.append((device, index))
        break
  return found


@jax.jit
def _differ(first: list[jax.Array], second: list[jax.Array]) -> jax.Array:
  """Returns whether any bit of each pair differs, bool [pairs]."""
  first, second = host_memory.to_device((first, second))
  return jnp.stack(
    [jnp.any(_bits(a) != _bits(b)) for a, b in zip(first, second, strict=True)]
  )


def _bits(x: jax.Array) -> jax.Array:
  """Returns an array whose equality is that of the bits, unlike for NaN."""
  if not jnp.issubdtype(x.dtype, jnp.floating):
    return x
  return jax.lax.bitcast_convert_type(x, _BITS[x.dtype.itemsize])

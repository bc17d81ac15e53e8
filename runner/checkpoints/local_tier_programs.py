"""Test processes that save to local disks and restore from them."""

import json
from typing import Any

from etils import epath
import jax
import jax.numpy as jnp
import numpy as np

from paxon.runner.checkpoints import local_tier
from paxon.runner.hosts import joining
from paxon.runner.hosts import testing as forks_lib
from paxon.sharding import variables

P = jax.sharding.PartitionSpec
# Axis sizes 2 and 2. Shards of `rows` are on one process each if it has two
# devices, those of `columns` on both.
_ARRAYS = {
  "rows": ((8, 6), np.float32, P("a")),
  "columns": ((8, 6), np.float32, P(None, "b")),
  "both": ((8, 6), jnp.bfloat16, P("a", "b")),
  "folded": ((12,), np.int32, P(("b", "a"))),
  "replicated": ((5,), np.float32, P()),
  "step": ((), np.int32, P()),
}


def make_specs() -> dict[str, variables.VariableSpec]:
  """Returns the specs of the arrays."""
  return {
    name: variables.VariableSpec(
      name=f"params/{name}",
      shape=shape,
      dtype=jnp.dtype(dtype),
      axes=(None,) * len(shape),
    )
    for name, (shape, dtype, _) in _ARRAYS.items()
  }


def make_values(step: int) -> dict[str, np.ndarray[Any, np.dtype[Any]]]:
  """Returns the arrays after a step."""
  random = np.random.default_rng(step)
  return {
    name: random.integers(0, 100, shape).astype(dtype)
    for name, (shape, dtype, _) in _ARRAYS.items()
  }


def make_shardings(
  *, swapped: bool = False
) -> dict[str, jax.sharding.Sharding]:
  """Returns shardings over four devices.

  Args:
    swapped: Whether the two mesh axes change places.
  """
  mesh = jax.make_mesh(
    (2, 2),
    ("b", "a") if swapped else ("a", "b"),
    devices=jax.devices()[:4],
    axis_types=(jax.sharding.AxisType.Auto,) * 2,
  )
  return {
    name: jax.sharding.NamedSharding(mesh, spec)
    for name, (_, _, spec) in _ARRAYS.items()
  }


def place(
  values: dict[str, Any], shardings: dict[str, jax.sharding.Sharding]
) -> dict[str, jax.Array]:
  """Returns arrays on devices."""
  return {
    name: jax.make_array_from_callback(
      value.shape, shardings[name], value.__getitem__
    )
    for name, value in values.items()
  }


def local_tier_program(arguments: list[str]) -> int:
  """Restores from the local tier and then saves some steps, with others.

  Args:
    arguments: The run directory; that of the host; steps to save, JSON; a file
      for the result; and the address, the number and the index of processes.
  """
  run_dir, disk, steps, result, address, count, index = arguments
  forks_lib.join(address, count, index)
  with joining.exit_together():
    specs, found = make_specs(), None
    tier = local_tier.LocalTier(disk, epath.Path(run_dir))
    if tier.step is not None:
      shardings = make_shardings(swapped=True)
      restored = tier.restore(specs=specs, shardings=shardings)
      equal = {
        name: all(
          np.array_equal(np.asarray(shard.data), expected[shard.index])
          for shard in restored.tree[name].addressable_shards
        )
        and restored.tree[name].sharding == shardings[name]
        for name, expected in make_values(restored.step).items()
      }
      found = {"step": restored.step, "data": restored.data, "equal": equal}
    for step in json.loads(steps):
      tree = place(make_values(step), make_shardings())
      tier.save(step, tree, specs=specs, data={"batch": step})
    tier.wait()
    tier.close()
    text = json.dumps({"found": found, "step": tier.step})
    epath.Path(result).write_text(text)
  return 0


if __name__ == "__main__":
  forks_lib.serve({"local_tier": local_tier_program})

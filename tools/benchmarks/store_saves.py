"""Times checkpoints in object stores, on a disk and in the local tier.

  python -m paxon.tools.benchmarks.store_saves --megabytes=200

The stores are servers on this machine: SeaweedFS (s3), Azurite (az) and a
server of the tests (gs). The local tier is in memory (/dev/shm), without a
neighbour. For each place: how long a save blocks the training,
how long until the checkpoint is complete, and how long a restore takes, with
checksums; medians and ranges.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
import contextlib
import pathlib
import statistics
import tempfile
import time

from etils import epath
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.inputs.store_servers import servers
from paxon.runner.checkpoints import checkpointer, local_tier
from paxon.sharding import variables

_LOCAL = "local tier"
_PLACES = (_LOCAL, "disk", "s3", "az", "gs")
_ARRAYS = 8
_HEADER = "| Store | Save blocks | Complete after | Restore |"


def main(argv: Sequence[str] | None = None) -> int:
  """Prints a table."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--megabytes", type=int, default=200)
  parser.add_argument("--repeats", type=int, default=5)
  options = parser.parse_args(argv)
  if options.megabytes < _ARRAYS or options.repeats < 1:
    parser.error(
      f"--megabytes must be at least {_ARRAYS} and --repeats at least 1"
    )
  rows: dict[str, list[tuple[float, float, float]]] = {}
  tree, specs = _make_tree(options.megabytes)
  with contextlib.ExitStack() as stack:
    folders = {
      place: folder
      for place in _PLACES
      if (folder := stack.enter_context(_open(place))) is not None
    }
    # In turns, so that all places see the same machine.
    for step in range(1, options.repeats + 1):
      for place, folder in folders.items():
        measure = _time_local if place == _LOCAL else _time
        rows.setdefault(place, []).append(measure(folder, step, tree, specs))
  print(_HEADER, "| --- | --- | --- | --- |", sep="\n")
  for place, times in rows.items():
    cells = [_show([each[i] for each in times]) for i in range(3)]
    print(f"| {place} | {' | '.join(cells)} |")
  return 0


@contextlib.contextmanager
def _open(place: str) -> Iterator[epath.Path | None]:
  parent = "/dev/shm" if place == _LOCAL else None
  with tempfile.TemporaryDirectory(prefix="saves-", dir=parent) as name:
    if place in ("disk", _LOCAL):
      yield epath.Path(name)
      return
    with contextlib.ExitStack() as stack:
      try:
        store = stack.enter_context(servers.run(place, pathlib.Path(name)))
      except pytest.skip.Exception as error:
        print(f"{place} is left out: {error.msg}")
        yield None
        return
      yield store.path("saves")


def _make_tree(megabytes: int) -> tuple[dict, dict]:
  random = np.random.default_rng(0)
  width = megabytes * 250_000 // _ARRAYS
  names = [f"layer_{i}" for i in range(_ARRAYS)]
  tree = {
    name: jnp.asarray(random.standard_normal(width, np.float32))
    for name in names
  }
  specs = {
    name: variables.VariableSpec(
      name=f"params/{name}",
      shape=(width,),
      dtype=jnp.dtype(jnp.float32),
      axes=(None,),
    )
    for name in names
  }
  return tree, specs


def _time(
  folder: epath.Path, step: int, tree: dict, specs: dict
) -> tuple[float, float, float]:
  device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  with checkpointer.Checkpointer(folder) as checkpoints:
    blocks, start = _seconds(
      lambda: checkpoints.save(step, tree, specs=specs, data={})
    )
    checkpoints.wait()
    complete = time.perf_counter() - start
    restore, _ = _seconds(
      lambda: jax.block_until_ready(
        checkpoints.restore(
          step, specs=specs, shardings=jax.tree.map(lambda _: device, tree)
        ).tree
      )
    )
  return blocks, complete, restore


def _time_local(
  folder: epath.Path, step: int, tree: dict, specs: dict
) -> tuple[float, float, float]:
  device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  tier = local_tier.LocalTier(folder, folder)
  blocks, start = _seconds(lambda: tier.save(step, tree, specs=specs, data={}))
  tier.wait()
  complete = time.perf_counter() - start
  tier.close()
  restore, _ = _seconds(
    lambda: jax.block_until_ready(
      local_tier.LocalTier(folder, folder)
      .restore(specs=specs, shardings=jax.tree.map(lambda _: device, tree))
      .tree
    )
  )
  return blocks, complete, restore


def _seconds(run: Callable[[], object]) -> tuple[float, float]:
  start = time.perf_counter()
  run()
  return time.perf_counter() - start, start


def _show(seconds: Sequence[float]) -> str:
  return (
    f"{statistics.median(seconds):.2f} s"
    f" ({min(seconds):.2f} to {max(seconds):.2f})"
  )


if __name__ == "__main__":
  raise SystemExit(main())

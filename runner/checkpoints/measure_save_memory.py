"""Measures the memory and the time that saving a state takes.

  tools/python -m paxon.runner.checkpoints.measure_save_memory [MEGABYTES]

The state is of random values in arrays of several sizes, one of which is half
of it: nothing compresses, and the largest array counts. Memory is that of this
process on the host beyond what it had before the save, at its highest point
until the save is complete, as Linux counts it. On CPU the state itself lies in
the host's memory and is not counted; on an accelerator the copy on the host is
what the first part of the growth is.
"""

import dataclasses
import pathlib
import sys
import tempfile
import time
from typing import Any

from etils import epath
import jax
import jax.numpy as jnp
import numpy as np

from paxon.runner.checkpoints import checkpointer
from paxon.sharding import variables

_DEFAULT_MEGABYTES = 400
_PROCESS = pathlib.Path("/proc/self")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measurement:
  """Time and memory of a save.

  Attributes:
    state_bytes: Of all arrays.
    peak_bytes: The most memory in use beyond that before the save.
    blocked_seconds: Until `save` returned.
    seconds: Until the checkpoint was complete.
  """

  state_bytes: int
  peak_bytes: int
  blocked_seconds: float
  seconds: float

  @property
  def ratio(self) -> float:
    """The memory as a multiple of the state."""
    return self.peak_bytes / self.state_bytes

  def line(self) -> str:
    """Returns all figures as text."""
    return (
      f"state {self.state_bytes / 1e6:.0f} MB, memory on the host"
      f" +{self.peak_bytes / 1e6:.0f} MB ({self.ratio:.2f} x the state),"
      f" save() blocked {self.blocked_seconds:.2f} s, complete after"
      f" {self.seconds:.2f} s"
    )


def measure(megabytes: int) -> Measurement:
  """Saves a state once more, after a small one.

  Args:
    megabytes: The state's size, in 10^6 bytes.
  """
  # What libraries take for themselves at their first use is no part of it.
  _save(_state(1))
  state = _state(megabytes)
  _reset_peak()
  before = _status("VmRSS")
  blocked, seconds = _save(state)
  return Measurement(
    state_bytes=sum(x.nbytes for x in jax.tree.leaves(state)),
    peak_bytes=_status("VmHWM") - before,
    blocked_seconds=blocked,
    seconds=seconds,
  )


def _state(megabytes: int) -> dict[str, jax.Array]:
  """Returns one array of half the size, and 14 smaller ones of equal size."""
  values = megabytes * 10**6 // 4
  random = np.random.default_rng(0)

  def make(shape: tuple[int, int]) -> jax.Array:
    return jnp.asarray(random.standard_normal(shape, np.float32))

  width = 128
  sizes = {"large": values // 2, **{f"a{i}": values // 28 for i in range(14)}}
  return {name: make((size // width, width)) for name, size in sizes.items()}


def _save(state: dict[str, jax.Array]) -> tuple[float, float]:
  specs = {
    name: variables.VariableSpec(
      name=f"params/{name}", shape=x.shape, dtype=x.dtype, axes=(None, None)
    )
    for name, x in state.items()
  }
  data: dict[str, Any] = {}
  with (
    tempfile.TemporaryDirectory() as folder,
    checkpointer.Checkpointer(epath.Path(folder)) as checkpoints,
  ):
    start = time.perf_counter()
    checkpoints.save(1, state, specs=specs, data=data)
    blocked = time.perf_counter() - start
    checkpoints.wait()
    return blocked, time.perf_counter() - start


def _reset_peak() -> None:
  (_PROCESS / "clear_refs").write_text("5")


def _status(name: str) -> int:
  """Returns a figure of this process, in bytes."""
  for line in (_PROCESS / "status").read_text().splitlines():
    key, _, value = line.partition(":")
    if key == name:
      return 1024 * int(value.split()[0])
  raise OSError(f"{_PROCESS / 'status'} has no {name}; this needs Linux.")


def main(arguments: list[str]) -> int:
  """Measures and prints one line."""
  megabytes = int(arguments[0]) if arguments else _DEFAULT_MEGABYTES
  print(measure(megabytes).line())
  return 0


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))

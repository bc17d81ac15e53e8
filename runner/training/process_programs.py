"""Programs of test processes, in addition to the command line."""

import contextlib
import functools
import json
import os
import signal
import time
from typing import Any
from unittest import mock
import warnings

from etils import epath
import fiddle as fdl
import jax
from jax.experimental import io_callback, multihost_utils
import jax.numpy as jnp
import numpy as np

from paxon.runner import main, run_dir
from paxon.runner.checkpoints import checkpointer
from paxon.runner.devices import device_check, device_speed
from paxon.runner.evaluation import evaluate, infer
from paxon.runner.generation import decode, decode_file
from paxon.runner.hosts import joining
from paxon.runner.hosts import testing as forks_lib
from paxon.runner.monitoring import launch
from paxon.runner.session import output_parts
from paxon.runner.session import session as session_lib
from paxon.runner.settings import monitoring
from paxon.runner.training import hooks, testing
from paxon.runner.training import train as train_lib

# Sequences are sharded over processes, over some of their devices, or not.
MESHES = ("data=4", "fsdp=2,tensor=2", "sequence=4", "sequence=2,data=2")


def command_line(arguments: list[str]) -> int:
  """Runs `main` with the experiments of tests."""
  main.run(("paxon.runner",), ["main", *arguments])


def train(arguments: list[str]) -> int:
  """Runs the program of `testing`; a warning is an error."""
  warnings.simplefilter("error")
  return testing.main(arguments)


def tour(arguments: list[str]) -> int:
  """Reads what other processes have trained, in every way.

  Args:
    arguments: The folder of the run; a file that gets what was found, JSON; its
      knobs, JSON; the address, the number of processes and that of this one.
  """
  folder, found, knobs, address, count, index = arguments
  forks_lib.join(address, count, index)
  with joining.exit_together():
    job, _ = testing.make(**json.loads(knobs))
    path = epath.Path(folder)
    session = session_lib.open_session(job)
    result = {
      "first_batches": [_first_batch(mesh) for mesh in MESHES],
      "batches": batch_digests(session, 3),
      "state": digest(session, path / run_dir.CHECKPOINTS),
    }
    evaluate.run(job, path, continuous=True)
    decode.run(job, path, "def ")
    epath.Path(f"{found}-{index}").write_text(json.dumps(result))
  return 0


def outputs(arguments: list[str]) -> int:
  """Writes predictions of a run and samples of a file, a batch in each part.

  Args:
    arguments: The folder of the run; the file of prompts; its knobs, JSON; the
      number of parts after which the last process is killed, 0 for never; the
      address, the number of processes and that of this one.
  """
  folder, prompts, knobs, parts, address, count, index = arguments
  if count != "1":
    forks_lib.join(address, count, index)
  with contextlib.ExitStack() as stack:
    stack.enter_context(joining.exit_together())
    for module, name in ((infer, "_PART"), (decode_file, "_WINDOW")):
      stack.enter_context(mock.patch.object(module, name, 1))
    if int(parts) and int(index) == int(count) - 1:
      write, left = output_parts.Parts.write, [None] * int(parts)

      def write_or_die(*args: Any) -> None:
        # Process 0 has written the last part, or this one would not be made.
        if not left:
          os.kill(os.getpid(), signal.SIGKILL)
        left.pop()
        write(*args)

      stack.enter_context(
        mock.patch.object(output_parts.Parts, "write", write_or_die)
      )
    path = epath.Path(folder)
    job, _ = testing.make(**json.loads(knobs))
    infer.run(job, path)
    decode_file.run(job, path, prompts, batch_size=2)
  return 0


class _Blocked(hooks.Hook):
  """A step whose devices never finish it, in one of the processes."""

  def __init__(self, step: int) -> None:
    self._step = step

  def wrap(self, step: int, train_step: hooks.Step) -> hooks.Step:
    """Returns the step, after a computation that does not end."""
    if step != self._step or jax.process_index() != jax.process_count() - 1:
      return train_step

    def block(state: Any, batch: Any) -> Any:
      never = jax.jit(
        lambda: io_callback(_sleep, jax.ShapeDtypeStruct((), np.int32))
      )
      never().block_until_ready()
      return train_step(state, batch)

    return block


def _sleep() -> np.ndarray:
  time.sleep(600)
  return np.zeros((), np.int32)


class _Starved(hooks.Hook):
  """A step that needs more memory than there is."""

  def wrap(self, step: int, train_step: hooks.Step) -> hooks.Step:
    """Allocates 256 TiB."""
    jnp.zeros((1 << 48,), jnp.int8).block_until_ready()
    return train_step


def run_out_of_memory(arguments: list[str]) -> int:
  """Runs `main` with a hook for which the memory is too small."""
  with mock.patch.object(
    train_lib, "_make_optional_hooks", return_value=[_Starved()]
  ):
    return command_line(arguments)


def hang_in_a_step(arguments: list[str]) -> int:
  """Trains with a step that hangs, as `main` does.

  Args:
    arguments: The folder of the run; its knobs, JSON; the address, the number
      of processes and that of this one.
  """
  folder, knobs, address, count, index = arguments
  forks_lib.join(address, count, index)
  with joining.exit_together():
    _, config = testing.make(**json.loads(knobs))
    config.observability.watchdog = monitoring.WatchdogSettings(
      min_seconds=2.0, end_factor=2.0, slow_seconds=30.0
    )
    path = epath.Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    train_lib.run(
      fdl.build(config),
      config,
      path,
      launch=launch.Launch(ends_when_hung=True),
      more_hooks=[_Blocked(5)],
    )
  return 0


def check_wrong_device(arguments: list[str]) -> int:
  """Checks the devices, of which the last one computes a wrong value.

  Args:
    arguments: The program that is wrong; the address, the number of processes
      and that of this one.
  """
  wrong, address, count, index = arguments

  def alter(name: str, result: jax.Array) -> jax.Array:
    if name != wrong:
      return result
    is_last = jax.lax.axis_index("all") == jax.device_count() - 1
    flat = result.reshape(-1).at[0].add(is_last.astype(result.dtype))
    return flat.reshape(result.shape)

  forks_lib.join(address, count, index)
  with joining.exit_together():
    device_check.run(
      is_strict=False,
      measure=functools.partial(device_speed.measure, alter=alter),
    )
  return 0


def check_hanging_device(arguments: list[str]) -> int:
  """Runs `main`, with a measurement that never ends."""

  def measure() -> list[device_speed.Measurement]:
    time.sleep(600)
    return []

  run = functools.partial(device_check.run, measure=measure)
  with mock.patch.object(device_check, "run", run):
    return command_line(arguments)


class _SlowProgram(hooks.Hook):
  """Work of the host before each step."""

  def __init__(self, seconds: float) -> None:
    self._seconds = seconds

  def on_dispatch(self, step: int, **positions: Any) -> None:
    """Takes its time."""
    time.sleep(self._seconds)


def train_with_a_slow_process(arguments: list[str]) -> int:
  """Trains; one of the processes reads data, or works, slowly.

  Args:
    arguments: `data` or `host`, what is slow, its seconds and its process; the
      folder of the run; its knobs, JSON; the address, the number of processes
      and that of this one.
  """
  what, seconds, slow, folder, knobs, address, count, index = arguments
  forks_lib.join(address, count, index)
  delay = float(seconds) if index == slow else 0.0
  with joining.exit_together():
    job, config = testing.make(**json.loads(knobs))
    path = epath.Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    if what == "data":
      assert isinstance(job.train_input, testing.SlowInput)
      job.train_input.delay = delay
    more = [_SlowProgram(delay)] if what == "host" else []
    train_lib.run(job, config, path, more_hooks=more)
  return 0


def _first_batch(mesh: str) -> str:
  job, _ = testing.make(mesh=mesh)
  return batch_digests(session_lib.open_session(job), 1)[0]


def batch_digests(session: session_lib.Session, number: int) -> list[str]:
  """Returns the digests of global batches, assembled from all hosts."""
  digests = []
  session.job.train_input.reset()
  for _ in range(number):
    placed = session.place(session.job.train_input.get_next())
    digests.append(_digest(placed))
  return digests


def digest(session: session_lib.Session, folder: epath.Path) -> str:
  """Returns the digest of the newest checkpoint, read onto the mesh."""
  with checkpointer.Checkpointer(folder, read_only=True) as checkpoints:
    step = checkpoints.latest_step()
    assert step is not None
    restored = checkpoints.restore(
      step, specs=session.state_specs, shardings=session.state_shardings
    )
  return f"{restored.step} {json.dumps(restored.data)} {_digest(restored.tree)}"


def _digest(tree: Any) -> str:
  """Returns the digest of the arrays, whole."""
  if jax.process_count() > 1:
    tree = multihost_utils.process_allgather(tree, tiled=True)
  return testing.digest(tree)


if __name__ == "__main__":
  forks_lib.serve(
    {
      each.__name__: each
      for each in (
        command_line,
        train,
        tour,
        outputs,
        hang_in_a_step,
        run_out_of_memory,
        train_with_a_slow_process,
        check_wrong_device,
        check_hanging_device,
      )
    }
  )

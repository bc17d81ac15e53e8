"""Programs of test processes, in addition to the command line."""

import json
import os
from typing import Any
import warnings

from etils import epath
import jax
from jax.experimental import multihost_utils

from paxon.runner import main, run_dir
from paxon.runner.checkpoints import checkpointer
from paxon.runner.evaluation import evaluate
from paxon.runner.generation import decode
from paxon.runner.hosts import joining, process_settings
from paxon.runner.hosts import testing as forks_lib
from paxon.runner.session import session as session_lib
from paxon.runner.training import testing

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
  joining.join(
    process_settings.ProcessSettings(
      coordinator_address=address,
      num_processes=int(count),
      process_id=int(index),
      timeout_seconds=60,
    ),
    os.environ,
  )
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
  forks_lib.serve({"command_line": command_line, "train": train, "tour": tour})

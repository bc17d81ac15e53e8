"""The arrays of one checkpoint, read by name: those asked for and no others."""

from collections.abc import Iterable, Mapping
import os
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from paxon.runner.checkpoints import (
  checkpointer,
  named_tree,
  stored_checkpoint,
)


def read(
  checkpoint: stored_checkpoint.StoredCheckpoint,
  wanted: Mapping[str, jax.ShapeDtypeStruct],
) -> dict[str, jax.Array]:
  """Reads arrays onto devices.

  Args:
    checkpoint: Which has them.
    wanted: By name, the shape that is stored, the dtype to have, and the
      sharding.

  Raises:
    checkpointer.DamagedCheckpointError: A file is incomplete or changed.
  """
  tree = _nested(checkpoint, wanted)
  restore_args = ocp.checkpoint_utils.construct_restore_args(tree)
  return _read(checkpoint, wanted, tree, restore_args)


def read_numpy(
  checkpoint: stored_checkpoint.StoredCheckpoint, names: Iterable[str]
) -> dict[str, np.ndarray]:
  """Reads whole arrays into the memory of this host.

  Args:
    checkpoint: Which has them.
    names: Theirs. Whoever wants little memory asks for one at a time.

  Raises:
    checkpointer.DamagedCheckpointError: A file is incomplete or changed.
  """
  wanted = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in names}
  tree = _nested(checkpoint, dict.fromkeys(wanted, 0))
  return _read(checkpoint, wanted, tree, _nested(checkpoint, wanted))


def _nested(
  checkpoint: stored_checkpoint.StoredCheckpoint, by_name: Mapping[str, Any]
) -> dict[str, Any]:
  specs = [checkpoint.arrays[name] for name in by_name]
  return named_tree.to_named(list(by_name.values()), specs=specs)


def _read(
  checkpoint: stored_checkpoint.StoredCheckpoint,
  wanted: Mapping[str, Any],
  tree: dict[str, Any],
  restore_args: Any,
) -> dict[str, Any]:
  if not wanted:
    return {}
  try:
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
      restored = reader.restore(
        checkpoint.state_path,
        args=ocp.args.PyTreeRestore(
          item=tree, restore_args=restore_args, partial_restore=True
        ),
      )
    specs = [checkpoint.arrays[name] for name in wanted]
    # Orbax leaves out what it does not find.
    arrays = named_tree.from_named(restored, specs=specs)
  # What orbax raises depends on the file.
  except Exception as error:
    lines = str(error).splitlines()
    raise checkpointer.DamagedCheckpointError(
      f"The checkpoint {os.fspath(checkpoint.path)} is damaged: it cannot be"
      f" read ({type(error).__name__}:"
      f" {lines[0][:300] if lines else 'no message'})"
    ) from error
  return dict(zip(wanted, arrays, strict=True))

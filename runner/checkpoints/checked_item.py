"""The last item of a checkpoint: a manifest of the files of all others.

Orbax finishes the items of a checkpoint one after the other, in the order of
their handlers, when all files of all processes are written and before the
checkpoint gets its final name. So a checkpoint with its name has its manifest.
"""

from collections.abc import Sequence
from typing import Any

from etils import epath
import orbax.checkpoint as ocp

from paxon.runner.checkpoints import manifest

FILE_NAME = "files.json"


class ManifestHandler(ocp.AsyncCheckpointHandler):
  """Writes the manifest of the other items when they are finished.

  Args:
    items: Their names. All must be finished before this one.
  """

  def __init__(self, items: Sequence[str]) -> None:
    self._items = tuple(items)

  async def async_save(self, directory: epath.Path, args: Any) -> None:
    """Has nothing to write yet."""
    del directory, args

  def save(self, directory: epath.Path, args: Any) -> None:
    """Has nothing to write yet."""
    del directory, args

  def restore(self, directory: epath.Path, args: Any = None) -> str:
    """Returns the text of the manifest."""
    del args
    return (directory / FILE_NAME).read_text()

  def finalize(self, directory: epath.Path) -> None:
    """Writes the manifest; called on one process."""
    parent = directory.parent
    missing = [name for name in self._items if not (parent / name).is_dir()]
    if missing:
      raise ValueError(
        f"The items {missing} of {parent} are not finished before the last."
      )
    entries = manifest.compute(parent, names=self._items)
    (directory / FILE_NAME).write_text(manifest.to_text(entries))


@ocp.args.register_with_handler(
  ManifestHandler, for_save=True, for_restore=True
)
class ManifestArgs(ocp.args.CheckpointArgs):
  """Asks for a manifest; there is nothing to say about it."""

"""What a checkpoint holds, as a tree of names with sizes.

```
params                                                     9,424   37.7 kB
  embedding/table  [264,16]  float32  vocab embed          4,224   16.9 kB
```
"""

from collections.abc import Iterable, Mapping
import dataclasses
import os

from paxon.runner.checkpoints import stored_checkpoint, text_table

_COLUMNS = ("name", "shape", "dtype", "axes", "values", "size")
_NUMBERS = (4, 5)


@dataclasses.dataclass(kw_only=True)
class _Folder:
  """A part of the names: what lies in it, by the next word."""

  folders: dict[str, "_Folder"] = dataclasses.field(default_factory=dict)
  arrays: dict[str, stored_checkpoint.StoredArray] = dataclasses.field(
    default_factory=dict
  )

  def all(self) -> list[stored_checkpoint.StoredArray]:
    """Returns every array in it."""
    below = [
      array for folder in self.folders.values() for array in folder.all()
    ]
    return [*self.arrays.values(), *below]


def explain(
  checkpoint: stored_checkpoint.StoredCheckpoint, *, prefix: str = ""
) -> list[str]:
  """Returns the lines that tell what a checkpoint holds.

  Args:
    checkpoint: Any.
    prefix: Only names of this folder, or this one name; the empty one is all.
  """
  arrays = within(checkpoint.arrays, prefix)
  rows: list[tuple[str, ...]] = [_COLUMNS]
  root = _tree(arrays.values())
  for name, array in root.arrays.items():
    rows.append(_row(name, array))
  for name, folder in root.folders.items():
    _add(rows, name, folder, depth=0)
  rows.append(_total("total", arrays.values()))
  head = (
    f"{os.fspath(checkpoint.path)}: step {checkpoint.step}, format version"
    f" {checkpoint.format_version}, {len(checkpoint.arrays)} arrays"
  )
  return [head, "", *text_table.lines(rows, right=_NUMBERS)]


def within(
  arrays: Mapping[str, stored_checkpoint.StoredArray], prefix: str
) -> dict[str, stored_checkpoint.StoredArray]:
  """Returns the arrays with a name, or in a folder of names.

  Args:
    arrays: By name.
    prefix: `params/head` holds `params/head/kernel` and not `params/header`.
  """
  folder = prefix.rstrip("/")
  return {
    name: array
    for name, array in arrays.items()
    if not folder or name == folder or name.startswith(f"{folder}/")
  }


def _tree(arrays: Iterable[stored_checkpoint.StoredArray]) -> _Folder:
  root = _Folder()
  for array in arrays:
    *folders, last = array.name.split("/")
    place = root
    for folder in folders:
      place = place.folders.setdefault(folder, _Folder())
    place.arrays[last] = array
  return root


def _add(
  rows: list[tuple[str, ...]], name: str, folder: _Folder, *, depth: int
) -> None:
  """Adds a folder with its total, and all that lies in it."""
  # A folder of one thing takes no line of its own, but the outermost have one.
  while depth and not folder.arrays and len(folder.folders) == 1:
    (word, folder), *_ = folder.folders.items()
    name = f"{name}/{word}"
  if depth and len(folder.arrays) == 1 and not folder.folders:
    (word, array), *_ = folder.arrays.items()
    rows.append(_row(f"{'  ' * depth}{name}/{word}", array))
    return
  rows.append(_total(f"{'  ' * depth}{name}", folder.all()))
  for word, array in folder.arrays.items():
    rows.append(_row(f"{'  ' * (depth + 1)}{word}", array))
  for word, inner in folder.folders.items():
    _add(rows, word, inner, depth=depth + 1)


def _row(name: str, array: stored_checkpoint.StoredArray) -> tuple[str, ...]:
  return (
    name,
    text_table.shape(array.shape),
    array.dtype,
    " ".join(axis or "-" for axis in array.axes),
    f"{array.size:,}",
    text_table.size(array.num_bytes),
  )


def _total(
  name: str, arrays: Iterable[stored_checkpoint.StoredArray]
) -> tuple[str, ...]:
  arrays = list(arrays)
  values = sum(array.size for array in arrays)
  num_bytes = stored_checkpoint.total_bytes(arrays)
  return (name, "", "", "", f"{values:,}", text_table.size(num_bytes))

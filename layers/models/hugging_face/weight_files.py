"""The weights of a model on disk: one file, or several with an index."""

from collections.abc import Iterable, Mapping
import dataclasses
import json
import os

from etils import epath
import numpy as np

from paxon.layers.models.hugging_face import family, safetensors_file

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
# More than these would bury the message.
_MAX_PROBLEMS = 5
# Tied tensors are compared in pieces of so many rows.
_ROWS = 1024


class WeightsError(ValueError):
  """Files do not hold the weights of a model; one line says what is wrong."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightFiles:
  """Tensors by the names of a family.

  Attributes:
    places: The file and the entry of each tensor, by the name it has there.
    names: What the model has.
  """

  places: Mapping[str, tuple[epath.Path, safetensors_file.Entry]]
  names: family.Names

  def entry(self, name: str) -> safetensors_file.Entry:
    """Returns what a file says of a tensor.

    Args:
      name: One of the model's.
    """
    return self.places[self._stored(name)][1]

  def read_rows(self, name: str, start: int, stop: int) -> np.ndarray:
    """Returns rows of a tensor; nothing else is read.

    Args:
      name: One of the model's.
      start: The first row.
      stop: The row after the last.
    """
    path, entry = self.places[self._stored(name)]
    return safetensors_file.read_rows(path, entry, start, stop)

  def leaf_dtype(self, leaf: family.Leaf) -> np.dtype:
    """Returns the dtype of all tensors that one array of ours is made of.

    Args:
      leaf: Which.

    Raises:
      WeightsError: They have several.
    """
    found = {tensor.name: self.entry(tensor.name) for tensor, _ in leaf.sources}
    by_dtype = {entry.dtype: name for name, entry in found.items()}
    if len(by_dtype) > 1:
      shown = ", ".join(f"{n} is {dtype}" for dtype, n in by_dtype.items())
      raise WeightsError(
        f"The layers of {leaf.name} have several dtypes ({shown}); give the one"
        " to store."
      )
    return next(iter(found.values())).numpy_dtype

  def check(self) -> None:
    """Raises an error unless the files hold this model, and nothing else.

    Raises:
      WeightsError: A tensor is missing, not known, of another shape, or tied
        and not equal.
    """
    problems = []
    for name, tensor in self.names.tensors.items():
      if self._stored(name) not in self.places:
        problems.append(f"{name} {_shape(tensor.shape)} is missing")
      elif self.entry(name).shape != tensor.shape:
        problems.append(
          f"{name} has shape {_shape(self.entry(name).shape)} in the file and"
          f" {_shape(tensor.shape)} by its config.json"
        )
    known = {self._stored(name) for name in self.names.tensors}
    for name in sorted(set(self.places) - known):
      whole = {name, f"{self.names.prefix}{name}"}
      if not (
        whole & set(self.names.tied) or any(map(self.names.is_ignored, whole))
      ):
        problems.append(f"{name} is in the file and not in the model")
    if not problems:
      problems = list(self._tied_problems())
    if problems:
      shown = problems[:_MAX_PROBLEMS]
      if len(problems) > len(shown):
        shown.append(f"and {len(problems) - len(shown)} more")
      raise WeightsError(
        f"The weights do not fit the model: {'; '.join(shown)}."
      )

  def _stored(self, name: str) -> str:
    """Returns the name in the files, which may lack the prefix."""
    short = name.removeprefix(self.names.prefix)
    return name if name in self.places or short not in self.places else short

  def _tied_problems(self) -> Iterable[str]:
    for name, other in self.names.tied.items():
      if name not in self.places:
        continue
      shape = self.entry(other).shape
      is_same = self.places[name][1].shape == shape and all(
        np.array_equal(
          self.read_rows(name, start, min(start + _ROWS, shape[0])),
          self.read_rows(other, start, min(start + _ROWS, shape[0])),
        )
        for start in range(0, shape[0], _ROWS)
      )
      if not is_same:
        yield (
          f"{name} must be {other}, as its config.json ties them"
          " (tie_word_embeddings), and differs"
        )


def find(path: epath.Path, *, names: family.Names) -> WeightFiles:
  """Returns the weights in a folder, or in one file.

  Args:
    path: Of the folder or the file.
    names: What the model has.

  Raises:
    WeightsError: There are none.
    DamagedFileError: A file is cut off, or no safetensors file.
  """
  places = {}
  for each, wanted in _files(path):
    if not each.exists():
      raise WeightsError(f"{os.fspath(each)} is missing, and {INDEX} names it.")
    entries = safetensors_file.read_header(each)
    missing = sorted(wanted - set(entries))
    if missing:
      raise WeightsError(
        f"{os.fspath(each)} lacks {missing[0]}, which {INDEX} places there."
      )
    places |= {
      names.current(name): (each, entry) for name, entry in entries.items()
    }
  return WeightFiles(places=places, names=names)


def _files(path: epath.Path) -> list[tuple[epath.Path, set[str]]]:
  """Returns the files, and what an index says is in each."""
  if not path.is_dir():
    return [(path, set())]
  if (path / INDEX).exists():
    index = path / INDEX
    try:
      of_file: dict[str, set[str]] = {}
      for name, file in json.loads(index.read_text())["weight_map"].items():
        of_file.setdefault(file, set()).add(name)
    except (ValueError, KeyError, AttributeError, TypeError) as error:
      raise WeightsError(
        f"{os.fspath(index)} cannot be read; copy it again."
      ) from error
    return [(path / file, each) for file, each in sorted(of_file.items())]
  if (path / WEIGHTS).exists():
    return [(path / WEIGHTS, set())]
  others = sorted(
    each.name
    for each in path.iterdir()
    if each.name.endswith((".bin", ".pt", ".pth", ".h5", ".msgpack", ".gguf"))
  )
  also = f"; {others[0]} is of a kind that is not read" if others else ""
  raise WeightsError(
    f"There is no {WEIGHTS} and no {INDEX} in {os.fspath(path)}{also}."
  )


def _shape(shape: Iterable[int]) -> str:
  return f"[{', '.join(map(str, shape))}]"

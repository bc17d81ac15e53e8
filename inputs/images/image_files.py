"""Sources of labelled images with random access.

A source has a length, and its items are `{"image": uint8 [H,W,C], "label":
int}`. `IdxImages` reads the format of MNIST and Fashion-MNIST, `ArrayImages`
files of numpy, and `RandomImages` makes up images for smoke tests. Files are
read when they are first used, so an experiment can be planned without its data.
"""

from collections.abc import Sequence
import dataclasses
import functools
import gzip
import math
import os
from typing import Any
import zlib

import numpy as np

from paxon.inputs import checks

# Type codes of IDX files, big-endian; http://yann.lecun.com/exdb/mnist
_IDX_TYPES = {
  0x08: ">u1",
  0x09: ">i1",
  0x0B: ">i2",
  0x0C: ">i4",
  0x0D: ">f4",
  0x0E: ">f8",
}

Example = dict[str, Any]


class _Arrays:
  """Base of sources that hold all images in two arrays."""

  def __len__(self) -> int:
    return len(self._arrays[0])

  def __getitem__(self, index: int, /) -> Example:
    """Returns `image`, uint8 [H,W,C], and `label`."""
    images, labels = self._arrays
    return {"image": images[index], "label": int(labels[index])}

  def check(self) -> None:
    """Raises ValueError if the files cannot be read."""
    _ = self._arrays

  @functools.cached_property
  def _arrays(self) -> tuple[np.ndarray, np.ndarray]:
    images, labels = self._read()
    name = type(self).__name__
    if images.ndim == 3:
      images = images[..., None]
    if images.ndim != 4 or images.dtype != np.uint8:
      raise ValueError(
        f"{name}: images must be uint8 [N,H,W] or [N,H,W,C], got"
        f" {images.dtype} {list(images.shape)}."
      )
    if labels.shape != images.shape[:1] or labels.dtype.kind not in "iu":
      raise ValueError(
        f"{name}: there must be an integer label for each of the"
        f" {len(images)} images, got {labels.dtype} {list(labels.shape)}."
      )
    return images, labels

  def _read(self) -> tuple[np.ndarray, np.ndarray]:
    raise NotImplementedError


@dataclasses.dataclass(kw_only=True, eq=False)
class IdxImages(_Arrays):
  """Images and labels in two IDX files, as MNIST is distributed.

  Attributes:
    images: Path of the images; `.gz` is decompressed.
    labels: Path of the labels.
    how: A sentence about where to get the files, for the error if there is
      none.
  """

  images: str
  labels: str
  how: str = ""

  def __post_init__(self) -> None:
    checks.check_not_empty(self, "images", "labels")

  def _read(self) -> tuple[np.ndarray, np.ndarray]:
    return read_idx(self.images, self.how), read_idx(self.labels, self.how)


@dataclasses.dataclass(kw_only=True, eq=False)
class ArrayImages(_Arrays):
  """Images and labels in two `.npy` files, of which only used parts are read.

  Attributes:
    images: Path of the images, uint8 [N,H,W] or [N,H,W,C].
    labels: Path of the labels, integers [N].
    how: As in `IdxImages`.
  """

  images: str
  labels: str
  how: str = ""

  def __post_init__(self) -> None:
    checks.check_not_empty(self, "images", "labels")

  def _read(self) -> tuple[np.ndarray, np.ndarray]:
    return _read_npy(self.images, self.how), _read_npy(self.labels, self.how)


@dataclasses.dataclass(kw_only=True, eq=False)
class RandomImages(_Arrays):
  """Noise around one random image for each class.

  Attributes:
    num_examples: Number of images.
    shape: Height, width and channels.
    num_classes: Number of classes.
    seed: Images with another seed have the same classes and other noise.
  """

  num_examples: int
  shape: Sequence[int]
  num_classes: int = 10
  seed: int = 0

  def __post_init__(self) -> None:
    checks.check_positive(self, "num_examples", "num_classes")

  def _read(self) -> tuple[np.ndarray, np.ndarray]:
    size = math.prod(self.shape)
    centres = _random_bytes(0, self.num_classes * size) // 2
    noise = _random_bytes(self.seed + 1, self.num_examples * size) // 2
    labels = np.arange(self.num_examples) % self.num_classes
    images = centres.reshape(-1, size)[labels] + noise.reshape(-1, size)
    return images.reshape(-1, *self.shape), labels


def read_idx(path: str, how: str = "") -> np.ndarray:
  """Returns the array of an IDX file.

  Raises:
    ValueError: The file is missing or damaged.
  """
  try:
    if path.endswith(".gz"):
      with gzip.open(path, "rb") as file:
        data = file.read()
    else:
      with open(path, "rb") as file:
        data = file.read()
  except (OSError, EOFError, zlib.error) as error:
    raise _make_error(path, error, how) from None
  if len(data) < 4 or data[:2] != b"\0\0" or data[2] not in _IDX_TYPES:
    raise ValueError(f"{path} is not an IDX file: it begins with {data[:4]!r}.")
  rank, dtype = data[3], np.dtype(_IDX_TYPES[data[2]])
  begin = 4 + 4 * rank
  shape = np.frombuffer(data[4:begin][: 4 * (len(data[4:begin]) // 4)], ">u4")
  expected = begin + math.prod(shape.tolist()) * dtype.itemsize
  if len(shape) != rank or len(data) != expected:
    raise ValueError(
      f"{path} is damaged: its {rank} dimensions {shape.tolist()} of {dtype}"
      f" need {expected} bytes, and it has {len(data)}."
    )
  values = np.frombuffer(data, dtype, offset=begin)
  return values.reshape(shape.tolist()).astype(dtype.newbyteorder("="))


def _read_npy(path: str, how: str) -> np.ndarray:
  try:
    return np.load(path, mmap_mode="r", allow_pickle=False)
  except (OSError, ValueError, EOFError) as error:
    raise _make_error(path, error, how) from None


def _make_error(path: str, error: Exception, how: str) -> ValueError:
  number = getattr(error, "errno", None)
  reason = str(error) if number is None else os.strerror(number)
  return ValueError(f"Cannot read {path}: {reason}.{how and ' '}{how}")


def _random_bytes(key: int, count: int) -> np.ndarray:
  # Raw bits of a generator are stable across numpy versions.
  words = np.random.Philox(key=key).random_raw(-(-count // 8))
  return words.astype("<u8").view(np.uint8)[:count]

"""Augmentation of images, as pure functions of a key.

An augmentation maps images [B,H,W,C] and one key per image, uint64 [B], to
images of the same shape and dtype. It has no state: the same image and key give
the same result on every host, in every batch and after a resume.
"""

from collections.abc import Callable
import dataclasses

import numpy as np

from paxon.inputs import checks

# `(images [B,H,W,C], keys uint64 [B]) -> images`.
Augmentation = Callable[[np.ndarray, np.ndarray], np.ndarray]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def make_keys(seed: int, numbers: np.ndarray) -> np.ndarray:
  """Returns a key, uint64, for each number and this seed."""
  return mix(
    mix(np.asarray(numbers, np.uint64))
    + mix(np.full(1, seed % 2**64, np.uint64))
  )


def mix(words: np.ndarray) -> np.ndarray:
  """Returns uint64 words of which each bit depends on all (splitmix64)."""
  # Wraps around, as meant.
  words = words + _GOLDEN
  words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
  words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
  return words ^ (words >> np.uint64(31))


def draw(keys: np.ndarray, number: int, limit: int) -> np.ndarray:
  """Returns integers in [0, limit), int64 [B]: draw `number` of each key.

  The bias of the modulo is negligible.
  """
  words = mix(keys + mix(np.full(1, number, np.uint64)))
  return (words % np.uint64(limit)).astype(np.int64)


@dataclasses.dataclass(frozen=True)
class Flip:
  """Mirrors half of the images horizontally."""

  def __call__(self, images: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Returns the images, mirrored or not."""
    flipped = draw(keys, 0, 2).astype(bool)[:, None, None, None]
    return np.where(flipped, images[:, :, ::-1], images)


@dataclasses.dataclass(frozen=True)
class PaddedCrop:
  """Crops images to their size at a random place, after padding.

  Attributes:
    padding: Pixels of zeros on each side.
  """

  padding: int

  def __post_init__(self) -> None:
    checks.check_positive(self, "padding")

  def __call__(self, images: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Returns the crops."""
    height, width = images.shape[1:3]
    pad, places = self.padding, 2 * self.padding + 1
    padded = np.pad(images, ((0, 0), (pad, pad), (pad, pad), (0, 0)))
    rows = draw(keys, 1, places)[:, None] + np.arange(height)
    columns = draw(keys, 2, places)[:, None] + np.arange(width)
    batch = np.arange(len(images))[:, None, None]
    return padded[batch, rows[:, :, None], columns[:, None, :]]


@dataclasses.dataclass(frozen=True)
class Cutout:
  """Sets a square around a random pixel to zero.

  DeVries and Taylor 2017, https://arxiv.org/abs/1708.04552. Squares may reach
  beyond the image.

  Attributes:
    size: Width of the square in pixels.
  """

  size: int

  def __post_init__(self) -> None:
    checks.check_positive(self, "size")

  def __call__(self, images: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Returns the images with a square of zeros each."""
    height, width = images.shape[1:3]
    inside = []
    for number, size in ((3, height), (4, width)):
      first = draw(keys, number, size)[:, None] - self.size // 2
      offset = np.arange(size) - first
      inside.append((offset >= 0) & (offset < self.size))
    covered = inside[0][:, :, None] & inside[1][:, None, :]
    return np.where(covered[..., None], np.zeros((), images.dtype), images)

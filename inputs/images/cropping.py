"""Crops of images of any size, resized to the size of a batch.

A crop maps one image [h,w,C] and a key to an image [H,W,C], like an
augmentation: it has no state. Images are resized with a triangle filter that
widens with the scale, as Pillow's bilinear filter and `jax.image.resize`.
"""

from collections.abc import Callable
import dataclasses
import math

import numpy as np

from paxon.inputs import checks
from paxon.inputs.images import augmentation

# Steps of a draw in [0, 1).
_STEPS = 2**24

# `(image uint8 [h,w,C], key of `make_keys`, height, width) -> uint8
# [height,width,C]`.
Crop = Callable[[np.ndarray, np.uint64, int, int], np.ndarray]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CenterCrop:
  """Cuts the middle of an image, with the shape of the batch's images.

  Attributes:
    fraction: Share of the longest possible crop that is kept, 0.875 for a crop
      of 224 of an image whose short side is 256.
  """

  fraction: float = 0.875

  def __post_init__(self) -> None:
    if not 0 < self.fraction <= 1:
      raise ValueError(
        f"CenterCrop.fraction must be in (0, 1], got {self.fraction}."
      )

  def __call__(
    self, image: np.ndarray, key: np.uint64, height: int, width: int
  ) -> np.ndarray:
    """Returns the resized middle; the key is not used."""
    del key
    scale = min(image.shape[0] / height, image.shape[1] / width) * self.fraction
    rows, columns = (max(1, round(n * scale)) for n in (height, width))
    top, left = (image.shape[0] - rows) // 2, (image.shape[1] - columns) // 2
    cut = image[top : top + rows, left : left + columns]
    return resize(cut, height, width)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistortedCrop:
  """Cuts a random part of an image, stretched to the shape of the batch's.

  Szegedy et al. 2014, https://arxiv.org/abs/1409.4842, section 6: area and
  ratio of the sides are uniform. A part that does not fit is drawn again; after
  `attempts`, the middle of the image is used.

  Attributes:
    min_area: Least share of the image's area.
    max_area: Largest share.
    min_ratio: Least width divided by height.
    max_ratio: Largest one.
    attempts: Number of draws.
  """

  min_area: float = 0.08
  max_area: float = 1.0
  min_ratio: float = 3 / 4
  max_ratio: float = 4 / 3
  attempts: int = 10

  def __post_init__(self) -> None:
    checks.check_positive(self, "attempts")
    if not 0 < self.min_area <= self.max_area <= 1:
      raise ValueError(
        "DistortedCrop needs 0 < min_area <= max_area <= 1, got"
        f" {self.min_area} and {self.max_area}."
      )
    if not 0 < self.min_ratio <= self.max_ratio:
      raise ValueError(
        "DistortedCrop needs 0 < min_ratio <= max_ratio, got"
        f" {self.min_ratio} and {self.max_ratio}."
      )

  def __call__(
    self, image: np.ndarray, key: np.uint64, height: int, width: int
  ) -> np.ndarray:
    """Returns the resized part."""
    keys = np.asarray([key], np.uint64)
    size = image.shape[:2]
    for attempt in range(self.attempts):
      first = 4 * attempt
      area = _draw(keys, first, self.min_area, self.max_area) * math.prod(size)
      ratio = _draw(keys, first + 1, self.min_ratio, self.max_ratio)
      rows, columns = (
        round(math.sqrt(each)) for each in (area / ratio, area * ratio)
      )
      if not (0 < rows <= size[0] and 0 < columns <= size[1]):
        continue
      top, left = (
        int(augmentation.draw(keys, first + number, free + 1)[0])
        for number, free in ((2, size[0] - rows), (3, size[1] - columns))
      )
      cut = image[top : top + rows, left : left + columns]
      return resize(cut, height, width)
    return CenterCrop(fraction=1.0)(image, key, height, width)


def resize(image: np.ndarray, height: int, width: int) -> np.ndarray:
  """Returns a uint8 image [h,w,C] with another size, [height,width,C]."""
  if image.shape[:2] == (height, width):
    return image
  rows = _make_weights(image.shape[0], height)
  columns = _make_weights(image.shape[1], width)
  wide = image.astype(np.float32)
  # Columns first: fewer values are left for most crops.
  wide = np.einsum("Ww,hwC->hWC", columns, wide, optimize=True)
  wide = np.einsum("Hh,hWC->HWC", rows, wide, optimize=True)
  return np.clip(np.rint(wide), 0, 255).astype(np.uint8)


def _make_weights(size: int, new_size: int) -> np.ndarray:
  """Returns the weights of old positions in new ones, float32 [new, old]."""
  scale = size / new_size
  centres = (np.arange(new_size)[:, None] + 0.5) * scale - 0.5
  distance = np.abs(np.arange(size) - centres) / max(scale, 1.0)
  weights = np.maximum(0.0, 1.0 - distance)
  return (weights / weights.sum(1, keepdims=True)).astype(np.float32)


def _draw(keys: np.ndarray, number: int, low: float, high: float) -> float:
  """Returns a uniform number in [low, high)."""
  share = int(augmentation.draw(keys, number, _STEPS)[0]) / _STEPS
  return low + (high - low) * share

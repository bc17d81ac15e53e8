"""Batches of labelled images, shuffled and augmented, with a position."""

from collections.abc import Mapping, Sequence
import dataclasses
from typing import Any

import numpy as np

from paxon.inputs import base_input, checks
from paxon.inputs.images import augmentation, cropping
from paxon.inputs.sources import example_source
from paxon.inputs.streams import document_order


@dataclasses.dataclass(kw_only=True, eq=False)
class ImageInput(document_order.OrderedInput):
  """Batches of the images of a source.

  A batch has `images` float32 [B,H,W,C], `labels` int32 [B] and
  `example_weights` float32 [B]. An epoch that does not fill the last batch ends
  with images of zeros and weight 0. The image at position n of the run, and its
  augmentation, depend on the seed and n only.

  Attributes:
    source: A source of `image_files`, or another one with such items.
    image_shape: Height, width and channels of all images.
    shuffle_seed: Seed of each epoch's order, and of the augmentation. `None`
      keeps the source's order.
    num_epochs: Number of epochs. `None` repeats without end.
    crop: Cuts `image_shape` out of images of any size, before augmentation;
      `None` for a source whose images have it.
    augmentations: Applied in this order, before normalization.
    mean: Subtracted from the pixels, which are in [0, 1]; one value, or one
      for each channel.
    deviation: Divides the result.
  """

  length: int = 1
  source: Any
  image_shape: Sequence[int]
  shuffle_seed: int | None
  num_epochs: int | None = None
  crop: cropping.Crop | None = None
  augmentations: Sequence[augmentation.Augmentation] = ()
  mean: float | Sequence[float] = 0.0
  deviation: float | Sequence[float] = 1.0
  _next: int = dataclasses.field(default=0, init=False, repr=False)

  def __post_init__(self) -> None:
    super().__post_init__()
    checks.check_positive(self, optional=["num_epochs"])
    if len(self.image_shape) != 3 or min(self.image_shape) <= 0:
      raise ValueError(
        "ImageInput.image_shape must be a height, a width and a number of"
        f" channels, got {self.image_shape}."
      )
    if self.augmentations and self.shuffle_seed is None:
      raise ValueError(
        "ImageInput.augmentations need a shuffle_seed, which their keys are"
        " made of."
      )
    if self.shuffle_seed is None and isinstance(
      self.crop, cropping.DistortedCrop
    ):
      raise ValueError(
        "ImageInput.crop needs a shuffle_seed, which its keys are made of."
      )
    if np.min(self.deviation) <= 0:
      raise ValueError(
        f"ImageInput.deviation must be positive, got {self.deviation}."
      )

  def get_next(self) -> base_input.Batch:
    """Returns this host's images of the next batch; see the class.

    Raises:
      StopIteration: All epochs have been read.
      ValueError: An image has another shape than `image_shape`, or a label is
        negative.
    """
    end = self._begin_batch()
    num_images = self.per_host_batch_size
    first = self._next + self.infeed_host_index * num_images
    places = np.arange(first, first + num_images)
    if end is not None:
      places = places[places < end]
    images = np.zeros((num_images, *self.image_shape), np.uint8)
    labels = np.zeros(num_images, np.int32)
    keys = augmentation.make_keys(self.shuffle_seed or 0, places)
    # Not a key of an augmentation, which is numbered.
    crop_keys = augmentation.make_keys(-1, keys)
    for index, place in enumerate(places.tolist()):
      images[index], labels[index] = self._read(place, crop_keys[index])
    if self.augmentations and len(places):
      changed = images[: len(places)]
      for number, augment in enumerate(self.augmentations):
        changed = augment(changed, augmentation.make_keys(number, keys))
      images[: len(places)] = changed
    self._next += self.global_batch_size
    weights = (np.arange(num_images) < len(places)).astype(np.float32)
    mean = np.asarray(self.mean, np.float32)
    scale = np.float32(1) / np.asarray(self.deviation, np.float32)
    pixels = (images.astype(np.float32) / np.float32(255) - mean) * scale
    pixels[len(places) :] = 0
    return {"images": pixels, "labels": labels, "example_weights": weights}

  @property
  def unit(self) -> str:
    """Images, each of which has one weight."""
    return "images"

  def view_example(
    self,
    batch: Mapping[str, np.ndarray],
    index: int,
    predicted: Mapping[str, np.ndarray],
  ) -> base_input.ExampleView:
    """Returns the pixels of an image, its label and the predicted one."""
    pixels = batch["images"][index] * np.asarray(self.deviation) + self.mean
    caption = f"label {batch['labels'][index]}"
    if "labels" in predicted:
      caption += f", predicted {predicted['labels'][index]}"
    image = np.rint(np.clip(pixels, 0, 1) * 255).astype(np.uint8)
    return base_input.ExampleView(caption=caption, image=image)

  def batch_shapes(self) -> base_input.Shapes:
    """Returns the shapes and dtypes of the arrays of `get_next`."""
    num_images = self.per_host_batch_size
    return {
      "images": ((num_images, *self.image_shape), np.dtype(np.float32)),
      "labels": ((num_images,), np.dtype(np.int32)),
      "example_weights": ((num_images,), np.dtype(np.float32)),
    }

  def check_readable(self) -> None:
    """Raises ValueError if the source cannot be read or is empty."""
    example_source.call_optional(self.source, "check")
    self._read(0, np.uint64(0))

  def _read(self, place: int, key: np.uint64) -> tuple[np.ndarray, int]:
    """Returns the cropped image and the label at a position of the run."""
    number = self._number(place)
    example = self.source[number]
    image, label = np.asarray(example["image"]), int(example["label"])
    if self.crop is not None and image.ndim == 3:
      image = self.crop(image, key, *self.image_shape[:2])
    if image.shape != tuple(self.image_shape) or image.dtype != np.uint8:
      raise ValueError(
        f"Image {number} must be uint8 {list(self.image_shape)}, the"
        f" image_shape, got {image.dtype} {list(image.shape)}."
      )
    if label < 0:
      raise ValueError(f"Image {number} has the negative label {label}.")
    return image, label

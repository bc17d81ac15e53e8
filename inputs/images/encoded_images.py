"""Sources of encoded images: folders of files, and TFRecords.

Items are those of `image_files`, with images of any size: an `ImageInput` of
them needs a `crop`. JPEG and PNG are decoded by Pillow, which is optional.
"""

from collections.abc import Sequence
import dataclasses
import functools
import io
import os
from typing import Any

import numpy as np

from paxon.inputs import checks, optional_library
from paxon.inputs.images import image_files
from paxon.inputs.sources import record_files
from paxon.inputs.tf_records import tf_example, tf_record_files

_ENDINGS = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".webp")
# Modes of Pillow by the number of channels.
_MODES = {1: "L", 3: "RGB"}


def decode(data: bytes, channels: int = 3) -> np.ndarray:
  """Returns a decoded image, uint8 [H,W,channels].

  Colours are converted, and transparency is dropped.

  Raises:
    MissingLibraryError: Pillow is not installed.
    ValueError: The bytes are not an image that Pillow reads.
  """
  library = optional_library.pillow()
  try:
    with library.open(io.BytesIO(data)) as image:
      decoded = np.asarray(image.convert(_MODES[channels]))
  except (OSError, SyntaxError, ValueError) as error:
    raise ValueError(f"not an image: {error}.") from error
  return decoded[..., None] if channels == 1 else decoded


@dataclasses.dataclass(kw_only=True, eq=False)
class FolderImages(record_files.PickledFields):
  """Images in one folder for each class, as torchvision's `ImageFolder`.

  The classes are the sorted names of the folders, and images are sorted by
  class and path.

  Attributes:
    folder: The folder of the classes' folders.
    channels: 3 for colours, 1 for grey.
    how: A sentence about where to get the files, for the error if there are
      none.
  """

  folder: str
  channels: int = 3
  how: str = ""

  def __post_init__(self) -> None:
    checks.check_not_empty(self, "folder")
    _check_channels(self, self.channels)

  @property
  def classes(self) -> list[str]:
    """Names of the classes, by label."""
    return self._files[0]

  def __len__(self) -> int:
    return len(self._files[1])

  def __getitem__(self, index: int, /) -> image_files.Example:
    """Returns `image`, uint8 [H,W,C] of any size, and `label`.

    Raises:
      ValueError: The file cannot be read or decoded; names it.
    """
    path, label = self._files[1][index]
    try:
      with open(path, "rb") as file:
        image = decode(file.read(), self.channels)
    except optional_library.MissingLibraryError:
      raise
    except (OSError, ValueError) as error:
      raise ValueError(f"{path}: {error}") from error
    return {"image": image, "label": label}

  def check(self) -> None:
    """Raises ValueError if there are no images."""
    optional_library.pillow()
    _ = self._files

  @functools.cached_property
  def _files(self) -> tuple[list[str], list[tuple[str, int]]]:
    """Returns the classes, and path and label of each image."""
    how = self.how and f" {self.how}"
    try:
      entries = sorted(os.scandir(self.folder), key=lambda each: each.name)
    except OSError as error:
      raise ValueError(
        f"FolderImages.folder: cannot read {self.folder}:"
        f" {error.strerror}.{how}"
      ) from None
    classes = [entry.name for entry in entries if entry.is_dir()]
    files = [
      (os.path.join(at, name), label)
      for label, each in enumerate(classes)
      for at, folders, names in _walk(os.path.join(self.folder, each))
      for name in names
      if name.lower().endswith(_ENDINGS)
    ]
    if not files:
      raise ValueError(
        f"FolderImages.folder: {self.folder} must have a folder of images for"
        f" each class, files that end in {', '.join(_ENDINGS)}.{how}"
      )
    return classes, files


@dataclasses.dataclass(kw_only=True, eq=False)
class TfRecordImages:
  """Encoded images in TFRecords of `tf.train.Example`, without TensorFlow.

  Attributes:
    files: A path or pattern of the files, or several of them.
    image_feature: Name of the feature with the encoded image.
    label_feature: Name of the feature with the label.
    first_label: Label of the first class in the files; 1 in those of ImageNet
      that TensorFlow's script made.
    channels: 3 for colours, 1 for grey.
    index_folder: See `tf_record_files.TfRecordFiles`.
  """

  files: str | Sequence[str]
  image_feature: str = "image/encoded"
  label_feature: str = "image/class/label"
  first_label: int = 0
  channels: int = 3
  index_folder: str | None = None

  def __post_init__(self) -> None:
    checks.check_not_empty(self, "files", "image_feature", "label_feature")
    _check_channels(self, self.channels)

  def __len__(self) -> int:
    return len(self._records)

  def __getitem__(self, index: int, /) -> image_files.Example:
    """Returns `image`, uint8 [H,W,C] of any size, and `label`.

    Raises:
      ValueError: The record is damaged, lacks a feature, or its image cannot be
        decoded; names file and record.
    """
    features = self._records[index]
    try:
      data = self._find(features, self.image_feature, "bytes")
      label = self._find(features, self.label_feature, "an integer")
      image = decode(data, self.channels)
    except optional_library.MissingLibraryError:
      raise
    except ValueError as error:
      raise ValueError(f"{self._records.name(index)}: {error}") from error
    return {"image": image, "label": int(label) - self.first_label}

  def check(self) -> None:
    """Raises an error if there are no files or Pillow is missing."""
    optional_library.pillow()
    len(self)

  @functools.cached_property
  def _records(self) -> tf_example.TfExampleRecords:
    return tf_example.TfExampleRecords(
      files=tf_record_files.TfRecordFiles(
        files=self.files, index_folder=self.index_folder
      )
    )

  def _find(self, features: tf_example.Features, name: str, kind: str) -> Any:
    """Returns the only value of a feature."""
    values = features.get(name)
    expected = {"bytes": bytes, "an integer": np.integer}[kind]
    if (
      values is None or len(values) != 1 or not isinstance(values[0], expected)
    ):
      raise ValueError(
        f"the feature {name!r} must be {kind}, one value; the record has the"
        f" features {sorted(features)}."
      )
    return values[0]


def _walk(folder: str) -> list[tuple[str, list[str], list[str]]]:
  """Returns `os.walk` of a folder, sorted."""
  return sorted(
    (at, dirs, sorted(names)) for at, dirs, names in os.walk(folder)
  )


def _check_channels(owner: Any, channels: int) -> None:
  if channels not in _MODES:
    raise ValueError(
      f"{type(owner).__name__}.channels must be 1 or 3, got {channels}."
    )

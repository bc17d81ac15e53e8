"""Tests for encoded images and their crops."""

import importlib.util
import io
import struct
import zlib

import numpy as np
import pytest

from paxon.inputs import optional_library
from paxon.inputs.images import (
  augmentation,
  cropping,
  encoded_images,
  image_files,
  image_input,
)
from paxon.inputs.tf_records import tf_example, tf_record_files

HAS_PILLOW = importlib.util.find_spec("PIL") is not None


def _image(seed=0, height=9, width=7, channels=3):
  rng = np.random.RandomState(seed)
  return rng.randint(0, 256, (height, width, channels), np.uint8)


def _png(image):
  """Returns a PNG, written from the definition of the format."""

  def chunk(kind, data):
    body = kind + data
    return (
      struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))
    )

  height, width, channels = image.shape
  colour = {1: 0, 3: 2}[channels]
  head = struct.pack(">IIBBBBB", width, height, 8, colour, 0, 0, 0)
  rows = b"".join(b"\0" + row.tobytes() for row in image)
  return b"\x89PNG\r\n\x1a\n" + b"".join(
    (
      chunk(b"IHDR", head),
      chunk(b"IDAT", zlib.compress(rows)),
      chunk(b"IEND", b""),
    )
  )


class _Reader:
  """Stands in for `PIL.Image`, for PNGs of `_png`."""

  def open(self, file):
    data = file.read()
    if not data.startswith(b"\x89PNG"):
      raise OSError("cannot identify image file")
    width, height, _, colour = struct.unpack_from(">IIBB", data, 16)
    channels = {0: 1, 2: 3}[colour]
    size = struct.unpack_from(">I", data, 33)[0]
    rows = np.frombuffer(zlib.decompress(data[41 : 41 + size]), np.uint8)
    rows = rows.reshape(height, -1)[:, 1:]
    return _Opened(rows.reshape(height, width, channels))


class _Opened:
  def __init__(self, image):
    self._image = image

  def __enter__(self):
    return self

  def __exit__(self, *args):
    return None

  def convert(self, mode):
    if mode == "L":
      return self._image[..., 0]
    return np.broadcast_to(self._image, (*self._image.shape[:2], 3))


@pytest.fixture
def reader(monkeypatch):
  """Decodes PNGs with Pillow, or without it where it is not installed."""
  if not HAS_PILLOW:
    monkeypatch.setattr(optional_library, "pillow", _Reader)


def _folder(tmp_path):
  for i, name in enumerate(("b/x/2.png", "a/1.PNG", "b/0.png", "a/notes.txt")):
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(_png(_image(i)))
  return encoded_images.FolderImages(folder=str(tmp_path))


def test_folder_of_a_folder_for_each_class(tmp_path, reader):
  del reader
  source = _folder(tmp_path)
  assert (source.classes, len(source)) == (["a", "b"], 3)
  found = [source[i] for i in range(3)]
  assert [each["label"] for each in found] == [0, 1, 1]
  for each, seed in zip(found, (1, 2, 0), strict=True):
    np.testing.assert_array_equal(each["image"], _image(seed))


def _write_records(path, **changes):
  records = []
  for i in range(5):
    features = {
      "image/encoded": np.asarray([_png(_image(i, 8 + i, 12))], object),
      "image/class/label": np.asarray([i + 1]),
      **changes,
    }
    records.append(tf_example.serialize(features))
  tf_record_files.write(path, records)


def test_records_of_encoded_images(tmp_path, reader):
  del reader
  _write_records(tmp_path / "train-0")
  source = encoded_images.TfRecordImages(
    files=str(tmp_path / "train-*"), first_label=1
  )
  assert len(source) == 5
  found = source[3]
  np.testing.assert_array_equal(found["image"], _image(3, 11, 12))
  assert found["label"] == 3


def test_batches_resume_with_the_same_crops(tmp_path, reader):
  del reader
  _write_records(tmp_path / "train-0")

  def make(**fields):
    return image_input.ImageInput(
      source=encoded_images.TfRecordImages(
        files=str(tmp_path / "train-0"), first_label=1
      ),
      image_shape=(6, 5, 3),
      shuffle_seed=7,
      crop=cropping.DistortedCrop(),
      augmentations=[augmentation.Flip()],
      **fields,
    )

  whole = make(global_batch_size=4)
  batches = [whole.get_next()["images"] for _ in range(4)]
  assert batches[0].shape == (4, 6, 5, 3)
  resumed = make(global_batch_size=4)
  whole.reset()
  whole.get_next()
  resumed.set_state(whole.get_state())
  np.testing.assert_array_equal(resumed.get_next()["images"], batches[1])
  # Two hosts together read what one does.
  halves = [make(global_batch_size=4) for _ in range(2)]
  for i, half in enumerate(halves):
    half.set_infeed_hosts(infeed_host_index=i, num_infeed_hosts=2)
  first = np.concatenate([half.get_next()["images"] for half in halves])
  np.testing.assert_array_equal(first, batches[0])
  # The image of the second epoch is another crop.
  assert not np.array_equal(batches[0][0], batches[1][1])


def _resized(line, size):
  """Returns a line of values with another length, one value at a time."""
  scale = len(line) / size
  found = []
  for i in range(size):
    centre, total, weights = (i + 0.5) * scale, 0.0, 0.0
    for j, value in enumerate(line):
      weight = max(0.0, 1 - abs(j + 0.5 - centre) / max(scale, 1.0))
      total, weights = total + weight * value, weights + weight
    found.append(total / weights)
  return np.asarray(found)


@pytest.mark.parametrize("shape", [(4, 5), (20, 3), (9, 7), (5, 30)])
def test_resize_is_a_triangle_filter(shape):
  image = _image()
  found = cropping.resize(image, *shape)
  wide = np.apply_along_axis(_resized, 0, image.astype(np.float64), shape[0])
  wide = np.apply_along_axis(_resized, 1, wide, shape[1])
  assert (found.shape, found.dtype) == (wide.shape, np.uint8)
  np.testing.assert_allclose(found, wide, atol=0.51)


def test_center_crop_keeps_the_ratio():
  image = np.zeros((40, 60, 3), np.uint8)
  # 0.5 of the largest square, from row 10 and column 20 on.
  image[10:30, 20:40] = 200
  crop = cropping.CenterCrop(fraction=0.5)
  assert np.all(crop(image, np.uint64(0), 10, 10) == 200)
  assert crop(image, np.uint64(0), 8, 4).shape == (8, 4, 3)


def test_distorted_crops_are_those_of_their_keys():
  crop = cropping.DistortedCrop(min_area=0.2)
  rows, columns = np.mgrid[:100, :80].astype(np.uint8)
  image = np.stack([rows, columns, rows], axis=-1)
  areas, ratios = [], []
  for key in augmentation.make_keys(3, np.arange(300)):
    found = crop(image, key, 50, 50).astype(np.float64)
    np.testing.assert_array_equal(found, crop(image, key, 50, 50))
    # The scales, from the slope of rows and columns.
    height = (found[44, 25, 0] - found[5, 25, 0]) / 39 * 50
    width = (found[25, 44, 1] - found[25, 5, 1]) / 39 * 50
    areas.append(height * width / 8000)
    ratios.append(width / height)
  assert 0.15 < min(areas) < 0.3
  assert 0.8 < max(areas) < 1.1
  assert 0.7 < min(ratios) < 0.8
  assert 1.2 < max(ratios) < 1.4
  # Uniform between 0.2 and 1, less what does not fit.
  assert 0.45 < np.mean(areas) < 0.65


def test_parts_that_do_not_fit_become_the_middle():
  image = _image(height=4, width=100)
  crop = cropping.DistortedCrop(min_area=1.0)
  middle = cropping.CenterCrop(fraction=1.0)
  key = np.uint64(5)
  np.testing.assert_array_equal(
    crop(image, key, 4, 4), middle(image, key, 4, 4)
  )


def test_errors(tmp_path, reader):
  del reader
  with pytest.raises(ValueError, match=r"cannot read .*missing.* Ask for it"):
    encoded_images.FolderImages(
      folder=str(tmp_path / "missing"), how="Ask for it."
    ).check()
  (tmp_path / "a").mkdir()
  folder = encoded_images.FolderImages(folder=str(tmp_path))
  with pytest.raises(ValueError, match=r"a folder of images for each class"):
    len(folder)
  (tmp_path / "a" / "bad.png").write_bytes(b"nothing")
  folder = encoded_images.FolderImages(folder=str(tmp_path))
  with pytest.raises(ValueError, match=r"bad.png: not an image"):
    folder[0]
  _write_records(tmp_path / "r", **{"image/class/label": np.asarray([1, 2])})
  records = encoded_images.TfRecordImages(files=str(tmp_path / "r"))
  with pytest.raises(
    ValueError, match=r"r, record 2: the feature 'image/class"
  ):
    records[2]
  with pytest.raises(ValueError, match="channels must be 1 or 3, got 4"):
    encoded_images.FolderImages(folder="x", channels=4)
  with pytest.raises(ValueError, match=r"needs 0 < min_area <= max_area"):
    cropping.DistortedCrop(min_area=0.5, max_area=0.1)
  with pytest.raises(ValueError, match=r"ImageInput.crop needs a shuffle_seed"):
    image_input.ImageInput(
      source=image_files.RandomImages(num_examples=2, shape=(4, 4, 3)),
      image_shape=(4, 4, 3),
      global_batch_size=2,
      shuffle_seed=None,
      crop=cropping.DistortedCrop(),
    )


@pytest.mark.skipif(HAS_PILLOW, reason="Pillow is installed")
def test_without_pillow_the_error_names_it():
  with pytest.raises(ValueError, match="Pillow is not installed"):
    encoded_images.decode(b"")


@pytest.mark.skipif(not HAS_PILLOW, reason="Pillow is not installed")
def test_pillow_decodes_and_resizes_alike():
  library = optional_library.pillow()
  rows, columns = np.mgrid[:32, :40].astype(np.uint8)
  image = np.stack([4 * rows, 4 * columns, rows + columns], axis=-1)
  for kind, error in (("png", 0), ("jpeg", 4)):
    file = io.BytesIO()
    library.fromarray(image).save(file, kind, quality=95)
    found = encoded_images.decode(file.getvalue())
    assert np.abs(found.astype(int) - image).mean() <= error
    assert encoded_images.decode(file.getvalue(), 1).shape == (32, 40, 1)
  for height, width in ((7, 9), (50, 45)):
    bilinear = library.Resampling.BILINEAR
    expected = library.fromarray(image).resize((width, height), bilinear)
    found = cropping.resize(image, height, width)
    np.testing.assert_allclose(found, np.asarray(expected), atol=1.01)

"""Tests for sources, augmentation and batches of images."""

import gzip
import struct

import numpy as np
import pytest

from paxon.inputs.images import augmentation, image_files, image_input

RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 256, (10, 4, 6), np.uint8)
LABELS = np.arange(10, dtype=np.uint8)


def _idx(array):
  """Returns an IDX file, written from the description of the format."""
  codes = {"uint8": 8, "int32": 0x0C}
  head = struct.pack(">BBBB", 0, 0, codes[array.dtype.name], array.ndim)
  sizes = struct.pack(f">{array.ndim}I", *array.shape)
  return head + sizes + array.astype(array.dtype.newbyteorder(">")).tobytes()


def _source(tmp_path):
  images, labels = tmp_path / "images.gz", tmp_path / "labels"
  images.write_bytes(gzip.compress(_idx(IMAGES)))
  labels.write_bytes(_idx(LABELS))
  return image_files.IdxImages(images=str(images), labels=str(labels))


def _input(source, **kwargs):
  given = {
    "source": source,
    "image_shape": (4, 6, 1),
    "global_batch_size": 4,
    "shuffle_seed": 3,
    "augmentations": [
      augmentation.PaddedCrop(1),
      augmentation.Flip(),
      augmentation.Cutout(3),
    ],
  }
  return image_input.ImageInput(**{**given, **kwargs})


def _batches(source, count):
  return [source.get_next() for _ in range(count)]


def _assert_equal(one, other):
  assert one.keys() == other.keys()
  for key, value in one.items():
    np.testing.assert_array_equal(value, other[key])


def test_idx_and_npy_files(tmp_path):
  source = _source(tmp_path)
  source.check()
  assert len(source) == 10
  np.testing.assert_array_equal(source[3]["image"], IMAGES[3][..., None])
  assert source[3]["label"] == 3
  wide = np.arange(-3, 3, dtype=np.int32).reshape(2, 3)
  (tmp_path / "wide").write_bytes(_idx(wide))
  np.testing.assert_array_equal(
    image_files.read_idx(str(tmp_path / "wide")), wide
  )
  for name, array in (("i.npy", IMAGES), ("l.npy", LABELS)):
    np.save(tmp_path / name, array)
  arrays = image_files.ArrayImages(
    images=str(tmp_path / "i.npy"), labels=str(tmp_path / "l.npy")
  )
  np.testing.assert_array_equal(arrays[9]["image"], IMAGES[9][..., None])


@pytest.mark.parametrize(
  ("data", "message"),
  [
    (b"\x89PNG", r"is not an IDX file: it begins with"),
    (_idx(IMAGES)[:-1], r"need 256 bytes, and it has 255"),
    (_idx(IMAGES)[:9], r"is damaged: its 3 dimensions \[10\]"),
    (_idx(LABELS), r"images must be uint8 \[N,H,W\]"),
    (_idx(IMAGES[:9]), r"an integer label for each of the 9 images"),
  ],
)
def test_damaged_files(tmp_path, data, message):
  source = _source(tmp_path)
  (tmp_path / "images.gz").write_bytes(gzip.compress(data))
  with pytest.raises(ValueError, match=message):
    source.check()


def test_missing_and_truncated_files(tmp_path):
  source = image_files.IdxImages(
    images="/none/such.gz", labels="/none", how="Install it."
  )
  with pytest.raises(
    ValueError, match=r"Cannot read /none/such.gz: No such file.* Install it\."
  ):
    _input(source).check_readable()
  whole = _source(tmp_path)
  packed = (tmp_path / "images.gz").read_bytes()
  (tmp_path / "images.gz").write_bytes(packed[:-20])
  with pytest.raises(ValueError, match=r"Cannot read .*images.gz: "):
    whole.check()
  # A wrong byte in the middle.
  (tmp_path / "images.gz").write_bytes(packed[:10] + b"\xff" + packed[11:])
  with pytest.raises(ValueError, match=r"Cannot read .*images.gz: .*invalid"):
    image_files.read_idx(str(tmp_path / "images.gz"))


def test_augmentations_match_their_definition():
  images = RNG.integers(1, 256, (64, 5, 7, 2), np.uint8)
  keys = augmentation.make_keys(1, np.arange(64))
  flipped = augmentation.Flip()(images, keys)
  is_flipped = [
    not np.array_equal(a, b) for a, b in zip(flipped, images, strict=True)
  ]
  assert 16 < sum(is_flipped) < 48
  for one, image, flip in zip(flipped, images, is_flipped, strict=True):
    np.testing.assert_array_equal(one, image[:, ::-1] if flip else image)
  crops = augmentation.PaddedCrop(2)(images, keys)
  padded = np.pad(images, ((0, 0), (2, 2), (2, 2), (0, 0)))
  found = set()
  for one, image in zip(crops, padded, strict=True):
    places = [
      (i, j)
      for i, j in np.ndindex(5, 5)
      if np.array_equal(image[i : i + 5, j : j + 7], one)
    ]
    assert places
    found.add(places[0])
  assert len(found) > 15
  cut = augmentation.Cutout(3)(images, keys)
  sizes = [(c == 0).any(-1) for c in cut]
  assert all(4 <= size.sum() <= 9 for size in sizes)
  for one, image, zero in zip(cut, images, sizes, strict=True):
    np.testing.assert_array_equal(one, np.where(zero[..., None], 0, image))
    rows, columns = np.nonzero(zero)
    assert np.ptp(rows) < 3
    assert np.ptp(columns) < 3


def test_augmentations_are_functions_of_the_key():
  images = RNG.integers(1, 256, (8, 5, 7, 2), np.uint8)
  keys = augmentation.make_keys(1, np.arange(8))
  for augment in (
    augmentation.Flip(),
    augmentation.PaddedCrop(2),
    augmentation.Cutout(3),
  ):
    whole = augment(images, keys)
    np.testing.assert_array_equal(augment(images[3:5], keys[3:5]), whole[3:5])
  assert not np.array_equal(keys, augmentation.make_keys(2, np.arange(8)))


def test_draws_are_uniform():
  keys = augmentation.make_keys(0, np.arange(10_000))
  counts = np.bincount(augmentation.draw(keys, 1, 10), minlength=10)
  # Nine degrees of freedom; the bound is exceeded with probability 1e-6.
  assert np.sum((counts - 1000) ** 2 / 1000) < 45


def test_a_batch_is_normalized_and_padded(tmp_path):
  source = _input(
    _source(tmp_path),
    shuffle_seed=None,
    augmentations=(),
    num_epochs=1,
    mean=0.5,
    deviation=0.25,
  )
  first, _, last = _batches(source, 3)
  expected = (IMAGES[:4, ..., None] / 255 - 0.5) / 0.25
  np.testing.assert_allclose(first["images"], expected, rtol=1e-5, atol=1e-6)
  assert first["labels"].tolist() == [0, 1, 2, 3]
  assert last["labels"].tolist() == [8, 9, 0, 0]
  assert last["example_weights"].tolist() == [1, 1, 0, 0]
  assert not last["images"][2:].any()
  shapes = source.batch_shapes()
  assert {k: (v.shape, v.dtype) for k, v in last.items()} == shapes
  with pytest.raises(StopIteration):
    source.get_next()


def test_an_epoch_has_each_image_once(tmp_path):
  source = _input(_source(tmp_path), global_batch_size=5)
  epochs = [
    np.concatenate([b["labels"] for b in _batches(source, 2)]) for _ in range(2)
  ]
  assert [sorted(e) for e in epochs] == [list(range(10))] * 2
  assert not np.array_equal(*epochs)


def test_resumes_exactly(tmp_path):
  source = _input(_source(tmp_path))
  _batches(source, 3)
  state = source.get_state()
  expected = _batches(source, 4)
  other = _input(_source(tmp_path))
  other.set_state(state)
  for one, another in zip(expected, _batches(other, 4), strict=True):
    _assert_equal(one, another)


def test_hosts_share_a_batch(tmp_path):
  whole = _batches(_input(_source(tmp_path)), 3)
  parts = []
  for host in range(2):
    source = _input(_source(tmp_path))
    source.set_infeed_hosts(infeed_host_index=host, num_infeed_hosts=2)
    parts.append(_batches(source, 3))
  for one, first, second in zip(whole, *parts, strict=True):
    joined = {k: np.concatenate([first[k], second[k]]) for k in first}
    _assert_equal(one, joined)


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"next": -1}, r"next must be a number of images, got -1"),
    ({"next": True}, r"next must be a number of images"),
    ({"shuffle_seed": 9}, r"saved with the shuffle_seed 9"),
    ({"content": "0"}, r"saved with the content '0'"),
    ({"more": 1}, r"must have the keys"),
  ],
)
def test_wrong_states(tmp_path, change, message):
  source = _input(_source(tmp_path))
  with pytest.raises(ValueError, match=message):
    source.set_state({**source.get_state(), **change})


@pytest.mark.parametrize(
  ("given", "message"),
  [
    ({"image_shape": (4, 6)}, r"image_shape must be a height, a width"),
    ({"deviation": 0.0}, r"deviation must be positive"),
    ({"shuffle_seed": None}, r"augmentations need a shuffle_seed"),
    ({"num_epochs": 0}, r"num_epochs must be positive"),
  ],
)
def test_wrong_fields(tmp_path, given, message):
  with pytest.raises(ValueError, match=message):
    _input(_source(tmp_path), **given)


def test_images_of_another_shape(tmp_path):
  source = _input(_source(tmp_path), image_shape=(6, 4, 1))
  with pytest.raises(ValueError, match=r"Image \d must be uint8 \[6, 4, 1\]"):
    source.check_readable()


def test_random_images_share_classes():
  shape = (3, 4, 2)
  make = image_files.RandomImages
  train = make(num_examples=50, shape=shape, num_classes=5)
  test = make(num_examples=50, shape=shape, num_classes=5, seed=1)

  def mean(source):
    images = [source[i]["image"] for i in range(50) if source[i]["label"] == 2]
    return np.mean(images, axis=0)

  assert np.abs(mean(train) - mean(test)).mean() < 25
  assert not np.array_equal(train[0]["image"], test[0]["image"])

"""Tests of the files of array shards."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from paxon.runner.checkpoints import shard_files

Box = shard_files.Box


def _write(folder, *, header=None):
  shards = [
    (Box("w", ((0, 2), (3, 6))), np.arange(6, dtype=np.float32).reshape(2, 3)),
    (Box("step", ()), np.asarray(7, np.int32)),
    (Box("half", ((4, 6),)), np.asarray([0.5, -2.0], jnp.bfloat16)),
    (Box("empty", ((0, 0),)), np.zeros((0,), np.float32)),
    (Box("mask", ((0, 2),)), np.asarray([True, False])),
  ]
  shard_files.write(folder, iter(shards), header=header or {"a": 1})
  return shards


def test_shards_are_read_as_written(tmp_path):
  shards = _write(tmp_path / "save", header={"data": {"batch": 3}})
  index = shard_files.read_index(tmp_path / "save")
  assert index.header == {"data": {"batch": 3}}
  for (box, values), shard in zip(shards, index.shards, strict=True):
    assert shard.box == box
    assert shard.is_intact()
    found = shard.read()
    assert found.dtype == values.dtype
    np.testing.assert_array_equal(found, values)


def test_a_changed_byte_damages_one_shard(tmp_path):
  _write(tmp_path / "save")
  path = tmp_path / "save" / "data.bin"
  content = bytearray(path.read_bytes())
  content[25] ^= 4  # In the second shard, after 24 bytes.
  path.write_bytes(content)
  index = shard_files.read_index(tmp_path / "save")
  assert [each.is_intact() for each in index.shards] == [
    *(True, False, True, True, True)
  ]


def test_a_shorter_file_damages_the_last_shards(tmp_path):
  _write(tmp_path / "save")
  path = tmp_path / "save" / "data.bin"
  path.write_bytes(path.read_bytes()[:30])
  index = shard_files.read_index(tmp_path / "save")
  assert [each.is_intact() for each in index.shards] == [
    *(True, True, False, True, False)
  ]


@pytest.mark.parametrize(
  "damage",
  [
    pytest.param(lambda text: text[:-9], id="cut"),
    pytest.param(lambda text: text.replace("7", "8", 1), id="changed"),
    pytest.param(lambda text: "[]", id="other"),
    pytest.param(
      lambda text: json.dumps({"crc32": 0, "content": json.loads(text)}),
      id="nested",
    ),
    pytest.param(lambda text: None, id="missing"),
  ],
)
def test_a_damaged_index_is_none(damage, tmp_path):
  _write(tmp_path / "save", header={"step": 7})
  path = tmp_path / "save" / "index.json"
  text = damage(path.read_text())
  path.unlink()
  if text is not None:
    path.write_text(text)
  assert shard_files.read_index(tmp_path / "save") is None


def test_an_interrupted_write_has_no_index(tmp_path):
  def shards():
    yield Box("w", ((0, 2),)), np.zeros(2, np.float32)
    raise OSError("the disk is full")

  with pytest.raises(OSError, match="full"):
    shard_files.write(tmp_path / "save", shards(), header={})
  assert shard_files.read_index(tmp_path / "save") is None


def test_boxes_overlap_as_index_sets_do():
  random = np.random.default_rng(0)

  def draw():
    begin, end = np.sort(random.integers(0, 6, (2, 2)), axis=0)
    return Box("w", tuple(zip(begin.tolist(), (end + 1).tolist(), strict=True)))

  grid = np.arange(49).reshape(7, 7)
  for _ in range(200):
    a, b = draw(), draw()
    whole = Box("w", ((0, 7), (0, 7)))
    expected = set(grid[a.within(whole)].flat) & set(grid[b.within(whole)].flat)
    common = a.overlap(b)
    if common is None:
      assert not expected
      continue
    assert set(grid[common.within(whole)].flat) == expected
    part = grid[a.within(whole)][common.within(a)]
    assert set(part.flat) == expected
    assert common.size == len(expected)

"""Tests of reading and writing arrays in blocks."""

import itertools

from etils import epath
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.runner import user_error
from paxon.runner.checkpoints import checkpointer, lazy_array, stored_checkpoint
from paxon.sharding import variables
from paxon.tools.pax_checkpoints import (
  array_blocks,
  axis_pattern,
  pax_files,
  testing,
)

NAME = "mdl_vars.params.w"


def _write(folder, value, chunks=None, **options):
  state = testing.make_state({"w": value})
  testing.write(folder, state, kind="zarr", **options)
  if chunks is not None:
    (items,) = folder.glob("*/state")
    for file in (items / NAME).iterdir():
      file.unlink()
    testing.write_array(items, "zarr", NAME, value, chunks=chunks)
  return pax_files.open_checkpoint(epath.Path(folder)).arrays[NAME]


def _make(parts, text, sizes, *, shape, **options):
  pattern = axis_pattern.parse(text)
  fields = {
    "entry": None,
    "num_layers": None,
    "mean_axis": None,
    "is_padding_zero": True,
    "dtype": np.dtype("f4"),
    "factor": 1.0,
    "shift": 0.0,
  }
  conversion = array_blocks.Conversion(
    pattern=pattern, sizes=sizes, **{**fields, **options}
  )
  return array_blocks.make(parts, conversion, shape=shape)


@pytest.mark.parametrize("region", [16, 200, 1 << 24])
@pytest.mark.parametrize(
  "chunks", list(itertools.product((1, 3), (2, 6), (1, 4, 5, 8, 24)))
)
def test_any_chunks_give_the_same_array(chunks, region, tmp_path, monkeypatch):
  monkeypatch.setattr(array_blocks, "_REGION", region)
  # Layers, embed, and heads with their features.
  x = np.arange(3 * 6 * 24, dtype="f4").reshape(3, 6, 24)
  array = _write(tmp_path, x, chunks)
  found = _make(
    [array_blocks.Part(array=array, layers={0: 1, 2: 0}, index=0)],
    "D (N H) -> N H D",
    {"D": 5, "N": 5, "H": 4},
    shape=(2, 5, 4, 5),
    num_layers=2,
    is_padding_zero=False,
    factor=0.5,
    shift=1.0,
  )
  seen = np.zeros(found.shape, int)
  result = np.zeros(found.shape, "f4")
  starts = []
  for where, block in found.read():
    seen[where] += 1
    result[where] = block
    starts.append([part.start for part in where])
  np.testing.assert_array_equal(seen, 1)
  expected = x[[2, 0], :5, :20].reshape(2, 5, 5, 4)
  expected = np.einsum("LDNH->LNHD", expected) * 0.5 + 1
  np.testing.assert_array_equal(result, expected)
  # No two blocks share a chunk.
  np.testing.assert_array_equal(np.asarray(starts) % found.chunks, 0)


def test_layers_in_order_stay_together_and_chunks_are_small(
  tmp_path, monkeypatch
):
  monkeypatch.setattr(array_blocks, "_REGION", 64)
  x = np.arange(4 * 2 * 6, dtype="f4").reshape(4, 2, 6)
  array = _write(tmp_path, x, (4, 2, 2))
  found = _make(
    [array_blocks.Part(array=array, layers=dict(enumerate(range(4))), index=0)],
    "D F -> F D",
    {"D": 2, "F": 6},
    shape=(4, 6, 2),
    num_layers=4,
  )
  assert found.chunks == (4, 2, 2)
  assert len(list(found.read())) == 3
  monkeypatch.setattr(array_blocks, "_REGION", 16)
  array = _write(tmp_path / "whole", x, (4, 2, 6))
  found = _make(
    [array_blocks.Part(array=array, layers=dict(enumerate(range(4))), index=0)],
    "D F -> F D",
    {"D": 2, "F": 6},
    shape=(4, 6, 2),
    num_layers=4,
  )
  assert found.chunks == (1, 2, 2)


def test_padding_is_checked_in_each_region(tmp_path, monkeypatch):
  monkeypatch.setattr(array_blocks, "_REGION", 16)
  x = np.zeros((4, 8), "f4")
  x[1, 7] = 1
  array = _write(tmp_path, x, (1, 4), version=1.0)
  part = array_blocks.Part(array=array, layers={0: 0}, index=0)
  found = _make([part], "D V -> V D", {"D": 4, "V": 4}, shape=(4, 4))
  with pytest.raises(user_error.UserError, match="not zero, so it is no padd"):
    found.to_numpy()


def test_blocks_are_restored_like_whole_arrays(tmp_path):
  x = np.arange(24, dtype="f4").reshape(4, 6).astype(jnp.bfloat16)
  spec = variables.VariableSpec("params/a", (4, 6), x.dtype, (None, None))

  def read():
    for i in range(0, 4, 2):
      yield (slice(i, i + 2), slice(0, 6)), x[i : i + 2]

  def save(folder, read):
    blocks = lazy_array.Blocks(
      shape=(4, 6), dtype=x.dtype, chunks=(2, 3), read=read
    )
    tree = [
      lazy_array.LazyArray(shape=(4, 6), dtype=x.dtype, read=lambda: blocks)
    ]
    with checkpointer.Checkpointer(folder, lazy=True) as target:
      target.save(0, tree, specs=[spec], data={})

  folder = epath.Path(tmp_path / "a")
  save(folder, read)
  sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  with checkpointer.Checkpointer(folder, read_only=True) as source:
    found = source.restore(0, specs=[spec], shardings=[sharding]).tree
  np.testing.assert_array_equal(found[0], x)
  stored = stored_checkpoint.find_checkpoint(folder)
  again = stored_checkpoint.read_numpy(stored, ["params/a"])["params/a"]
  np.testing.assert_array_equal(again, x)
  with pytest.raises(checkpointer.SaveError, match="have 12 values"):
    save(epath.Path(tmp_path / "b"), lambda: itertools.islice(read(), 1))

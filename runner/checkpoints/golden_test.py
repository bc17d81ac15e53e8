"""Tests that stored checkpoints stay readable."""

import json
import pathlib
import shutil

from etils import epath
import jax
import numpy as np
import pytest

from paxon.runner.checkpoints import checkpointer, golden, named_tree

# Written here by hand, so that no change of a formula changes what is expected.
UP = np.arange(24).reshape(2, 3, 4)
EXPECTED = {
  "count": np.arange(5, dtype=np.uint32),
  "mask": np.array([False, True, False, True, False]),
  "moments": ((UP + 2) / 4,),
  "params": [
    (UP + 3) / 4,
    (np.arange(6).reshape(2, 3) + 4) / 4,
    (np.arange(4) + 5) / 4,
  ],
  "step": np.int32(6),
}


def _restore(folder):
  specs = golden.specs()
  place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  with checkpointer.Checkpointer(
    epath.Path(folder), read_only=True
  ) as checkpoints:
    assert checkpoints.steps() == [golden.STEP]
    return checkpoints.restore(
      golden.STEP, specs=specs, shardings=jax.tree.map(lambda _: place, specs)
    )


def _assert_is_golden(restored):
  assert (restored.step, restored.data) == (golden.STEP, golden.DATA)
  assert jax.tree.structure(restored.tree) == jax.tree.structure(EXPECTED)
  for spec, actual, expected in zip(
    jax.tree.leaves(golden.specs()),
    jax.tree.leaves(restored.tree),
    jax.tree.leaves(EXPECTED),
    strict=True,
  ):
    assert (actual.shape, actual.dtype) == (spec.shape, spec.dtype), spec.name
    exact = np.asarray(expected).astype(spec.dtype)
    assert np.asarray(actual).tobytes() == exact.tobytes(), spec.name


def _metadata_file(folder):
  return folder / str(golden.STEP) / "metadata" / "metadata"


def test_golden_checkpoint_is_restored_bit_for_bit(tmp_path):
  golden.extract(epath.Path(tmp_path))
  version = json.loads(_metadata_file(tmp_path).read_text())["format_version"]
  assert version == named_tree.FORMAT_VERSION
  _assert_is_golden(_restore(tmp_path))


def test_golden_checkpoint_is_the_only_one_and_small():
  [file] = pathlib.Path(golden.archive_path()).parent.iterdir()
  assert file.stat().st_size < 25_000


def test_written_checkpoint_has_the_format_of_the_golden(tmp_path):
  today, before = epath.Path(tmp_path / "a"), epath.Path(tmp_path / "b")
  golden.write(today)
  _assert_is_golden(_restore(today))
  golden.extract(before)
  written, stored = (
    json.loads(_metadata_file(folder).read_text()) for folder in (today, before)
  )
  assert written.keys() == stored.keys()
  assert written["arrays"] == stored["arrays"]


def test_another_version_is_rejected_in_one_line(tmp_path, monkeypatch):
  monkeypatch.setattr(
    named_tree, "FORMAT_VERSION", named_tree.FORMAT_VERSION + 1
  )
  golden.write(epath.Path(tmp_path))
  monkeypatch.undo()
  with pytest.raises(
    named_tree.CheckpointMismatchError,
    match=r"/7 has format version 3, but this program reads version 2 only\.$",
  ) as caught:
    _restore(tmp_path)
  assert "\n" not in str(caught.value)


def test_another_version_without_a_manifest_is_rejected_as_such(tmp_path):
  golden.write(epath.Path(tmp_path))
  stored = _metadata_file(tmp_path)
  metadata = json.loads(stored.read_text())
  stored.write_text(json.dumps({**metadata, "format_version": 1}))
  shutil.rmtree(tmp_path / str(golden.STEP) / "manifest")
  with pytest.raises(
    named_tree.CheckpointMismatchError, match="has format version 1, but"
  ):
    _restore(tmp_path)

"""Tests that checkpoints of all format versions load, and no newer one."""

import json
import pathlib

from etils import epath
import jax
import numpy as np
import pytest

from paxon.runner.checkpoints import checkpointer, compatibility, golden

VERSIONS = range(1, compatibility.FORMAT_VERSION + 1)
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


@pytest.mark.parametrize("version", VERSIONS)
def test_a_golden_checkpoint_loads_bit_for_bit(version, tmp_path):
  golden.extract(version, epath.Path(tmp_path))
  stored = tmp_path / str(golden.STEP) / "metadata" / "metadata"
  assert json.loads(stored.read_text())["format_version"] == version
  _assert_is_golden(_restore(tmp_path))


def test_all_goldens_are_here_and_small():
  files = list(pathlib.Path(golden.archive_of(1)).parent.iterdir())
  assert sorted(f.name for f in files) == [f"v{v}.zip" for v in VERSIONS]
  assert sum(f.stat().st_size for f in files) < 50_000


def test_what_is_written_today_is_the_newest_golden(tmp_path):
  today, before = epath.Path(tmp_path / "a"), epath.Path(tmp_path / "b")
  golden.write(today)
  _assert_is_golden(_restore(today))
  golden.extract(compatibility.FORMAT_VERSION, before)
  described = []
  for folder in (today, before):
    with checkpointer.Checkpointer(folder, read_only=True) as checkpoints:
      described.append(checkpoints.describe(golden.STEP))
  written, stored = described
  assert written.keys() == stored.keys()
  assert written["arrays"] == stored["arrays"]


def test_a_newer_version_is_refused_in_one_line(tmp_path, monkeypatch):
  monkeypatch.setattr(
    compatibility, "FORMAT_VERSION", compatibility.FORMAT_VERSION + 1
  )
  golden.write(epath.Path(tmp_path))
  monkeypatch.undo()
  with pytest.raises(
    compatibility.CheckpointMismatchError,
    match=r"/7 has format version 3; this program reads versions 1 to 2\.$",
  ) as caught:
    _restore(tmp_path)
  assert "\n" not in str(caught.value)

"""Tests that damage to a checkpoint is found, wherever it is."""

import json
import os
import pathlib
import re
import shutil

from etils import epath
import jax
import numpy as np
import pytest

from paxon.runner import user_error
from paxon.runner.checkpoints import checkpointer, golden, manifest, named_tree

STEP = golden.STEP
# Orbax writes them after the last item; nothing is read from them.
MARKS = (
  "_CHECKPOINT_METADATA",
  "commit_success.txt",
  "manifest/commit_success.txt",
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
  folder = tmp_path_factory.mktemp("whole")
  golden.write(epath.Path(folder))
  return folder


@pytest.fixture
def copy(whole, tmp_path):
  shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
  return tmp_path


def _files(folder: pathlib.Path) -> list[str]:
  """The files of the items; those in `d` have random names."""
  top = folder / str(STEP)
  names = (
    os.fspath(path.relative_to(top))
    for path in top.rglob("*")
    if path.is_file() and path.parent != top
  )
  return sorted(name for name in names if name not in MARKS)


def _restore(folder):
  shardings = jax.tree.map(
    lambda _: jax.sharding.SingleDeviceSharding(jax.devices()[0]),
    golden.specs(),
  )
  with checkpointer.Checkpointer(
    epath.Path(folder), read_only=True
  ) as checkpoints:
    return checkpoints.restore(STEP, specs=golden.specs(), shardings=shardings)


def _verify(folder):
  with checkpointer.Checkpointer(
    epath.Path(folder), read_only=True
  ) as checkpoints:
    checkpoints.verify(STEP)


def _removed(path: pathlib.Path) -> str:
  path.unlink()
  return "is missing"


def _cut_off(path: pathlib.Path) -> str:
  content = path.read_bytes()
  path.write_bytes(content[: len(content) // 2])
  half, size = len(content) // 2, len(content)
  return f"has {half:,} bytes instead of {size:,}"


def _grown(path: pathlib.Path) -> str:
  content = path.read_bytes()
  path.write_bytes(content + b"\n")
  return f"has {len(content) + 1:,} bytes instead of {len(content):,}"


def _bit_flipped(path: pathlib.Path) -> str:
  content = bytearray(path.read_bytes())
  content[len(content) // 2] ^= 0x10
  path.write_bytes(content)
  return "checksum mismatch"


@pytest.mark.parametrize("damage", [_removed, _cut_off, _grown, _bit_flipped])
def test_damage_of_any_file_is_found_and_named(whole, tmp_path, damage):
  names = _files(whole)
  assert any(name.startswith("state/ocdbt.process_0/d/") for name in names)
  for number, name in enumerate(names):
    is_manifest = name == f"manifest/{manifest.FILE_NAME}"
    if is_manifest and damage == _grown:
      # An empty line more: what it says is unchanged.
      continue
    folder = tmp_path / str(number)
    shutil.copytree(whole, folder)
    problem = damage(folder / str(STEP) / name)
    if is_manifest and damage != _removed:
      # It is no JSON, or its own checksum differs.
      problem = ""
    message = f"/{STEP} is damaged: {re.escape(name)}.*{re.escape(problem)}"
    with pytest.raises(checkpointer.DamagedCheckpointError, match=message):
      _verify(folder)
    with pytest.raises(checkpointer.DamagedCheckpointError, match=message):
      _restore(folder)


def test_intact_checkpoint_is_verified_and_lists_its_arrays(whole):
  _verify(whole)
  stored = whole / str(STEP) / "metadata" / "metadata"
  metadata = json.loads(stored.read_text())
  assert metadata["format_version"] == named_tree.FORMAT_VERSION
  assert metadata["step"] == STEP
  assert metadata["arrays"] == named_tree.describe(golden.specs())
  text = (whole / str(STEP) / "manifest" / manifest.FILE_NAME).read_text()
  sizes = {name: entry.size for name, entry in manifest.from_text(text).items()}
  assert sizes == {
    name: (whole / str(STEP) / name).stat().st_size
    for name in _files(whole)
    if not name.startswith("manifest/")
  }


@pytest.mark.parametrize("name", MARKS)
@pytest.mark.parametrize("damage", [_cut_off, _bit_flipped])
def test_damage_to_orbax_files_cannot_change_values(copy, name, damage):
  damage(copy / str(STEP) / name)
  try:
    restored = _restore(copy)
  except checkpointer.DamagedCheckpointError:
    return
  jax.tree.map(np.testing.assert_array_equal, restored.tree, golden.values())


def test_damaged_checkpoint_can_be_skipped_and_saved_again(copy):
  specs, values = golden.specs(), golden.values()
  with checkpointer.Checkpointer(epath.Path(copy)) as checkpoints:
    checkpoints.save(STEP - 2, values, specs=specs, data={})
    checkpoints.wait()
    _bit_flipped(copy / str(STEP) / "metadata" / "metadata")
    checkpoints.skip(STEP)
    assert checkpoints.steps() == [STEP - 2]
    assert checkpoints.latest_step() == STEP - 2
    # Orbax alone would refuse a step before the newest one.
    checkpoints.save(STEP - 1, values, specs=specs, data={})
    checkpoints.wait()
    assert (copy / str(STEP)).exists()
    checkpoints.save(STEP, values, specs=specs, data={"anew": 1})
    checkpoints.wait()
    assert checkpoints.steps() == [STEP - 2, STEP - 1, STEP]
    checkpoints.verify(STEP)
  assert _restore(copy).data == {"anew": 1}


def test_a_copy_is_no_checkpoint_of_another_step(copy):
  shutil.copytree(copy / str(STEP), copy / str(STEP + 5))
  with checkpointer.Checkpointer(epath.Path(copy), read_only=True) as opened:
    assert opened.steps() == [STEP, STEP + 5]
    opened.verify(STEP)
    with pytest.raises(
      checkpointer.DamagedCheckpointError,
      match=f"{STEP + 5} is damaged: it is a copy of the checkpoint of step",
    ):
      opened.verify(STEP + 5)


def test_a_checkpoint_of_another_run_is_found(copy, tmp_path_factory):
  other = epath.Path(tmp_path_factory.mktemp("other"))
  golden.write(other)
  later = STEP + 5
  # The same run saves two; the other one's has the later step as its own.
  for folder in (epath.Path(copy), other):
    with checkpointer.Checkpointer(folder) as opened:
      opened.save(
        later, golden.values(), specs=golden.specs(), data={"read": 1}
      )
  with checkpointer.Checkpointer(epath.Path(copy), read_only=True) as opened:
    opened.verify(later)
  shutil.rmtree(copy / str(later))
  shutil.copytree(other / str(later), copy / str(later))
  with checkpointer.Checkpointer(epath.Path(copy), read_only=True) as opened:
    opened.verify(STEP)
    with pytest.raises(
      checkpointer.DamagedCheckpointError,
      match=f"belongs to another run than the checkpoint of step {STEP}",
    ):
      opened.verify(later)


def test_wrong_times_are_an_error_that_names_the_file(copy):
  path = copy / str(STEP) / "_CHECKPOINT_METADATA"
  path.write_text("true")
  with pytest.raises(user_error.UserError, match=f"listed: {path} is damaged"):
    _verify(copy)
  path.unlink()
  _verify(copy)


def test_several_problems_are_counted(copy):
  for name in ("data/metadata", "state/_METADATA", "state/_sharding"):
    (copy / str(STEP) / name).unlink()
  with pytest.raises(
    checkpointer.DamagedCheckpointError,
    match=r"data/metadata is missing \(and 2 more\)",
  ):
    _verify(copy)


def test_missing_checkpoint_is_named(copy):
  with (
    checkpointer.Checkpointer(epath.Path(copy), read_only=True) as checkpoints,
    pytest.raises(
      checkpointer.DamagedCheckpointError,
      match=r"/99 was deleted by its run while it was read",
    ),
  ):
    checkpoints.verify(99)


def test_large_file_is_read_in_chunks(tmp_path):
  content = np.random.default_rng(0).bytes((9 << 20) + 5)
  (tmp_path / "a").mkdir()
  (tmp_path / "a" / "large").write_bytes(content)
  (tmp_path / "empty").write_bytes(b"")
  folder = epath.Path(tmp_path)
  entries = manifest.compute(folder, names=["empty", "a"])
  assert list(entries) == ["a/large", "empty"]
  # By the definition of CRC-32, bit by bit, of the bytes 0 to 8.
  assert entries["empty"] == manifest.Entry(0, 0)
  assert entries["a/large"].size == len(content)
  assert manifest.find_problems(folder, entries) == []
  (tmp_path / "a" / "large").write_bytes(content[:-1] + b"\0")
  assert manifest.find_problems(folder, entries) == [
    "a/large: checksum mismatch"
  ]


def test_checksums_are_crc32_by_its_definition(tmp_path):
  content = bytes(range(200))
  register = 0xFFFFFFFF
  for byte in content:
    register ^= byte
    for _ in range(8):
      register = (register >> 1) ^ (0xEDB88320 if register & 1 else 0)
  (tmp_path / "file").write_bytes(content)
  entries = manifest.compute(epath.Path(tmp_path), names=["file"])
  assert entries == {"file": manifest.Entry(200, register ^ 0xFFFFFFFF)}


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"crc32": 1, "files": {}}'])
def test_invalid_manifest_is_rejected(text):
  with pytest.raises(manifest.UnreadableManifestError):
    manifest.from_text(text)


def test_manifest_round_trip():
  entries = {"a/b": manifest.Entry(3, 5), "caf\u00e9": manifest.Entry(0, 0)}
  assert manifest.from_text(manifest.to_text(entries)) == entries


def test_manifest_is_written_last(tmp_path):
  handler = manifest.ManifestHandler(["state"])
  (tmp_path / "manifest").mkdir()
  with pytest.raises(
    ValueError, match=r"items \['state'\] .* must be finalized"
  ):
    handler.finalize(epath.Path(tmp_path / "manifest"))

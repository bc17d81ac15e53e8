"""Tests for batches with what a teacher predicts."""

import os

import numpy as np
import pytest

from paxon.inputs import byte_tokenizer, packed_input, teacher_input
from paxon.inputs.sources import example_source


def _text(**knobs):
  documents = [f"document {n} " * (1 + n % 3) for n in range(20)]
  return packed_input.pack_documents(
    source=example_source.InMemoryDocuments(documents),
    tokenizer=byte_tokenizer.ByteTokenizer(),
    length=16,
    shuffle_seed=3,
    **{"global_batch_size": 4, **knobs},
  )


def _predictions(batch, top=2):
  ids = np.stack([batch["targets"], batch["inputs"]], axis=-1)[..., :top]
  return ids, -ids.astype(np.float32) / 256


def _input(folder, text=None, **fields):
  text = text or _text()
  return teacher_input.TeacherInput(
    **{
      "text": text,
      "folder": os.fspath(folder),
      "teacher": "a",
      "temperature": 2.0,
      "global_batch_size": text.global_batch_size,
      "length": text.length,
      **fields,
    }
  )


def _writer(folder, **fields):
  facts = {"teacher": "a", "temperature": 2.0}
  given = {"num_batches": 6, "facts": facts, "top": 2, **fields}
  return teacher_input.Writer(os.fspath(folder), **given)


def _write(writer, indices):
  text = _text()
  for index in range(indices.stop):
    batch = text.get_next()
    if index in indices:
      ids, log_probs = _predictions(batch)
      writer.write(index, batch, ids=ids, log_probs=log_probs)


@pytest.fixture(name="folder", scope="module")
def _folder(tmp_path_factory):
  folder = tmp_path_factory.mktemp("teacher") / "folder"
  writer = _writer(folder)
  _write(writer, range(6))
  writer.finish()
  return folder


def test_an_interrupted_folder_is_continued(folder, tmp_path, monkeypatch):
  monkeypatch.setattr(teacher_input, "SAVE_SECONDS", 0.0)
  _write(_writer(tmp_path / "new"), range(4))
  text, digest = _text(), 0
  for _ in range(4):
    digest = teacher_input.add_digest(text.get_next(), digest)
  writer = _writer(tmp_path / "new")
  assert (writer.done, writer.digest) == (4, digest)
  assert not (tmp_path / "new").exists()
  # Another process counts, and touches no file.
  assert _writer(tmp_path / "new", is_first=False).done == 0
  _write(writer, range(4, 6))
  writer.finish()
  found, whole = (
    {path.name: path.read_bytes() for path in each.iterdir()}
    for each in (tmp_path / "new", folder)
  )
  assert found == whole


@pytest.mark.parametrize(
  "other", [{"top": 1}, {"num_batches": 7}, {"facts": {"teacher": "b"}}]
)
def test_an_interrupted_folder_of_another_kind(tmp_path, monkeypatch, other):
  monkeypatch.setattr(teacher_input, "SAVE_SECONDS", 0.0)
  _write(_writer(tmp_path / "new"), range(2))
  assert _writer(tmp_path / "new").done == 2
  assert _writer(tmp_path / "new", **other).done == 0


def test_each_batch_has_its_predictions_after_resuming_too(folder):
  given = _input(folder)
  given.check_readable()
  for index in range(6):
    state = given.get_state()
    batch = given.get_next()
    ids, log_probs = _predictions(batch)
    np.testing.assert_array_equal(batch[teacher_input.IDS], ids)
    np.testing.assert_array_equal(batch[teacher_input.LOG_PROBS], log_probs)
    resumed = _input(folder)
    resumed.set_state(state)
    for name, value in resumed.get_next().items():
      np.testing.assert_array_equal(value, batch[name], err_msg=str(index))
  with pytest.raises(ValueError, match=r"predictions of 6 batches, and"):
    given.get_next()
  given.reset()
  given.get_next()
  with pytest.raises(ValueError, match=r"keys \['batch', 'text'\], got"):
    given.set_state({"batch": 1})


def test_hosts_share_a_batch(folder):
  whole = _input(folder).get_next()
  for host in range(2):
    part = _input(folder)
    part.set_infeed_hosts(infeed_host_index=host, num_infeed_hosts=2)
    for name, value in part.get_next().items():
      np.testing.assert_array_equal(value, whole[name][2 * host : 2 * host + 2])


def test_what_does_not_belong_together(folder, tmp_path):
  with pytest.raises(ValueError, match=r"has no predictions of a teacher"):
    _input(tmp_path).check_readable()
  with pytest.raises(ValueError, match=r"with teacher a, and this run has b"):
    _input(folder, teacher="b").check_readable()
  with pytest.raises(ValueError, match=r"with temperature 2.0, and .* has 1.0"):
    _input(folder, temperature=1.0).check_readable()
  with pytest.raises(ValueError, match=r"batches of 4 .* this run has 2 of 16"):
    _input(folder, _text(global_batch_size=2)).check_readable()
  with pytest.raises(ValueError, match=r"must be that of its text, 16"):
    _input(folder, length=8)
  other = _text()
  other.get_next()
  with pytest.raises(ValueError, match=r"predictions of another text at batch"):
    _input(folder, other).get_next()

"""Tests for tokenizing a corpus: same bytes, resuming, and errors."""

import dataclasses
import gzip
import json
import os
import pathlib
import tracemalloc
import zlib

import hypothesis
from hypothesis import strategies as st
import pytest

from paxon.inputs import byte_tokenizer, tokenizer_protocol
from paxon.inputs.sources import corpus_shards, corpus_tokenizer, token_file

_LINES = [f"line {i} " + "x" * (i * i % 37) for i in range(60)]
_TEXT = "\n".join(_LINES[:30]) + "\n\n \n" + "\n".join(_LINES[30:])


@dataclasses.dataclass(frozen=True)
class Stops(byte_tokenizer.ByteTokenizer):
  """A byte tokenizer that raises at certain text, to simulate a kill."""

  at: bytes

  def encode(self, text):
    if isinstance(text, bytes) and self.at in text:
      raise RuntimeError("stopped")
    return super().encode(text)


def _corpus(paths, form=corpus_shards.Form.LINE, **kwargs):
  defaults = {
    "tokenizer": byte_tokenizer.ByteTokenizer(),
    "shard_bytes": 100,
  }
  return corpus_tokenizer.Corpus(
    paths=[str(p) for p in paths], form=form, **defaults | kwargs
  )


def _bytes(path):
  return [pathlib.Path(f"{path}{e}").read_bytes() for e in (".bin", ".idx")]


def _documents(path) -> list[bytes]:
  tokens = token_file.TokenFile(path=str(path))
  decode = byte_tokenizer.ByteTokenizer().decode_bytes
  return [decode(tokens.tokens(i)) for i in range(len(tokens))]


@pytest.fixture
def text(tmp_path):
  path = tmp_path / "text.txt"
  path.write_text(_TEXT)
  return path


@pytest.mark.parametrize("num_workers", [0, 2])
def test_output_does_not_depend_on_workers(tmp_path, text, num_workers):
  expected = tmp_path / "expected"
  corpus_tokenizer.run(_corpus([text], shard_bytes=10**6), str(expected))
  assert _documents(expected) == [line.encode() for line in _LINES]
  seen = []
  last = corpus_tokenizer.run(
    _corpus([text]),
    str(tmp_path / "out"),
    num_workers=num_workers,
    report=seen.append,
  )
  assert _bytes(tmp_path / "out") == _bytes(expected)
  assert last.documents == 60
  # Each document has an end id.
  assert last.tokens == sum(len(line) + 1 for line in _LINES)
  assert [p.bytes_done for p in seen] == sorted(p.bytes_done for p in seen)
  assert seen[-1].bytes_done == seen[-1].bytes_total == len(_TEXT)
  assert not (tmp_path / "out.parts").exists()
  facts = json.loads((tmp_path / "out.json").read_text())
  tokenizer = byte_tokenizer.ByteTokenizer()
  assert tokenizer_protocol.describe(tokenizer).items() <= facts.items()
  assert (facts["has_begin"], facts["has_end"]) == (False, True)


@hypothesis.settings(max_examples=40)
@hypothesis.given(
  data=st.lists(st.sampled_from([b"a", b"bc", b"\n", b" ", b"d\n"])).map(
    b"".join
  ),
  shard_bytes=st.integers(1, 9),
)
def test_byte_ranges_contain_every_line_once(
  tmp_path_factory, data, shard_bytes
):
  path = tmp_path_factory.mktemp("corpus") / "lines"
  path.write_bytes(data)
  form = corpus_shards.Form.LINE
  shards = corpus_shards.cut_shards(
    [str(path)], form=form, shard_bytes=shard_bytes
  )
  found = [
    text
    for shard in shards
    for _, text in corpus_shards.documents(shard, form=form, text_key="text")
  ]
  assert found == [line for line in data.split(b"\n") if line.strip()]


def test_an_interrupted_run_resumes(tmp_path, text):
  expected = tmp_path / "expected"
  corpus_tokenizer.run(_corpus([text]), str(expected), num_workers=0)
  out = tmp_path / "out"
  stopping = _corpus([text], tokenizer=Stops(at=b"line 40"))
  with pytest.raises(RuntimeError, match="stopped"):
    corpus_tokenizer.run(stopping, str(out), num_workers=0)
  whole = sorted(p.name for p in (tmp_path / "out.parts").glob("*.npy"))
  assert whole
  going_on = _corpus([text], tokenizer=Stops(at=b"never"))
  seen = []
  corpus_tokenizer.run(going_on, str(out), num_workers=0, report=seen.append)
  # Finished shards are counted and not repeated.
  assert seen[0].bytes_found == 100 * len(whole)
  assert seen[0].documents > 0
  assert _bytes(out) == _bytes(expected)


def test_a_run_interrupted_during_concatenation_resumes(
  tmp_path, text, monkeypatch
):
  def stop(*_, **__):
    raise RuntimeError("stopped")

  with monkeypatch.context() as patch:
    patch.setattr(corpus_tokenizer.token_file_writer, "write_index", stop)
    with pytest.raises(RuntimeError, match="stopped"):
      corpus_tokenizer.run(_corpus([text]), str(tmp_path / "out"))
  assert (tmp_path / "out.bin").exists()
  corpus_tokenizer.run(_corpus([text]), str(tmp_path / "out"))
  assert _documents(tmp_path / "out") == [line.encode() for line in _LINES]


def test_rejects_resuming_with_other_arguments(tmp_path, text):
  stopping = _corpus([text], tokenizer=Stops(at=b"line 40"))
  with pytest.raises(RuntimeError, match="stopped"):
    corpus_tokenizer.run(stopping, str(tmp_path / "out"), num_workers=0)
  for change in (
    {"shard_bytes": 200},
    {"append_end": False},
    {"tokenizer": byte_tokenizer.ByteTokenizer()},
  ):
    other = dataclasses.replace(stopping, **change)
    with pytest.raises(ValueError, match=r"parts was begun with another "):
      corpus_tokenizer.run(other, str(tmp_path / "out"), num_workers=0)


@pytest.mark.parametrize("is_compressed", [False, True])
def test_lines_of_json(tmp_path, is_compressed):
  rows = [json.dumps({"body": line}) for line in _LINES]
  data = "\n".join(rows).encode()
  path = tmp_path / ("a.jsonl.gz" if is_compressed else "a.jsonl")
  path.write_bytes(gzip.compress(data) if is_compressed else data)
  corpus = _corpus([path], corpus_shards.Form.JSON_LINE, text_key="body")
  corpus_tokenizer.run(corpus, str(tmp_path / "out"), num_workers=0)
  assert _documents(tmp_path / "out") == [line.encode() for line in _LINES]


def test_files_with_begin_and_without_end(tmp_path):
  paths = []
  for i, words in enumerate(["one", " \n", "two", "three"]):
    paths.append(tmp_path / f"{i}.txt")
    paths[-1].write_text(words)
  corpus = _corpus(
    paths,
    corpus_shards.Form.FILE,
    shard_bytes=4,
    append_end=False,
    prepend_begin=True,
  )
  corpus_tokenizer.run(corpus, str(tmp_path / "out"), num_workers=0)
  tokens = token_file.TokenFile(path=str(tmp_path / "out"))
  assert [tokens.tokens(i)[0] for i in range(3)] == [1, 1, 1]
  assert _documents(tmp_path / "out") == [b"one", b"two", b"three"]


@pytest.mark.parametrize(
  ("data", "form", "message"),
  [
    ('{"text": "a"}\n{"x": 1}', "JSON_LINE", r"bad, byte 14: a line has no s"),
    ('{"text": "a"}\n{', "JSON_LINE", r"bad, byte 14: a line is no JSON"),
    (" \n", "LINE", r"The 1 files from .*bad on hold no documents"),
    ("", "FILE", r"hold no documents"),
  ],
)
def test_errors_name_file_and_position(tmp_path, data, form, message):
  path = tmp_path / "bad"
  path.write_text(data)
  corpus = _corpus([path], corpus_shards.Form[form])
  with pytest.raises(ValueError, match=message):
    corpus_tokenizer.run(corpus, str(tmp_path / "out"), num_workers=0)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
@pytest.mark.parametrize("form", ["JSON_LINE", "LINE"])
def test_a_line_is_not_read_beyond_the_limit(tmp_path, monkeypatch, name, form):
  """An archive of blanks is a thousand times as large as its file."""
  monkeypatch.setenv("PAXON_MAX_LINE_BYTES", "2000")
  line = '{"text": "%s"}' % ("x" * 1988)
  long = " " * (1 << 26)
  data = f"{line}\n{long}".encode()
  data = gzip.compress(data) if name.endswith(".gz") else data
  (tmp_path / name).write_bytes(data)
  kind = corpus_shards.Form[form]
  paths = [str(tmp_path / name)]
  (shard,) = corpus_shards.cut_shards(paths, form=kind, shard_bytes=1 << 30)
  found = corpus_shards.documents(shard, form=kind, text_key="text")
  tracemalloc.start()
  assert next(found)[1]
  with pytest.raises(ValueError, match=r"line at byte 2,001 .* 2,000 bytes; P"):
    next(found)
  _, peak = tracemalloc.get_traced_memory()
  tracemalloc.stop()
  assert peak < 1 << 22


def test_a_damaged_archive_is_named(tmp_path):
  path = tmp_path / "a.jsonl.gz"
  path.write_bytes(gzip.compress(b'{"text": "abc"}\n' * 999)[:-20])
  corpus = _corpus([path], corpus_shards.Form.JSON_LINE)
  with pytest.raises(ValueError, match=r"a\.jsonl\.gz is damaged"):
    corpus_tokenizer.run(corpus, str(tmp_path / "out"), num_workers=0)


def test_rejects_invalid_use(tmp_path, text):
  with pytest.raises(ValueError, match=r"paths must not be empty"):
    _corpus([])
  with pytest.raises(ValueError, match=r"shard_bytes must be positive, got 0"):
    _corpus([text], shard_bytes=0)
  (tmp_path / "out.idx").touch()
  with pytest.raises(ValueError, match=r"out\.idx is there already"):
    corpus_tokenizer.run(_corpus([text]), str(tmp_path / "out"))

  class Wrong(byte_tokenizer.ByteTokenizer):
    @property
    def vocab_size(self):
      return 50

  with pytest.raises(ValueError, match=r"text\.txt, byte 0: .* the id \d+, an"):
    corpus_tokenizer.run(
      _corpus([text], tokenizer=Wrong()), str(tmp_path / "o"), num_workers=0
    )


@pytest.mark.parametrize(
  "form", [corpus_shards.Form.LINE, corpus_shards.Form.FILE]
)
def test_an_archive_damaged_in_the_middle_is_named(tmp_path, form):
  whole = gzip.compress(b"\n".join(str(i * i).encode() for i in range(9999)))

  def damaged(place):
    return whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :]

  def is_no_code(data):
    try:
      gzip.decompress(data)
    except zlib.error:
      return True
    except OSError:
      return False  # Changed text, which only the checksum detects.
    return False

  middle = range(len(whole) // 2, len(whole))
  data = next(d for d in map(damaged, middle) if is_no_code(d))
  path = tmp_path / "a.txt.gz"
  path.write_bytes(data)
  with pytest.raises(
    ValueError, match=r"a\.txt\.gz is damaged or cut off: Error -3"
  ):
    corpus_tokenizer.run(
      _corpus([path], form), str(tmp_path / "out"), num_workers=0
    )


def test_rejects_resuming_with_a_changed_file(tmp_path, text):
  stopping = _corpus([text], tokenizer=Stops(at=b"line 40"))
  with pytest.raises(RuntimeError, match="stopped"):
    corpus_tokenizer.run(stopping, str(tmp_path / "out"), num_workers=0)
  text.write_text(_TEXT.replace("line", "rows"))
  os.utime(text, ns=(0, 0))
  with pytest.raises(ValueError, match=r"begun with another files"):
    corpus_tokenizer.run(stopping, str(tmp_path / "out"), num_workers=0)


def test_leftovers_of_a_killed_command_are_removed(tmp_path, text):
  left = tmp_path / "out.parts.done"
  left.mkdir()
  (left / "00000000.bin").touch()
  corpus_tokenizer.run(_corpus([text]), str(tmp_path / "out"), num_workers=0)
  assert _documents(tmp_path / "out") == [line.encode() for line in _LINES]
  assert not left.exists()

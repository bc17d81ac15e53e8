"""Tests for documents in JSON-lines files."""

import gzip
import json
import random
import tracemalloc

import pytest

from paxon.inputs import byte_tokenizer, packed_input
from paxon.inputs.sources import json_lines


def _documents(number: int, seed: int = 0, length: int = 300) -> list[str]:
  rng = random.Random(seed)
  letters = 'abc déφ\n\t"\\ 日本 😀'
  return [
    "".join(rng.choices(letters, k=rng.randrange(length)))
    for _ in range(number)
  ]


def _lines(documents: list[str]) -> bytes:
  rows = [
    json.dumps({"url": "x", "text": text}, ensure_ascii=i % 2 == 0)
    for i, text in enumerate(documents)
  ]
  return "".join(row + "\n" for row in rows).encode()


def _read(files) -> list[str]:
  source = json_lines.JsonLines(files=str(files))
  return [source[i].decode() for i in range(len(source))]


@pytest.mark.parametrize("suffix", [".json", ".jsonl", ".json.gz"])
def test_every_line_of_every_file_is_a_document(tmp_path, suffix):
  documents = _documents(50)
  for number, part in enumerate((documents[:20], documents[20:])):
    data = _lines(part)
    if suffix.endswith("gz"):
      data = gzip.compress(data)
    (tmp_path / f"part-{number}{suffix}").write_bytes(data)
  (tmp_path / "other.txt").write_text("no JSON")
  assert _read(tmp_path / f"part-*{suffix}") == documents


def test_any_order_of_a_large_compressed_file(tmp_path, monkeypatch):
  # Many chunks and saved states with little data.
  monkeypatch.setattr(json_lines, "_CHUNK", 512)
  monkeypatch.setattr(json_lines, "_SPAN", 1000)
  documents = _documents(400)
  path = tmp_path / "part.json.gz"
  path.write_bytes(gzip.compress(_lines(documents)))
  source = json_lines.JsonLines(files=str(path))
  assert len(source) == 400
  order = list(range(400)) * 2
  random.Random(1).shuffle(order)
  for i in order:
    assert source[i].decode() == documents[i]
  # One state is saved per `_SPAN` bytes of text.
  (file,) = source._parts
  assert len(file._starts) > 30


def test_random_access_does_not_read_from_the_start(tmp_path, monkeypatch):
  monkeypatch.setattr(json_lines, "_CHUNK", 512)
  monkeypatch.setattr(json_lines, "_SPAN", 1000)
  decompress, sizes = json_lines._File._decompress, []

  def count(*args):
    for each in decompress(*args):
      sizes.append(len(each[-1]))
      yield each

  monkeypatch.setattr(json_lines._File, "_decompress", count)
  documents = _documents(400)
  path = tmp_path / "part.json.gz"
  path.write_bytes(gzip.compress(_lines(documents), compresslevel=1))
  source = json_lines.JsonLines(files=str(path))
  assert len(source) == 400
  whole = sum(sizes)
  assert whole == len(_lines(documents))
  for index in (399, 200, 0):
    sizes.clear()
    assert source[index].decode() == documents[index]
    # From the state before the document to its end.
    assert 0 < sum(sizes) < whole / 10


@pytest.mark.parametrize("fill", [b"", b"\0" * 1000])
def test_concatenated_gzip_files_are_one(tmp_path, monkeypatch, fill):
  monkeypatch.setattr(json_lines, "_CHUNK", 512)
  monkeypatch.setattr(json_lines, "_SPAN", 100)
  documents = _documents(60)
  path = tmp_path / "part.json.gz"
  parts = [gzip.compress(_lines(documents[i::3])) for i in range(3)]
  path.write_bytes(fill.join(parts) + fill)
  assert _read(path) == documents[::3] + documents[1::3] + documents[2::3]


def test_blank_lines_and_a_missing_last_newline_are_valid(tmp_path):
  path = tmp_path / "a.json"
  path.write_bytes(b'\n{"text": "one"}\r\n\r\n\n{"text": "two"}')
  assert _read(path) == ["one", "two"]


@pytest.mark.parametrize("chunk", [1, 2, 1 << 20])
@pytest.mark.parametrize("end", [b"", b"\n"])
def test_one_character_is_a_line_but_white_space_is_none(
  tmp_path, monkeypatch, chunk, end
):
  monkeypatch.setattr(json_lines, "_CHUNK", chunk)
  path = tmp_path / "a.json"
  path.write_bytes(b'{"text": "one"}\n \n\t\n\r\n{"text": "two"}\n\r' + end)
  assert _read(path) == ["one", "two"]
  path.write_bytes(b'{"text": "one"}\n5' + end)
  with pytest.raises(ValueError, match=r"a\.json: a line has no string 'text'"):
    _read(path)


@pytest.mark.parametrize("chunk", [8, 16, 1 << 20])
@pytest.mark.parametrize("name", ["a.json", "a.json.gz"])
def test_skips_lines_of_blanks(tmp_path, monkeypatch, chunk, name):
  monkeypatch.setattr(json_lines, "_CHUNK", chunk)
  text = b'  \r\n {"text": "one"} \r\n \t\x0b\n \r\n {"text": "two"}\r\n\r   '
  path = tmp_path / name
  path.write_bytes(gzip.compress(text) if name.endswith("gz") else text)
  assert _read(path) == ["one", "two"]
  path.write_bytes(gzip.compress(b"  \r\n") if name.endswith("gz") else b"  ")
  with pytest.raises(ValueError, match=r"holds no documents"):
    _read(path)


def test_a_lone_surrogate_becomes_a_question_mark(tmp_path):
  path = tmp_path / "a.json"
  path.write_bytes(b'{"text": "a\\ud800b"}\n')
  assert _read(path) == ["a?b"]


def test_packed_sequences_can_be_restored(tmp_path):
  path = tmp_path / "a.json.gz"
  path.write_bytes(gzip.compress(_lines(_documents(40))))

  def make():
    return packed_input.pack_documents(
      source=json_lines.JsonLines(files=str(path)),
      tokenizer=byte_tokenizer.ByteTokenizer(),
      global_batch_size=2,
      length=64,
      shuffle_seed=0,
    )

  source = make()
  source.get_next()
  state = source.get_state()
  expected = source.get_next()["inputs"].tolist()
  other = make()
  other.set_state(state)
  assert other.get_next()["inputs"].tolist() == expected


def _write(path, data: bytes) -> str:
  path.write_bytes(data)
  return str(path)


@pytest.mark.parametrize(
  ("data", "name", "message"),
  [
    (b'{"text": "a"}\n{"text": 3}\n', "a.json", r"no string 'text': {\"text\""),
    (
      b'{"title": "a", "n": 3, "body": "b"}\n',
      "a.json",
      r"no string 'text' \(text_key can be one of \['title', 'body'\]\): \{",
    ),
    (b"[1, 2]\n", "a.json", r"a\.json: a line has no string 'text': \[1, 2\]"),
    (b"{text}\n", "a.json", r"a\.json: a line is no JSON \(Expecting"),
    (b"", "a.json", r"a\.json' holds no documents"),
    (b"", "a.json.gz", r"a\.json\.gz' holds no documents"),
    (b"no gzip", "a.json.gz", r"a\.json\.gz is damaged: .*header"),
    (
      gzip.compress(_lines(["abc"] * 99))[:-20],
      "a.json.gz",
      r"a\.json\.gz is cut off",
    ),
  ],
)
def test_rejects_damaged_files(tmp_path, data, name, message):
  path = _write(tmp_path / name, data)
  with pytest.raises(ValueError, match=message):
    _read(path)


def test_rejects_a_damaged_checksum(tmp_path):
  data = bytearray(gzip.compress(_lines(_documents(9))))
  data[-5] ^= 1
  path = _write(tmp_path / "a.json.gz", bytes(data))
  with pytest.raises(ValueError, match=r"damaged: .*check"):
    _read(path)


def test_rejects_missing_files(tmp_path):
  source = json_lines.JsonLines(files=str(tmp_path / "*.json"))
  with pytest.raises(FileNotFoundError, match=r"no file has the name '.*json'"):
    len(source)


@pytest.mark.parametrize("field", ["files", "text_key"])
def test_rejects_empty_fields(field):
  with pytest.raises(
    ValueError, match=rf"JsonLines\.{field} must not be empty"
  ):
    json_lines.JsonLines(**{"files": "a", field: ""})


def test_rejects_an_index_out_of_range(tmp_path):
  source = json_lines.JsonLines(
    files=_write(tmp_path / "a.json", _lines(["a"]))
  )
  with pytest.raises(IndexError, match="no document 1 of 1"):
    source[1]


@pytest.mark.parametrize("chunk", [1, 3, 64])
def test_lines_are_those_of_split(tmp_path, monkeypatch, chunk):
  monkeypatch.setattr(json_lines, "_CHUNK", chunk)
  rng, path = random.Random(0), tmp_path / "x.jsonl"
  pieces = [b"\n", b" ", b"a", b"\r\n", b"ab c", b"  x  ", b"\n\n"]
  for _ in range(60):
    data = b"".join(rng.choices(pieces, k=rng.randrange(40)))
    path.write_bytes(data)
    file = json_lines._File(str(path))
    lines = [file.line(i) for i in range(len(file))]
    assert lines == [each for each in data.split(b"\n") if each.strip()]


@pytest.mark.parametrize("blank", [b" ", b"\n", b" \n", b"\t\r\n"])
def test_blanks_take_no_memory(tmp_path, blank):
  path = tmp_path / "x.jsonl.gz"
  with gzip.open(path, "wb") as file:
    for _ in range(16):
      file.write(blank * (1 << 20))
    file.write(b'\n{"text": "a"}\n')
  tracemalloc.start()
  assert _read(path) == ["a"]
  _, peak = tracemalloc.get_traced_memory()
  tracemalloc.stop()
  assert peak < 256 << 20


def test_a_line_has_a_limit(tmp_path, monkeypatch):
  monkeypatch.setenv("PAXON_MAX_LINE_BYTES", "100")
  path = tmp_path / "x.jsonl"
  path.write_text(" " * 300 + "\n" + "a" * 100 + "\n")
  assert len(json_lines._File(str(path))) == 1
  path.write_text('{"text": "a"}\n{"text": "' + "a" * 100)
  with pytest.raises(ValueError, match=r"x\.jsonl: the line at byte 14 .* 100"):
    _read(path)

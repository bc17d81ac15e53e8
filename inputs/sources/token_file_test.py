"""Tests for token files: the format by hand, every dtype, and damage."""

import os
import pickle
import struct

import numpy as np
import pytest

from paxon.inputs import byte_tokenizer
from paxon.inputs.sources import example_source, token_file, token_file_writer
from paxon.inputs.streams import example_stream

_DOCUMENTS = [np.arange(i, dtype=np.int64) % 100 for i in (3, 0, 5)]


def _write_by_hand(path, *, code, dtype, sequences, documents, extra=b""):
  """Writes both files with `struct`, from the format's description."""
  with open(f"{path}.bin", "wb") as file:
    for ids in sequences:
      file.write(np.asarray(ids).astype(np.dtype(dtype).newbyteorder("<")))
  size, pointers, place = np.dtype(dtype).itemsize, [], 0
  for ids in sequences:
    pointers.append(place)
    place += size * len(ids)
  with open(f"{path}.idx", "wb") as file:
    file.write(b"MMIDIDX\x00\x00")
    file.write(struct.pack("<Q", 1))
    file.write(struct.pack("<B", code))
    file.write(struct.pack("<Q", len(sequences)))
    file.write(struct.pack("<Q", len(documents)))
    for ids in sequences:
      file.write(struct.pack("<i", len(ids)))
    for pointer in pointers:
      file.write(struct.pack("<q", pointer))
    for document in documents:
      file.write(struct.pack("<q", document))
    file.write(extra)


@pytest.fixture
def path(tmp_path):
  return str(tmp_path / "tokens")


@pytest.mark.parametrize(
  ("code", "dtype"),
  [
    (1, "u1"),
    (2, "i1"),
    (3, "i2"),
    (4, "i4"),
    (5, "i8"),
    (6, "f8"),
    (7, "f4"),
    (8, "u2"),
  ],
)
def test_every_dtype_documents_and_sequences(path, code, dtype):
  sequences = [[1, 2, 3], [4], [], [5, 100]]
  _write_by_hand(
    path,
    code=code,
    dtype=dtype,
    sequences=sequences,
    documents=[0, 2, 2, 4],
    extra=bytes(4),  # Modes of sequences.
  )
  documents = token_file.TokenFile(path=f"{path}.bin", vocab_size=101)
  expected = [[1, 2, 3, 4], [], [5, 100]]
  assert [documents.tokens(i).tolist() for i in range(3)] == expected
  assert len(documents) == 3
  assert documents.tokens(0).dtype == np.int32
  assert documents.num_tokens(0) == 3
  single = token_file.TokenFile(
    path=path,
    unit=token_file.Unit.SEQUENCE,
    begin_id=7,
    end_id=8,
    vocab_size=101,
  )
  assert [single.tokens(i).tolist() for i in range(4)] == [
    [7, *ids, 8] for ids in sequences
  ]
  assert [single.num_tokens(i) for i in range(4)] == [4, 2, 1, 3]
  np.testing.assert_array_equal(single[3]["inputs"], [7, 5, 100])
  np.testing.assert_array_equal(single[3]["targets"], [5, 100, 8])
  with pytest.raises(IndexError, match=r"no example 4 of 4"):
    single.tokens(4)
  documents.check()


def test_offsets_beyond_32_bits(path):
  # A sparse file whose second document begins at 5 GB.
  far = 5_000_000_000
  with open(f"{path}.bin", "wb") as file:
    file.seek(far)
    file.write(np.array([3, 4, 5], "<i4"))
  with open(f"{path}.idx", "wb") as file:
    file.write(b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 4, 2, 3))
    file.write(struct.pack("<ii", far // 4, 3))
    file.write(struct.pack("<qq", 0, far))
    file.write(struct.pack("<qqq", 0, 1, 2))
  tokens = token_file.TokenFile(path=path)
  assert tokens.tokens(1).tolist() == [3, 4, 5]
  assert tokens.num_tokens(0) == far // 4 - 1


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_the_writer_writes_the_format(path, tmp_path, dtype):
  token_file_writer.write(path, _DOCUMENTS, dtype=np.dtype(dtype))
  other = str(tmp_path / "other")
  code = {np.uint16: 8, np.int32: 4}[dtype]
  _write_by_hand(
    other,
    code=code,
    dtype=dtype,
    sequences=_DOCUMENTS,
    documents=[0, 1, 2, 3],
  )
  for ending in (".bin", ".idx"):
    with open(path + ending, "rb") as ours, open(other + ending, "rb") as file:
      assert ours.read() == file.read()


def test_the_dtype_is_the_smallest_that_holds_the_ids():
  assert token_file_writer.dtype_for(65536) == np.uint16
  assert token_file_writer.dtype_for(65537) == np.int32


def test_a_tokenizer_counts_bytes_and_must_match_the_file(path):
  tokenizer = byte_tokenizer.ByteTokenizer()
  texts = ["one", "", "three"]
  ids = [np.append(tokenizer.encode(text), 2) for text in texts]
  facts = {
    "tokenizer": "ByteTokenizer",
    "vocab_size": 259,
    "has_begin": False,
    "has_end": True,
  }
  token_file_writer.write(path, ids, dtype=np.dtype(np.uint16), facts=facts)
  tokens = token_file.TokenFile(path=path, begin_id=1, tokenizer=tokenizer)
  tokens.check()
  assert tokens.required_vocab_size() == 259
  text = example_source.TokenizedDocuments(
    source=example_source.InMemoryDocuments(texts), tokenizer=tokenizer
  )
  for i in range(3):
    assert tokens[i].keys() == text[i].keys()
    for key, value in text[i].items():
      np.testing.assert_array_equal(tokens[i][key], value)
  # Another process opens the files again.
  assert "_tables" not in pickle.loads(pickle.dumps(tokens)).__dict__

  facts["probe"] = "0123456789abcdef"
  token_file_writer.write_facts(f"{path}.json", facts)
  with pytest.raises(ValueError, match=r"json: .* with probe 0123456789abcdef"):
    token_file.TokenFile(path=path, tokenizer=tokenizer).check()
  with pytest.raises(ValueError, match=r"end_id is set, and .* have their end"):
    token_file.TokenFile(path=path, end_id=2).check()
  # Only the ids that occur must be in a smaller vocabulary.
  largest = max(map(max, ids))
  token_file.TokenFile(path=path, vocab_size=int(largest) + 1).check()
  smaller = token_file.TokenFile(path=path, vocab_size=int(largest))
  smaller.check()
  assert smaller.tokens(0).tolist() == ids[0].tolist()
  with pytest.raises(
    ValueError, match=rf"document 2 has the id {largest}, and the voc"
  ):
    smaller.tokens(2)


def _cut(path, size):
  os.truncate(path, os.path.getsize(path) - size)


@pytest.mark.parametrize(
  ("damage", "message"),
  [
    (lambda p: os.remove(f"{p}.idx"), r"there is no file .*tokens\.idx; give"),
    (lambda p: os.remove(f"{p}.bin"), r"there is no file .*tokens\.bin; give"),
    (
      lambda p: _cut(f"{p}.bin", 2),
      r"tokens\.bin is cut short: it has 14 .* requires 16; sequence 2 of 3",
    ),
    (
      lambda p: _cut(f"{p}.bin", 12),
      r"it has 4 bytes, .* sequence 0 of 3 is the first",
    ),
    (lambda p: _cut(f"{p}.idx", 1), r"tokens\.idx is cut off: it has \d+ byt"),
    (lambda p: os.truncate(f"{p}.idx", 20), r"cut off within its first bytes"),
    (lambda p: os.truncate(f"{p}.idx", 5), r"is no index of tokens"),
  ],
)
def test_damaged_files_are_named(path, damage, message):
  token_file_writer.write(path, _DOCUMENTS, dtype=np.dtype(np.uint16))
  damage(path)
  with pytest.raises(ValueError, match=message):
    token_file.TokenFile(path=path).check()


@pytest.mark.parametrize(
  ("place", "value", "message"),
  [
    # Sequence 1 of 3, whose tokens are of two bytes.
    ("length", -7, r"sequence 1 has -7 tokens of 2 bytes from byte 6 on"),
    ("length", 6, r"sequence 1 has 6 .* from byte 6 on, and .* at byte 10"),
    ("pointer", 1 << 40, r"sequence 0 has 3 .* 1 begins at byte 1099511627776"),
    ("pointer", -20, r"sequence 0 has 3 .* sequence 1 begins at byte -20"),
    ("pointer", 7, r"sequence 0 has 3 .* sequence 1 begins at byte 7"),
    ("document", 9, r"document 1 has the sequences from 1 to 9, of 3"),
    ("document", 0, r"document 1 has the sequences from 1 to 0, of 3"),
  ],
)
def test_a_damaged_entry_within_the_index_is_named(path, place, value, message):
  sequences = [np.arange(3), np.arange(2), np.arange(3)]
  token_file_writer.write(path, sequences, dtype=np.dtype(np.uint16))
  header = 9 + 8 + 1 + 8 + 8
  offset, form = {
    "length": (header + 4, "<i"),
    "pointer": (header + 12 + 8, "<q"),
    "document": (header + 12 + 24 + 16, "<q"),
  }[place]
  with open(f"{path}.idx", "r+b") as file:
    file.seek(offset)
    file.write(struct.pack(form, value))
  tokens = token_file.TokenFile(path=path)
  for read in (tokens.check, lambda: tokens.tokens(0)):
    with pytest.raises(ValueError, match=rf"tokens\.idx is damaged: {message}"):
      read()


def test_rejects_other_formats(path):
  for version, code in ((2, 4), (1, 9), (1, 0)):
    token_file_writer.write(path, _DOCUMENTS, dtype=np.dtype(np.uint16))
    with open(f"{path}.idx", "r+b") as file:
      file.seek(9)
      file.write(struct.pack("<QB", version, code))
    with pytest.raises(
      ValueError, match=rf"version {version} and dtype {code}"
    ):
      token_file.TokenFile(path=path).check()


def test_rejects_documents_that_do_not_span_the_sequences(path):
  _write_by_hand(
    path, code=4, dtype="i4", sequences=[[1], [2]], documents=[0, 1]
  )
  with pytest.raises(ValueError, match=r"do not span its 2 sequences; .* SEQ"):
    token_file.TokenFile(path=path).check()


@pytest.mark.parametrize(
  ("ids", "dtype", "message"),
  [
    ([5, 99], np.int32, r"document 0 has the id 99, and the vocabulary has 50"),
    ([5, -1], np.int32, r"document 0 has values that are no ids .*from -1 to"),
  ],
)
def test_ids_of_another_vocabulary_name_file_and_record(
  path, ids, dtype, message
):
  _write_by_hand(path, code=4, dtype=dtype, sequences=[ids], documents=[0, 1])
  with pytest.raises(ValueError, match=rf"tokens\.bin: {message}"):
    _ = token_file.TokenFile(path=path, vocab_size=50)[0]


def test_rejects_fractional_ids(path):
  _write_by_hand(path, code=7, dtype="f4", sequences=[[0.5]], documents=[0, 1])
  with pytest.raises(ValueError, match=r"no ids of tokens \(from 0.5 to 0.5"):
    token_file.TokenFile(path=path).tokens(0)


@pytest.mark.parametrize(
  ("make", "message"),
  [
    (
      lambda p: token_file.TokenFile(path=p, vocab_size=0),
      r"vocab_size must be positive, got 0",
    ),
    (
      lambda p: token_file.TokenFile(path=p, vocab_size=5, end_id=5),
      r"end_id must be an id below vocab_size \(5\), got 5",
    ),
    (
      lambda p: token_file_writer.write(
        p, [np.array([300])], dtype=np.dtype(np.uint8)
      ),
      r"from 300 to 300 do not fit in uint8",
    ),
    (
      lambda p: token_file_writer.write_index(
        p,
        dtype=np.dtype(np.uint32),
        lengths=np.zeros(0),
        documents=np.zeros(0),
      ),
      r"cannot hold uint32",
    ),
    (
      lambda p: token_file_writer.write_index(
        p,
        dtype=np.dtype(np.uint16),
        lengths=np.array([1, 1 << 31]),
        documents=np.arange(3),
      ),
      r"Sequence 1 has 2147483648 tokens",
    ),
  ],
)
def test_rejects_invalid_fields(path, make, message):
  with pytest.raises(ValueError, match=message):
    make(path)


@pytest.mark.parametrize("name", ["begin_id", "end_id"])
def test_rejects_added_ids_outside_the_vocabulary(path, name):
  token_file_writer.write(
    path, _DOCUMENTS, dtype=np.dtype(np.uint16), facts={"vocab_size": 300}
  )
  token_file.TokenFile(path=path, **{name: 299}).check()
  token_file.TokenFile(path=path, vocab_size=301, **{name: 300}).check()
  with pytest.raises(ValueError, match=rf"{name} is 300, .* has 300 ids"):
    token_file.TokenFile(path=path, **{name: 300}).check()


def test_rejects_invalid_json_facts(path):
  token_file_writer.write(path, _DOCUMENTS, dtype=np.dtype(np.uint16))
  with open(f"{path}.json", "w") as file:
    file.write("{")
  with pytest.raises(ValueError, match=r"tokens\.json is no JSON"):
    token_file.TokenFile(path=path).check()


def test_another_index_or_other_tokens_are_other_data(path):
  def signature(sequences, documents):
    _write_by_hand(
      path, code=8, dtype="u2", sequences=sequences, documents=documents
    )
    source = token_file.TokenFile(path=path, vocab_size=100)
    return example_stream.Examples(source=source, shuffle_seed=0).signature()

  before = signature([[1, 2], [3, 5]], [0, 1, 2])
  assert before == signature([[1, 2], [3, 5]], [0, 1, 2])
  tokens = signature([[1, 2], [4, 5]], [0, 1, 2])
  assert {k for k in before if before[k] != tokens[k]} == {"content"}
  lengths = signature([[1], [2, 3, 5]], [0, 1, 2])
  assert {k for k in before if before[k] != lengths[k]} == {"content", "index"}


def test_a_file_of_another_index_or_dtype_is_rejected(path):
  sequences = [[1, 2, 3], [4, 5]]

  def write(code=4, dtype="i4", extra=b""):
    _write_by_hand(
      path,
      code=code,
      dtype=dtype,
      sequences=sequences,
      documents=[0, 1, 2],
      extra=extra,
    )

  for code in (1, 3, 5, 6, 8):  # Of other sizes than four bytes.
    write(code=code)
    with pytest.raises(ValueError, match=r"idx is damaged: sequence 0 has 3"):
      token_file.TokenFile(path=path).check()
  write(extra=bytes(1))
  with pytest.raises(ValueError, match=r"83 bytes, .* need 82, or 84 with m"):
    token_file.TokenFile(path=path).check()
  write()
  with open(f"{path}.bin", "ab") as file:
    file.write(bytes(4))
  with pytest.raises(ValueError, match=r"has 24 bytes, .* requires 20: one of"):
    token_file.TokenFile(path=path).check()


def _documents_of(path):
  source = token_file.TokenFile(path=path)
  source.check()
  return [source.tokens(i).tolist() for i in range(len(source))]


@pytest.mark.parametrize("ending", ["idx", "json"])
def test_each_flipped_bit_is_found_or_harmless(path, ending):
  ids = [np.arange(n) for n in (3, 0, 9, 1, 30)]
  facts = {"vocab_size": 500, "has_end": True}
  token_file_writer.write(path, ids, dtype=np.dtype(np.uint16), facts=facts)
  expected = _documents_of(path)
  with open(f"{path}.{ending}", "rb") as file:
    content = file.read()
  found = 0
  for bit in range(8 * len(content)):
    damaged = bytearray(content)
    damaged[bit // 8] ^= 1 << bit % 8
    with open(f"{path}.{ending}", "wb") as file:
      file.write(damaged)
    try:
      assert _documents_of(path) == expected
    except ValueError:
      found += 1
  # White space and the name "checksums" of the facts are not covered.
  assert found >= (8 * len(content) if ending == "idx" else 4 * len(content))


def test_flipped_bits_of_an_index_without_checksum_change_no_length(path):
  ids = [np.arange(n) for n in (3, 0, 9, 1, 30)]
  token_file_writer.write(path, ids, dtype=np.dtype(np.int32))
  with open(f"{path}.idx", "rb") as file:
    content = file.read()
  begin = token_file.HEADER.size
  for bit in range(8 * begin, 8 * (begin + 12 * len(ids))):
    damaged = bytearray(content)
    damaged[bit // 8] ^= 1 << bit % 8
    with open(f"{path}.idx", "wb") as file:
      file.write(damaged)
    with pytest.raises(ValueError, match=r"tokens\."):
      _documents_of(path)


def test_facts_of_older_versions_and_changed_facts(path):
  ids = [np.arange(5)]
  token_file_writer.write(
    path, ids, dtype=np.dtype(np.uint16), facts={"vocab_size": 9}
  )
  source = token_file.TokenFile(path=path)
  assert source.check_tokens() == 5
  with open(f"{path}.bin", "r+b") as file:
    file.write(b"\7")
  source.check()
  with pytest.raises(ValueError, match=r"tokens\.bin is damaged, or of anoth"):
    source.check_tokens()
  facts = {**source.facts, "vocab_size": 8}
  token_file_writer.write_facts(f"{path}.json", facts)
  with pytest.raises(ValueError, match=r"was changed after it was written"):
    token_file.TokenFile(path=path).check()
  facts["checksums"] = {"index": 3}
  token_file_writer.write_facts(f"{path}.json", facts)
  with pytest.raises(ValueError, match=r"checksums must have the keys facts,"):
    token_file.TokenFile(path=path).check()
  token_file_writer.write_facts(f"{path}.json", {"vocab_size": 8})
  old = token_file.TokenFile(path=path)
  assert old.tokens(0).tolist() == [7, 1, 2, 3, 4]
  with pytest.raises(ValueError, match=r"has no checksum of the tokens"):
    old.check_tokens()

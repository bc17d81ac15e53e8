"""Tests for rank files, compared with merges by their definition."""

import base64
import dataclasses
import itertools

import pytest
import regex

from paxon.inputs.tokenizers import load, rank_file, text_tokenizer

_MERGED = (
  *(b"th", b"the", b" the", b"er", b"in", b"\xc3\xbc", b"\xf0\x9f", b"  "),
  *(b"\xf0\x9f\xa6", b"\xf0\x9f\xa6\x8a", b"12", b" t", b"\n\n"),
)
_PATTERN = r" ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+"
_TEXTS = (
  "the other thing is üblich in there",
  "  12 123   🦊 the\n\n<|end|> \x00\u202e",
  "",
)


@pytest.fixture(scope="module", name="path")
def make_file(tmp_path_factory):
  path = tmp_path_factory.mktemp("ranks") / "small.tiktoken"
  _write(path, [*(bytes([i]) for i in range(256)), *_MERGED])
  return str(path)


def _write(path, tokens):
  lines = (f"{base64.b64encode(t).decode()} {i}" for i, t in enumerate(tokens))
  path.write_text("\n".join(lines) + "\n")


@pytest.fixture(name="tokenizer")
def make_tokenizer(path):
  return rank_file.RankFile(
    path=path, pattern=_PATTERN, special_tokens={"<|end|>": 269}, end="<|end|>"
  )


def _merge(piece: bytes) -> list[int]:
  """Merges the pair of the lowest rank until there is none."""
  tokens = [bytes([i]) for i in range(256)] + list(_MERGED)
  ranks = {token: i for i, token in enumerate(tokens)}
  parts = [bytes([byte]) for byte in piece]
  while True:
    pairs = [
      (ranks.get(a + b, 10**6), i)
      for i, (a, b) in enumerate(itertools.pairwise(parts))
    ]
    if not pairs or min(pairs)[0] == 10**6:
      return [ranks[part] for part in parts]
    _, i = min(pairs)
    parts[i : i + 2] = [parts[i] + parts[i + 1]]


def _ids(text):
  pieces = regex.findall(_PATTERN, text)
  return [i for piece in pieces for i in _merge(piece.encode())]


@pytest.mark.parametrize("text", _TEXTS)
def test_ids_are_merges_by_rank(tokenizer, text):
  expected = _ids(text)
  ids = tokenizer.encode(text)
  assert ids.tolist() == expected
  assert tokenizer.decode(ids) == text
  assert tokenizer.byte_counts(ids).sum() == len(text.encode())
  decoder = text_tokenizer.Decoder(tokenizer)
  parts = "".join(decoder.push(number) for number in ids)
  assert parts + decoder.finish() == text


def test_names_of_special_tokens_are_text_in_documents(tokenizer):
  assert 269 not in tokenizer.encode("a<|end|>")
  assert tokenizer.encode_special("a<|end|>").tolist() == [97, 269]
  assert tokenizer.decode([97, 269]) == "a"
  assert (tokenizer.end_id, tokenizer.vocab_size) == (269, 270)


def test_invalid_utf8_is_kept_as_bytes(tokenizer):
  data = b"the \xff\xfe in \xe2\x82"
  ids = tokenizer.encode(data)
  assert tokenizer.decode_bytes(ids) == data
  assert tokenizer.decode(ids) == data.decode(errors="replace")


def test_the_vocabulary_of_qwen_normalizes_texts(path, monkeypatch):
  # As its own tokenizer does before it calls tiktoken.
  known = rank_file._KNOWN[151643]
  assert known.normal_form == "NFC"
  monkeypatch.setitem(
    rank_file._KNOWN,
    256 + len(_MERGED),
    dataclasses.replace(known, special={"<|endoftext|>": 269}),
  )
  tokenizer = load.load(path)
  text = "u\u0308ber Cafe\u0301"
  assert tokenizer.encode(text).tolist() == _ids("\u00fcber Caf\u00e9")
  data = text.encode() + b"\xff"
  assert tokenizer.decode_bytes(tokenizer.encode(data)) == (
    "\u00fcber Caf\u00e9".encode() + b"\xff"
  )
  assert not tokenizer.is_lossless


def test_a_changed_file_is_read_again(tmp_path):
  path = tmp_path / "a.tiktoken"
  hashes = []
  for last in (b"ab", b"cd"):
    _write(path, [*(bytes([i]) for i in range(256)), last])
    tokenizer = rank_file.RankFile(
      path=str(path), pattern=_PATTERN, special_tokens={"<e>": 300}, end="<e>"
    )
    assert tokenizer.encode(last.decode()).tolist() == [256]
    hashes.append(tokenizer.content_hash)
  assert hashes[0] != hashes[1]


@pytest.mark.parametrize(
  ("content", "message"),
  [
    ("YQ== 0\n*** 1\n", ":2 must be a token in base64 and its rank"),
    ("YQ== 0\nYg== 0\n", "two tokens have the same rank"),
    ("YQ== 0\n", "give RankFile.pattern"),
  ],
)
def test_a_damaged_or_unknown_file_is_one_clear_error(
  tmp_path, content, message
):
  path = tmp_path / "a.tiktoken"
  path.write_text(content)
  with pytest.raises(ValueError, match=message):
    load.load(str(path), end="a").encode("a")


def test_all_bytes_must_be_tokens(tmp_path):
  path = tmp_path / "a.tiktoken"
  _write(path, [bytes([i]) for i in range(256) if i != 98])
  tokenizer = rank_file.RankFile(
    path=str(path), pattern=_PATTERN, special_tokens={"<e>": 300}, end="<e>"
  )
  with pytest.raises(ValueError, match=r"a.tiktoken: the byte 98 is no token"):
    tokenizer.encode("b")

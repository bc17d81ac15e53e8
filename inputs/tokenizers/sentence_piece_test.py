"""Tests for SentencePiece models."""

import io
import json

import numpy as np
import pytest
import sentencepiece
import tokenizers
from tokenizers import models, normalizers

from paxon.inputs.tokenizers import load, sentence_piece, text_tokenizer

_LINES = (
  "the quick brown fox jumps over the lazy dog",
  "in the beginning was the word, and the word was with the fox",
  "a fox is a fox is a fox 12 345",
) * 4
_TEXTS = (
  "the fox, and 🦊 the dög",
  "  two  spaces ",
  "敏捷的狐狸🦊🦊 fox 👩‍👩‍👧",
  "",
)


def _train(path, model_type, **options):
  writer = io.BytesIO()
  sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter(_LINES),
    model_writer=writer,
    vocab_size=340,
    model_type=model_type,
    byte_fallback=True,
    hard_vocab_limit=False,
    minloglevel=2,
    **options,
  )
  path.write_bytes(writer.getvalue())
  return path


@pytest.fixture(
  scope="module", name="path", params=["unigram", "bpe", "no_prefix"]
)
def make_model(request, tmp_path_factory):
  folder = tmp_path_factory.mktemp(request.param)
  options = {}
  if request.param == "no_prefix":
    options = {"add_dummy_prefix": False, "remove_extra_whitespaces": False}
  kind = "unigram" if request.param == "unigram" else "bpe"
  return _train(folder / "tokenizer.model", kind, **options)


@pytest.mark.parametrize("text", _TEXTS)
def test_ids_and_text_are_those_of_the_library(path, text):
  library = sentencepiece.SentencePieceProcessor(model_file=str(path))
  tokenizer = load.load(str(path))
  assert isinstance(tokenizer, sentence_piece.SentencePiece)
  assert tokenizer.vocab_size == library.get_piece_size()
  ids = tokenizer.encode(text)
  assert ids.tolist() == library.encode(text)
  assert tokenizer.decode([1, *ids, 2]) == library.decode(ids.tolist())
  assert tokenizer.encode_prompt(text).tolist() == [1, *ids]
  decoder = text_tokenizer.Decoder(tokenizer)
  parts = [decoder.push(number) for number in ids]
  assert "\ufffd" not in "".join(parts)
  assert "".join(parts) + decoder.finish() == tokenizer.decode(ids)


def test_bytes_of_tokens_are_those_of_the_text(path):
  tokenizer = load.load(str(path))
  text = "the fox 🦊 dög"
  # The model may put a space before the text.
  data = tokenizer.decode_bytes(tokenizer.encode(text))
  assert data.removeprefix(b" ") == text.encode()
  counts = tokenizer.byte_counts(tokenizer.encode(text))
  assert counts.sum() == len(data)


def test_incomplete_characters_wait_for_the_end(path):
  tokenizer = load.load(str(path))
  ids = [*tokenizer.encode("fox"), tokenizer.find_id("<0xF0>")]
  more = [*ids, *tokenizer.encode("fox"), tokenizer.find_id("<0x9F>")]
  decoder = text_tokenizer.Decoder(tokenizer)
  assert decoder.push(ids) == "fox"
  assert decoder.push(more[len(ids) :]) + decoder.finish() == (
    tokenizer.decode(more).removeprefix("fox")
  )


def test_special_tokens_are_read_where_asked(path):
  tokenizer = load.load(str(path))
  assert 2 not in tokenizer.encode("fox</s>")
  assert tokenizer.encode_special("fox</s>")[-1] == 2
  assert (tokenizer.begin_id, tokenizer.end_id) == (1, 2)


def test_a_folder_adds_tokens_and_a_policy(path, tmp_path):
  (tmp_path / "tokenizer.model").write_bytes(path.read_bytes())
  size = load.load(str(path)).vocab_size
  added = {"content": "<|user|>", "special": True}
  config = {
    "added_tokens_decoder": {str(size): added},
    "add_bos_token": False,
    "add_eos_token": True,
    "eos_token": "<|user|>",
  }
  (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
  tokenizer = load.load(str(tmp_path))
  assert tokenizer.vocab_size == size + 1
  assert tokenizer.end_id == size
  ids = tokenizer.encode("fox").tolist()
  assert tokenizer.encode_prompt("fox").tolist() == [*ids, size]
  assert tokenizer.decode([*ids, size]) == "fox"
  assert tokenizer.content_hash != load.load(str(path)).content_hash


def test_a_damaged_file_is_one_clear_error(path, tmp_path):
  damaged = tmp_path / "a.model"
  damaged.write_bytes(path.read_bytes()[:100])
  with pytest.raises(ValueError, match="is not a SentencePiece model"):
    load.load(str(damaged)).encode("a")
  damaged.write_bytes(b"\x00\x01")
  with pytest.raises(ValueError, match="is neither a tokenizer"):
    load.load(str(damaged))
  damaged.write_text("version https://git-lfs.github.com/spec/v1\n")
  with pytest.raises(ValueError, match="Git LFS pointer"):
    load.load(str(damaged))


def _make_merges(library):
  """Returns all merges of two pieces into a third, by the third's score."""
  pieces = [library.id_to_piece(i) for i in range(library.get_piece_size())]
  numbers = {piece: i for i, piece in enumerate(pieces)}
  pairs = [
    (-library.get_score(number), numbers[piece[:i]], numbers[piece[i:]])
    for piece, number in numbers.items()
    for i in range(1, len(piece))
    if piece[:i] in numbers and piece[i:] in numbers
  ]
  return [(pieces[left], pieces[right]) for _, left, right in sorted(pairs)]


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_ids_are_those_of_another_implementation(kind, tmp_path):
  path = _train(
    tmp_path / "tokenizer.model",
    kind,
    normalization_rule_name="identity",
    remove_extra_whitespaces=False,
  )
  library = sentencepiece.SentencePieceProcessor(model_file=str(path))
  pieces = [library.id_to_piece(i) for i in range(library.get_piece_size())]
  if kind == "bpe":
    model = models.BPE(
      {piece: i for i, piece in enumerate(pieces)},
      _make_merges(library),
      unk_token="<unk>",
      fuse_unk=True,
      byte_fallback=True,
    )
  else:
    scores = [library.get_score(i) for i in range(len(pieces))]
    vocabulary = list(zip(pieces, scores, strict=True))
    model = models.Unigram(vocabulary, unk_id=0, byte_fallback=True)
  other = tokenizers.Tokenizer(model)
  other.normalizer = normalizers.Sequence(
    [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
  )
  tokenizer = load.load(str(path))
  rng = np.random.default_rng(0)
  words = [
    "the",
    "quick",
    "fox",
    "word",
    "12",
    "345",
    "Grüße",
    "дом",
    "敏捷",
    "🦊",
    "\x1b",
    "def",
  ]
  for _ in range(300):
    line = " ".join(rng.choice(words, size=rng.integers(1, 12)))
    assert tokenizer.encode(line).tolist() == other.encode(line).ids

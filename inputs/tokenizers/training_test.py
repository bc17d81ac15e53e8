"""Tests for the training of tokenizers."""

import pathlib

import pytest

from paxon.inputs.tokenizers import load, training

# Text with more words than a vocabulary needs.
_TEXTS = pathlib.Path(training.__file__).read_text().splitlines() * 2


@pytest.mark.parametrize("kind", training.Kind)
def test_it_is_deterministic_and_lossless(kind, tmp_path):
  paths = [
    training.train(
      (text.encode() for text in _TEXTS),
      str(tmp_path / name),
      kind=kind,
      vocab_size=400,
    )
    for name in ("a", "b")
  ]
  contents = [pathlib.Path(path).read_bytes() for path in paths]
  assert contents[0] == contents[1]
  tokenizer = load.load(str(tmp_path / "a"))
  assert tokenizer.vocab_size == 400
  facts = (tokenizer.pad_id, tokenizer.begin_id, tokenizer.end_id)
  assert facts == (0, 1, 2)
  for text in (_TEXTS[0], "  Grüße 🦊\n\n 12345 ", "light"):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.byte_counts(ids).sum() == len(text.encode())
    assert tokenizer.encode_prompt(text).tolist() == [1, *ids]
  assert len(tokenizer.encode("tokenizers")) < len("tokenizers")


@pytest.mark.parametrize("kind", training.Kind)
def test_a_size_that_does_not_fit_is_one_clear_error(kind, tmp_path):
  with pytest.raises(ValueError, match="vocab_size must be at least 2"):
    training.train([], str(tmp_path), kind=kind, vocab_size=100)
  with pytest.raises(ValueError, match=r"only; lower|cannot train: .*too high"):
    training.train([b"a few words"], str(tmp_path), kind=kind, vocab_size=9999)
  assert list(tmp_path.iterdir()) == []


def test_a_tokenizer_is_never_replaced(tmp_path):
  (tmp_path / "tokenizer.json").write_text("{}")
  with pytest.raises(ValueError, match="exists already"):
    training.train([], str(tmp_path), kind=training.Kind.BPE, vocab_size=300)

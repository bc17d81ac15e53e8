"""Tests of the comparison, on vocabularies of all kinds."""

import base64
import dataclasses
import io
import json

import pytest
import sentencepiece

from paxon.inputs.tokenizers import load, rank_file, tokenizer_json, training
from paxon.tools import tokenize_main, tokenizer_comparison

_LINES = tokenizer_comparison.make_lines(200, seed=1)
_CORPUS = [
  line if isinstance(line, bytes) else line.encode()
  for line in tokenizer_comparison.make_lines(300, seed=2)
]


def _train(folder, kind):
  size = 1200 if "sentencepiece" in kind.value else 400
  return training.train(_CORPUS, str(folder), kind=kind, vocab_size=size)


def _write_ranks(path, source):
  """Writes a byte-level BPE as ranks, which begin after its special ids."""
  table = load.load(source)
  alphabet = tokenizer_json.make_byte_alphabet()
  with open(source) as file:
    vocabulary = json.load(file)["model"]["vocab"]
  tokens = [
    bytes(alphabet[letter] for letter in token)
    for token, number in sorted(vocabulary.items(), key=lambda item: item[1])
    if number not in table.special_ids
  ]
  lines = (
    f"{base64.b64encode(token).decode()} {i}" for i, token in enumerate(tokens)
  )
  path.write_text("\n".join(lines) + "\n")


def _train_t5(path):
  """Trains a unigram model with T5's ids, normalization and no bytes."""
  writer = io.BytesIO()
  sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=(text.decode(errors="replace") for text in _CORPUS),
    model_writer=writer,
    model_type="unigram",
    vocab_size=500,
    hard_vocab_limit=False,
    character_coverage=0.98,
    **{"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1},
    num_threads=8,
    minloglevel=2,
  )
  path.write_bytes(writer.getvalue())
  return str(path)


@pytest.fixture(scope="module", name="bpe")
def make_bpe(tmp_path_factory):
  return _train(tmp_path_factory.mktemp("bpe"), training.Kind.BPE)


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize(
  "kind",
  [
    training.Kind.SENTENCE_PIECE_BPE,
    training.Kind.SENTENCE_PIECE_UNIGRAM,
    "t5",
    training.Kind.BPE,
    "ranks",
  ],
)
def test_all_kinds_equal_their_libraries(kind, bpe, tmp_path, monkeypatch):
  names = ["ids", "decoded text", "decoded one by one", "bytes kept"]
  if kind == "t5":
    path = _train_t5(tmp_path / "spiece.model")
  elif kind == "ranks":
    path = tmp_path / "a.tiktoken"
    _write_ranks(path, bpe)
    count = len(path.read_text().splitlines())
    known = rank_file._KNOWN[50256]
    monkeypatch.setitem(
      rank_file._KNOWN,
      count,
      dataclasses.replace(known, special={"<|endoftext|>": count}),
    )
    path = str(path)
  else:
    path = bpe if kind is training.Kind.BPE else _train(tmp_path, kind)
  checks = tokenizer_comparison.compare(path, _LINES)
  assert [check.different for check in checks] == [()] * 4
  if kind in ("ranks", training.Kind.BPE):
    assert [check.name for check in checks] == names
    assert [check.lines for check in checks] == [180, 180, 180, 200]
  else:
    assert checks[-1].name == "invalid as U+FFFD"
    assert checks[-1].lines == 20


def test_lines_have_everything_and_depend_on_the_seed_only():
  assert tokenizer_comparison.make_lines(200, seed=1) == _LINES
  assert tokenizer_comparison.make_lines(200, seed=3) != _LINES
  lines = tokenizer_comparison.make_lines(1000, seed=1)
  text = "".join(line for line in lines if isinstance(line, str))
  for sample in ("Straße", "公園", "ש", "\x00", "🦊", "\u202e", "def f"):
    assert sample in text
  text.encode()
  data = [line for line in lines if isinstance(line, bytes)]
  assert len(data) == 100
  for line in data:
    with pytest.raises(UnicodeDecodeError):
      line.decode()


def test_the_command_reports_differences(bpe, tmp_path, capsys):
  at = f"--tokenizer={bpe}"
  assert tokenize_main.main(["compare", at, "--lines=50"]) == 0
  printed = capsys.readouterr().out.splitlines()
  assert printed[0].split() == ["check", "lines", "different"]
  assert printed[1].split() == ["ids", "45", "0"]
  # A merge less.
  with open(bpe) as file:
    content = json.load(file)
  content["model"]["merges"].pop(5)
  other = tmp_path / "tokenizer.json"
  other.write_text(json.dumps(content))
  arguments = [at, f"--with={other}", "--lines=200"]
  assert tokenize_main.main(["compare", *arguments]) == 1
  assert "\nids: '" in capsys.readouterr().out
  no_vocabulary = tmp_path / "special_tokens_map.json"
  no_vocabulary.write_text('{"eos_token": "</s>"}')
  for arguments, message in (
    ([f"--tokenizer={no_vocabulary}"], "is not a tokenizer.json"),
    ([], "--tokenizer is missing"),
    ([at, "--lines=-1"], "--lines must be a whole number, got '-1'"),
    (["--tokenizer=bytes"], "must be a vocabulary file or folder"),
    (["--tokenizer=none"], "no such file or folder"),
  ):
    assert tokenize_main.main(["compare", *arguments]) == 2
    assert message in capsys.readouterr().err

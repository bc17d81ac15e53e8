"""Tests for tokenizers in the format of Hugging Face."""

import json
import os
import pickle
import re

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from paxon.inputs import tokenizer_protocol
from paxon.inputs.tokenizers import load, text_tokenizer, tokenizer_json

_TEXTS = (
  "The quick brown fox, 3.14!\n\n\tdef f(x): return x",
  "Grüße, naïve façade; быстрая лиса 敏捷的狐狸 🦊👩‍👩‍👧 \x00\x1b\u202e",
  "",
  " leading and trailing  ",
)


@pytest.fixture(scope="module", name="folder")
def make_folder(tmp_path_factory):
  """A Hugging Face folder with a byte-level BPE and a post-processor."""
  folder = tmp_path_factory.mktemp("byte_level")
  library = tokenizers.Tokenizer(models.BPE())
  library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  library.decoder = decoders.ByteLevel()
  trainer = trainers.BpeTrainer(
    vocab_size=300,
    initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    special_tokens=["<|begin|>", "<|end|>"],
    show_progress=False,
  )
  library.train_from_iterator(_TEXTS * 8, trainer)
  library.post_processor = processors.TemplateProcessing(
    single="<|begin|> $A", special_tokens=[("<|begin|>", 0)]
  )
  library.save(str(folder / "tokenizer.json"))
  names = {"bos_token": "<|begin|>", "eos_token": {"content": "<|end|>"}}
  (folder / "tokenizer_config.json").write_text(json.dumps(names))
  return folder


@pytest.fixture(name="tokenizer")
def make_tokenizer(folder):
  return load.load(str(folder))


def test_ids_and_text_are_those_of_the_library(tokenizer, folder):
  library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
  assert isinstance(tokenizer, tokenizer_protocol.Tokenizer)
  assert tokenizer.vocab_size == library.get_vocab_size()
  assert (tokenizer.begin_id, tokenizer.end_id) == (0, 1)
  for text in _TEXTS:
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32
    assert ids.tolist() == library.encode(text, add_special_tokens=False).ids
    assert tokenizer.encode_prompt(text).tolist() == library.encode(text).ids
    assert tokenizer.decode([0, *ids, 1]) == library.decode(ids.tolist())
    assert tokenizer.decode(ids) == text


def test_invalid_utf8_is_kept_as_bytes(tokenizer):
  assert tokenizer.is_lossless
  for data in (b"\xff", b"ab\xc3", b"\xe2\x82 x \xf0\x9f", bytes(range(256))):
    ids = tokenizer.encode(data)
    assert tokenizer.decode_bytes(ids) == data
    assert tokenizer.byte_counts(ids).sum() == len(data)


def test_bytes_of_tokens_add_up_to_the_text(tokenizer):
  for text in _TEXTS:
    ids = tokenizer.encode(text)
    assert tokenizer.byte_counts(ids).sum() == len(text.encode())
  assert tokenizer.byte_counts([[0, 1]]).tolist() == [[0, 0]]


def test_incremental_decoding_equals_decoding_at_once(tokenizer):
  for text in _TEXTS:
    ids = tokenizer.encode(text)
    decoder = text_tokenizer.Decoder(tokenizer)
    parts = [decoder.push(number) for number in ids]
    assert "\ufffd" not in "".join(parts)
    assert "".join(parts) + decoder.finish() == text


@pytest.mark.parametrize("ids", [[-1], [300], [3, 10**6]])
def test_ids_outside_of_the_vocabulary_are_rejected(tokenizer, ids):
  for use in (tokenizer.decode, tokenizer.byte_counts):
    with pytest.raises(ValueError, match="at least 0 and less than 300, got"):
      use(ids)


def test_a_model_may_embed_more_ids_or_fewer(folder):
  padded = load.load(str(folder), padded_size=512)
  assert padded.vocab_size == 300
  assert padded.decode([3, 511]) == padded.decode([3])
  assert padded.byte_counts([511]).tolist() == [0]
  # The last merges differ from one training of the vocabulary to another.
  text = _TEXTS[0]
  top = int(padded.encode(text).max())
  smaller = load.load(str(folder), padded_size=top)
  assert smaller.encode("a b").tolist() == padded.encode("a b").tolist()
  assert tokenizer_protocol.find_id_bound(smaller) == top
  token = re.escape(repr(padded.find_token(top)))
  for encode in (
    smaller.encode,
    smaller.encode_special,
    smaller.encode_prompt,
    lambda text: smaller.encode(text.encode()),
  ):
    with pytest.raises(
      ValueError,
      match=rf"(?s)^The text .* has the token {token}, whose id {top} the model"
      f" does not embed: it has {top} ids",
    ):
      encode(text)


@pytest.mark.parametrize("has_template", [True, False])
def test_the_file_decides_what_prompts_begin_with(
  folder, tmp_path, has_template
):
  content = json.loads((folder / "tokenizer.json").read_text())
  if not has_template:
    content["post_processor"] = None
  (tmp_path / "tokenizer.json").write_text(json.dumps(content))
  policy = {
    "bos_token": "<|begin|>",
    "eos_token": "<|end|>",
    "add_bos_token": False,
    "add_eos_token": True,
  }
  (tmp_path / "tokenizer_config.json").write_text(json.dumps(policy))
  tokenizer = load.load(str(tmp_path))
  ids = [*tokenizer.encode("a b")]
  # As `AutoTokenizer` of transformers 5.23, for any of the two values.
  expected = [0, *ids] if has_template else ids
  assert tokenizer.encode_prompt("a b").tolist() == expected


def test_the_hash_is_of_the_vocabulary_and_not_of_its_format(folder, tmp_path):
  content = json.loads((folder / "tokenizer.json").read_text())
  content["padding"] = None
  path = tmp_path / "tokenizer.json"
  path.write_text(json.dumps(content, indent=7))
  names = (folder / "tokenizer_config.json").read_text()
  (tmp_path / "tokenizer_config.json").write_text(names)
  here = tokenizer_protocol.describe(load.load(str(folder)))
  assert tokenizer_protocol.describe(load.load(str(path))) == here
  content["pre_tokenizer"]["add_prefix_space"] = True
  path.write_text(json.dumps(content))
  there = tokenizer_protocol.describe(load.load(str(path)))
  assert there["vocabulary"] != here["vocabulary"]


def test_it_is_pickled_by_its_fields(tokenizer):
  copy = pickle.loads(pickle.dumps(tokenizer))
  assert copy == tokenizer
  assert copy.encode("a").tolist() == tokenizer.encode("a").tolist()


@pytest.mark.parametrize(
  ("content", "message"),
  [
    ("{", "is not JSON"),
    ("[]", "has no object `model`"),
    ('{"model": {"type": "?"}}', "cannot be read by tokenizers"),
  ],
)
def test_a_damaged_file_is_one_clear_error(tmp_path, content, message):
  path = tmp_path / "tokenizer.json"
  path.write_text(content)
  tokenizer = tokenizer_json.TokenizerJson(path=str(path))
  with pytest.raises(ValueError, match=message):
    tokenizer.encode("a")


def test_a_missing_tokenizer_is_one_clear_error(tmp_path):
  with pytest.raises(ValueError, match="no such file or folder"):
    load.load(str(tmp_path / "none"))
  with pytest.raises(ValueError, match="the folder has no tokenizer"):
    load.load(str(tmp_path))


def test_a_pipe_is_no_tokenizer(tmp_path):
  os.mkfifo(tmp_path / "tokenizer.json")
  with pytest.raises(ValueError, match=r"tokenizer\.json is not a file"):
    load.find(str(tmp_path))

"""Tests of the texts of encoders."""

import json

import numpy as np
import pytest
import tokenizers

from paxon.inputs import byte_tokenizer
from paxon.inputs.sources import example_source
from paxon.inputs.tokenizers import encoder_texts, load

_WORDS = ("[PAD]", "[CLS]", "[SEP]", "[MASK]", "[UNK]", *"abcdefgh")


@pytest.fixture(name="tokenizer", scope="module")
def _tokenizer(tmp_path_factory):
  """Returns a tokenizer as BERT's, of single letters."""
  vocabulary = {word: i for i, word in enumerate(_WORDS)}
  model = tokenizers.models.WordPiece(vocabulary, unk_token="[UNK]")
  made = tokenizers.Tokenizer(model)
  made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
  made.add_special_tokens(list(_WORDS[:5]))
  made.post_processor = tokenizers.processors.TemplateProcessing(
    single="[CLS] $A [SEP]",
    pair="[CLS] $A [SEP] $B:1 [SEP]:1",
    special_tokens=[("[CLS]", 1), ("[SEP]", 2)],
  )
  path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
  made.save(str(path))
  return load.load(str(path))


def _write(folder, *rows):
  path = folder / "texts.jsonl"
  path.write_text("\n".join(map(json.dumps, rows)))
  return encoder_texts.JsonRows(files=str(path))


def _texts(rows, tokenizer, **fields):
  return encoder_texts.EncoderTexts(
    source=rows, tokenizer=tokenizer, **({"length": 8} | fields)
  )


@pytest.mark.parametrize(
  ("text", "pair", "length", "ids", "types", "cut"),
  [
    ("a b", None, 8, "[CLS] a b [SEP]", [0] * 4, 0),
    ("a b c d", None, 4, "[CLS] a b [SEP]", [0] * 4, 2),
    ("a", "b c", 8, "[CLS] a [SEP] b c [SEP]", [0, 0, 0, 1, 1, 1], 0),
    # The longer text is cut first.
    ("a b c d", "e f", 7, "[CLS] a b [SEP] e f [SEP]", [0] * 4 + [1] * 3, 2),
    ("a b c d", "e f", 6, "[CLS] a b [SEP] e [SEP]", [0] * 4 + [1] * 2, 3),
  ],
)
def test_texts_are_cut_as_transformers_cuts_them(
  text, pair, length, ids, types, cut, tokenizer
):
  found = tokenizer.encode_pair(text, pair, length=length)
  assert [tokenizer.find_token(int(x)) for x in found[0]] == ids.split()
  assert found[1].tolist() == types
  assert found[2] == cut
  upper = tokenizer.encode_pair(
    text.upper(), pair, length=length, lower_case=True
  )
  np.testing.assert_array_equal(upper[0], found[0])


def test_bytes_have_begin_and_end(tmp_path):
  rows = _write(tmp_path, {"text": "abcdef", "other": "xy"})
  texts = _texts(rows, byte_tokenizer.ByteTokenizer(), pair_key="other")
  found = texts[0]
  expected = [1, *(3 + ord(x) for x in "abc"), 2, *(3 + ord(x) for x in "xy")]
  assert found["inputs"].tolist() == [*expected, 2]
  assert found["type_ids"].tolist() == [0] * 5 + [1] * 3
  assert found["cut_tokens"].tolist() == [3] + [0] * 7


def test_labels_are_names_or_numbers(tmp_path, tokenizer):
  rows = _write(
    tmp_path, {"text": "a", "label": "yes"}, {"text": "b", "label": 0}
  )
  texts = _texts(rows, tokenizer, label_key="label", labels=("no", "yes"))
  texts.check()
  assert [int(texts[i]["labels"]) for i in range(2)] == [1, 0]
  assert texts[0]["example_weights"] == texts[0]["is_example"] == 1
  alone = _texts(rows, tokenizer)[0]
  assert (alone["example_weights"], alone["is_example"]) == (0, 1)
  assert encoder_texts.find_labels(rows, "label") == [0, "yes"]


def test_second_texts_may_be_separate(tmp_path, tokenizer):
  rows = _write(tmp_path, {"text": "a b", "text_pair": "c d e"})
  found = _texts(
    rows, tokenizer, pair_key="text_pair", is_separate=True, length=4
  )[0]
  assert found["inputs"].tolist() == [1, 5, 6, 2]
  assert found["encoder_inputs"].tolist() == [1, 7, 8, 2]
  assert found["cut_tokens"].tolist() == [1, 0, 0, 0]
  assert found["example_weights"] == 1


@pytest.mark.parametrize(
  ("row", "message"),
  [
    ({"body": "a"}, r"line 1: 'text' is missing; .* texts: \['body'\]"),
    ({"text": 3}, "'text' is 3; it must be a text"),
    ({"text": " "}, "'text' is empty"),
    ({"text": "a"}, "'label' is missing; it must be one of 'no', 'yes'"),
    ({"text": "a", "label": "maybe"}, "'label' is 'maybe'; .* from 0 to 1"),
    ({"text": "a", "label": 2}, "'label' is 2; "),
    ({"text": "a", "label": True}, "'label' is True; "),
    ({"text": "a", "label": None}, "'label' is None; "),
  ],
)
def test_rows_that_cannot_be_used_are_errors(row, message, tmp_path, tokenizer):
  rows = _write(tmp_path, row)
  texts = _texts(rows, tokenizer, label_key="label", labels=("no", "yes"))
  with pytest.raises(ValueError, match=message):
    _ = texts[0]


def test_lines_that_are_no_objects_are_errors(tmp_path):
  rows = _write(tmp_path, {"text": "a"}, [1])
  with pytest.raises(ValueError, match=r"no JSON object. \(line 2 of the file"):
    _ = rows[1]


def test_lengths_without_room_are_errors(tokenizer):
  with pytest.raises(ValueError, match="1 tokens are too few"):
    tokenizer.encode_pair("a", length=1)


def test_whole_documents_have_begin_and_end(tokenizer):
  source = example_source.InMemoryDocuments(["a b"])
  found = encoder_texts.WholeDocuments(source=source, tokenizer=tokenizer)[0]
  assert found["inputs"].tolist() == found["targets"].tolist() == [1, 5, 6, 2]
  assert found["target_bytes"][[0, 3]].tolist() == [0, 0]

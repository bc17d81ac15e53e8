"""Tests for pairs of answers as examples."""

import json

import numpy as np
import pytest

from paxon.inputs import packed_input, packing
from paxon.inputs.sources import example_source
from paxon.inputs.streams import example_stream
from paxon.inputs.tokenizers import (
  chat_template,
  chats,
  preference_pairs,
  scored_pairs,
  testing,
)

_PROMPT = [{"role": "user", "content": "1?"}]
_CHOSEN = [{"role": "assistant", "content": "2"}]
_REJECTED = [{"role": "assistant", "content": "35"}]
_ROW = {"prompt": "1?", "chosen": "2", "rejected": "35"}


def _pairs(tmp_path, *rows, **fields):
  path = tmp_path / "pairs.jsonl"
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))
  return preference_pairs.TokenizedPairs(
    source=preference_pairs.PairLines(files=str(path)),
    template=chat_template.ChatTemplate(source=testing.TEMPLATE),
    tokenizer=testing.Letters(),
    **{"length": 10, **fields},
  )


@pytest.mark.parametrize(
  "row",
  [
    _ROW,
    {"prompt": _PROMPT, "chosen": _CHOSEN, "rejected": _REJECTED},
    {"chosen": _PROMPT + _CHOSEN, "rejected": _PROMPT + _REJECTED},
  ],
)
def test_both_halves(tmp_path, row):
  example = _pairs(tmp_path, row)[0]
  assert {len(value) for value in example.values()} == {20}
  texts = ["U:1?;A:2;", "U:1?;A:35;"]
  for i, (text, answer) in enumerate(zip(texts, ["2;", "35;"], strict=True)):
    half = {k: v[10 * i : 10 * (i + 1)] for k, v in example.items()}
    is_token = half["is_token"] == 1
    assert "".join(map(chr, half["inputs"][is_token])) == text[:-1]
    assert "".join(map(chr, half["targets"][is_token])) == text[1:]
    trained = half["targets"][half["weights"] == 1]
    assert "".join(map(chr, trained)) == answer
    assert not half["inputs"][~is_token].any()


def test_turns_of_the_prompt_have_no_weight(tmp_path):
  prompt = [*_PROMPT, *_CHOSEN, *_PROMPT]
  row = {"prompt": prompt, "chosen": "4", "rejected": "5"}
  example = _pairs(tmp_path, row, length=30)[0]
  assert example["weights"].sum() == 4


def test_batches_have_one_pair_a_sequence(tmp_path):
  source = _pairs(tmp_path, _ROW, {**_ROW, "chosen": "7"})
  stream = packed_input.PackedInput(
    examples=example_stream.Examples(source=source, shuffle_seed=None),
    packing=packing.Packing.NONE,
    global_batch_size=2,
    length=20,
  )
  batch = stream.get_next()
  for i in range(2):
    np.testing.assert_array_equal(batch["inputs"][i], source[i]["inputs"])
    np.testing.assert_array_equal(batch["weights"][i], source[i]["weights"])


def test_a_dropped_conversation_has_no_weight(tmp_path):
  source = _pairs(tmp_path, _ROW, length=8, too_long=chats.TooLong.DROP)
  example = source[0]
  # Without one of its answers the pair has no effect.
  assert example["weights"].sum() == 0
  assert example["cut_tokens"].tolist() == [0] * 8 + [8] + [0] * 7


@pytest.mark.parametrize("too_long", ["CUT_RIGHT", "CUT_LEFT", "DROP"])
@pytest.mark.parametrize(
  ("chosen", "rejected", "targets"),
  [
    pytest.param("2222a", "2222b", ("CUT_LEFT",), id="equal after the cut"),
    pytest.param("2", "35", ("CUT_RIGHT", "CUT_LEFT", "DROP"), id="short"),
    pytest.param("2", "222a", ("CUT_RIGHT", "CUT_LEFT"), id="one is cut"),
  ],
)
def test_pairs_without_a_target(tmp_path, too_long, chosen, rejected, targets):
  row = {**_ROW, "chosen": chosen, "rejected": rejected}
  source = _pairs(tmp_path, row, length=9, too_long=chats.TooLong[too_long])
  has_target = example_source.has_target(source[0])
  assert has_target == (too_long in targets)


def test_labelled_answers_without_a_target(tmp_path):
  rows = [
    {"prompt": "1?", "completion": "2", "label": True},
    {"prompt": "1" * 20, "completion": "2", "label": False},
  ]
  path = tmp_path / "answers.jsonl"
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))
  source = preference_pairs.LabelledAnswers(
    source=preference_pairs.LabelledLines(files=str(path)),
    template=chat_template.ChatTemplate(source=testing.TEMPLATE),
    tokenizer=testing.Letters(),
    length=10,
  )
  assert [example_source.has_target(x) for x in (source[0], source[1])] == [
    True,
    False,
  ]


@pytest.mark.parametrize(
  ("row", "message"),
  [
    ({**_ROW, "rejected": "2"}, r"answers? are equal.*line 2 of|equal.*line 2"),
    ({"prompt": "a", "chosen": "b"}, r"must have 'rejected'.*\(line 2"),
    ({**_ROW, "prompt": 3}, r"'prompt' is no string.*\(line 2"),
    ({**_ROW, "chosen": []}, "line 2, 'chosen': It has no turn"),
    ({**_ROW, "chosen": "2" * 9}, "line 2, 'chosen': .* 16 tokens"),
  ],
)
def test_rejects(tmp_path, row, message):
  source = _pairs(tmp_path, _ROW, row, too_long=chats.TooLong.ERROR)
  with pytest.raises(ValueError, match=message):
    _ = source[1]


_ANSWER = {"prompt": "1?", "completion": "2", "label": True}


def _answers(tmp_path, *rows):
  path = tmp_path / "answers.jsonl"
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))
  return preference_pairs.LabelledAnswers(
    source=preference_pairs.LabelledLines(files=str(path)),
    template=chat_template.ChatTemplate(source=testing.TEMPLATE),
    tokenizer=testing.Letters(),
    length=10,
  )


def test_answers_and_those_to_other_prompts(tmp_path):
  other = {"prompt": "3?", "completion": "45", "label": False}
  found = _answers(tmp_path, _ANSWER, other)
  for index, texts, label in (
    (0, ["U:1?;A:2;", "U:1?;A:45;"], 1),
    (1, ["U:3?;A:45;", "U:3?;A:2;"], 0),
  ):
    example = found[index]
    assert set(example["is_desirable"]) == {label}
    assert example.keys() == found.token_dtypes().keys()
    for i, text in enumerate(texts):
      half = slice(10 * i, 10 * (i + 1))
      targets = example["targets"][half][example["is_token"][half] == 1]
      assert "".join(map(chr, targets)) == text[1:]


@pytest.mark.parametrize(
  ("change", "error"),
  [
    ({"label": 1}, "'label' must be true or false, got 1"),
    ({"completion": None}, "must have 'completion'"),
    ({"chosen": "2", "label": "x"}, "must be true or false"),
  ],
)
def test_rows_without_a_labelled_answer(tmp_path, change, error):
  found = _answers(tmp_path, _ANSWER, _ANSWER | change)
  with pytest.raises(ValueError, match=error):
    found[1]


def test_pairs_are_no_labelled_answers(tmp_path):
  with pytest.raises(
    ValueError, match=r"must have 'completion', got \['chosen"
  ):
    _answers(tmp_path, _ROW, _ROW)[0]
  with pytest.raises(ValueError, match="must be at least two"):
    _answers(tmp_path, _ANSWER)


def test_log_probabilities_from_a_file(tmp_path):
  found = _pairs(tmp_path, _ROW, {**_ROW, "chosen": "4"})
  file = str(tmp_path / "log_probs.npz")
  values = np.asarray([[-1.5, -2.5], [-3.5, -4.5]], np.float32)
  digests = np.asarray([scored_pairs.digest(found[i]) for i in range(2)])
  scored_pairs.write(file, {"train": (values, digests)}, reference="a")

  def scored(pairs, split="train", reference="a"):
    return scored_pairs.ScoredPairs(
      pairs=pairs, file=file, split=split, reference=reference
    )

  for index in range(2):
    example = scored(found)[index]
    assert example.keys() == scored(found).token_dtypes().keys()
    stored = example[scored_pairs.KEY]
    np.testing.assert_array_equal(stored[[0, 10]], values[index])
    assert np.count_nonzero(stored) == 2
  other = _pairs(tmp_path, _ROW, _ROW)
  assert scored(other)[0].keys() == scored(found)[0].keys()
  with pytest.raises(ValueError, match="log probability of another pair 1"):
    scored(other)[1]
  with pytest.raises(ValueError, match="of the reference a, and this one is b"):
    scored(found, reference="b")
  with pytest.raises(ValueError, match="no log probabilities of validation"):
    scored(found, split="validation")
  with pytest.raises(ValueError, match="2 pairs of train, and the data has 1"):
    scored(_pairs(tmp_path, _ROW))

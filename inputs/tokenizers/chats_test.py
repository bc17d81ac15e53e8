"""Tests for chats as examples; goldens are of transformers 5.23.0."""

import json
import pathlib

import numpy as np
import pytest

from paxon.inputs import example_source, example_stream, packed_input, packing
from paxon.inputs.tokenizers import (
  chat_template,
  chats,
  make_chat_goldens,
  testing,
  tokenizer_json,
)

_GOLDENS = pathlib.Path(__file__).parent / "goldens" / "chats.json"
_CHAT = [
  {"role": "user", "content": "1?"},
  {"role": "assistant", "content": "2"},
]


def _tokenized(*rows, **fields):
  documents = [chats.conversation(row) for row in rows]
  return chats.TokenizedChats(
    source=example_source.InMemoryDocuments(documents),
    template=chat_template.ChatTemplate(source=testing.TEMPLATE),
    tokenizer=testing.Letters(),
    **fields,
  )


def _trained(example):
  kept = example["targets"][example["weights"] > 0]
  return "".join(map(chr, kept))


@pytest.mark.parametrize("case", json.loads(_GOLDENS.read_text()))
def test_generation_blocks_as_transformers(case, tmp_path):
  path = make_chat_goldens.write_tokenizer(tmp_path)
  template = chat_template.ChatTemplate(
    source=make_chat_goldens.TEMPLATES[case["template"]],
    special_tokens={"eos_token": "<|im_end|>"},
  )
  ids, mask = template.tokenize(
    make_chat_goldens.CHATS[case["chat"]],
    tokenizer_json.TokenizerJson(path=str(path)),
  )
  assert ids.tolist() == case["ids"]
  assert mask.tolist() == [bool(x) for x in case["mask"]]


def test_only_the_assistant_has_weight():
  example = _tokenized({"messages": _CHAT})[0]
  assert "".join(map(chr, example["targets"])) == ":1?;A:2;"
  assert _trained(example) == "2;"


@pytest.mark.parametrize(
  ("row", "trained"),
  [
    ({"prompt": "1?", "completion": "2"}, "2;"),
    ({"prompt": _CHAT, "completion": _CHAT}, "2;"),
    ({"prompt": _CHAT + _CHAT[:1], "completion": "3"}, "3;"),
    ({"messages": _CHAT * 2}, "2;2;"),
  ],
)
def test_weight_of_prompts_and_completions(row, trained):
  assert _trained(_tokenized(row)[0]) == trained


def test_a_completion_with_generation_blocks():
  block = "{% generation %}{{ m.content }};{% endgeneration %}"
  source = testing.TEMPLATE.replace(
    "{{ m.content }};{% endif %}", f"{block}{{% endif %}}"
  )
  template = chat_template.ChatTemplate(source=source)
  ids, mask = template.tokenize(_CHAT * 2, testing.Letters(), first=2)
  assert "".join(map(chr, ids[mask])) == "2;"
  assert mask[:10].sum() == 0


@pytest.mark.parametrize(
  ("too_long", "targets", "cut"),
  [
    ("CUT_RIGHT", ":1?;A:", [2, 0, 0, 0, 0, 0]),
    ("CUT_LEFT", "?;A:2;", [2, 0, 0, 0, 0, 0]),
    ("DROP", ":", [7]),
  ],
)
def test_long_chats(too_long, targets, cut):
  source = _tokenized(
    {"messages": _CHAT}, length=6, too_long=chats.TooLong[too_long]
  )
  example = source[0]
  assert "".join(map(chr, example["targets"])) == targets
  assert example["cut_tokens"].tolist() == cut
  assert {len(value) for value in example.values()} == {len(cut)}
  assert _trained(example) == ("2;" if too_long == "CUT_LEFT" else "")
  exact = _tokenized({"messages": _CHAT}, length=8)[0]
  assert len(exact["targets"]) == 8
  assert not exact["cut_tokens"].any()


@pytest.mark.parametrize(
  ("row", "message"),
  [
    ({"messages": _CHAT[:1]}, "Chat 0: .*no turn of the assistant"),
    ({"messages": []}, "no turn of the assistant"),
    (
      {"messages": [{"role": "judge", "content": "a"}, *_CHAT]},
      "Chat 0: The chat template: unknown role judge",
    ),
    ({"messages": _CHAT * 3}, "26 tokens, and a sequence 10"),
  ],
)
def test_rejects_chats(row, message):
  source = _tokenized(row, length=10, too_long=chats.TooLong.ERROR)
  with pytest.raises(ValueError, match=message):
    _ = source[0]


@pytest.mark.parametrize(
  ("line", "message"),
  [
    ("{", r"a\.jsonl: a line has no 'messages': .*\(line 4 of the file\)"),
    ('{"prompt": "a"}', r"must be a list of messages.*\(line 4 of"),
    ('{"messages": "a"}', r"must be a list of messages.*\(line 4 of"),
    ("[1]", r"must be an object.*\(line 4 of"),
    ('{"q": "a", "a": "b"}', r"It has \['q', 'a'\]\. Give it a list .*line 4"),
  ],
)
def test_a_damaged_line_is_named(tmp_path, line, message):
  good = json.dumps({"messages": _CHAT})
  path = tmp_path / "a.jsonl"
  path.write_text(f"{good}\n\n{good}\n{line}\n")
  lines = chats.ChatLines(files=str(path))
  assert lines.name(1) == f"{path}, line 3"
  with pytest.raises(ValueError, match=message):
    _ = lines[2]


def test_rows_lose_nulls():
  messages = [{**_CHAT[0], "tool_calls": None}, _CHAT[1]]
  rows = [{"messages": messages, "prompt": None}, {"messages": None}]
  source = chats.ChatRows(rows=rows)
  assert chats.parse(source[0]) == (_CHAT, 0)
  with pytest.raises(ValueError, match="row 1 has no 'messages'"):
    _ = source[1]


def test_packing_keeps_chats_apart_and_resumes():
  rows = [
    {"messages": [{"role": "user", "content": "?" * n}, _CHAT[1]]}
    for n in range(1, 9)
  ]

  def make():
    source = _tokenized(*rows, length=12, too_long=chats.TooLong.DROP)
    return packed_input.PackedInput(
      examples=example_stream.Examples(source=source, shuffle_seed=0),
      packing=packing.Packing.BEST_FIT,
      global_batch_size=2,
      length=24,
    )

  one = make()
  first = one.get_next()
  state = json.loads(json.dumps(one.get_state()))
  expected = [one.get_next() for _ in range(5)]
  other = make()
  other.set_state(state)
  for batch in expected:
    found = other.get_next()
    assert found.keys() == batch.keys()
    for key, value in batch.items():
      np.testing.assert_array_equal(found[key], value)
  # A chat is one segment of one sequence, from position 0.
  for ids, segments, positions in zip(
    *(first[key] for key in ("inputs", "segment_ids", "positions")),
    strict=True,
  ):
    for segment in range(1, segments.max() + 1):
      where = segments == segment
      assert ids[where][0] == ord("U")
      np.testing.assert_array_equal(positions[where], np.arange(where.sum()))

"""Tests for chats as examples; goldens are of transformers 5.23.0."""

import dataclasses
import json
import pathlib

import numpy as np
import pytest

from paxon.inputs import packed_input, packing, prompt_groups
from paxon.inputs.sources import example_source
from paxon.inputs.streams import example_stream
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


def test_a_chat_of_weight_0_is_an_example_without_a_target():
  chat = [_CHAT[0], {**_CHAT[1], "weight": 0}]
  example = _tokenized({"messages": chat})[0]
  assert not example_source.has_target(example)
  assert example["inputs"].tolist() == [ord("U")]
  assert example["cut_tokens"].tolist() == [0]
  with pytest.raises(ValueError, match="no turn of the assistant"):
    _ = _tokenized({"messages": chat[:1]})[0]


_ANSWER = {"role": "assistant", "content": "3"}
_READS_FIRST = (
  "{% if messages[0].role == 'system' %}S{% endif %}" + testing.TEMPLATE
)
_NEEDS_USER = "{{ messages[0]['content'].strip() }}" + testing.TEMPLATE


@pytest.mark.parametrize("source", [_READS_FIRST, _NEEDS_USER])
def test_a_template_that_needs_a_message_before_the_assistant(source, tmp_path):
  path, begun = tmp_path / "a.jsonl", [_ANSWER, *_CHAT]
  weightless = [{**_ANSWER, "weight": 0}, *_CHAT]
  rows = (json.dumps({"messages": x}) for x in (_CHAT, begun, weightless))
  path.write_text("\n".join(rows))
  made = chats.TokenizedChats(
    source=chats.ChatLines(files=str(path), text_key="messages"),
    template=chat_template.ChatTemplate(source=source),
    tokenizer=testing.Letters(),
  )
  message = (
    r"a\.jsonl, line 2: Message 0 has the role 'assistant', and the chat"
    r" template needs a message before it.*no element 0.*\"weight\": 0"
  )
  with pytest.raises(ValueError, match=message):
    _ = made[1]
  assert _trained(made[2]) == "2;"
  # Without such a need the first turn is trained, too.
  assert _trained(_tokenized({"messages": begun})[0]) == "3;2;"


_FORGETS = (
  "{% for m in messages %}{% if m.role == 'user' %}U:{{ m.content }};"
  "{% else %}A:{{ m.content if loop.last else '' }};{% endif %}{% endfor %}"
  "{% if add_generation_prompt %}A:{% endif %}"
)


def _forgetful(*rows, **fields):
  source = _tokenized(*rows, **fields)
  template = chat_template.ChatTemplate(source=_FORGETS)
  return dataclasses.replace(source, template=template)


def test_each_turn_is_trained_in_its_own_text():
  source = _forgetful({"messages": [*_CHAT, _CHAT[0], _ANSWER]})
  example = source[0]
  parts = [example_source.select_part(example, i) for i in range(2)]
  texts = ["".join(map(chr, part["targets"])) for part in parts]
  assert texts == [":1?;A:2;", ":1?;A:;U:1?;A:3;"]
  assert [_trained(part) for part in parts] == ["2;", "3;"]
  last = dataclasses.replace(source, trained_turns=chats.TrainedTurns.LAST)[0]
  assert "part" not in last
  assert _trained(last) == "3;"
  # `weight` 0 of OpenAI's format is the same for any turn.
  first = {**_CHAT[1], "weight": 0}
  source = _forgetful({"messages": [_CHAT[0], first, _CHAT[0], _ANSWER]})
  assert _trained(source[0]) == "3;"


@pytest.mark.parametrize("num_workers", [0, 2])
def test_parts_are_packed_apart_and_resumed(num_workers):
  rows = [
    {"messages": [*_CHAT, {"role": "user", "content": "?" * n}, _ANSWER]}
    for n in range(1, 6)
  ]

  def make(num_epochs=1, workers=num_workers):
    return packed_input.PackedInput(
      examples=example_stream.Examples(
        source=_forgetful(*rows), shuffle_seed=0, num_epochs=num_epochs
      ),
      packing=packing.Packing.NONE,
      global_batch_size=1,
      length=24,
      num_workers=workers,
    )

  one, texts, states, batches = make(), [], [], []
  first = one.get_state()
  while True:
    try:
      batch = one.get_next()
    except StopIteration:
      break
    states.append(json.loads(json.dumps(one.get_state())))
    batches.append(batch)
    texts.append("".join(map(chr, batch["targets"][batch["segment_ids"] > 0])))
  assert one.documents_between(first, states[0]) == one.documents_between(
    first, states[1]
  )
  one.close()
  assert sorted(texts) == sorted(
    [":1?;A:2;"] * 5 + [f":1?;A:;U:{'?' * n};A:3;" for n in range(1, 6)]
  )
  assert "part" not in batches[0]
  for number in (0, 1, 4):
    other = make(workers=0)
    other.set_state(states[number])
    np.testing.assert_array_equal(
      other.get_next()["inputs"], batches[number + 1]["inputs"]
    )


def test_prompts_of_rollouts(tmp_path):
  path = tmp_path / "a.jsonl"
  rows = [{"prompt": "1?"}, {"prompt": _CHAT[:1]}, {"prompt": [{"role": "x"}]}]
  path.write_text("".join(f"{json.dumps(x)}\n" for x in rows))
  groups = prompt_groups.PromptGroups(
    source=chats.PromptLines(files=str(path)),
    template=chat_template.ChatTemplate(source=testing.TEMPLATE),
    tokenizer=testing.Letters(),
    group_size=2,
    length=10,
    answer_length=2,
  )
  for i in range(2):
    found = groups[i]
    ids = found["inputs"][found["is_token"] > 0]
    assert "".join(map(chr, ids)) == "U:1?;A:"
  with pytest.raises(ValueError, match=r"prompt\[0\].content.*line 3 of"):
    _ = groups[2]


def test_columns_that_are_not_used_are_listed_once(tmp_path, capsys):
  path = tmp_path / "a.jsonl"
  row = {"id": 3, "messages": [{**_CHAT[0], "date": "x"}, _CHAT[1]]}
  more = {**row, "source": "web", "tools": None, "prompt": "1?"}
  path.write_text("".join(f"{json.dumps(x)}\n" for x in (row, row, more)))
  lines = chats.ChatLines(files=str(path))
  for i in range(3):
    _ = lines[i]
  assert capsys.readouterr().out.splitlines() == [
    f"{path}: not used: id, messages.date",
    f"{path}: not used: source, prompt",
  ]


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
    ('{"prompt": "a"}', r"must have 'completion', got .*\(line 4 of"),
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
  found = chats.parse(source[0])
  assert (found.messages, found.trained) == (_CHAT, [1])
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

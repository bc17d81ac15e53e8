"""Tests of conversations of ShareGPT and Alpaca."""

import json

import pytest

from paxon.inputs.tokenizers import chats, record_formats

_SHAREGPT = record_formats.RecordFormat.SHAREGPT
_ALPACA = record_formats.RecordFormat.ALPACA
_KEY = "conversations"


def _turns(*pairs):
  return [{"from": role, "value": text} for role, text in pairs]


def _messages(*pairs):
  return [{"role": role, "content": text} for role, text in pairs]


@pytest.mark.parametrize(
  ("form", "row", "expected"),
  [
    pytest.param(
      _SHAREGPT,
      {_KEY: _turns(("system", "s"), ("human", "a"), ("gpt", "b"))},
      _messages(("system", "s"), ("user", "a"), ("assistant", "b")),
      id="FastChat",
    ),
    pytest.param(
      _SHAREGPT,
      {
        _KEY: _turns(("human", "a"), ("observation", "x"), ("gpt", "b")),
        "system": "s",
      },
      _messages(
        ("system", "s"), ("user", "a"), ("tool", "x"), ("assistant", "b")
      ),
      id="LLaMA-Factory",
    ),
    pytest.param(
      _SHAREGPT,
      {_KEY: [{"from": "user", "value": "a", "markdown": None}], "id": "7"},
      _messages(("user", "a")),
      id="null fields",
    ),
    pytest.param(
      _ALPACA,
      {"instruction": "Add.", "input": "1 and 1", "output": "2"},
      _messages(("user", "Add.\n1 and 1"), ("assistant", "2")),
      id="input",
    ),
    pytest.param(
      _ALPACA,
      {"instruction": "Hi", "input": "", "output": "Ho", "system": ""},
      _messages(("user", "Hi"), ("assistant", "Ho")),
      id="empty input",
    ),
    pytest.param(
      _ALPACA,
      {
        "instruction": "c",
        "input": None,
        "output": "d",
        "system": "s",
        "history": [["a", "b"]],
      },
      _messages(
        ("system", "s"),
        ("user", "a"),
        ("assistant", "b"),
        ("user", "c"),
        ("assistant", "d"),
      ),
      id="history",
    ),
  ],
)
def test_messages_of_other_formats(form, row, expected):
  found = record_formats.to_messages(row, form, _KEY)
  assert found["messages"] == expected


@pytest.mark.parametrize("is_list", [False, True])
def test_calls_of_sharegpt_are_those_of_llama_factory(is_list):
  call = {"name": "f", "arguments": {"a": 1}}
  value = json.dumps([call] if is_list else call)
  turns = _turns(
    ("human", "q"), ("function_call", value), ("observation", "r"), ("gpt", "z")
  )
  found = record_formats.to_messages({_KEY: turns}, _SHAREGPT, _KEY)["messages"]
  calls = [{"type": "function", "function": call}]
  assert found == [
    {"role": "user", "content": "q"},
    {"role": "assistant", "tool_calls": calls},
    {"role": "tool", "content": "r"},
    {"role": "assistant", "content": "z"},
  ]


@pytest.mark.parametrize(
  ("form", "row", "message"),
  [
    (_SHAREGPT, {_KEY: _turns(("bot", "a"))}, r"\[0\] has the unknown role 'b"),
    (_SHAREGPT, {_KEY: [{"from": "gpt"}]}, r"conversations\[0\]\.value is mis"),
    (
      _SHAREGPT,
      {_KEY: _turns(("gpt", 3))},
      r"\[0\]\.value must be a string, g",
    ),
    (_SHAREGPT, {_KEY: "a"}, r"'conversations' must be a list, got str"),
    (
      _SHAREGPT,
      {_KEY: ["a"]},
      r"conversations\[0\] must be an object, got str",
    ),
    (_SHAREGPT, {"messages": []}, r"no 'conversations', only \['messages'\]"),
    (
      _SHAREGPT,
      {_KEY: _turns(("system", "a")), "system": "b"},
      r"'system' and a first message of that role",
    ),
    (_ALPACA, {"instruction": "a"}, r"output is missing"),
    (
      _ALPACA,
      {"instruction": 3, "output": "b"},
      r"instruction must be a strin",
    ),
    (
      _ALPACA,
      {"instruction": "a", "output": "b", "history": [["c"]]},
      r"'history' must be a list of pairs",
    ),
    (_ALPACA, ["a"], r"must be an object, got list"),
    (
      _ALPACA,
      {"instruction": "a", "output": "b", "messages": [{"role": "user"}]},
      r"it has 'messages' besides a chat of alpaca",
    ),
    (
      _SHAREGPT,
      {_KEY: _turns(("function_call", "f(1)"))},
      r"\[0\]\.value is not JSON",
    ),
    (
      _SHAREGPT,
      {_KEY: _turns(("function_call", "3"))},
      r"\[0\]\.value must be JSON of an object with 'name'",
    ),
  ],
)
def test_an_error_names_file_line_and_field(
  form, row, message, tmp_path, capsys
):
  path = tmp_path / "mine.jsonl"
  good = {
    _SHAREGPT: {_KEY: _turns(("human", "a"), ("gpt", "b"))},
    _ALPACA: {"instruction": "a", "output": "b"},
  }
  path.write_text("".join(f"{json.dumps(x)}\n" for x in (good[form], row)))
  lines = chats.ChatLines(files=str(path), form=form, text_key=_KEY)
  found = chats.parse(lines[0])
  assert found.messages == _messages(("user", "a"), ("assistant", "b"))
  assert found.trained == [1]
  # Its columns are used.
  assert not capsys.readouterr().out
  with pytest.raises(
    ValueError, match=rf"mine\.jsonl: .* of {form.value}: .*{message}.*line 2"
  ):
    lines[1]

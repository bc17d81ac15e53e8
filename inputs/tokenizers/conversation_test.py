"""Tests for the reader of conversations, of the fields of OpenAI and TRL."""

import json

import numpy as np
import pytest

from paxon.inputs.tokenizers import conversation

_USER = {"role": "user", "content": "1?"}
_ANSWER = {"role": "assistant", "content": "2"}
_TOOLS = [{"type": "function", "function": {"name": "f"}}]
_CALL = {"function": {"name": "f", "arguments": {"x": 1}}}


def _with(**fields):
  return {"messages": [_USER, {**_ANSWER, **fields}]}


@pytest.mark.parametrize(
  ("record", "messages", "trained"),
  [
    ({"messages": [_USER, _ANSWER]}, [_USER, _ANSWER], [1]),
    ({"prompt": "1?", "completion": "2"}, [_USER, _ANSWER], [1]),
    (
      {"prompt": [_USER, _ANSWER, _USER], "completion": [_ANSWER]},
      [_USER, _ANSWER, _USER, _ANSWER],
      [3],
    ),
    (
      {"system": "S", "prompt": "1?", "completion": "2"},
      [{"role": "system", "content": "S"}, _USER, _ANSWER],
      [2],
    ),
    ({"system": "", "messages": [_USER, _ANSWER]}, [_USER, _ANSWER], [1]),
    (_with(weight=0), [_USER, _ANSWER], []),
    (_with(weight=1, refusal=None, audio=None), [_USER, _ANSWER], [1]),
    (
      _with(content=[{"type": "text", "text": x} for x in "23"]),
      [_USER, {**_ANSWER, "content": "23"}],
      [1],
    ),
    (
      _with(content=None, tool_calls=[_CALL], name="n"),
      [_USER, {"role": "assistant", "tool_calls": [_CALL], "name": "n"}],
      [1],
    ),
    (_with(tool_calls=[]), [_USER, _ANSWER], [1]),
  ],
)
def test_reads(record, messages, trained):
  found = conversation.read(record)
  assert list(found.messages) == messages
  assert list(found.trained) == trained
  copy = json.loads(json.dumps(found.to_dict()))
  assert conversation.from_dict(copy).to_dict() == found.to_dict()


@pytest.mark.parametrize("form", [lambda x: x, json.dumps])
def test_values_of_the_template(form):
  """In tables they are often JSON."""
  found = conversation.read(
    {
      **_with(),
      "tools": form(_TOOLS),
      "documents": form([{"text": "t"}]),
      "chat_template_kwargs": form({"enable_thinking": False}),
    }
  )
  assert found.variables == {
    "tools": _TOOLS,
    "documents": [{"text": "t"}],
    "enable_thinking": False,
  }


@pytest.mark.parametrize(
  ("record", "message"),
  [
    (
      {**_with(), "functions": [1]},
      "functions is not supp.*; write 'tools'",
    ),
    ({**_with(), "images": ["x"]}, "images is not supported; only text"),
    ({**_with(), "weight": 0.5}, "weight is not supported; write it in the"),
    ({**_with(), "system_prompt": "x"}, "system_prompt .*; write 'system'"),
    ({**_with(), "system": 3}, "'system' must be a string"),
    ({**_with(), "tools": {"a": 1}}, "'tools' must be a list of objects"),
    ({**_with(), "tools": "[1"}, "'tools' is not JSON"),
    ({**_with(), "tools": [1]}, "'tools' must be a list of objects"),
    ({**_with(), "chat_template_kwargs": 3}, "'chat_template_kwargs' must be"),
    (
      {**_with(), "chat_template_kwargs": {"add_generation_prompt": True}},
      "'chat_template_kwargs' must not have 'add_generation_prompt'",
    ),
    (
      {**_with(), "tools": _TOOLS, "chat_template_kwargs": {"tools": []}},
      "'chat_template_kwargs' must not have 'tools'",
    ),
    (
      {"system": "S", "messages": [{"role": "system", "content": "T"}]},
      "'system' is a second system prompt",
    ),
    (_with(weight=0.5), r"messages\[1\].weight must be 0 or 1, .* got 0.5"),
    ({"messages": [{**_USER, "weight": 1}]}, r"got 1 in one of 'user'"),
    (_with(function_call={"name": "f"}), r"\[1\].function_call is not supp"),
    (_with(audio={"id": "x"}), r"messages\[1\].audio is not supported"),
    (_with(refusal="No."), r"messages\[1\].refusal is not supported"),
    (_with(content=None), r"messages\[1\].content must be a string or a list"),
    (_with(content=3), r"messages\[1\].content must be a string or a list"),
    (
      _with(content=[{"type": "image_url", "image_url": {"url": "x"}}]),
      r"only parts of type 'text' .* got 'image_url' with \['image_url'\]",
    ),
    (_with(content=["x"]), "only parts of type 'text'"),
    (_with(tool_calls={}), r"messages\[1\].tool_calls must be a list"),
    (_with(tool_calls=[{}]), r"tool_calls\[0\] must be an object with"),
    (
      _with(tool_calls=[{"function": {"name": "f", "arguments": 3}}]),
      "'arguments' must be an object, or JSON in a string",
    ),
    (
      {"messages": [{**_USER, "tool_calls": [_CALL]}]},
      "tool_calls must be in a message of the assistant",
    ),
    (_with(name=3), r"messages\[1\].name must be a string"),
    (
      {"prompt": [{**_ANSWER, "weight": 1}], "completion": "x"},
      r"prompt\[0\].weight has no meaning",
    ),
    ({"q": 1}, r"It has \['q'\]. Give it a list of messages"),
    ([], "A chat must be an object"),
    ({"messages": [3]}, r"messages\[0\] must be an object"),
    ({"messages": [{"content": "x"}]}, r"messages\[0\].role must be a string"),
  ],
)
def test_rejects(record, message):
  with pytest.raises(ValueError, match=message):
    conversation.read(record)


@pytest.mark.parametrize(
  ("record", "prompt"),
  [
    ({"prompt": "1?", "chosen": "2", "rejected": "3"}, [_USER]),
    ({"prompt": [_USER], "chosen": [_ANSWER], "rejected": "3"}, [_USER]),
    # Whole conversations, as in UltraFeedback.
    (
      {
        "prompt": "1?",
        "chosen": [_USER, _ANSWER],
        "rejected": [_USER, {**_ANSWER, "content": "3"}],
      },
      [_USER],
    ),
    (
      {
        "chosen": [_USER, _ANSWER],
        "rejected": [_USER, {**_ANSWER, "content": "3"}],
        "system": "S",
      },
      [{"role": "system", "content": "S"}, _USER],
    ),
  ],
)
def test_answers(record, prompt):
  found, answers = conversation.read_answers(
    {**record, "tools": _TOOLS}, keys=["chosen", "rejected"], what="A pair"
  )
  assert list(found.messages) == prompt
  assert found.variables == {"tools": _TOOLS}
  assert [list(answer.messages) for answer in answers] == [
    [{"role": "assistant", "content": x}] for x in "23"
  ]
  whole = found.extend(answers[0])
  assert list(whole.trained) == [len(prompt)]
  assert whole.variables == {"tools": _TOOLS}


@pytest.mark.parametrize("messages", ["x", [], 3, None])
def test_prompts_of_messages_are_lists(messages):
  with pytest.raises(ValueError, match="'messages' must be a list of messages"):
    conversation.read_prompt({"messages": messages}, key="messages")


def test_rows_become_json():
  row = {"a": np.asarray([{"b": None, "c": np.int64(3)}], object), "d": None}
  assert json.dumps(conversation.to_plain(row)) == '{"a": [{"c": 3}]}'


_OTHER = {"role": "assistant", "content": "3"}


@pytest.mark.parametrize(
  ("record", "message"),
  [
    ({"chosen": "a: x", "rejected": "a: y"}, "A pair must have 'prompt'"),
    (
      {"chosen": [_USER, _ANSWER], "rejected": [_OTHER]},
      "A pair must have 'prompt'",
    ),
    (
      {
        "prompt": "1? ",
        "chosen": [_USER, _ANSWER],
        "rejected": [_USER, _OTHER],
      },
      "'chosen' must continue 'prompt', .* 0 is one of 'user' after .*'user'",
    ),
  ],
)
def test_answers_without_their_prompt(record, message):
  with pytest.raises(ValueError, match=message):
    conversation.read_answers(
      record, keys=["chosen", "rejected"], what="A pair"
    )


def test_completions_may_repeat_the_prompt():
  found = conversation.read({"prompt": "1?", "completion": [_USER, _ANSWER]})
  assert list(found.messages) == [_USER, _ANSWER]
  assert list(found.trained) == [1]

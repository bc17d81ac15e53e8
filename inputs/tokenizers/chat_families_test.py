"""Tests of chats in the templates of public models, against transformers.

Ids are those of the `tokenizers` library for the prompts of transformers.
"""

# Special tokens of DeepSeek have wide letters.
# ruff: noqa: RUF001

import json
import pathlib

import numpy as np
import pytest
import tokenizers

from paxon.inputs.tokenizers import (
  chat_families,
  chat_template,
  conversation,
  make_chat_goldens,
  tokenizer_json,
)

_GOLDENS = pathlib.Path(__file__).parent / "goldens" / "chat_families.json"
_CASES = json.loads(_GOLDENS.read_text())


@pytest.fixture(name="library", scope="module")
def _library(tmp_path_factory):
  path = make_chat_goldens.write_family_tokenizer(tmp_path_factory.mktemp("t"))
  return tokenizers.Tokenizer.from_file(str(path)), str(path)


def _read(case):
  record = chat_families.list_records(case["family"])[case["record"]]
  template = chat_template.ChatTemplate(
    source=chat_families.TEMPLATES[case["family"]],
    special_tokens=chat_families.SPECIAL_TOKENS,
  )
  return template, conversation.read(json.loads(json.dumps(record)))


def _decode(library, ids):
  return library.decode(np.asarray(ids).tolist(), skip_special_tokens=False)


@pytest.mark.parametrize(
  "case", _CASES, ids=[f"{x['family']}-{x['record']}" for x in _CASES]
)
def test_trains_what_inference_continues(case, library):
  """Each prompt is a prefix of a sequence, and the loss begins after it."""
  library, path = library
  template, given = _read(case)
  tokenizer = tokenizer_json.TokenizerJson(path=path)
  sequences = template.sequences(given, tokenizer)
  count = 0
  for i, turn in zip(given.trained, case["turns"], strict=True):
    variables = given.variables
    assert template(given.messages[:i], **variables) == turn["prompt"]
    text = template(
      given.messages[: i + 1], add_generation_prompt=False, **variables
    )
    assert text == turn["text"]
    prompt = library.encode(turn["prompt"], add_special_tokens=False).ids
    size = len(prompt)
    found = [x for x in sequences if x[0][:size].tolist() == prompt]
    ids, mask = found[0]
    assert mask[size]
    assert not mask[size - 1]
    rest = np.flatnonzero(~mask[size:])
    end = size + rest[0] if len(rest) else len(ids)
    count += end - size
    generated = _decode(library, ids[size:end])
    content = given.messages[i].get("content", "").strip()
    answer = turn["text"].removeprefix(turn["prompt"])
    if case["family"] == "r1-think":
      assert "<think>\n" + generated == content + "<｜end▁of▁sentence｜>"
    elif "r1" in case["family"] and "</think>" in content:
      assert generated == content + "<｜end▁of▁sentence｜>"
    elif turn["text"].startswith(turn["prompt"]):
      assert answer.removesuffix("\n") == generated
    else:  # Mistral drops the system prompt.
      assert generated == f" {content}</s>"
  # Nothing else has a loss.
  assert sum(mask.sum() for _, mask in sequences) == count


def test_two_line_breaks_are_one_token_at_the_end_of_a_prompt(library):
  """The fault: the loss began within what inference had read."""
  library, path = library
  template, given = _read({"family": "llama3", "record": 0})
  text = template(given.messages[:3], add_generation_prompt=False)
  prompt = library.encode(template(given.messages[:2])).ids
  assert library.encode(text).ids[: len(prompt)] != prompt
  tokenizer = tokenizer_json.TokenizerJson(path=path)
  (ids, mask), *_ = template.sequences(given, tokenizer)
  assert ids[: len(prompt)].tolist() == prompt
  assert _decode(library, ids[mask]) == "2<|eot_id|>"


def test_earlier_reasoning_is_dropped_as_in_inference(library):
  template, given = _read({"family": "qwen3", "record": 1})
  tokenizer = tokenizer_json.TokenizerJson(path=library[1])
  first, second = template.sequences(given, tokenizer)
  assert "One." in _decode(library[0], first[0][first[1]])
  assert "One." not in _decode(library[0], second[0])
  assert "Two." in _decode(library[0], second[0][second[1]])
  with pytest.raises(ValueError, match="changes the text before message 3 "):
    template.tokenize_whole(given, tokenizer)


def test_variables_reach_the_template(library):
  template, given = _read({"family": "qwen3", "record": 0})
  record = {
    "messages": given.messages,
    "chat_template_kwargs": {"enable_thinking": False},
  }
  given = conversation.read(record)
  assert template(given.messages[:2], **given.variables).endswith(
    "<|im_start|>assistant\n<think>\n\n</think>\n\n"
  )
  tokenizer = tokenizer_json.TokenizerJson(path=library[1])
  ids, mask = template.sequences(given, tokenizer)[0]
  assert _decode(library[0], ids[mask]) == "2<|im_end|>"


@pytest.mark.parametrize(
  ("family", "record", "name"),
  [
    ("chatml", chat_families.CALLED, "tools"),
    ("gemma", chat_families.REASONED, "reasoning_content"),
    (
      "phi",
      {"messages": chat_families.CALLED["messages"]},
      "tool_calls",
    ),
    (
      "llama3",
      {
        "messages": chat_families.PLAIN["messages"],
        "chat_template_kwargs": {"enable_thinking": True},
      },
      "enable_thinking",
    ),
  ],
)
def test_what_a_template_does_not_use_is_named(family, record, name):
  template = chat_template.ChatTemplate(
    source=chat_families.TEMPLATES[family],
    special_tokens=chat_families.SPECIAL_TOKENS,
  )
  given = conversation.read(record)
  with pytest.raises(ValueError, match=f"does not use '{name}'"):
    template(given.messages, **given.variables)


def test_a_null_content_is_none_where_a_template_asks():
  """DeepSeek R1 finds tool calls by it, as transformers gives it."""
  messages = conversation.read(
    {"messages": chat_families.CALLED["messages"]}
  ).messages
  template = chat_template.ChatTemplate(
    source=chat_families.TEMPLATES["r1"],
    special_tokens=chat_families.SPECIAL_TOKENS,
  )
  assert "<｜tool▁sep｜>weather" in template(messages)


_SYSTEM = {"role": "system", "content": "Be brief."}
_QUESTION = {"role": "user", "content": "1 + 1?"}
_ANSWER = {"role": "assistant", "content": "2"}
_CALLS = [{"function": {"name": "f", "arguments": '{"a": 1}'}}]


@pytest.mark.parametrize(
  ("family", "messages", "message"),
  [
    (
      "qwen2.5",
      [{**_SYSTEM, "role": "developer"}, _QUESTION, _ANSWER],
      "content of message 0, which is of the role 'developer'",
    ),
    (
      "r1",
      [_QUESTION, _ANSWER, {"role": "function", "content": "3"}, _ANSWER],
      "content of message 2, which is of the role 'function'",
    ),
    (
      "llama3",
      [_QUESTION, {**_ANSWER, "content": "Let me see.", "tool_calls": _CALLS}],
      "content of message 1, .* of the role 'assistant' and has tool_calls",
    ),
    ("chatml", [{**_SYSTEM, "role": "developer"}, _QUESTION, _ANSWER], None),
    ("mistral", [_SYSTEM, *[_QUESTION, _ANSWER] * 2], None),
  ],
)
def test_messages_that_a_template_leaves_out(
  family, messages, message, library
):
  template = chat_template.ChatTemplate(
    source=chat_families.TEMPLATES[family],
    special_tokens=chat_families.SPECIAL_TOKENS,
  )
  given = conversation.read({"messages": messages})
  tokenizer = tokenizer_json.TokenizerJson(path=library[1])
  if message is None:
    assert template.sequences(given, tokenizer)
    return
  with pytest.raises(ValueError, match=message):
    template.sequences(given, tokenizer)


def test_arguments_in_a_string_are_not_encoded_twice():
  """OpenAI's clients send them so; `transformers serve` decodes them."""
  template = chat_template.ChatTemplate(source=chat_families.QWEN25)
  message = {"role": "assistant", "tool_calls": _CALLS}
  assert '"arguments": {"a": 1}}' in template([_QUESTION, message])
  # As they are where a template writes them so.
  template = chat_template.ChatTemplate(source=chat_families.QWEN3)
  (call,) = _CALLS
  function = {"name": "f", "arguments": '{"a":1}'}
  message["tool_calls"] = [{**call, "function": function}]
  assert '"arguments": {"a":1}}' in template([_QUESTION, message])

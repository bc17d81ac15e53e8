"""Tests for the values of requests."""

import dataclasses
import json

import pytest

from paxon.runner.endpoint import openai_requests

MESSAGES = [{"role": "user", "content": "x"}]


def _encode(prompt):
  if not isinstance(prompt, str):
    prompt = "".join(m["content"] for m in prompt.messages)
  if "bad" in prompt:
    raise ValueError("No such text.")
  return [1, *prompt.encode()]


SERVED = openai_requests.Served(
  name="m",
  context=100,
  max_logprobs=5,
  vocab_size=300,
  encode=_encode,
  max_choices=8,
  max_n=6,
)


def _parse(is_chat=False, **fields):
  given = {"messages": MESSAGES} if is_chat else {"prompt": "x"}
  body = json.dumps({"model": "m", **given, **fields}).encode()
  return openai_requests.parse(body, SERVED, is_chat=is_chat)


def test_values_of_the_template_reach_it():
  """As the clients of OpenAI send them back."""
  found = []
  served = dataclasses.replace(
    SERVED, encode=lambda given: found.append(given) or [1]
  )
  call = {"id": "c", "type": "function"}
  call["function"] = {"name": "f", "arguments": "{}"}
  reply = {"role": "assistant", "content": None, "tool_calls": [call]}
  unset = dict.fromkeys(("refusal", "audio", "function_call", "name"))
  answer = {"role": "tool", "tool_call_id": "c", "content": "3"}
  body = {
    "model": "m",
    "messages": [*MESSAGES, {**reply, **unset, "annotations": []}, answer],
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "tool_choice": "auto",
    "chat_template_kwargs": {"enable_thinking": False},
  }
  openai_requests.parse(json.dumps(body).encode(), served, is_chat=True)
  (given,) = found
  del reply["content"]
  reply["annotations"] = []
  assert list(given.messages) == [*MESSAGES, reply, answer]
  assert given.variables == {"tools": body["tools"], "enable_thinking": False}


def test_defaults_are_openais():
  found = _parse()
  assert found.settings.temperature == found.settings.top_p == 1
  assert (found.n, found.max_tokens, found.logprobs) == (1, (16,), None)
  assert not found.stream
  assert _parse(is_chat=True).max_tokens == (98,)
  # Without a seed each request is another one.
  assert found.settings.seed != _parse().settings.seed
  assert _parse(seed=-1).settings.seed == 2**31 - 1
  assert _parse(seed=None, stop=None, n=None).n == 1


def test_values_reach_their_settings():
  found = _parse(
    prompt=["ab", [5, 6]],
    temperature=0.5,
    top_p=0.25,
    top_k=3,
    min_p=0.1,
    presence_penalty=-2,
    frequency_penalty=1.5,
    repetition_penalty=1.1,
    logit_bias={"7": -100, "8": 1.5},
    seed=3,
    max_tokens=9,
    min_tokens=2,
    n=4,
    stop="end",
    logprobs=5,
    stream=True,
    stream_options={"include_usage": True},
    user="me",
  )
  settings = found.settings
  assert [list(p.ids) for p in found.prompts] == [[1, 97, 98], [5, 6]]
  assert (settings.temperature, settings.top_p) == (0.5, 0.25)
  assert (settings.top_k, settings.min_p) == (3, 0.1)
  assert settings.presence_penalty == -2
  assert settings.frequency_penalty == 1.5
  assert settings.repetition_penalty == 1.1
  assert settings.logit_bias == {7: -100, 8: 1.5}
  assert (settings.seed, settings.min_new_tokens) == (3, 2)
  assert found.max_tokens == (9, 9)
  assert (found.n, found.stops, found.logprobs) == (4, ("end",), 5)
  assert found.stream
  assert found.include_usage
  chat = _parse(is_chat=True, logprobs=True, response_format={"type": "text"})
  assert chat.logprobs == 0
  assert _parse(is_chat=True, logprobs=True, top_logprobs=4).logprobs == 4


def test_grammars_are_those_of_two_fields():
  schema = {"type": "object"}
  for form in (
    {"type": "json_object"},
    {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
  ):
    found = _parse(is_chat=True, response_format=form).grammar
    assert found is not None
    assert (found.field, found.kind) == ("response_format", "json")
    assert found.source == schema
  found = _parse(structured_outputs={"regex": "[ab]*"}).grammar
  assert found is not None
  assert (found.field, found.kind) == ("structured_outputs", "regex")
  assert found.source == "[ab]*"
  chat = _parse(is_chat=True, response_format={"type": "text"})
  assert chat.grammar is None


def test_numbers_that_float32_cannot_use():
  """They would give NaN; a temperature of 0 selects the most likely id."""
  assert _parse(temperature=1e-300).settings.temperature == 0
  assert _parse(temperature=1e-4).settings.temperature == 1e-4
  assert _parse(logit_bias={"0": 1, "10": 2}).settings.logit_bias == {
    0: 1,
    10: 2,
  }


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"tempreature": 1}, r"argument 'tempreature'.*did you mean 'temperature'"),
    ({"temperature": 2.5}, r"'temperature' must be from 0 to 2"),
    ({"temperature": "1"}, r"'temperature' must be an integer or a number"),
    ({"temperature": True}, r"'temperature' must be an integer or a number"),
    ({"top_p": -0.1}, r"'top_p' must be from 0 to 1"),
    ({"top_k": 2.0}, r"'top_k' must be an integer"),
    ({"n": 0}, r"'n' must be from 1 to 128"),
    ({"n": 7}, r"'n' must be at most 6, the number of slots"),
    ({"n": 3, "prompt": ["x"] * 3}, r"has 3 prompts; there can be 2 at once"),
    ({"best_of": 3, "n": 3, "echo": True}, r"'echo' is not supported"),
    ({"best_of": 2, "n": 3}, r"'best_of' must equal n \(3\)"),
    ({"suffix": "x"}, r"'suffix' is not supported"),
    ({"max_tokens": 0}, r"'max_tokens' must be from 1 to 2147483647"),
    ({"max_tokens": 10**30}, r"'max_tokens' must be from 1 to 2147483647"),
    (
      {"max_tokens": 99},
      r"context length is 100 tokens. However, you requested 101 tokens .2 in",
    ),
    ({"min_tokens": 17}, r"'min_tokens' must be from 0 to 16"),
    ({"logprobs": 6}, r"'logprobs' must be from 0 to 5"),
    ({"logprobs": True}, r"'logprobs' must be an integer"),
    ({"stop": ["a"] * 17}, r"'stop' must be at most 16 strings of 1 to 256"),
    ({"stop": [""]}, r"'stop' must be at most 16 strings"),
    ({"stop": 3}, r"'stop' must be a string or a list"),
    ({"stream": 1}, r"'stream' must be a boolean"),
    ({"stream_options": {"include_usage": True}}, r"requires stream"),
    ({"logit_bias": {"a": 1}}, r"'logit_bias' must map token ids to numbers"),
    ({"logit_bias": {"1": 101}}, r"'logit_bias' must map token ids to numbers"),
    ({"logit_bias": {"9" * 5000: 1}}, r"'logit_bias' must map token ids to"),
    ({"logit_bias": {"01": 1}}, r"'logit_bias' must map token ids to numbers"),
    ({"logit_bias": {"1": 1, "300": 1}}, r"'logit_bias' .* 0 to 299, got 300"),
    ({"repetition_penalty": 0}, r"'repetition_penalty' must be from 0.01 to 1"),
    ({"repetition_penalty": 10**400}, r"'repetition_penalty' must be from 0.0"),
    ({"stop": "\ud800"}, r"'stop' is not valid Unicode"),
    ({"prompt": []}, r"'prompt' must not be empty"),
    ({"prompt": [[]]}, r"'prompt' must be a string, a list of strings, or"),
    ({"prompt": [1, "a"]}, r"'prompt' must be a string, a list of strings, or"),
    ({"prompt": [2**70]}, r"'prompt' must have ids from 0 to 2147483647"),
    ({"prompt": [[1, -1]]}, r"'prompt' must have ids from 0 to 2147483647"),
    ({"prompt": {}}, r"'prompt' must be a string or a list"),
    ({"prompt": "bad"}, r"No such text"),
    ({"prompt": "\ud800"}, r"'prompt' is not valid Unicode \(character 0\)"),
    ({"structured_outputs": {"regex": {}}}, r"must have regex of another type"),
    ({"structured_outputs": {"x": "a"}}, r"must have one of 'json', 'regex'"),
    ({"response_format": {}}, r"Unrecognized request argument 'response_form"),
    ({"messages": MESSAGES}, r"Unrecognized request argument 'messages'"),
  ],
)
def test_rejects_bad_completions(fields, message):
  with pytest.raises(openai_requests.RequestError, match=message) as found:
    _parse(**fields)
  assert found.value.status == 400
  assert found.value.param is not None
  assert found.value.body()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"messages": []}, r"'messages' must not be empty"),
    ({"messages": [3]}, r"messages\[0\] must be an object"),
    ({"messages": [{"content": "x"}]}, r"messages\[0\].role must be a string"),
    ({"messages": [{"role": "user"}]}, r"\[0\].content must be a string or a"),
    (
      {"messages": [{"role": "u", "content": [{"type": "image_url"}]}]},
      r"messages\[0\].content: only parts of type 'text' are supported",
    ),
    ({"top_logprobs": 3}, r"'top_logprobs' requires logprobs"),
    ({"response_format": {"type": "x"}}, r"'response_format' must be of type"),
    (
      {"response_format": {"type": "json_schema", "json_schema": {}}},
      r"'response_format' must have an object json_schema.schema",
    ),
    (
      {
        "response_format": {"type": "json_object"},
        "structured_outputs": {"regex": "a"},
      },
      r"'structured_outputs' must not be set with a response_format",
    ),
    (
      {"response_format": {"type": "json_object"}, "min_tokens": 1},
      r"'min_tokens' must be 0 with a grammar",
    ),
    ({"functions": []}, r"Unrecognized request argument 'functions'"),
    ({"tools": [3]}, r"'tools' must be a list of objects"),
    ({"tool_choice": "required"}, r"'tool_choice' must be 'auto'"),
    (
      {"messages": [{**MESSAGES[0], "weight": 0}]},
      r"messages\[0\].weight must be 0 or 1, in a message of the assistant",
    ),
    (
      {"chat_template_kwargs": {"messages": []}},
      r"'chat_template_kwargs' must not have 'messages'",
    ),
    (
      {"messages": [{"role": "u", "content": "x" * 99}]},
      r"you requested 101 tokens \(100 in the messages, 1 in the completion\).",
    ),
  ],
)
def test_rejects_bad_chats(fields, message):
  with pytest.raises(openai_requests.RequestError, match=message):
    _parse(is_chat=True, **fields)


@pytest.mark.parametrize(
  ("body", "message"),
  [
    (b"", r"The body is not valid JSON"),
    (b"[1]", r"The body must be a JSON object"),
    (b'{"model": "m", "prompt": "x", "top_p": NaN}', r"NaN is not JSON"),
    (b'{"model": "m", "prompt": "x", "min_p": 1e999}', r"'min_p' must be from"),
    (
      b'{"model": "m", "prompt": "x", "repetition_penalty": 1e999}',
      r"must be from 0.01 to 100",
    ),
    (b'{"model": "m", "prompt": "x", "n": 1, "n": 2}', r"'n' occurs twice"),
    (b'{"model": "m", "prompt": "x", "n": ' + b"9" * 5000 + b"}", r"digits"),
  ],
)
def test_rejects_bad_bodies(body, message):
  with pytest.raises(openai_requests.RequestError, match=message):
    openai_requests.parse(body, SERVED, is_chat=False)


def test_errors_repeat_little_of_a_request_in_valid_unicode():
  for name in ("\ud800" * 9, "y" * 1_000_000):
    with pytest.raises(openai_requests.RequestError) as found:
      _parse(**{name: 1})
    text = json.dumps(found.value.body(), ensure_ascii=False)
    assert len(text.encode()) < 1500

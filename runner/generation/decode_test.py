"""Tests for prompts and for the file of samples."""

import dataclasses
import json

from etils import epath
import numpy as np
import pytest

from paxon.inputs import byte_tokenizer
from paxon.layers.decoding import samplers
from paxon.runner import user_error
from paxon.runner.generation import decode, decode_requests, samples
from paxon.runner.settings import generation
from paxon.runner.training import testing


@pytest.mark.parametrize(
  ("given", "prompt"),
  [
    ("def ", "def "),
    ("", ""),
    ("a@b", "a@b"),
    ("@@home", "@home"),
    ("@@", "@"),
  ],
)
def test_a_text_is_one_prompt(given, prompt):
  assert decode.parse_prompts(given, {}) == [prompt]


@pytest.mark.parametrize(
  ("content", "prompts"),
  [
    ("one\ntwo\n", ["one", "two"]),
    ("one\r\n two ", ["one", " two "]),
    ("one\n\ntwo\n\n", ["one", "", "two", ""]),
    ("a\u2028b\x0cc\n", ["a\u2028b\x0cc"]),
    ("\n", [""]),
  ],
)
def test_a_file_has_one_prompt_a_line(tmp_path, content, prompts):
  path = tmp_path / "prompts.txt"
  path.write_bytes(content.encode())
  assert decode.parse_prompts(f"@{path}", {}) == prompts


def test_a_relative_file_is_where_the_user_stands(tmp_path):
  (tmp_path / "p.txt").write_text("x")
  environ = {"BUILD_WORKING_DIRECTORY": str(tmp_path)}
  assert decode.parse_prompts("@p.txt", environ) == ["x"]


@pytest.mark.parametrize(
  ("name", "message"),
  [
    ("", r"--prompt=@ names no file; write --prompt=@FILE, or --prompt=@@"),
    ("no.txt", r"no.txt cannot be read \(No such file or dir.*begins with @"),
    (".", r"cannot be read \(Is a directory\)"),
    ("empty.txt", r"empty.txt is empty; write one prompt per line"),
    ("bytes.txt", r"bytes.txt is not UTF-8 text \(byte 1\)"),
    ("az://a/b", r"az://a/b needs the package adlfs: pip install"),
  ],
)
def test_a_file_that_gives_no_prompts(tmp_path, name, message):
  (tmp_path / "empty.txt").write_text("")
  (tmp_path / "bytes.txt").write_bytes(b"a\xff")
  with pytest.raises(user_error.UserError, match=message):
    decode.parse_prompts(f"@{name}", {"BUILD_WORKING_DIRECTORY": str(tmp_path)})


def _messages(prompt):
  return list(decode.parse_chat(prompt).messages)


def test_messages_of_a_chat():
  message = {"role": "user", "content": "x"}
  assert _messages("x") == [message]
  assert _messages("[1, 2]?") == [{"role": "user", "content": "[1, 2]?"}]
  listed = json.dumps([message], indent=1)
  assert _messages(listed) == [message]
  wrapped = json.dumps({"messages": [message]}, indent=1)
  assert _messages(wrapped) == [message]


def test_a_chat_with_tools():
  tools = [{"type": "function", "function": {"name": "f"}}]
  chat = {
    "system": "s",
    "tools": tools,
    "messages": [{"role": "user", "content": "x"}],
  }
  found = decode.parse_chat(json.dumps(chat))
  assert [message["content"] for message in found.messages] == ["s", "x"]
  assert found.variables == {"tools": tools}
  # A line of a file, whose other fields are copied.
  line = json.dumps({**chat, "id": 3}).encode()
  limits = decode_requests.Limits(
    chat=False, has_settings=True, max_new_tokens=1
  )
  (request,) = decode_requests.parse(line, epath.Path("p"), limits)
  assert request.prompt == found
  listed = {"prompt": chat["messages"], "system": "s", "tools": tools}
  (request,) = decode_requests.parse(
    json.dumps(listed).encode(), epath.Path("p"), limits
  )
  assert request.prompt == found
  text = json.dumps({"prompt": "x", "tools": tools}).encode()
  with pytest.raises(user_error.UserError, match="line 1: 'tools' requires a"):
    list(decode_requests.parse(text, epath.Path("p"), limits))


@pytest.mark.parametrize(
  ("prompt", "message"),
  [
    ('[{"role": "user"', r"--prompt is not JSON \("),
    ('[{"content": "x"}]', r"--prompt: messages\[0\].role must be a string"),
    ('{"messages": 3}', "'messages' must be a list of messages, got 3"),
    ('{"messages": [{"role": "user", "content": "x"}], "tool": 1}', "tool"),
    ('{"messages": []}', r"'messages' must be a list of messages, got \[\]"),
  ],
)
def test_messages_that_are_no_chat(prompt, message):
  with pytest.raises(user_error.UserError, match=message):
    decode.parse_chat(prompt)


@pytest.fixture(scope="module")
def job():
  return testing.make(seed=3)[0]


def _sample(prompt, continuation="x\n\u2028é"):
  return samples.Sample(prompt=prompt, continuation=continuation, ids=(5, 7))


def _lines(path):
  text = path.read_text()
  assert text.endswith("\n")
  return [json.loads(line) for line in text[:-1].split("\n")]


def test_a_line_has_all_fields_of_a_sample(tmp_path, job):
  path = decode.write_samples(
    epath.Path(tmp_path), [_sample("a"), _sample("")], step=12, job=job
  )
  assert path == tmp_path / "decode" / "12.jsonl"
  first, second = _lines(path)
  assert first == {
    "step": 12,
    "prompt": "a",
    "continuation": "x\n\u2028é",
    "ids": [5, 7],
    "log_probs": [],
    "finish_reason": "length",
    "sample": 0,
    "seed": 3,
    "sampler": "Greedy()",
    "max_new_tokens": 12,
    "stop": [],
  }
  assert second["prompt"] == ""


def test_a_sample_drawn_again_replaces_its_line_and_others_stay(tmp_path, job):
  folder = epath.Path(tmp_path)
  decode.write_samples(folder, [_sample("a"), _sample("b")], step=4, job=job)
  decode.write_samples(folder, [_sample("a", "new")], step=4, job=job)
  warm = dataclasses.replace(
    job,
    generation=generation.GenerationSettings(
      max_new_tokens=12, sampler=samplers.Temperature(temperature=0.5)
    ),
  )
  path = decode.write_samples(folder, [_sample("a", "warm")], step=4, job=warm)
  found = [(line["prompt"], line["continuation"]) for line in _lines(path)]
  assert found == [("a", "new"), ("b", "x\n\u2028é"), ("a", "warm")]
  assert _lines(path)[2]["sampler"].startswith("Temperature(temperature=0.5,")


def test_a_function_is_named(tmp_path, job):
  def mine(logits, key):
    return logits

  named = dataclasses.replace(
    job,
    generation=generation.GenerationSettings(sampler=mine),
  )
  path = decode.write_samples(
    epath.Path(tmp_path), [_sample("a")], step=4, job=named
  )
  assert _lines(path)[0]["sampler"].endswith(".mine")


@pytest.mark.parametrize("text", ["{", "[]\n", '{"prompt": "a"}\n'])
def test_a_file_of_something_else_is_named(tmp_path, job, text):
  (tmp_path / "decode").mkdir()
  (tmp_path / "decode" / "4.jsonl").write_text(text)
  with pytest.raises(user_error.UserError, match=r"4.jsonl, line 1, is not "):
    decode.write_samples(epath.Path(tmp_path), [_sample("a")], step=4, job=job)


@pytest.mark.parametrize(
  ("stops", "expected"),
  [
    ((), ("abcabc", None)),
    (("ca",), ("ab", 2)),
    (("zz", "bc", "ca"), ("a", 2)),
    (("abcabc",), ("", 3)),
    (("x",), ("abcabc", None)),
    # The second is whole two letters before the first.
    (("bcab", "a"), ("", 1)),
    (("bcab", "ca"), ("ab", 2)),
  ],
)
def test_a_text_is_cut_before_a_stop(stops, expected):
  # Tokens of two letters: a stop may begin and end inside of one.
  text = "abcabc"
  assert (
    samples._cut_at_stops(text, stops, lambda count: text[: 2 * count], 3)
    == expected
  )


class _Spelled(byte_tokenizer.ByteTokenizer):
  """Spells the end of a document, as tokenizers of other libraries do."""

  def decode(self, ids):
    number = self.end_id
    return "".join(
      "</s>" if i == number else super(_Spelled, self).decode([i]) for i in ids
    )


@pytest.mark.parametrize(
  ("has_ended", "finish"), [(True, "stop"), (False, "length")]
)
def test_the_end_token_is_in_the_ids_and_not_in_the_text(has_ended, finish):
  tokenizer = _Spelled()
  end = [tokenizer.end_id] if has_ended else []
  ids = np.array([*tokenizer.encode("bc"), *end], np.int32)
  # Without a model: the ids are given.
  generator = object.__new__(samples.Generator)
  generator.settings = generation.GenerationSettings()
  generator.tokenizer, generator.end_ids = tokenizer, (tokenizer.end_id,)
  prompt = samples.Encoded(text="a", ids=[100], is_chat=True)
  row = {"log_probs": np.zeros(3, np.float32), "ended": has_ended}
  found = generator._sample(prompt, 0, ids, row)
  assert (found.continuation, found.finish) == ("bc", finish)
  assert found.ids == tuple(ids.tolist())

"""Tests for the endpoint, over HTTP."""

import concurrent.futures
import dataclasses
import functools
import json
import os
import re
import socket
import sys
import threading
import time

from etils import epath
import pytest

from paxon.inputs import byte_tokenizer
from paxon.layers.decoding import (
  continuous_batching,
  methods,
  sampling,
  speculative,
)
from paxon.layers.models import testing as models_testing
from paxon.layers.positions import position_embedding
from paxon.runner import user_error
from paxon.runner.endpoint import engine as engine_lib
from paxon.runner.endpoint import serve, testing
from paxon.runner.generation import samples
from paxon.runner.session import session as session_lib

MODEL = {"model": "TinyLm"}
NO_END = {str(byte_tokenizer.ByteTokenizer().end_id): -100}
CONTEXT, PAGES = testing.CONTEXT, testing.PAGES
_connect, _send = testing.connect, testing.send


@pytest.fixture(name="run_dir", scope="module")
def _run_dir(tmp_path_factory):
  folder = epath.Path(tmp_path_factory.mktemp("run"))
  testing.make_run(folder)
  return folder


@pytest.fixture(name="server", scope="module")
def _server(run_dir):
  """The server, running; its shutdown is tested at the end."""
  with testing.serve_run(run_dir) as server:
    yield server
    _shut_down(server)


def _post(server, path="/v1/completions", **fields):
  status, text = _send(server, path, {**MODEL, **fields})
  found = json.loads(text)
  assert status == 200, found
  return found


def _events(text):
  lines = [line for line in text.decode().split("\n\n") if line]
  assert all(line.startswith("data: ") for line in lines)
  assert lines[-1] == "data: [DONE]"
  return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def _stream(server, path="/v1/completions", **fields):
  body = {**MODEL, "stream": True, **fields}
  status, text = _send(server, path, body)
  assert status == 200, text
  return _events(text)


def _metric(server, name):
  _, text = _send(server, "/metrics", method="GET")
  (line,) = [
    line
    for line in text.decode().splitlines()
    if line.startswith(f"paxon_{name} ")
  ]
  return int(line.split()[1])


def _wait_until_idle(server):
  while _metric(server, "slots_busy") or _metric(server, "sequences_open"):
    time.sleep(0.02)


def _shut_down(server):
  """Ends the server; it answers what was asked before."""
  connection = _connect(server)
  body = {**MODEL, "prompt": ["x", "x"], "max_tokens": 80, "n": 4}
  body["stream"] = True
  connection.request(
    "POST",
    "/v1/completions",
    json.dumps({**body, "logit_bias": NO_END}),
    {"Content-Type": "application/json"},
  )
  response = connection.getresponse()
  first = response.readline()
  server.should_exit = True
  events = _events(first + response.read())
  response.close()
  connection.close()
  ends = [e["choices"][0]["finish_reason"] for e in events]
  assert ends.count("length") == 8
  with pytest.raises(OSError, match="refused"):
    _send(server, "/health", method="GET")


def test_a_completion_is_what_decoding_generates(server):
  job = testing.make_job()
  session = session_lib.open_session(job)
  (expected,) = samples.draw(session, session.initial_state(), prompts=["def "])
  found = _post(server, prompt="def ", temperature=0, max_tokens=12, logprobs=2)
  (choice,) = found["choices"]
  assert choice["text"] == expected.continuation
  assert choice["finish_reason"] == expected.finish
  assert found["usage"] == {
    "prompt_tokens": 5,
    "completion_tokens": len(expected.ids),
    "total_tokens": 5 + len(expected.ids),
  }
  logprobs = choice["logprobs"]
  assert logprobs["token_logprobs"] == pytest.approx(
    expected.log_probs, rel=1e-4
  )
  assert len(logprobs["tokens"]) == len(logprobs["text_offset"]) == 12
  assert all(1 <= len(top) <= 3 for top in logprobs["top_logprobs"])


def test_prompts_may_be_several_and_ids(server):
  texts = [
    _post(server, prompt=p, temperature=0)["choices"][0]["text"]
    for p in ("def ", "x")
  ]
  tokenizer = testing.make_job().task.tokenizer
  ids = [
    [tokenizer.begin_id, *tokenizer.encode(p).tolist()] for p in ("def ", "x")
  ]
  for prompts in (["def ", "x"], ids):
    found = _post(server, prompt=prompts, temperature=0)
    assert [choice["text"] for choice in found["choices"]] == texts
    assert [choice["index"] for choice in found["choices"]] == [0, 1]


def test_a_stream_has_the_text_of_the_whole(server):
  fields = {"prompt": "x", "seed": 5, "max_tokens": 40, "n": 3}
  choices = _post(server, **fields)["choices"]
  assert len({choice["text"] for choice in choices}) == 3
  assert _post(server, **fields)["choices"] == choices
  events = _stream(server, **fields, stream_options={"include_usage": True})
  *events, last = events
  assert last["choices"] == []
  assert last["usage"]["prompt_tokens"] == 2
  texts, finish = [""] * 3, {}
  for event in events:
    (choice,) = event["choices"]
    assert choice["index"] not in finish
    texts[choice["index"]] += choice["text"]
    if choice["finish_reason"]:
      finish[choice["index"]] = choice["finish_reason"]
  assert texts == [choice["text"] for choice in choices]
  assert finish == {c["index"]: c["finish_reason"] for c in choices}


def test_a_stop_text_ends_a_completion_and_frees_its_slot(server):
  fields = {"prompt": "def ", "temperature": 0, "max_tokens": 60}
  text = _post(server, **fields)["choices"][0]["text"]
  stop = text[10:13]
  (choice,) = _post(server, **fields, stop=["never", stop])["choices"]
  assert choice["text"] == text[: text.index(stop)]
  assert choice["finish_reason"] == "stop"
  events = _stream(server, **fields, stop=stop)
  texts = [event["choices"][0]["text"] for event in events]
  assert "".join(texts) == choice["text"]
  _wait_until_idle(server)


def test_prompts_that_begin_alike_are_read_once(server):
  """And get the same tokens and probabilities."""
  name = "reused_prompt_tokens_total"
  before = _metric(server, name)
  fields = {"prompt": "y" * 80, "max_tokens": 6, "logprobs": 1, "seed": 3}
  first = _post(server, **fields)["choices"]
  assert _metric(server, name) == before
  assert _post(server, **fields)["choices"] == first
  assert _metric(server, name) - before == 64
  assert len(_post(server, **fields, n=4)["choices"]) == 4
  assert _metric(server, name) - before == 5 * 64
  _wait_until_idle(server)
  assert _metric(server, "pages_free") == _metric(server, "pages") == PAGES


def test_a_chat_uses_the_template(server):
  messages = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": [{"type": "text", "text": "hello"}]},
  ]
  path = "/v1/chat/completions"
  fields = {"messages": messages, "seed": 1, "max_completion_tokens": 6}
  found = _post(server, path, **fields, logprobs=True, top_logprobs=2)
  (choice,) = found["choices"]
  assert found["object"] == "chat.completion"
  assert choice["message"]["role"] == "assistant"
  # A begin id, and the bytes.
  assert found["usage"]["prompt_tokens"] == 1 + len(
    testing.apply_template([messages[0], {"role": "user", "content": "hello"}])
  )
  content = choice["logprobs"]["content"]
  assert len(content) == 6
  assert [len(token["top_logprobs"]) for token in content] == [2] * 6
  first, *events = _stream(server, path, **fields)
  assert first["choices"][0]["delta"]["role"] == "assistant"
  assert first["object"] == "chat.completion.chunk"
  deltas = [event["choices"][0]["delta"] for event in events]
  text = "".join(delta.get("content", "") for delta in deltas)
  assert text == choice["message"]["content"]
  # Without a limit a chat fills the context.
  found = _post(server, path, messages=messages, logit_bias=NO_END)
  assert found["usage"]["total_tokens"] == CONTEXT


def test_every_completion_has_the_form_of_its_schema(server):
  """Of a model that has learned nothing; `PAXON_SCHEMA_OUTPUTS` is how many."""
  schema = {
    "type": "object",
    "properties": {
      "a": {"type": "integer", "minimum": -9, "maximum": 99},
      "b": {"type": "array", "items": {"enum": ["x", "é"]}, "maxItems": 2},
    },
    "required": ["a", "b"],
    "additionalProperties": False,
  }
  form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
  fields = {"messages": [{"role": "user", "content": "?"}], "n": 4}
  rounds = -(-int(os.environ.get("PAXON_SCHEMA_OUTPUTS", "40")) // 4)
  for seed in range(rounds):
    path = "/v1/chat/completions"
    found = _post(server, path, **fields, response_format=form, seed=seed)
    for choice in found["choices"]:
      value = json.loads(choice["message"]["content"])
      assert choice["finish_reason"] == "stop"
      assert value.keys() == {"a", "b"}
      assert -9 <= value["a"] <= 99
      assert set(value["b"]) <= {"x", "é"}
  print(f"{4 * rounds} outputs parsed")


def test_regular_expressions_and_grammars(server):
  (choice,) = _post(
    server, prompt="x", structured_outputs={"regex": "(ab|cd){3}"}
  )["choices"]
  assert re.fullmatch("(ab|cd){3}", choice["text"])
  grammar = 'start: "<" item ">"\nitem: "1" | "2"'
  found = _post(
    server, prompt="x", n=4, structured_outputs={"grammar": grammar}
  )
  assert {c["text"] for c in found["choices"]} <= {"<1>", "<2>"}
  for kind, source, message in (
    ("json", {"type": "nonsense"}, "Invalid type: nonsense"),
    ("regex", "[a", "unclosed character class"),
    ("grammar", "start: no", "no"),
  ):
    body = {**MODEL, "prompt": "x", "structured_outputs": {kind: source}}
    status, text = _send(server, "/v1/completions", body)
    error = json.loads(text)["error"]
    assert status == 400
    assert error["message"].startswith("The grammar is not valid: ")
    assert message in error["message"]


def test_the_client_of_openai(server):
  """Runs with `--config=oracle` only, which has the package."""
  openai = pytest.importorskip("openai")
  client = openai.OpenAI(
    base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0
  )
  assert [model.id for model in client.models.list()] == ["TinyLm"]
  complete = functools.partial(client.completions.create, **MODEL)
  fields = {"prompt": "def ", "temperature": 0, "max_tokens": 30}
  (choice,) = complete(**fields, logprobs=2).choices
  assert len(choice.logprobs.token_logprobs) == 30
  chunks = [*complete(**fields, stream=True)]
  assert "".join(c.choices[0].text for c in chunks) == choice.text
  (stopped,) = complete(**fields, stop=choice.text[5:8]).choices
  assert stopped.text == choice.text[: choice.text.index(choice.text[5:8])]
  assert stopped.finish_reason == "stop"
  assert len({c.text for c in complete(prompt="x", n=4).choices}) == 4

  chat = functools.partial(client.chat.completions.create, **MODEL)
  messages = [{"role": "user", "content": "hello"}]
  fields = {"messages": messages, "seed": 2, "max_completion_tokens": 9}
  found = chat(**fields, logprobs=True, top_logprobs=3)
  assert found.usage.prompt_tokens == 1 + len(testing.apply_template(messages))
  (choice,) = found.choices
  assert len(choice.logprobs.content[0].top_logprobs) == 3
  deltas = [chunk.choices[0].delta for chunk in chat(**fields, stream=True)]
  assert deltas[0].role == "assistant"
  text = "".join(delta.content or "" for delta in deltas)
  assert text == choice.message.content
  schema = {"enum": [{"a": 1}, {"a": 2}]}
  form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
  found = chat(messages=messages, response_format=form, n=3)
  texts = [choice.message.content for choice in found.choices]
  assert {json.loads(text)["a"] for text in texts} <= {1, 2}
  with pytest.raises(openai.BadRequestError, match="maximum context length"):
    complete(prompt="x" * 95)
  with pytest.raises(openai.NotFoundError, match="does not exist"):
    client.completions.create(model="gpt", prompt="x")
  with complete(prompt="x", max_tokens=90, stream=True) as left:
    next(iter(left))
  client.close()
  _wait_until_idle(server)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_slots(server, stream):
  fields = {"prompt": ["x"] * 8, "max_tokens": 90, "n": 4, "stream": stream}
  before = _metric(server, "generated_tokens_total")
  connection = _connect(server)
  body = json.dumps({**MODEL, **fields, "logit_bias": NO_END})
  connection.request(
    "POST", "/v1/completions", body, {"Content-Type": "application/json"}
  )
  if stream:
    response = connection.getresponse()
    assert response.readline().startswith(b"data: ")
    response.close()
  else:
    while not _metric(server, "slots_busy"):
      time.sleep(0.01)
  connection.close()
  _wait_until_idle(server)
  assert _metric(server, "generated_tokens_total") - before < 32 * 90


def test_clients_at_the_same_time_get_what_each_gets_alone(server):
  def ask(i):
    fields = {"prompt": f"{i} = ", "seed": i, "max_tokens": 5 + i % 7}
    return _post(server, **fields)["choices"]

  alone = [ask(i) for i in range(32)]
  with concurrent.futures.ThreadPoolExecutor(32) as pool:
    assert [*pool.map(ask, range(32))] == alone
  _wait_until_idle(server)


@pytest.mark.parametrize(
  ("path", "body", "status", "message"),
  [
    ("/v1/completions", b'{"model"', 400, "The body is not valid JSON: "),
    ("/v1/completions", b"\xff", 400, "The body is not valid JSON: "),
    ("/v1/completions", b"[" * 100_000, 400, "The body is not valid JSON: "),
    ("/v1/completions", {"prompt": "x"}, 400, "'model' is missing."),
    (
      "/v1/completions",
      {"model": "gpt", "prompt": "x"},
      404,
      "The model 'gpt' does not exist; it is 'TinyLm'.",
    ),
    (
      "/v1/completions",
      {**MODEL, "prompt": "x" * 96},
      400,
      "This model's maximum context length is 96 tokens. However, you requ",
    ),
    (
      "/v1/completions",
      {**MODEL, "prompt": [9999]},
      400,
      "The id 9999 is not in the model's embedding, which has 264 ids",
    ),
    ("/v1/completions", {**MODEL, "prompt": [-1]}, 400, "'prompt' must have"),
    (
      "/v1/completions",
      {**MODEL, "prompt": "x", "logit_bias": {"9999": 1}},
      400,
      "'logit_bias' must have ids from 0 to 263, got 9999.",
    ),
    (
      "/v1/completions",
      {**MODEL, "prompt": "x", "n": 5},
      400,
      "'n' must be at most 4, the number of slots.",
    ),
    (
      "/v1/completions",
      {**MODEL, "prompt": ["x"] * 35, "n": 2},
      400,
      "'prompt' has 35 prompts; there can be 34 at once (with n, at most 68",
    ),
    ("/v1/completions", b" " * 5_000_000, 413, "The body must have at most"),
    ("/v1/chat/completions", {**MODEL}, 400, "'messages' is missing."),
    ("/v1/nothing", {}, 404, "Not Found: POST /v1/nothing"),
    ("/v1/models", {}, 405, "Method Not Allowed: POST /v1/models"),
  ],
)
def test_errors_have_openais_form(server, path, body, status, message):
  _wait_until_idle(server)
  got, text = _send(server, path, body)
  error = json.loads(text)["error"]
  assert error["message"].startswith(message)
  assert got == status
  assert error.keys() == {"message", "type", "param", "code"}


def test_other_content_and_unknown_lengths_of_bodies(server):
  text = {"Content-Type": "text/plain"}
  status, _ = _send(server, "/v1/completions", {**MODEL, "prompt": "x"}, **text)
  assert status == 415
  # In chunks, without a length.
  connection = _connect(server)
  head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type:"
  head += b" application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
  connection.connect()
  with connection.sock as sock:
    sock.sendall(head)
    chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    for _ in range(200):
      sock.sendall(chunk)
    sock.sendall(b"0\r\n\r\n")
    assert sock.recv(100).startswith(b"HTTP/1.1 413 ")


def test_the_model_and_health(server):
  status, text = _send(server, "/v1/models", method="GET")
  assert [entry["id"] for entry in json.loads(text)["data"]] == ["TinyLm"]
  assert status == 200
  assert _send(server, "/v1/models/TinyLm", method="GET")[0] == 200
  assert _send(server, "/v1/models/gpt", method="GET")[0] == 404
  assert _send(server, "/health", method="GET") == (200, b'{"status":"ok"}')


def test_a_context_has_no_more_positions_than_the_model():
  options = serve.Options(context=20)
  model = models_testing.tiny_gpt2(
    positions=position_embedding.LearnedPositions(16)
  )
  assert serve.limit_context(options, model).context == 16
  assert serve.limit_context(options, models_testing.tiny_decoder()) == options


def test_a_key_that_no_header_can_have():
  assert serve.read_api_key({}) is None
  assert serve.read_api_key({"PAXON_API_KEY": "sk-1"}) == "sk-1"
  for key in ("", "a b", "é", "a\n"):
    with pytest.raises(user_error.UserError, match=r"^PAXON_API_KEY must be"):
      serve.read_api_key({"PAXON_API_KEY": key})


def test_a_nan_ends_its_request_only():
  done = threading.Event()
  delivered = []

  class Broken(continuous_batching.Batcher):
    """Gives the first request a NaN, and goes on."""

    num_slots, is_busy, num_submitted = 2, False, 0

    def __init__(self):
      pass

    def check(self, request):
      pass

    def submit(self, request):
      self.is_busy = True
      self.num_submitted += 1
      return self.num_submitted - 1

    def cancel(self, number):
      assert number == 0

    def step(self):
      self.is_busy = False
      token = functools.partial(continuous_batching.Token, id=3)
      return [
        token(request=0, log_prob=float("nan")),
        token(request=1, log_prob=-0.5, finish="length"),
      ]

  def deliver(*event):
    delivered.append(event)
    if len(delivered) == 2:
      done.set()

  engine = engine_lib.Engine(Broken(), max_waiting=0)
  engine.start()
  settings = sampling.Settings(max_new_tokens=1)
  request = continuous_batching.Request(prompt=[1], settings=settings)
  engine.submit([request] * 2, deliver)
  assert done.wait()
  assert engine.failure is None
  engine.close()
  (first, token, error), (second, right, no_error) = delivered
  assert (first, token, second, no_error) == (0, None, 1, None)
  assert isinstance(error, engine_lib.NonFiniteError)
  assert right.log_prob == -0.5
  assert not engine.num_open


def test_a_failed_step_ends_the_server(run_dir, monkeypatch):
  def fail(self):
    raise RuntimeError("a device failed")

  monkeypatch.setattr(engine_lib.Engine, "_step", fail)
  body = {"model": "TinyLm", "prompt": "a", "max_tokens": 1}
  answers = []
  with concurrent.futures.ThreadPoolExecutor() as pool:

    def ask(server):
      answers.append(pool.submit(testing.send, server, "/v1/completions", body))

    options = serve.Options(port=0, context=CONTEXT)
    with pytest.raises(RuntimeError, match="a device failed"):
      serve.run(testing.make_job(), run_dir, options, when_ready=ask)
    assert answers[0].result()[0] == 500


def test_a_cache_too_small_for_its_context(run_dir):
  options = serve.Options(port=0, context=CONTEXT, cache_tokens=127)
  with pytest.raises(
    user_error.UserError, match=r"--serve_cache_tokens=127 must be at least 128"
  ):
    serve.run(testing.make_job(), run_dir, options)


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    (
      {"speculation": speculative.PromptLookup()},
      r"does not draft tokens; unset",
    ),
    (
      {"method": methods.BestEnd()},
      r"does not use .*method, .* BestEnd\(\); se",
    ),
  ],
)
def test_drafts_and_methods_are_not_served(run_dir, fields, message):
  job = testing.make_job()
  assert job.generation is not None
  settings = dataclasses.replace(job.generation, **fields)
  with pytest.raises(user_error.UserError, match=message):
    serve.run(
      dataclasses.replace(job, generation=settings),
      run_dir,
      serve.Options(port=0),
    )


def test_an_address_in_use_and_missing_libraries(run_dir, monkeypatch):
  with socket.create_server(("127.0.0.1", 0)) as taken:
    port = taken.getsockname()[1]
    with pytest.raises(
      user_error.UserError, match=rf"--serve_port={port}: Address already in"
    ):
      serve.run(testing.make_job(), run_dir, serve.Options(port=port))
  for name in [*sys.modules]:
    if name.partition(".")[0] == "starlette" or name.endswith("endpoint.app"):
      monkeypatch.delitem(sys.modules, name)
  monkeypatch.delattr("paxon.runner.endpoint.app", raising=False)
  monkeypatch.setitem(sys.modules, "starlette", None)
  with pytest.raises(
    user_error.UserError,
    match=r"^--mode=serve: starlette is not installed: .* extra `serve`",
  ):
    serve.run(testing.make_job(), run_dir, serve.Options(port=0))

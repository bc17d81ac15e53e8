"""Tests for the endpoint under attack: nothing ends, stalls or changes it."""

import asyncio
import collections
from concurrent import futures
import contextlib
import json
import socket
import threading
import time

from etils import epath
import pytest

from paxon.runner.endpoint import access, attacks, testing

KEY = "sk-secret"
HEADERS = {"Authorization": f"Bearer {KEY}"}


@pytest.fixture(name="server", scope="module")
def _server(tmp_path_factory):
  folder = epath.Path(tmp_path_factory.mktemp("run"))
  testing.make_run(folder)
  with testing.serve_run(
    folder, api_key=KEY, allowed_hosts=("llm.example.org",)
  ) as server:
    yield server


def _post(server, body, path="/v1/completions", **options):
  return testing.send(server, path, body, **options, **HEADERS)


def _answer(server):
  """Returns a completion of temperature 0, with its probabilities."""
  fields = {"prompt": "def ", "temperature": 0, "max_tokens": 40}
  status, text = _post(server, {"model": "TinyLm", "logprobs": 5, **fields})
  assert status == 200
  return json.loads(text)["choices"]


class _Others:
  """Clients who measure how long they wait, while this is a context."""

  def __init__(self, server):
    self._server = server
    self._is_over = threading.Event()
    self.waits = {"health": [], "token": []}
    # The machine may be busy with others.
    with self:
      time.sleep(0.5)
    self._quiet = {name: max(x) for name, x in self.waits.items()}
    self.waits = {"health": [], "token": []}

  def __enter__(self):
    self._is_over.clear()
    self._threads = [
      threading.Thread(target=each) for each in (self._health, self._stream)
    ]
    for thread in self._threads:
      thread.start()

  def __exit__(self, *exception):
    self._is_over.set()
    for thread in self._threads:
      thread.join()

  def check(self):
    for name, waits in self.waits.items():
      assert max(waits) < max(1.0, 5 * self._quiet[name]), name
    health = sorted(self.waits["health"])
    assert health[len(health) // 2] < max(0.1, 5 * self._quiet["health"])

  def _measure(self, name, begin):
    self.waits[name].append(time.monotonic() - begin)
    return time.monotonic()

  def _health(self):
    while not self._is_over.wait(0.03):
      begin = time.monotonic()
      assert testing.send(self._server, "/health", method="GET")[0] == 200
      self._measure("health", begin)

  def _stream(self):
    body = {"model": "TinyLm", "prompt": "x", "stream": True, "max_tokens": 90}
    while not self._is_over.wait(0.2):
      connection = testing.connect(self._server)
      headers = {"Content-Type": "application/json", **HEADERS}
      begin = time.monotonic()
      connection.request("POST", "/v1/completions", json.dumps(body), headers)
      response = connection.getresponse()
      while response.readline():
        begin = self._measure("token", begin)
      response.close()
      connection.close()


@pytest.mark.nightly
def test_grammars_end_their_own_request_at_most(server):
  grammars = attacks.make_grammars()
  assert len(grammars) >= 80
  before, others = _answer(server), _Others(server)

  def ask(name):
    kind, source = grammars[name]
    body = {"model": "TinyLm", "prompt": "x", "max_tokens": 12}
    body["structured_outputs"] = {kind: source}
    status, text = _post(server, body)
    found = json.loads(text)
    assert status in (200, 400), name
    if status == 400:
      assert found["error"]["param"] == "structured_outputs"
      assert "grammar" in found["error"]["message"]
    return name, status

  with others, futures.ThreadPoolExecutor(3) as pool:
    statuses = dict(pool.map(ask, grammars))
  others.check()
  assert _answer(server) == before
  assert statuses["1,000 nested objects by $ref"] == 400
  assert statuses["a chain of 2,500 $ref"] == 400
  assert statuses["lark: 3,000 rules"] == 400
  assert statuses["regex: 10^10 characters"] == 400
  assert statuses["a loop of $ref"] == 400
  assert statuses["9,000 values"] == 200
  assert statuses["regex: 10,000 words"] == 200


def test_a_stream_reports_a_grammar_that_cannot_be_followed(server):
  body = {"model": "TinyLm", "prompt": "x", "max_tokens": 12, "stream": True}
  body["structured_outputs"] = {"grammar": 'start: ("a"{100000}){100000}\n'}
  status, text = _post(server, body)
  events = text.decode().strip().split("\n\n")
  error = json.loads(events[-1].removeprefix("data: "))["error"]
  assert status == 200
  assert error["param"] == "structured_outputs"
  assert error["message"].startswith("The grammar cannot be followed")


@pytest.mark.nightly
def test_values_and_bodies_have_an_answer(server):
  before, others = _answer(server), _Others(server)
  counts = collections.Counter()
  connection = testing.connect(server)
  with others, contextlib.closing(connection):
    for path, body in attacks.make_bodies("TinyLm"):
      status, text = _post(server, body, path, connection=connection)
      counts[status] += 1
      assert status in (200, 400, 404), body[:200]
      if status != 200:
        error = json.loads(text)["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        assert 5 < len(error["message"]) < 1100
        assert "\n" not in error["message"]
  others.check()
  assert _answer(server) == before
  assert sum(counts.values()) > 800
  assert counts[400] > 600


def _open(server, data=b""):
  found = socket.create_connection(("127.0.0.1", server.port), timeout=30)
  found.sendall(data)
  return found


def _read(connection):
  """Returns what comes until the other side closes."""
  with connection:
    return b"".join(iter(lambda: connection.recv(65536), b""))


def _send_often(connection, data, *, pause=0.0):
  end = time.monotonic() + 20
  while time.monotonic() < end:
    connection.sendall(data)
    time.sleep(pause)


def test_a_request_must_arrive_in_time(server, monkeypatch):
  monkeypatch.setattr(access, "_READ_SECONDS", 0.3)
  head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
  full = head + b"Content-Type: application/json\r\nContent-Length: 9\r\n"
  full += f"Authorization: Bearer {KEY}\r\n\r\n{{".encode()
  for data in (b"", b"G", head, full):
    text = _read(_open(server, data))
    assert text.startswith(b"HTTP/1.1 408 Request Timeout\r\n")
    error = json.loads(text.partition(b"\r\n\r\n")[2])["error"]
    assert error["message"] == "The request did not arrive within 0.3 s."
  # Bytes that come now and then do not help.
  for data in (head, full):
    with (
      _open(server, data) as connection,
      pytest.raises(OSError, match=r"reset|pipe"),
    ):
      _send_often(connection, b"x", pause=0.05)
  # A response may take longer than the request.
  body = {"model": "TinyLm", "prompt": ["x"] * 8, "max_tokens": 90}
  assert _post(server, body)[0] == 200


def test_connections_are_limited_and_idle_ones_end_first(server, monkeypatch):
  monkeypatch.setattr(access, "_MAX_CONNECTIONS", 6)
  with contextlib.ExitStack() as stack:
    idle = [stack.enter_context(_open(server)) for _ in range(20)]
    for _ in range(10):
      assert testing.send(server, "/health", method="GET")[0] == 200
    assert _read(idle[0]).startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
  # Those that are answered go on, and no more are accepted.
  body = {"model": "TinyLm", "prompt": "x", "max_tokens": 90, "stream": True}
  data = json.dumps(body).encode()
  head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close"
  head += f"\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
  head += f"\r\nAuthorization: Bearer {KEY}\r\n\r\n"
  busy = [_open(server, head.encode() + data) for _ in range(6)]
  assert all(each.recv(8) == b"HTTP/1.1" for each in busy)
  rejected = _read(_open(server))
  assert rejected.startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
  assert all(b"data: [DONE]" in _read(each) for each in busy)


def test_a_response_must_be_read(server, monkeypatch):
  monkeypatch.setattr(access, "_WRITE_SECONDS", 0.3)
  request = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nAuthorization:"
  request += f" Bearer {KEY}\r\n\r\n".encode()
  # Accepted connections have the buffers of their listener.
  listener = server._listener
  size = listener.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
  listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
  with _open(server) as connection:
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, size // 2)
    with pytest.raises(OSError, match=r"reset|pipe"):
      _send_often(connection, request * 100)


def _admit(rules, path="/v1/models", address="127.0.0.1", **headers):
  """Returns the status, and the headers of an error."""
  sent = []

  async def answer(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})

  async def send(message):
    sent.append(message)

  pairs = [(k.encode(), v.encode("latin-1")) for k, v in headers.items()]
  scope = {"type": "http", "path": path, "headers": pairs, "method": "GET"}
  scope["server"] = address, 8000
  app = access.Access(answer, **rules)
  asyncio.run(app(scope, None, send))
  return sent[0]["status"], dict(sent[0]["headers"])


def test_other_hosts_are_rejected():
  for rules, hosts, status in (
    ({}, ("localhost", "LOCALHOST:80", "127.0.0.1:1", "[::1]:8000"), 200),
    ({}, ("evil.example", "localhost.evil.example:8000", "", ":8000"), 403),
    (
      {},
      ("127.0.0.1.evil.example", "localhost:80:80", "[::1", "10.0.0.5"),
      403,
    ),
    ({}, ("localhost@evil.example", "\xe9", "evil.example#localhost"), 403),
    ({"hosts": ["LLM.example.org"]}, ("llm.example.org:8000", "[::1]"), 200),
    ({"hosts": ["llm.example.org"]}, ("example.org", "x.llm.example.org"), 403),
    ({"hosts": ["*"]}, ("evil.example", ""), 200),
  ):
    for host in hosts:
      assert _admit(rules, host=host)[0] == status, host
      assert _admit(rules, "/health", host=host)[0] == status, host
  # The address that the client has connected to.
  assert _admit({}, host="10.0.0.5:8000", address="10.0.0.5")[0] == 200
  assert _admit({}, host="[fe80::1]:8000", address="fe80::1")[0] == 200


def test_requests_must_have_the_key():
  rules = {"api_key": KEY}
  for value, status in (
    (f"Bearer {KEY}", 200),
    (f"bearer  {KEY}", 200),
    ("", 401),
    (KEY, 401),
    ("Bearer", 401),
    (f"Bearer {KEY}x", 401),
    (f"Bearer {KEY[:-1]}", 401),
    (f"Basic {KEY}", 401),
    ("Bearer \xe9", 401),
  ):
    found, headers = _admit(rules, host="localhost", authorization=value)
    assert found == status, value
    assert status == 200 or headers[b"www-authenticate"] == b"Bearer"
  assert _admit(rules, host="localhost")[0] == 401
  assert _admit(rules, "/metrics", host="localhost")[0] == 401
  assert _admit(rules, "/health", host="localhost")[0] == 200


def test_the_client_of_openai_sends_the_key(server):
  """Runs with `--config=oracle` only, which has the package."""
  openai = pytest.importorskip("openai")
  address = f"http://127.0.0.1:{server.port}/v1"
  with openai.OpenAI(base_url=address, api_key=KEY, max_retries=0) as client:
    assert [model.id for model in client.models.list()] == ["TinyLm"]
    with pytest.raises(openai.PermissionDeniedError, match="host 'evil"):
      client.models.list(extra_headers={"Host": "evil.example"})
    with pytest.raises(openai.BadRequestError, match="number of slots"):
      client.completions.create(model="TinyLm", prompt="x", n=9)
  with (
    openai.OpenAI(base_url=address, api_key="none", max_retries=0) as client,
    pytest.raises(openai.AuthenticationError, match="API key is missing or"),
  ):
    client.models.list()

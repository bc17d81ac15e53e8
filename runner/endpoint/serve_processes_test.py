"""Tests that several processes serve one model as one process does."""

from concurrent import futures
import json
import os
import signal
import time
import types

from etils import epath
import pytest

from paxon.runner.endpoint import serve_program, testing
from paxon.runner.hosts import testing as forks_lib

_SCHEMA = {
  "type": "object",
  "properties": {"a": {"enum": ["x", "yy"]}},
  "required": ["a"],
  "additionalProperties": False,
}
_REQUESTS = (
  {"prompt": "def ", "temperature": 0, "max_tokens": 12, "logprobs": 2},
  {"prompt": "x" * 70, "temperature": 1, "seed": 3, "n": 2, "max_tokens": 9},
  {"prompt": ["a", "b"], "temperature": 1, "seed": 7, "max_tokens": 20},
  {
    "messages": [{"role": "user", "content": "a"}],
    "temperature": 1,
    "seed": 1,
    "max_tokens": 24,
    "response_format": {
      "type": "json_schema",
      "json_schema": {"name": "s", "schema": _SCHEMA},
    },
  },
)


@pytest.fixture(name="forks", scope="module")
def _forks(tmp_path_factory):
  folder = tmp_path_factory.mktemp("processes")
  with forks_lib.Forks(serve_program.__name__, folder) as made:
    yield made


@pytest.fixture(name="run_dir", scope="module")
def _run_dir(tmp_path_factory):
  folder = epath.Path(tmp_path_factory.mktemp("run"))
  testing.make_run(folder)
  return folder


def _start(forks, run_dir, count, port):
  address = f"localhost:{forks_lib.free_port()}"
  given = [os.fspath(run_dir), "tensor=2", os.fspath(port), address, str(count)]
  processes = [
    forks.start("serve", [*given, str(index)], devices=2 // count)
    for index in range(count)
  ]
  while not port.exists():
    for process in processes:
      assert process.poll() is None, process.output()
    time.sleep(0.02)
  return processes, types.SimpleNamespace(port=int(port.read_text()))


def _ask(server, request):
  body = {"model": "TinyLm", **request}
  path = "chat/completions" if "messages" in request else "completions"
  status, text = testing.send(server, f"/v1/{path}", body)
  found = json.loads(text)
  assert status == 200, found
  for name in ("id", "created"):
    del found[name]
  return found


def _answers(server):
  with futures.ThreadPoolExecutor() as pool:
    return [*pool.map(lambda each: _ask(server, each), _REQUESTS)]


def test_processes_answer_as_one(forks, run_dir, tmp_path):
  found = {}
  for count in (1, 2):
    processes, server = _start(forks, run_dir, count, tmp_path / f"{count}")
    found[count] = _answers(server)
    # Longer than the followers wait for a sign of life.
    time.sleep(3)
    assert _answers(server) == found[count]
    for process in processes:
      process.send_signal(signal.SIGTERM)
    for process in processes:
      assert process.wait() == 0, process.output()
    assert all(not p.output().strip() for p in processes[1:])
  for one, two in zip(found[1], found[2], strict=True):
    for choice, other in zip(one["choices"], two["choices"], strict=True):
      logprobs = [x.pop("logprobs", None) for x in (choice, other)]
      if logprobs[0] is None:
        continue
      assert logprobs[0]["tokens"] == logprobs[1]["tokens"]
      assert logprobs[0]["token_logprobs"] == pytest.approx(
        logprobs[1]["token_logprobs"], rel=1e-5
      )
  assert found[1] == found[2]
  text = found[2][-1]["choices"][0]["message"]["content"]
  assert text.startswith("{")


@pytest.mark.parametrize("index", [0, 1])
def test_a_lost_process_ends_the_others(forks, run_dir, tmp_path, index):
  processes, server = _start(forks, run_dir, 2, tmp_path / "port")
  _ask(server, _REQUESTS[0])
  lost, other = processes[index], processes[1 - index]
  lost.kill()
  assert lost.wait() == -signal.SIGKILL
  # JAX may be faster than Python to end it, and aborts.
  assert other.wait() in (75, -signal.SIGABRT), other.output()

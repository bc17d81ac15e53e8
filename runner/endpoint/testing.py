"""An endpoint of a tiny model, for tests."""

from collections.abc import Iterator
from concurrent import futures
import contextlib
import dataclasses
import http.client
import json
import threading
from typing import Any, Final

from etils import epath
import fiddle as fdl

from paxon.layers.decoding import samplers
from paxon.runner.checkpoints import checkpointer
from paxon.runner.endpoint import serve
from paxon.runner.session import session as session_lib
from paxon.runner.settings import generation
from paxon.runner.training import testing

CONTEXT: Final = 96
SLOTS: Final = 4
PAGES: Final = 7


def apply_template(messages: Any) -> str:
  """Returns the prompt of a chat."""
  return "".join(f"<{m['role']}>{m['content']}" for m in messages) + "<a>"


def make_job(**knobs: Any) -> Any:
  """Returns the job of the model `TinyLm`."""
  job = fdl.build(testing.TinyLm(num_layers=1, **knobs).job())
  settings = generation.GenerationSettings(
    sampler=samplers.Greedy(), max_new_tokens=12, chat_template=apply_template
  )
  return dataclasses.replace(job, generation=settings)


def make_run(folder: epath.Path) -> None:
  """Writes a run that has made no step."""
  session = session_lib.open_session(make_job())
  with checkpointer.Checkpointer(folder / "checkpoints") as checkpoints:
    checkpoints.save(
      0,
      session.initial_state(),
      specs=session.state_specs,
      data=session.job.train_input.get_state(),
    )


@contextlib.contextmanager
def serve_run(run_dir: epath.Path, **options: Any) -> Iterator[Any]:
  """Yields a server of a run; at the end it must have been stopped."""
  found: futures.Future[Any] = futures.Future()
  status = []
  chosen = serve.Options(
    port=0, slots=SLOTS, context=CONTEXT, cache_tokens=PAGES * 64, **options
  )

  def run() -> None:
    try:
      status.append(
        serve.run(make_job(), run_dir, chosen, when_ready=found.set_result)
      )
    except BaseException as error:
      if not found.done():
        found.set_exception(error)
      raise

  thread = threading.Thread(target=run)
  thread.start()
  server = found.result(timeout=120)
  try:
    yield server
  finally:
    server.should_exit = True
    thread.join(timeout=60)
  assert status == [0]


def connect(server: Any) -> http.client.HTTPConnection:
  """Returns a connection to a server."""
  return http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)


def send(
  server: Any,
  path: str,
  body: Any = None,
  method: str = "POST",
  *,
  connection: http.client.HTTPConnection | None = None,
  **headers: str,
) -> tuple[int, bytes]:
  """Returns the status and the text of a response to bytes, or to JSON."""
  used = connect(server) if connection is None else connection
  data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
  used.request(
    method, path, data, {"Content-Type": "application/json", **headers}
  )
  response = used.getresponse()
  text = response.read()
  response.close()
  if connection is None:
    used.close()
  return response.status, text

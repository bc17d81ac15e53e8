"""The HTTP server of an endpoint: routes, streams and limits.

  POST /v1/completions        continues prompts
  POST /v1/chat/completions   continues chats
  GET  /v1/models             the model
  GET  /health                200 while the engine runs
  GET  /metrics               counters, in the text format of Prometheus

Bodies must be `application/json`, which a web page of another site may not send
without being allowed to; nothing allows it.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
import contextlib
import dataclasses
import signal
import socket
import time
from typing import Any

from starlette import applications, concurrency, exceptions, responses, routing
from starlette import requests as http_requests
import uvicorn

from paxon.layers.decoding import continuous_batching
from paxon.runner import files
from paxon.runner.endpoint import (
  access,
  grammars,
  openai_requests,
  openai_responses,
)
from paxon.runner.endpoint import engine as engine_lib

_MAX_BODY_BYTES = 4 * 2**20
# Bytes read of a longer body, unstored, before the connection is closed.
_MAX_READ_BYTES = 2 * 2**30
_SHUTDOWN_SECONDS = 30
# Grammars that are compiled at the same time.
_MAX_COMPILING = 2
_FAILURES = (engine_lib.StoppedError, engine_lib.NonFiniteError)
_NAMES = {404: "not_found", 405: "method_not_allowed"}

# Index of a choice, its token, and the error that ended it.
_Event = tuple[int, continuous_batching.Token | None, BaseException | None]


class _Run:
  """A request that is being answered."""

  def __init__(
    self,
    completion: openai_requests.Completion,
    made: openai_responses.Responses,
    engine: engine_lib.Engine,
    end_ids: tuple[int, ...],
    *,
    constrain: grammars.Grammar | None,
    closing: contextlib.ExitStack,
  ) -> None:
    """Submits the request.

    Args:
      completion: The request.
      made: Its responses.
      engine: Generates.
      end_ids: Ids that end a completion.
      constrain: The compiled grammar.
      closing: Taken over, and closed with this.

    Raises:
      ValueError: It can never be served.
      BusyError: Too many requests wait.
      StoppedError: The engine has stopped.
    """
    self.completion, self.made = completion, made
    # `deliver` without this run, which would be garbage for a long time.
    events: asyncio.Queue[_Event] = asyncio.Queue()
    self._events = events
    loop = asyncio.get_running_loop()

    def deliver(*event: Any) -> None:
      # The loop may be closed at the end of the program.
      with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(events.put_nowait, event)

    settings = completion.settings
    requests = [
      continuous_batching.Request(
        prompt=prompt.ids,
        settings=dataclasses.replace(settings, max_new_tokens=count),
        end_ids=end_ids,
        sample=sample,
        num_alternatives=completion.logprobs or 0,
        constraint=constrain() if constrain is not None else None,
      )
      for prompt, count in zip(
        completion.prompts, completion.max_tokens, strict=True
      )
      for sample in range(completion.n)
    ]
    self._submission = engine.submit(requests, deliver)
    self.choices = made.make_choices()
    self._closing = closing.pop_all()

  async def deltas(self) -> AsyncIterator[tuple[int, openai_responses.Delta]]:
    """Yields the delta of each token, until all choices have ended."""
    running = set(range(len(self.choices)))
    while running:
      index, token, error = await self._events.get()
      if error is not None:
        raise error
      if index not in running or token is None:
        continue
      delta = self.choices[index].add(token)
      if delta.finish is not None:
        running.remove(index)
        # At a stop text the engine would go on.
        self._submission.cancel(index)
      yield index, delta

  def close(self) -> None:
    """Frees the slots of choices that have not ended, and the grammar."""
    self._submission.cancel()
    self._closing.close()


class _Stream(responses.StreamingResponse):
  """Server-sent events of a run, which is closed however they end."""

  def __init__(self, run: _Run) -> None:
    super().__init__(
      _events(run),
      media_type="text/event-stream",
      headers={"Cache-Control": "no-cache"},
    )
    self._run = run

  async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
    try:
      await super().__call__(scope, receive, send)
    finally:
      self._run.close()


async def _events(run: _Run) -> AsyncIterator[str]:
  made, offsets = run.made, [0] * len(run.choices)
  try:
    for index in range(len(run.choices)):
      first = made.first_chunk(index)
      if first is not None:
        yield _event(first)
    async for index, delta in run.deltas():
      chunk = made.chunk(index, delta, offsets[index])
      offsets[index] += len(delta.text)
      if chunk is not None:
        yield _event(chunk)
  except _FAILURES as error:
    yield _event(_to_request_error(error).body())
    return
  except engine_lib.FailedError as error:
    yield _event(_constraint_error(run, error).body())
    return
  if run.completion.include_usage:
    yield _event(made.usage_chunk(run.choices))
  yield "data: [DONE]\n\n"


def _event(value: Any) -> str:
  return f"data: {files.to_json(value, ensure_ascii=False)}\n\n"


class Endpoint:
  """The routes of a model; `app` is the ASGI application."""

  def __init__(
    self,
    engine: engine_lib.Engine,
    served: openai_requests.Served,
    *,
    tokenizer: Any,
    end_ids: tuple[int, ...],
    constrained: grammars.Grammars,
  ) -> None:
    """Makes the application.

    Args:
      engine: Generates.
      served: The model as requests see it.
      tokenizer: Decodes ids.
      end_ids: Ids that end a completion.
      constrained: Compiles grammars.
    """
    self._engine, self._served = engine, served
    self._tokenizer, self._end_ids = tokenizer, end_ids
    self._constrained = constrained
    # Each grammar has a process. Compiling may take all of a CPU, and a thread
    # of those that read requests.
    self._following = asyncio.Semaphore(engine.batcher.num_slots)
    self._compiling = asyncio.Semaphore(_MAX_COMPILING)
    self._started = int(time.time())
    self._counts: dict[int, int] = {}
    self._num_prompt_tokens = 0
    self.app = applications.Starlette(
      routes=[
        routing.Route("/v1/completions", self._completions, methods=["POST"]),
        routing.Route("/v1/chat/completions", self._chats, methods=["POST"]),
        routing.Route("/v1/models", self._models),
        routing.Route("/v1/models/{name:path}", self._model),
        routing.Route("/health", self._health),
        routing.Route("/metrics", self._metrics),
      ],
      exception_handlers={
        exceptions.HTTPException: _http_error,
        Exception: _internal_error,
      },
    )

  async def _completions(self, request: http_requests.Request) -> Any:
    return await self._answer(request, is_chat=False)

  async def _chats(self, request: http_requests.Request) -> Any:
    return await self._answer(request, is_chat=True)

  async def _answer(
    self, request: http_requests.Request, *, is_chat: bool
  ) -> responses.Response:
    try:
      response = await self._respond(request, is_chat=is_chat)
    except openai_requests.RequestError as error:
      response = responses.JSONResponse(error.body(), error.status)
      if error.status == 413:
        # The rest of the body is not read.
        response.headers["Connection"] = "close"
    except http_requests.ClientDisconnect:
      response = responses.Response(status_code=499)
    status = response.status_code
    self._counts[status] = self._counts.get(status, 0) + 1
    return response

  async def _respond(
    self, request: http_requests.Request, *, is_chat: bool
  ) -> responses.Response:
    body = await _read_body(request)
    completion = await concurrency.run_in_threadpool(
      openai_requests.parse, body, self._served, is_chat=is_chat
    )
    made = openai_responses.Responses(
      completion, model=self._served.name, tokenizer=self._tokenizer
    )
    with contextlib.ExitStack() as closing:
      constrain = await self._compile(completion, closing)
      run = self._submit(completion, made, constrain, closing)
    self._num_prompt_tokens += sum(len(p.ids) for p in completion.prompts)
    if completion.stream:
      return _Stream(run)
    try:
      return await _full_response(run, request)
    finally:
      run.close()

  async def _compile(
    self,
    completion: openai_requests.Completion,
    closing: contextlib.ExitStack,
  ) -> grammars.Grammar | None:
    """Returns the compiled grammar of a request, which `closing` ends.

    Raises:
      RequestError: It is not valid.
    """
    grammar = completion.grammar
    if grammar is None:
      return None
    await self._following.acquire()
    closing.callback(self._following.release)
    try:
      async with self._compiling:
        found = await concurrency.run_in_threadpool(
          self._constrained.compile, grammar.kind, grammar.source
        )
    except (ValueError, RecursionError) as error:
      raise openai_requests.RequestError(
        str(error), param=grammar.field
      ) from error
    closing.callback(found.close)
    return found

  def _submit(
    self,
    completion: openai_requests.Completion,
    made: openai_responses.Responses,
    constrain: grammars.Grammar | None,
    closing: contextlib.ExitStack,
  ) -> _Run:
    """Returns the run of a request.

    Raises:
      RequestError: It cannot be served, or not now.
    """
    try:
      return _Run(
        completion,
        made,
        self._engine,
        self._end_ids,
        constrain=constrain,
        closing=closing,
      )
    except ValueError as error:
      raise openai_requests.RequestError(str(error)) from error
    except engine_lib.BusyError as error:
      raise openai_requests.RequestError(
        f"{error} Try again later.",
        status=429,
        code="rate_limit_exceeded",
        kind="rate_limit_error",
      ) from error
    except engine_lib.StoppedError as error:
      raise _to_request_error(error) from error

  async def _models(self, request: http_requests.Request) -> Any:
    del request
    return responses.JSONResponse({"object": "list", "data": [self._entry()]})

  async def _model(self, request: http_requests.Request) -> Any:
    name = request.path_params["name"]
    if name == self._served.name:
      return responses.JSONResponse(self._entry())
    error = openai_requests.RequestError(
      f"The model {name!r} does not exist; it is {self._served.name!r}.",
      status=404,
      param="model",
      code="model_not_found",
    )
    return responses.JSONResponse(error.body(), error.status)

  def _entry(self) -> dict[str, Any]:
    return {
      "id": self._served.name,
      "object": "model",
      "created": self._started,
      "owned_by": "paxon",
      "max_model_len": self._served.context,
    }

  async def _health(self, request: http_requests.Request) -> Any:
    del request
    if self._engine.failure is None:
      return responses.JSONResponse({"status": "ok"})
    return responses.JSONResponse({"status": "stopped"}, 503)

  async def _metrics(self, request: http_requests.Request) -> Any:
    del request
    batcher = self._engine.batcher
    busy = batcher.num_running
    paged = []
    if batcher.pages is not None:
      paged = [
        ("reused_prompt_tokens_total", "counter", batcher.pages.num_reused),
        ("preemptions_total", "counter", batcher.num_preempted),
        ("pages", "gauge", batcher.pages.num_pages),
        ("pages_free", "gauge", batcher.pages.num_free),
      ]
    lines = [
      "# TYPE paxon_requests_total counter",
      *(
        f'paxon_requests_total{{status="{status}"}} {count}'
        for status, count in sorted(self._counts.items())
      ),
    ]
    for name, kind, value in (
      ("prompt_tokens_total", "counter", self._num_prompt_tokens),
      ("generated_tokens_total", "counter", self._engine.num_generated),
      ("slots", "gauge", batcher.num_slots),
      ("slots_busy", "gauge", busy),
      ("sequences_open", "gauge", self._engine.num_open),
      *paged,
    ):
      lines += [f"# TYPE paxon_{name} {kind}", f"paxon_{name} {value}"]
    return responses.PlainTextResponse(
      "\n".join([*lines, ""]), media_type="text/plain; version=0.0.4"
    )


async def _read_body(request: http_requests.Request) -> bytes:
  """Returns the body.

  Raises:
    RequestError: It is not JSON, or too long.
  """
  kind = request.headers.get("content-type", "").partition(";")[0].strip()
  if kind.lower() != "application/json":
    raise openai_requests.RequestError(
      f"The Content-Type must be application/json, got {kind!r}.", status=415
    )
  too_long = openai_requests.RequestError(
    f"The body must have at most {_MAX_BODY_BYTES} bytes.", status=413
  )
  body, count = bytearray(), 0
  async for chunk in request.stream():
    count += len(chunk)
    if count <= _MAX_BODY_BYTES:
      body += chunk
    elif count > _MAX_READ_BYTES:
      break
  # A client reads the response only after it has sent the whole body.
  if count > _MAX_BODY_BYTES:
    raise too_long
  return bytes(body)


async def _full_response(
  run: _Run, request: http_requests.Request
) -> responses.Response:
  """Returns the response of a run that does not stream.

  Raises:
    ClientDisconnect: The client has left.
  """
  deltas: list[list[openai_responses.Delta]] = [[] for _ in run.choices]

  async def collect() -> None:
    async for index, delta in run.deltas():
      deltas[index].append(delta)

  async def _wait_for_disconnect() -> None:
    while (await request.receive())["type"] != "http.disconnect":
      pass

  tasks = [
    asyncio.create_task(each()) for each in (collect, _wait_for_disconnect)
  ]
  try:
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    if not tasks[0].done():
      raise http_requests.ClientDisconnect
    tasks[0].result()
  except _FAILURES as error:
    raise _to_request_error(error) from error
  except engine_lib.FailedError as error:
    raise _constraint_error(run, error) from error
  finally:
    for task in tasks:
      task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
  return responses.JSONResponse(run.made.whole(deltas, run.choices))


def _to_request_error(error: Exception) -> openai_requests.RequestError:
  is_stopped = isinstance(error, engine_lib.StoppedError)
  return openai_requests.RequestError(
    str(error), status=503 if is_stopped else 500, kind="server_error"
  )


def _constraint_error(
  run: _Run, error: Exception
) -> openai_requests.RequestError:
  """Returns the error of a request that was begun and cannot go on."""
  grammar = run.completion.grammar
  return openai_requests.RequestError(
    str(error), param=None if grammar is None else grammar.field
  )


async def _http_error(request: http_requests.Request, error: Any) -> Any:
  """Returns OpenAI's form of an error of the routes."""
  found = openai_requests.RequestError(
    f"{error.detail}: {request.method} {request.url.path}",
    code=_NAMES.get(error.status_code),
  )
  return responses.JSONResponse(
    found.body(), error.status_code, headers=error.headers
  )


async def _internal_error(request: http_requests.Request, error: Any) -> Any:
  """Returns OpenAI's form of an error of ours, without its text."""
  del request, error
  found = openai_requests.RequestError("Internal error.", kind="server_error")
  return responses.JSONResponse(found.body(), 500)


class Server(uvicorn.Server):
  """A server that ends normally at SIGINT and SIGTERM.

  It first answers the requests that it has. A second SIGINT does not wait.

  Attributes:
    port: The port that it listens at.
  """

  def __init__(self, app: Any, listener: socket.socket) -> None:
    """Records the application and the socket that it listens at."""
    super().__init__(
      uvicorn.Config(
        app,
        loop="asyncio",
        http=access.Protocol,
        ws="none",
        lifespan="off",
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=_SHUTDOWN_SECONDS,
      )
    )
    self._listener = listener
    self.port: int = listener.getsockname()[1]

  def answer(self) -> None:
    """Answers requests until a signal, or until `should_exit` is set."""
    self.run(sockets=[self._listener])

  def stop(self) -> None:
    """Ends `answer`, after the requests that it has."""
    self.should_exit = True

  @contextlib.contextmanager
  def capture_signals(self) -> Iterator[None]:
    """Handles signals without raising them again at the end."""
    handlers = {}
    with contextlib.suppress(ValueError):  # Only the main thread gets signals.
      for each in (signal.SIGINT, signal.SIGTERM):
        handlers[each] = signal.signal(each, self.handle_exit)
    try:
      yield
    finally:
      for each, handler in handlers.items():
        signal.signal(each, handler)

"""Limits of who may use an endpoint, and for how long a client may take.

Access    rejects requests with another `Host`, and those without the key
Protocol  ends connections that are too many or too slow
"""

import asyncio
from collections.abc import Sequence
import hmac
import json
import resource
from typing import Any

from starlette import datastructures, responses
from uvicorn.protocols.http import h11_impl

from paxon.runner import host_header
from paxon.runner.endpoint import openai_requests

# Time for a whole request, and for a part of a response that is not read.
_READ_SECONDS = 30.0
_WRITE_SECONDS = 30.0
_MAX_CONNECTIONS = 512


class Access:
  """An ASGI application around another one."""

  def __init__(
    self,
    app: Any,
    *,
    hosts: Sequence[str] = (),
    api_key: str | None = None,
  ) -> None:
    """Records the rules.

    Args:
      app: Answers requests that are admitted.
      hosts: Names of this server, besides those of the loopback interface and
        the address that the client has connected to; `*` stands for any.
      api_key: Key that requests must have, except those for `/health`.
    """
    self._app, self._key = app, api_key
    self._hosts = {*host_header.LOOPBACK, *map(str.lower, hosts)}

  async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
    """Answers a request."""
    error = self._find_error(scope)
    if error is None:
      await self._app(scope, receive, send)
      return
    # The body is not read.
    headers = {"Connection": "close"}
    if error.status == 401:
      headers["WWW-Authenticate"] = "Bearer"
    response = responses.JSONResponse(error.body(), error.status, headers)
    await response(scope, receive, send)

  def _find_error(self, scope: Any) -> openai_requests.RequestError | None:
    headers = datastructures.Headers(scope=scope)
    address = (scope.get("server") or [""])[0]
    own = f"[{address}]" if ":" in address else address
    host = headers.get("host", "")
    if "*" not in self._hosts and not host_header.is_one_of(
      host, {*self._hosts, own}
    ):
      return openai_requests.RequestError(
        f"The host {host!r} is not served; --serve_allowed_hosts can allow it.",
        status=403,
        code="host_not_allowed",
      )
    if self._key is None or scope["path"] == "/health":
      return None
    scheme, _, key = headers.get("authorization", "").partition(" ")
    # In constant time, so that the time does not tell how much is right.
    is_equal = hmac.compare_digest(key.strip().encode(), self._key.encode())
    if scheme.lower() == "bearer" and is_equal:
      return None
    return openai_requests.RequestError(
      "The API key is missing or wrong; send `Authorization: Bearer KEY`.",
      status=401,
      code="invalid_api_key",
    )


class Protocol(h11_impl.H11Protocol):
  """A connection that may not keep the server waiting.

  A request must arrive within a time, and a response must be read. Beyond the
  limit of connections, the one that has waited longest for its request ends.
  """

  _reading: asyncio.TimerHandle | None = None
  _writing: asyncio.TimerHandle | None = None

  def connection_made(self, transport: Any) -> None:
    """Begins to wait for a request."""
    super().connection_made(transport)
    if len(self.connections) > _count_connections():
      idle = [c for c in self.connections if getattr(c, "_reading", None)]
      oldest: Any = min(idle, key=lambda c: c._reading.when(), default=self)
      oldest.reject(503, "Too many connections are open. Try again later.")
    self._watch()

  def connection_lost(self, exc: Exception | None) -> None:
    """Ends all waiting."""
    super().connection_lost(exc)
    for timer in (self._reading, self._writing):
      if timer is not None:
        timer.cancel()
    self._reading = self._writing = None

  def data_received(self, data: bytes) -> None:
    """Reads a part of a request."""
    super().data_received(data)
    self._watch()

  def pause_writing(self) -> None:
    """Begins to wait for the client to read."""
    super().pause_writing()
    self._writing = self.loop.call_later(_WRITE_SECONDS, self.transport.abort)

  def resume_writing(self) -> None:
    """Ends that."""
    super().resume_writing()
    if self._writing is not None:
      self._writing.cancel()
      self._writing = None

  def reject(self, status: int, message: str) -> None:
    """Sends an error, unless a response has begun, and ends the connection."""
    if self.transport.is_closing():
      return
    if self.cycle is None or not self.cycle.response_started:
      error = openai_requests.RequestError(message, kind="server_error")
      body = json.dumps(error.body()).encode()
      reason = h11_impl.STATUS_PHRASES[status].decode()
      head = (
        f"HTTP/1.1 {status} {reason}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
      )
      self.transport.write(head.encode() + body)
    self.transport.close()

  def _watch(self) -> None:
    """Starts or stops the time in which a request must arrive."""
    cycle = self.cycle
    waits = cycle is None or cycle.response_complete or cycle.more_body
    if self.transport.is_closing():
      return
    if waits and self._reading is None:
      self._reading = self.loop.call_later(
        _READ_SECONDS,
        self.reject,
        408,
        f"The request did not arrive within {_READ_SECONDS:g} s.",
      )
    elif not waits and self._reading is not None:
      self._reading.cancel()
      self._reading = None


def _count_connections() -> int:
  """Returns the maximum number of connections; others need files, too."""
  return min(
    _MAX_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2
  )

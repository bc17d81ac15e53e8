"""A store of fsspec as a store that TensorStore has a driver for.

TensorStore has no driver for Azure and cannot call Python. The gateway is a
server on this machine that speaks the part of S3's protocol that TensorStore's
driver uses, and passes each request on to a file system of fsspec: arrays are
read by ranges and written as they come, without a copy on a disk.

A request needs the secret name of the bucket, so that other users of the
machine cannot use the credentials of this one.
"""

from collections.abc import Iterator
import hashlib
import http.server
import re
import secrets
import threading
from typing import Any
import urllib.parse
from xml.sax import saxutils

import fsspec

_CHUNK_BYTES = 1 << 22
_RANGE = re.compile(r"bytes=(\d*)-(\d*)")


class Gateway:
  """A server for one file system, until the process ends."""

  def __init__(self, store: fsspec.AbstractFileSystem) -> None:
    """Starts the server, on a free port."""
    self._bucket = secrets.token_hex(16)
    self._server = _Server(store, self._bucket)
    threading.Thread(
      target=self._server.serve_forever, name="store gateway", daemon=True
    ).start()

  def spec(self, path: str) -> dict[str, Any]:
    """Returns TensorStore's spec of a path `container/key`."""
    host, port = self._server.server_address[:2]
    return {
      "driver": "s3",
      "bucket": self._bucket,
      "endpoint": f"http://{host}:{port}",
      "aws_region": "us-east-1",
      "aws_credentials": {"type": "anonymous"},
      "path": path,
    }

  def close(self) -> None:
    """Stops the server."""
    self._server.shutdown()
    self._server.server_close()


class _Server(http.server.ThreadingHTTPServer):
  """Keeps what the handlers of requests need."""

  daemon_threads = True
  # TensorStore opens many connections at once.
  request_queue_size = 128

  # fsspec declares no types of what its methods return.
  def __init__(self, store: Any, bucket: str) -> None:
    super().__init__(("127.0.0.1", 0), _Handler)
    self.store, self.bucket = store, bucket

  def handle_error(self, request: Any, client_address: Any) -> None:
    """Prints nothing: TensorStore, which closed the connection, reports it."""


class _ResponseError(Exception):
  """A request that ends with a status."""

  def __init__(self, status: int, code: str) -> None:
    super().__init__(code)
    self.status, self.code = status, code


class _Handler(http.server.BaseHTTPRequestHandler):
  """One connection."""

  protocol_version = "HTTP/1.1"
  server: _Server  # pyrefly: ignore[bad-override-mutable-attribute]

  def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
    """Prints nothing."""

  def do_GET(self) -> None:
    """Returns an object, a range of it, or a list of objects."""
    self._answer(self._get)

  def do_HEAD(self) -> None:
    """Returns the size of an object."""
    self._answer(self._get)

  def do_PUT(self) -> None:
    """Writes an object."""
    self._answer(self._put)

  def do_DELETE(self) -> None:
    """Deletes an object; it need not exist."""
    self._answer(self._delete)

  def _answer(self, run: Any) -> None:
    left = int(self.headers.get("Content-Length") or 0)
    self._left = left
    try:
      url = urllib.parse.urlsplit(self.path)
      bucket, _, key = urllib.parse.unquote(url.path).lstrip("/").partition("/")
      if not secrets.compare_digest(
        bucket.encode(), self.server.bucket.encode()
      ):
        raise _ResponseError(403, "AccessDenied")
      run(key, urllib.parse.parse_qs(url.query))
    except _ResponseError as error:
      self._fail(error.status, error.code)
    except FileNotFoundError:
      self._fail(404, "NoSuchKey")
    except PermissionError as error:
      self._fail(403, "AccessDenied", str(error))
    # Of the library of the store; TensorStore tries again.
    except Exception as error:
      self._fail(503, "ServiceUnavailable", f"{type(error).__name__}: {error}")

  def _get(self, key: str, query: dict[str, list[str]]) -> None:
    if not key:
      self._list(query)
      return
    info = self._find(key)
    if info is None:
      raise FileNotFoundError(key)
    tag = _tag(info)
    self._check_conditions(tag)
    size = info["size"]
    start, end = _parse_range(self.headers.get("Range"), size)
    is_part = self.headers.get("Range") is not None
    chunks = self._read(key, start, end) if self.command == "GET" else iter(())
    # Fails before the answer begins, in most cases.
    first = next(chunks, b"")
    self.send_response(206 if is_part else 200)
    if is_part:
      self.send_header("Content-Range", f"bytes {start}-{end - 1}/{size}")
    self.send_header("ETag", tag)
    self.send_header("Content-Length", str(end - start))
    self.end_headers()
    try:
      self.wfile.write(first)
      for chunk in chunks:
        self.wfile.write(chunk)
    except Exception:
      # What follows would be taken for content.
      self.close_connection = True

  def _read(self, key: str, start: int, end: int) -> Iterator[bytes]:
    while start < end:
      stop = min(end, start + _CHUNK_BYTES)
      data = self.server.store.cat_file(key, start=start, end=stop)
      if len(data) != stop - start:
        raise EOFError(f"{key} became shorter")
      yield data
      start = stop

  def _put(self, key: str, query: dict[str, list[str]]) -> None:
    info = self._find(key)
    self._check_conditions(None if info is None else _tag(info))
    with self.server.store.open(key, "wb") as file:
      for chunk in self._body():
        file.write(chunk)
    self._send(200, tag=_tag(self._find(key) or {}))

  def _delete(self, key: str, query: dict[str, list[str]]) -> None:
    info = self._find(key)
    self._check_conditions(None if info is None else _tag(info))
    if info is not None:
      self.server.store.rm_file(key)
    self._send(204)

  def _list(self, query: dict[str, list[str]]) -> None:
    prefix = query.get("prefix", [""])[0]
    after = query.get("start-after", [""])[0]
    folder = prefix.rpartition("/")[0]
    found = self.server.store.find(folder) if folder else []
    found = [each.lstrip("/") for each in found]
    keys = [each for each in found if each.startswith(prefix) and each > after]
    contents = "".join(
      f"<Contents><Key>{saxutils.escape(each)}</Key></Contents>"
      for each in keys
    )
    self._send(
      200,
      '<?xml version="1.0" encoding="UTF-8"?><ListBucketResult>'
      f"<KeyCount>{len(keys)}</KeyCount><IsTruncated>false</IsTruncated>"
      f"{contents}</ListBucketResult>",
    )

  def _find(self, key: str) -> dict[str, Any] | None:
    try:
      info = self.server.store.info(key)
    except FileNotFoundError:
      return None
    return info if info["type"] == "file" else None

  def _check_conditions(self, tag: str | None) -> None:
    """Compares the tag of an object with the headers; None for no object."""
    wanted = self.headers.get("If-Match")
    if wanted is not None and wanted != tag:
      raise _ResponseError(412, "PreconditionFailed")
    other = self.headers.get("If-None-Match")
    if other is not None and (other == tag or (other == "*" and tag)):
      is_read = self.command in ("GET", "HEAD")
      raise _ResponseError(304 if is_read else 412, "PreconditionFailed")

  def _body(self) -> Iterator[bytes]:
    while self._left:
      chunk = self.rfile.read(min(self._left, _CHUNK_BYTES))
      if not chunk:
        raise ConnectionError("the request ended early")
      self._left -= len(chunk)
      yield chunk

  def _fail(self, status: int, code: str, message: str = "") -> None:
    for _ in self._body():
      pass  # The next request follows it.
    self._send(
      status,
      f"<Error><Code>{code}</Code><Message>{saxutils.escape(message)}"
      "</Message></Error>",
    )

  def _send(self, status: int, text: str = "", *, tag: str = "") -> None:
    data = text.encode()
    self.send_response(status)
    if tag:
      self.send_header("ETag", tag)
    if status not in (204, 304):
      self.send_header("Content-Length", str(len(data)))
    self.end_headers()
    if self.command != "HEAD" and status not in (204, 304):
      self.wfile.write(data)


def _tag(info: dict[str, Any]) -> str:
  """Returns a tag that changes with the content of an object."""
  return f'"{hashlib.sha256(repr(info).encode()).hexdigest()[:32]}"'


def _parse_range(header: str | None, size: int) -> tuple[int, int]:
  """Returns the first byte and the one after the last."""
  if header is None:
    return 0, size
  match = _RANGE.fullmatch(header)
  if match is None or not any(match.groups()):
    raise _ResponseError(416, "InvalidRange")
  first, last = match.groups()
  if not first:
    return max(0, size - int(last)), size
  if int(first) >= size:
    raise _ResponseError(416, "InvalidRange")
  return int(first), min(size, int(last) + 1) if last else size

"""A server of Cloud Storage's JSON API in memory, for tests.

No registry has a server that keeps to the conditions on generations, which
TensorStore depends on. This one follows the public description of the API as
far as gcsfs and TensorStore use it: buckets, lists with prefix and delimiter,
reads of ranges, simple, multipart and resumable uploads, and deletions, one by
one or in batches, all with conditions on generations.
"""

from collections.abc import Callable
import http.server
import itertools
import json
import re
import threading
from typing import Any
import urllib.parse

_OBJECT = re.compile(r"(?:/download)?/storage/v1/b/([^/]+)/o/(.+)")
_LIST = re.compile(r"/storage/v1/b/([^/]+)/o/?")
_BUCKET = re.compile(r"/storage/v1/b/([^/]+)")
_UPLOAD = re.compile(r"(?:/resumable)?/upload/storage/v1/b/([^/]+)/o/?")
_TIME = "2026-01-01T00:00:00.000Z"


class Server:
  """A store of named buckets; a context."""

  def __init__(self, *buckets: str, port: int = 0) -> None:
    """Binds a port of this machine; 0 for a free one.

    Args:
      *buckets: Their names.
      port: The port.
    """
    self.buckets: dict[str, dict[str, _Object]] = {name: {} for name in buckets}
    self.lock = threading.RLock()
    self.generations = itertools.count(1)
    self.uploads: dict[str, tuple[dict[str, str], str, bytearray]] = {}
    # Functions of a part of the names of objects, such as `runs/a/`. Each is
    # called for requests of such names, and may return a status to answer with.
    self.faults: dict[str, Callable[[], int | None]] = {}
    owner = self

    class Handler(_Handler):
      store = owner

    self._http = http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
    self._http.daemon_threads = True
    # A client that is killed, which tests do, is no error.
    self._http.handle_error = lambda request, client_address: None
    self.url = "http://{}:{}".format(*self._http.server_address[:2])

  def __enter__(self) -> "Server":
    threading.Thread(target=self._http.serve_forever, daemon=True).start()
    return self

  def __exit__(self, *exception: object) -> None:
    self._http.shutdown()
    self._http.server_close()

  def environ(self) -> dict[str, str]:
    """Returns the variables that lead gcsfs and TensorStore here."""
    return {
      "STORAGE_EMULATOR_HOST": self.url,
      "TENSORSTORE_GCS_HTTP_URL": self.url,
      "GOOGLE_AUTH_TOKEN_FOR_TESTING": "test",
      # Asks another service for the kind of the bucket.
      "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
    }


class _Object:
  """The content of an object and its generation."""

  def __init__(self, data: bytes, generation: int) -> None:
    self.data, self.generation = data, generation

  def describe(self, bucket: str, name: str) -> dict[str, Any]:
    """Returns the resource of the API."""
    return {
      "kind": "storage#object",
      "name": name,
      "bucket": bucket,
      "id": f"{bucket}/{name}/{self.generation}",
      "generation": str(self.generation),
      "metageneration": "1",
      "size": str(len(self.data)),
      "contentType": "application/octet-stream",
      "storageClass": "STANDARD",
      "etag": str(self.generation),
      "timeCreated": _TIME,
      "updated": _TIME,
    }


class _StatusError(Exception):
  """A request that ends with a status."""

  def __init__(self, status: int) -> None:
    super().__init__(status)
    self.status = status


class _Handler(http.server.BaseHTTPRequestHandler):
  """One connection."""

  protocol_version = "HTTP/1.1"
  # Headers and body leave at once: sent separately, the body waits 40 ms for
  # the client's acknowledgement of the headers.
  wbufsize = -1
  disable_nagle_algorithm = True
  store: Server

  def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
    """Prints nothing."""

  def _run(self) -> None:
    body = self._read_body()
    target = urllib.parse.unquote(self.path)
    for part, make in list(self.store.faults.items()):
      if part in target and (status := make()) is not None:
        self._send(status, {"error": {"code": status}})
        return
    try:
      with self.store.lock:
        answer = self._answer(self.command, self.path, dict(self.headers), body)
    except _StatusError as error:
      answer = error.status, {"error": {"code": error.status}}, {}
    self._send(*answer)

  do_GET = do_POST = do_PUT = do_DELETE = do_HEAD = _run  # noqa: N815

  def _read_body(self) -> bytes:
    if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
      return self.rfile.read(int(self.headers.get("Content-Length") or 0))
    body = b""
    while size := int(self.rfile.readline().split(b";")[0], 16):
      body += self.rfile.read(size)
      self.rfile.readline()
    self.rfile.readline()
    return body

  def _answer(
    self, method: str, target: str, headers: dict[str, str], body: bytes
  ) -> tuple[int, Any, dict[str, str]]:
    url = urllib.parse.urlsplit(target)
    query = dict(urllib.parse.parse_qsl(url.query, keep_blank_values=True))
    if url.path.startswith("/batch/"):
      return self._batch(headers, body)
    if match := _UPLOAD.fullmatch(url.path):
      return self._upload(self._bucket(match[1]), match[1], query, body)
    if match := _OBJECT.fullmatch(url.path):
      name = urllib.parse.unquote(match[2])
      return self._object(method, match[1], name, query)
    if match := _LIST.fullmatch(url.path):
      return 200, self._list(match[1], query), {}
    if match := _BUCKET.fullmatch(url.path):
      self._bucket(match[1])
      return 200, {"kind": "storage#bucket", "name": match[1]}, {}
    raise _StatusError(501)

  def _bucket(self, name: str) -> dict[str, _Object]:
    if name not in self.store.buckets:
      raise _StatusError(404)
    return self.store.buckets[name]

  def _object(
    self, method: str, bucket: str, name: str, query: dict[str, str]
  ) -> tuple[int, Any, dict[str, str]]:
    objects = self._bucket(bucket)
    found = objects.get(name)
    _check(query, found, is_read=method in ("GET", "HEAD"))
    if found is None:
      raise _StatusError(404)
    if method == "DELETE":
      del objects[name]
      return 204, b"", {}
    if query.get("alt") != "media":
      return 200, found.describe(bucket, name), {}
    data, size = found.data, len(found.data)
    tags = {
      "x-goog-generation": str(found.generation),
      "x-goog-stored-content-length": str(size),
    }
    match = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
    if match is None:
      return 200, data, tags
    start = int(match[1])
    end = min(size, int(match[2]) + 1) if match[2] else size
    if start >= size:
      raise _StatusError(416)
    tags["Content-Range"] = f"bytes {start}-{end - 1}/{size}"
    return 206, data[start:end], tags

  def _list(self, bucket: str, query: dict[str, str]) -> dict[str, Any]:
    prefix, mark = query.get("prefix", ""), query.get("delimiter")
    start, end = query.get("startOffset", ""), query.get("endOffset")
    items, prefixes = [], set[str]()
    for name, each in sorted(self._bucket(bucket).items()):
      if not name.startswith(prefix) or name < start or (end and name >= end):
        continue
      rest = name[len(prefix) :]
      if mark and mark in rest:
        prefixes.add(prefix + rest[: rest.index(mark) + len(mark)])
      else:
        items.append(each.describe(bucket, name))
    return {"items": items, "prefixes": sorted(prefixes)}

  def _upload(
    self,
    objects: dict[str, _Object],
    bucket: str,
    query: dict[str, str],
    body: bytes,
  ) -> tuple[int, Any, dict[str, str]]:
    kind = query.get("uploadType")
    if kind == "resumable":
      return self._resume(objects, bucket, query, body)
    name = query.get("name", "")
    if kind == "multipart":
      kind_header = self.headers["Content-Type"].encode()
      mark = b"--" + re.findall(rb'boundary="?([^";]+)', kind_header)[0]
      _, facts, content, *_ = body.split(mark)
      name = json.loads(facts.split(b"\r\n\r\n", 1)[1])["name"]
      body = content.split(b"\r\n\r\n", 1)[1].removesuffix(b"\r\n")
    return self._write(objects, bucket, name, query, body)

  def _resume(
    self,
    objects: dict[str, _Object],
    bucket: str,
    query: dict[str, str],
    body: bytes,
  ) -> tuple[int, Any, dict[str, str]]:
    upload = query.get("upload_id")
    if upload is None:
      name = query.get("name") or json.loads(body)["name"]
      upload = str(next(self.store.generations))
      self.store.uploads[upload] = (query, name, bytearray())
      where = (
        f"{self.store.url}/upload/storage/v1/b/{bucket}/o"
        f"?uploadType=resumable&upload_id={upload}"
      )
      return 200, {}, {"Location": where}
    first, name, content = self.store.uploads[upload]
    content += body
    place = self.headers.get("Content-Range", "bytes */*")
    if place.endswith("/*"):
      return 308, b"", {"Range": f"bytes=0-{len(content) - 1}"}
    del self.store.uploads[upload]
    return self._write(objects, bucket, name, first, bytes(content))

  def _write(
    self,
    objects: dict[str, _Object],
    bucket: str,
    name: str,
    query: dict[str, str],
    data: bytes,
  ) -> tuple[int, Any, dict[str, str]]:
    _check(query, objects.get(name), is_read=False)
    objects[name] = _Object(data, next(self.store.generations))
    return 200, objects[name].describe(bucket, name), {}

  def _batch(
    self, headers: dict[str, str], body: bytes
  ) -> tuple[int, Any, dict[str, str]]:
    mark = re.findall(r'boundary="?([^";]+)', headers["Content-Type"])[0]
    answers = []
    for part in body.decode().split(f"--{mark}")[1:-1]:
      head, call = part.strip().split("\r\n\r\n", 1)
      found = re.search(r"Content-ID: *<?([^>\s]+)", head, re.IGNORECASE)
      method, target, _ = call.split(" ", 2)
      url = urllib.parse.urlsplit(target)
      try:
        status, _, _ = self._answer(method, f"{url.path}?{url.query}", {}, b"")
      except _StatusError as error:
        status = error.status
      answers.append(
        f"--{mark}\r\nContent-Type: application/http\r\nContent-ID:"
        f" <response-{found[1] if found else ''}>\r\n\r\n"
        f"HTTP/1.1 {status} \r\nContent-Length: 0\r\n\r\n\r\n"
      )
    text = "".join(answers) + f"--{mark}--"
    return (
      200,
      text.encode(),
      {"Content-Type": f"multipart/mixed; boundary={mark}"},
    )

  def _send(
    self, status: int, answer: Any, headers: dict[str, str] | None = None
  ) -> None:
    data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
    headers = {"Content-Type": "application/json"} | (headers or {})
    self.send_response(status)
    for name, value in headers.items():
      self.send_header(name, value)
    if status not in (204, 304):
      self.send_header("Content-Length", str(len(data)))
    self.end_headers()
    if self.command != "HEAD" and status not in (204, 304):
      self.wfile.write(data)


def _check(
  query: dict[str, str], found: _Object | None, *, is_read: bool
) -> None:
  """Compares the generation of an object, 0 if there is none, with a query."""
  generation = str(found.generation if found else 0)
  if query.get("ifGenerationMatch", generation) != generation:
    raise _StatusError(412)
  if query.get("ifGenerationNotMatch") == generation:
    raise _StatusError(304 if is_read else 412)

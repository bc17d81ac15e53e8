"""A server of files with the public API of the Hugging Face Hub.

It answers the requests that `huggingface_hub` makes to list a repository and to
read its files; nothing is authenticated or written.
"""

from collections.abc import Iterator, Mapping
import contextlib
import hashlib
import http.server
import json
import re
import threading
from typing import Any, ClassVar
import urllib.parse

_COMMIT = "0123456789abcdef0123456789abcdef01234567"
_API = re.compile(
  r"/api/(?P<kind>models|datasets)/(?P<name>[^/]+/[^/]+)"
  r"(?:/(?P<call>revision|tree|paths-info|refs)(?:/(?P<rest>.*))?)?"
)
_FILE = re.compile(
  r"/(?P<kind>datasets/)?(?P<name>[^/]+/[^/]+)/resolve/[^/]+/(?P<path>.+)"
)

# Content by path, of each repository by `models/org/name`.
Repositories = Mapping[str, Mapping[str, bytes]]


@contextlib.contextmanager
def serve(repositories: Repositories) -> Iterator[tuple[str, list[str]]]:
  """Yields the address of a server, and its requests so far."""
  requests: list[str] = []

  class Handler(_Handler):
    """Serves these repositories."""

  Handler.repositories, Handler.requests = repositories, requests
  server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
  threading.Thread(target=server.serve_forever, daemon=True).start()
  try:
    yield f"http://127.0.0.1:{server.server_address[1]}", requests
  finally:
    server.shutdown()
    server.server_close()


class _Handler(http.server.BaseHTTPRequestHandler):
  protocol_version = "HTTP/1.1"
  repositories: ClassVar[Repositories]
  requests: ClassVar[list[str]]

  def do_GET(self) -> None:
    self._answer({})

  def do_HEAD(self) -> None:
    self._answer({})

  def do_POST(self) -> None:
    body = self.rfile.read(int(self.headers["Content-Length"])).decode()
    is_json = "json" in self.headers.get("Content-Type", "")
    self._answer(json.loads(body) if is_json else urllib.parse.parse_qs(body))

  def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
    del format, args

  def _answer(self, body: Mapping[str, Any]) -> None:
    url = urllib.parse.urlsplit(self.path)
    path = urllib.parse.unquote(url.path)
    self.requests.append(f"{self.command} {path}")
    if found := _API.fullmatch(path):
      files = self.repositories.get(f"{found['kind']}/{found['name']}")
      if files is None:
        self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        return
      query = urllib.parse.parse_qs(url.query)
      result = _call(found, files, body, query)
      if result is None:
        self._send(404, b"{}", {"X-Error-Code": "EntryNotFound"})
      else:
        self._send(200, json.dumps(result).encode(), {})
    elif found := _FILE.fullmatch(path):
      kind = "datasets" if found["kind"] else "models"
      files = self.repositories.get(f"{kind}/{found['name']}", {})
      self._send_file(files.get(found["path"]))
    else:
      self._send(404, b"", {})

  def _send_file(self, data: bytes | None) -> None:
    if data is None:
      self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
      return
    headers = {"ETag": f'"{_hash(data)}"', "X-Repo-Commit": _COMMIT}
    given = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
    if not given:
      self._send(200, data, headers)
      return
    begin, end = int(given[1]), int(given[2] or len(data) - 1) + 1
    part = data[begin:end]
    place = f"bytes {begin}-{begin + len(part) - 1}/{len(data)}"
    self._send(206, part, {**headers, "Content-Range": place})

  def _send(self, status: int, data: bytes, headers: Mapping[str, str]) -> None:
    self.send_response(status)
    for name, value in headers.items():
      self.send_header(name, value)
    self.send_header("Content-Length", str(len(data)))
    self.end_headers()
    if self.command != "HEAD":
      self.wfile.write(data)


def _call(
  found: re.Match[str],
  files: Mapping[str, bytes],
  body: Mapping[str, Any],
  query: Mapping[str, list[str]],
) -> Any:
  """Returns the result of a call of the API, None if a path is missing."""
  rest = (found["rest"] or "").strip("/")
  if found["call"] == "refs":
    main = {"name": "main", "ref": "refs/heads/main", "targetCommit": _COMMIT}
    return {"branches": [main], "converts": [], "tags": []}
  if found["call"] == "paths-info":
    entries = _entries(files)
    return [entries[each] for each in body["paths"] if each in entries]
  if found["call"] == "tree":
    folder = rest.partition("/")[2]
    entries = _entries(files)
    if folder and entries.get(folder, {}).get("type") != "directory":
      return None
    prefix = f"{folder}/" if folder else ""
    is_deep = query.get("recursive", ["false"])[0].lower() in ("true", "1")
    return [
      each
      for path, each in entries.items()
      if path.startswith(prefix)
      and (is_deep or "/" not in path.removeprefix(prefix))
    ]
  return {
    "id": found["name"],
    "sha": _COMMIT,
    "siblings": [{"rfilename": path} for path in files],
    "private": False,
    "gated": False,
    "disabled": False,
    "downloads": 0,
    "likes": 0,
    "tags": [],
  }


def _entries(files: Mapping[str, bytes]) -> dict[str, dict[str, Any]]:
  """Returns the entries of files and their folders by path."""
  found: dict[str, dict[str, Any]] = {}
  for path, data in files.items():
    parts = path.split("/")
    for i in range(1, len(parts)):
      folder = "/".join(parts[:i])
      oid = _hash(folder.encode())
      found[folder] = {
        "type": "directory",
        "oid": oid,
        "size": 0,
        "path": folder,
      }
    found[path] = {
      "type": "file",
      "oid": _hash(data),
      "size": len(data),
      "path": path,
    }
  return found


def _hash(data: bytes) -> str:
  return hashlib.sha1(data).hexdigest()

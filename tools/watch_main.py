"""`tools/watch`: a page with the live curves of all runs below a folder.

The server listens on the loopback interface only. The page asks it for the
runs, for chosen metrics and, with few runs selected, for their tables, spikes,
samples and configuration every two seconds. It loads nothing from elsewhere.

With many runs, only some training lines of each `metrics.jsonl` are parsed,
evenly spaced. Selecting fewer runs parses every line, and then at most
`run_page.MAX_POINTS` points of each curve are sent: the extremes of equal
groups, so that spikes remain.
"""

import argparse
from collections.abc import Mapping, Sequence
import contextlib
import functools
import hashlib
from http import server as http_server
import os
import sys
from typing import Any
from urllib import parse

from etils import epath

from paxon.runner import files, host_header, run_dir, user_error
from paxon.runner.monitoring import curves, metrics_file, run_page

_MAX_LINES = 20_000
_MIN_LINES = 200
_MAX_DEPTH = 4

Runs = Mapping[str, epath.Path]


def find_runs(folder: epath.PathLike) -> dict[str, epath.Path]:
  """Returns the run directories in a folder by relative path, newest first.

  The folder may be a run directory itself, and in an object store.
  """
  folder = epath.Path(folder)
  found, waiting = [], [(folder, 0)]
  while waiting:
    path, depth = waiting.pop()
    inside = _list(path)
    if run_dir.METRICS in {each.name for each in inside}:
      # A run holds no other run.
      found.append((_find_time(path / run_dir.METRICS), path))
    elif depth < _MAX_DEPTH:
      waiting += [
        (each, depth + 1) for each in reversed(inside) if _is_folder(each)
      ]
  found.sort(key=lambda pair: -pair[0])
  return {_name(path, folder): path for _, path in found}


def _list(path: epath.Path) -> list[epath.Path]:
  """Returns the content of a folder; of one that cannot be read, nothing."""
  try:
    return sorted(each for each in path.iterdir() if each != path)
  except OSError:
    return []


def _is_folder(path: epath.Path) -> bool:
  """Whether a path is a folder; links may lead back."""
  return path.is_dir() and not os.path.islink(path)


def _find_time(path: epath.Path) -> float:
  """Returns when a file was written; 0 for a link that leads nowhere."""
  try:
    if files.is_local(path):
      return os.stat(path).st_mtime
    return float(path.stat().mtime or 0)
  except OSError:
    return 0.0


def _name(path: epath.Path, folder: epath.Path) -> str:
  """Returns a path as text that a page can send back, whatever its bytes."""
  shown = path.name
  if path != folder:
    shown = path.relative_to(folder).as_posix()
  return os.fsencode(shown).decode(errors="backslashreplace")


def read(path: epath.Path, *, max_lines: int) -> list[metrics_file.Record]:
  """Returns metrics of a run as `curves.read`, again only if they changed."""
  return _read(path, _stamp(path), max_lines)


def _stamp(path: epath.Path) -> tuple[int | None, ...]:
  """Returns times and sizes of the metrics of a run."""
  found: list[int | None] = []
  for file in (path / run_dir.METRICS, path / run_dir.EVAL / run_dir.METRICS):
    with contextlib.suppress(OSError):
      if files.is_local(file):
        local = os.stat(file)
        found += [local.st_mtime_ns, local.st_size]
      else:
        remote = file.stat()
        found += [remote.mtime, remote.length]
  return tuple(found)


@functools.lru_cache(maxsize=256)
def _read(
  path: epath.Path, stamp: tuple[int | None, ...], max_lines: int
) -> list[metrics_file.Record]:
  del stamp  # Of the key.
  return curves.read(path, max_lines=max_lines)


@functools.lru_cache(maxsize=256)
def _make_tables(
  path: epath.Path,
  stamp: tuple[int | None, ...],
  metrics: tuple[str, ...],
  max_lines: int,
  max_points: int,
) -> dict[str, Any]:
  records = _read(path, stamp, max_lines)
  return curves.make_tables({"": records}, metrics, max_points=max_points)


def _limit(num_runs: int) -> int:
  return max(_MIN_LINES, _MAX_LINES // max(1, num_runs))


def collect(runs: Runs, metrics: Sequence[str]) -> dict[str, Any]:
  """Returns the curves of runs; see `curves.make_tables`."""
  points = max(_MIN_LINES, 20 * run_page.MAX_POINTS // max(20, len(runs)))
  names: set[str] = set()
  tables: dict[str, dict[str, Any]] = {metric: {} for metric in metrics}
  for name, path in runs.items():
    try:
      found = _make_tables(
        path, _stamp(path), tuple(metrics), _limit(len(runs)), points
      )
    except (OSError, files.DamagedFileError):
      continue  # Its section has the reason.
    names.update(found["metrics"])
    for metric, by_run in found["curves"].items():
      if by_run:
        tables[metric][name] = by_run[""]
  return {"metrics": sorted(names), "curves": tables}


def make_sections(
  runs: Runs, known: Sequence[str]
) -> dict[str, list[tuple[str, str, str | None]]]:
  """Returns names, digests and HTML of the sections of each run.

  A section whose digest is `known` to the page has None as its HTML.
  """
  found: dict[str, list[tuple[str, str, str | None]]] = {}
  for run, path in runs.items():
    found[run] = []
    sections = run_page.make_sections(
      path, functools.partial(read, path, max_lines=_limit(len(runs)))
    )
    for name, html in sections.items():
      # Of the section of this run: others may have the same text.
      whole = "\n".join((run, name, html)).encode()
      digest = hashlib.sha256(whole).hexdigest()[:16]
      found[run].append((name, digest, None if digest in known else html))
  return found


class _Handler(http_server.BaseHTTPRequestHandler):
  """Answers `/`, `/runs`, `/curves?run=&metric=`, `/sections?run=&known=`."""

  def __init__(self, folder: epath.PathLike, *args: Any):
    self._folder = folder
    super().__init__(*args)

  def do_GET(self) -> None:
    # Otherwise a web site could read this server under a name that leads here.
    host = self.headers.get("Host", "")
    if not host_header.is_one_of(host, host_header.LOOPBACK):
      self.send_error(403, "Open this page as localhost.")
      return
    address = parse.urlsplit(self.path)
    if address.path == "/":
      self._send(run_page.make_live(), "text/html")
    elif address.path in ("/runs", "/curves", "/sections"):
      found = self._find(address.path, parse.parse_qs(address.query))
      self._send(run_page.to_json(found), "application/json")
    else:
      self.send_error(404)

  def _find(self, path: str, query: Mapping[str, list[str]]) -> Any:
    runs = find_runs(self._folder)
    if path == "/runs":
      return [run_page.describe(name, run) for name, run in runs.items()]
    chosen = {name: runs[name] for name in query.get("run", []) if name in runs}
    if path == "/curves":
      return collect(chosen, query.get("metric", ["loss"]))
    return make_sections(chosen, query.get("known", []))

  def _send(self, text: str, kind: str) -> None:
    data = text.encode()
    self.send_response(200)
    self.send_header("Content-Type", f"{kind}; charset=utf-8")
    self.send_header("Content-Length", str(len(data)))
    self.send_header("Cache-Control", "no-store")
    policy = f"{run_page.make_policy()}; frame-ancestors 'none'"
    self.send_header("Content-Security-Policy", policy)
    self.send_header("X-Content-Type-Options", "nosniff")
    # A page that was left reads no answer.
    with contextlib.suppress(ConnectionError):
      self.end_headers()
      self.wfile.write(data)

  def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
    """Logs nothing: the page asks every two seconds."""


def make_server(
  folder: epath.PathLike, port: int
) -> http_server.ThreadingHTTPServer:
  """Returns a server on the loopback interface; port 0 takes any.

  Raises:
    user_error.UserError: The folder does not exist, or the port is taken.
  """
  if not epath.Path(folder).is_dir():
    raise user_error.UserError(f"{os.fspath(folder)} is not a folder of runs.")
  handler = functools.partial(_Handler, folder)
  try:
    return http_server.ThreadingHTTPServer(("127.0.0.1", port), handler)
  except (OSError, OverflowError) as error:
    raise user_error.UserError(
      f"--port={port}: cannot listen ({error}); --port=0 takes a free port."
    ) from error


def main(arguments: Sequence[str] | None = None) -> int:
  """Serves until it is interrupted."""
  parser = argparse.ArgumentParser(prog="tools/watch", description=__doc__)
  parser.add_argument(
    "folder",
    help="A run directory or a folder of them; also in an object store.",
  )
  parser.add_argument("--port", type=int, default=8008, help="0 for any.")
  flags = parser.parse_args(arguments)
  try:
    folder = run_dir.resolve(flags.folder, os.environ)
    if files.is_local(folder):
      folder = folder.resolve()
    server = make_server(folder, flags.port)
  except user_error.UserError as error:
    print(error, file=sys.stderr)
    return 2
  print(f"watch: http://localhost:{server.server_port}", flush=True)
  try:
    server.serve_forever()
  except KeyboardInterrupt:
    pass
  finally:
    server.server_close()
  return 0


if __name__ == "__main__":
  sys.exit(main())

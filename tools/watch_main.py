"""`tools/watch`: a page with the live curves of all runs below a folder.

The server listens on the loopback interface only. The page asks it for the
runs and for chosen metrics every two seconds. It loads nothing from elsewhere:
the plotting library, uPlot, is a part of the page. With few runs selected, it
also shows their goodput, spikes and samples.

With many runs, only some training lines of each `metrics.jsonl` are parsed,
evenly spaced. Selecting fewer runs parses every line, and then at most
`_MAX_POINTS` points of each curve are sent: the extremes of equal groups, so
that spikes remain.
"""

import argparse
from collections.abc import Mapping, Sequence
import contextlib
import functools
from http import server as http_server
import json
import math
import os
import pathlib
import re
import sys
from typing import Any
from urllib import parse

from paxon.runner import run_dir, user_error
from paxon.runner.monitoring import goodput

_MAX_LINES = 20_000
_MIN_LINES = 200
_MAX_POINTS = 1_000
_MAX_DEPTH = 4
_MAX_SPIKES = 10
_MAX_SAMPLES = 20_000  # Characters.
# More than most lines have.
_LINE_BYTES = 1_000
_HOSTS = ("localhost", "127.0.0.1", "[::1]")
_HERE = pathlib.Path(__file__).parent
_LIBRARY = _HERE.parent / "third_party" / "uplot"
_OTHER_SPLIT = re.compile(rb'"split": "(?!train")')

Curve = list[tuple[int, float]]


def find_runs(folder: pathlib.Path) -> dict[str, pathlib.Path]:
  """Returns the run directories in a folder by relative path, newest first.

  The folder may be a run directory itself.
  """
  found = []
  for root, folders, names in os.walk(folder):
    path = pathlib.Path(root)
    if run_dir.METRICS in names:
      modified = (path / run_dir.METRICS).stat().st_mtime
      found.append((modified, path))
      folders.clear()  # A run holds no other run.
    elif len(path.relative_to(folder).parts) >= _MAX_DEPTH:
      folders.clear()
    folders.sort()
  found.sort(key=lambda pair: -pair[0])
  return {
    path.relative_to(folder).as_posix() if path != folder else path.name: path
    for _, path in found
  }


def describe(name: str, path: pathlib.Path) -> dict[str, Any]:
  """Returns the name, experiment and knobs of a run for the list."""
  settings: dict[str, Any] = {}
  try:
    read = json.loads((path / run_dir.SETTINGS).read_text())
    settings = read if isinstance(read, dict) else {}
  except (OSError, ValueError):
    pass  # A run that starts, or is not of this program, has no settings.
  overrides = settings.get("overrides")
  knobs = [str(each).removeprefix("--fdl.") for each in overrides or ()]
  return {
    "name": name,
    "experiment": str(settings.get("experiment", "")),
    "knobs": knobs,
    "finished": (path / "finished.json").exists(),
  }


def read_curves(
  path: pathlib.Path, *, max_lines: int
) -> dict[str, dict[str, Curve]]:
  """Returns the curves of a run by metric and split.

  Args:
    path: The run directory.
    max_lines: Bound on the training lines that are parsed; of more,
      evenly spaced ones and the last are. Other splits are parsed whole.
  """
  file = path / run_dir.METRICS
  try:
    status = file.stat()
  except OSError:
    return {}
  return _read_file(file, status.st_mtime_ns, status.st_size, max_lines)


@functools.lru_cache(maxsize=256)
def _read_file(
  file: pathlib.Path, modified: int, size: int, max_lines: int
) -> dict[str, dict[str, Curve]]:
  del modified, size  # Of the key: a changed file is read again.
  curves: dict[str, dict[str, Curve]] = {}
  for line in _choose_lines(file.read_bytes(), max_lines):
    try:
      fields = json.loads(line)
      step, split = int(fields.pop("step")), str(fields.pop("split"))
      values = {name: float(value) for name, value in fields.items()}
    except (ValueError, TypeError, KeyError, AttributeError):
      continue  # A damaged line hides one point, not the run.
    for name, value in values.items():
      curves.setdefault(name, {}).setdefault(split, []).append((step, value))
  for splits in curves.values():
    for curve in splits.values():
      curve.sort()
  return curves


def _choose_lines(data: bytes, limit: int) -> list[bytes]:
  """Returns all lines, or about `limit` of the training lines and the others.

  The lines are found by their offsets: splitting long files takes seconds.
  """
  # Long files are not counted to their end.
  first = limit * _LINE_BYTES
  if data.count(b"\n", 0, first) <= limit and data.count(b"\n") <= limit:
    return data.splitlines()
  offsets = {len(data) * i // limit for i in range(limit)}
  offsets.update(match.start() for match in _OTHER_SPLIT.finditer(data))
  # The last line ends with the file.
  offsets.add(max(0, len(data) - 2))
  starts = sorted({data.rfind(b"\n", 0, each) + 1 for each in offsets})
  return [data[start : data.find(b"\n", start)] for start in starts]


def thin(curve: Curve, limit: int = _MAX_POINTS) -> Curve:
  """Returns at most about `limit` points, with the extremes of each group."""
  if len(curve) <= limit:
    return curve
  size = math.ceil(2 * len(curve) / limit)
  kept: Curve = []
  for start in range(0, len(curve), size):
    group = curve[start : start + size]
    finite = [point for point in group if math.isfinite(point[1])]
    if len(finite) < len(group):
      kept.append((group[0][0], math.nan))
    if finite:
      low = min(finite, key=lambda point: point[1])
      kept += sorted({low, max(finite, key=lambda point: point[1])})
  # The newest point is the one that is looked for.
  return kept if kept[-1] == curve[-1] else [*kept, curve[-1]]


def collect(
  runs: Mapping[str, pathlib.Path], metrics: Sequence[str]
) -> dict[str, Any]:
  """Returns the curves of runs: `curves[metric][run][split]`.

  Each is `[steps, values]`; a value that is not finite is None.
  """
  limit = max(_MIN_LINES, _MAX_LINES // max(1, len(runs)))
  points = max(_MIN_LINES, 20 * _MAX_POINTS // max(20, len(runs)))
  names: set[str] = set()
  curves: dict[str, dict[str, Any]] = {metric: {} for metric in metrics}
  for run, path in runs.items():
    found = read_curves(path, max_lines=limit)
    names.update(found)
    for metric in metrics:
      for split, curve in found.get(metric, {}).items():
        kept = thin(curve, points)
        values = [v if math.isfinite(v) else None for _, v in kept]
        table = [[step for step, _ in kept], values]
        curves[metric].setdefault(run, {})[split] = table
  return {"metrics": sorted(names), "curves": curves}


def read_details(path: pathlib.Path) -> dict[str, Any]:
  """Returns the goodput, the newest spikes and the samples of a run.

  What a run has not written yet is empty.
  """
  try:
    line = goodput.account(goodput.read(path / run_dir.GOODPUT)).line()
  except (OSError, user_error.UserError):
    line = ""
  spikes = []
  for text in _read_text(path / run_dir.SPIKES).splitlines()[-_MAX_SPIKES:]:
    try:
      spike = json.loads(text)
      fields = ("step", "metric", "value", "documents", "position_before")
      spikes.append({name: spike.get(name) for name in fields})
    except (ValueError, AttributeError):
      continue
  samples = _read_text(path / run_dir.SAMPLES)[:_MAX_SAMPLES]
  return {"goodput": line, "spikes": spikes, "samples": samples}


def _read_text(path: pathlib.Path) -> str:
  try:
    return path.read_text(errors="replace")
  except OSError:
    return ""


def to_json(value: Any) -> str:
  """Returns JSON that a browser reads: Python also writes NaN and Infinity."""
  try:
    return json.dumps(value, allow_nan=False)
  except ValueError:
    return json.dumps(_without_nan(value))


def _without_nan(value: Any) -> Any:
  if isinstance(value, dict):
    return {name: _without_nan(each) for name, each in value.items()}
  if isinstance(value, list):
    return [_without_nan(each) for each in value]
  is_bad = isinstance(value, float) and not math.isfinite(value)
  return str(value) if is_bad else value


def make_page() -> str:
  """Returns the page with the plotting library in it."""
  page = (_HERE / "watch_page.html").read_text()
  for mark, name in (
    ("/* uPlot.css */", "uPlot.min.css"),
    ("/* uPlot.js */", "uPlot.iife.min.js"),
  ):
    page = page.replace(mark, (_LIBRARY / name).read_text())
  return page


class _Handler(http_server.BaseHTTPRequestHandler):
  """Answers `/`, `/runs`, `/curves?run=&metric=` and `/details?run=`."""

  def __init__(self, folder: pathlib.Path, *args: Any):
    self._folder = folder
    super().__init__(*args)

  def do_GET(self) -> None:
    # Otherwise a web site could read this server under a name that leads here.
    host = self.headers.get("Host", "").rpartition(":")[0]
    if host not in _HOSTS:
      self.send_error(403, "Open this page as localhost.")
      return
    address = parse.urlsplit(self.path)
    if address.path == "/":
      self._send(make_page(), "text/html")
    elif address.path == "/runs":
      runs = find_runs(self._folder)
      described = [describe(name, path) for name, path in runs.items()]
      self._send(to_json(described), "application/json")
    elif address.path == "/curves":
      query = parse.parse_qs(address.query)
      runs, asked = find_runs(self._folder), query.get("run", [])
      chosen = {name: runs[name] for name in asked if name in runs}
      found = collect(chosen, query.get("metric", ["loss"]))
      self._send(to_json(found), "application/json")
    elif address.path == "/details":
      runs = find_runs(self._folder)
      asked = parse.parse_qs(address.query).get("run", [])
      details = {
        name: read_details(runs[name]) for name in asked if name in runs
      }
      self._send(to_json(details), "application/json")
    else:
      self.send_error(404)

  def _send(self, text: str, kind: str) -> None:
    data = text.encode()
    self.send_response(200)
    self.send_header("Content-Type", f"{kind}; charset=utf-8")
    self.send_header("Content-Length", str(len(data)))
    self.send_header("Cache-Control", "no-store")
    # A page that was left reads no answer.
    with contextlib.suppress(ConnectionError):
      self.end_headers()
      self.wfile.write(data)

  def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
    """Logs nothing: the page asks every two seconds."""


def make_server(
  folder: pathlib.Path, port: int
) -> http_server.ThreadingHTTPServer:
  """Returns a server on the loopback interface; port 0 takes any.

  Raises:
    user_error.UserError: The folder does not exist, or the port is taken.
  """
  if not folder.is_dir():
    raise user_error.UserError(f"{folder} is not a folder of runs.")
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
  parser.add_argument("folder", help="A run directory or a folder of them.")
  parser.add_argument("--port", type=int, default=8008, help="0 for any.")
  flags = parser.parse_args(arguments)
  try:
    server = make_server(pathlib.Path(flags.folder).resolve(), flags.port)
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

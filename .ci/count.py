"""Counts the test cases of a Bazel run: `N passed, N failed[, N skipped]`.

Usage: `count.py EVENTS`, the file of `--build_event_json_file`. It names the
JUnit report of every test that took part, cached ones included. A test that
failed without a failing case (it crashed, or ran out of time) counts as one.

Failures are printed first, with the last lines of their logs: often only the
end of a CI log is kept.
"""

import json
import pathlib
import sys
import urllib.parse
from xml.etree import ElementTree


def _events(path: str):
  for line in pathlib.Path(path).read_text(encoding="utf-8").splitlines():
    try:
      yield json.loads(line)
    except json.JSONDecodeError:
      return  # Bazel was stopped in the middle of a line.


# Lines of output per failure.
_LINES = 30


def _print(what: str, text: str) -> None:
  print(f"FAILED {what}")
  print("\n".join(f"    {line}" for line in text.splitlines()[-_LINES:]))


def _text(path: str) -> str:
  try:
    return pathlib.Path(path).read_text(encoding="utf-8", errors="replace")
  except OSError:
    return ""


def _cases(label: str, result: dict) -> tuple[int, int, int]:
  passed = failed = skipped = 0
  log = ""
  for output in result.get("testActionOutput", ()):
    path = urllib.parse.unquote(urllib.parse.urlparse(output["uri"]).path)
    if output["name"] == "test.log":
      log = path
    if output["name"] != "test.xml":
      continue
    try:
      cases = list(ElementTree.parse(path).iter("testcase"))
    except (OSError, ElementTree.ParseError):
      cases = []
    for case in cases:
      problem = case.find("failure")
      if problem is None:
        problem = case.find("error")
      if problem is not None:
        failed += 1
        _print(f"{label}: {case.get('name')}", problem.text or "")
      elif case.find("skipped") is not None:
        skipped += 1
      else:
        passed += 1
  if result.get("status") != "PASSED" and not failed:
    failed += 1
    _print(f"{label}: {result.get('status')}", _text(log))
  return passed, failed, skipped


def main(path: str) -> None:
  """Prints the counts of the events in `path`."""
  results = {}
  for event in _events(path):
    if "testResult" in event:
      place = event["id"]["testResult"]
      # A test that was retried counts by its last attempt.
      key = place["label"], place.get("run"), place.get("shard")
      results[key] = _cases(place["label"], event["testResult"])
  counts = [sum(column) for column in zip(*results.values(), strict=True)]
  passed, failed, skipped = counts or (0, 0, 0)
  more = f", {skipped} skipped" if skipped else ""
  print(f"{passed} passed, {failed} failed{more}")


if __name__ == "__main__":
  main(sys.argv[1])

"""Counts the test cases of a Bazel run: `N passed, N failed[, N skipped]`.

Usage: `count.py EVENTS [CONTRIBUTING]`. EVENTS is the file of
`--build_event_json_file`. It names the JUnit report of every test that took
part, cached ones included. A test that failed without a failing case (it
crashed, or ran out of time) counts as one. Targets that Bazel did not reach
before it was stopped are named.

Failures are printed first, with the last lines of their logs: often only the
end of a CI log is kept. Then come the slowest targets and cases, and the cases
that the tier left out. With CONTRIBUTING, its `minutes on two cores` are
compared with half of the tests' CPU minutes, which other work on the machine
does not change; the exit status is 1 if they are more than twice the number, as
no CPU is so much slower than those that it was measured on.
"""

import collections
import dataclasses
import json
import pathlib
import re
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
# How many of the slowest are printed.
_SLOWEST = 20
# Lines of tools/pytest_main.py in the log of a test.
_LEFT_OUT = re.compile(r"^(\d+) cases are left to ", re.MULTILINE)
_CPU = re.compile(r"^CPU: ([\d.]+) s$", re.MULTILINE)
# Of a test that was stopped with Bazel.
_STOPPED = ("NO_STATUS", "INCOMPLETE")
_MINUTES = re.compile(r"(\d+) minutes on two cores")


def _print(what: str, text: str) -> None:
  print(f"FAILED {what}")
  print("\n".join(f"    {line}" for line in text.splitlines()[-_LINES:]))


def _text(path: str) -> str:
  try:
    return pathlib.Path(path).read_text(encoding="utf-8", errors="replace")
  except OSError:
    return ""


@dataclasses.dataclass
class _Result:
  """Counts, seconds and cases of one run of a test, or of one shard."""

  passed: int = 0
  failed: int = 0
  skipped: int = 0
  seconds: float = 0.0
  cpu_seconds: float = 0.0
  left_out: int = 0
  cases: list[tuple[float, str]] = dataclasses.field(default_factory=list)


def _read(label: str, event: dict) -> _Result:
  result = _Result(seconds=int(event.get("testAttemptDurationMillis", 0)) / 1e3)
  log = ""
  for output in event.get("testActionOutput", ()):
    path = urllib.parse.unquote(urllib.parse.urlparse(output["uri"]).path)
    if output["name"] == "test.log":
      log = _text(path)
      result.left_out = max(map(int, _LEFT_OUT.findall(log)), default=0)
      result.cpu_seconds = sum(map(float, _CPU.findall(log)[-1:]))
    if output["name"] != "test.xml":
      continue
    try:
      cases = list(ElementTree.parse(path).iter("testcase"))
    except (OSError, ElementTree.ParseError):
      cases = []
    for case in cases:
      name = f"{label}: {case.get('name')}"
      result.cases.append((float(case.get("time") or 0), name))
      problem = case.find("failure")
      if problem is None:
        problem = case.find("error")
      if problem is not None:
        result.failed += 1
        _print(name, problem.text or "")
      elif case.find("skipped") is not None:
        result.skipped += 1
      else:
        result.passed += 1
  if event.get("status") != "PASSED" and not result.failed:
    result.failed += 1
    _print(f"{label}: {event.get('status')}", log)
  return result


def _print_slowest(what: str, times: list[tuple[float, str]]) -> None:
  print(f"Slowest {what}:")
  for seconds, name in sorted(times, reverse=True)[:_SLOWEST]:
    print(f"{seconds:8.1f} s  {name}")


def _check_minutes(results: list[_Result], page: str) -> bool:
  """Prints whether the tests take as long as a page says; False for twice."""
  match = _MINUTES.search(_text(page))
  if not match:
    print(f"{page} does not say `N minutes on two cores`.")
    return False
  limit = int(match[1])
  found = sum(result.cpu_seconds for result in results) / 2 / 60
  if not found:
    print(f"{limit} minutes on two cores: no log has CPU seconds")
    return True
  verdict = "as promised" if found <= limit else "MORE THAN PROMISED"
  print(f"{found:.1f} of {limit} minutes on two cores: {verdict}")
  return found <= 2 * limit


def main(path: str, page: str = "") -> int:
  """Prints the counts of the events in `path`; returns the exit status."""
  results: dict[tuple, _Result] = {}
  tests: set[str] = set()
  nightly: set[str] = set()
  for event in _events(path):
    result = event.get("testResult", {})
    if result and result.get("status") not in _STOPPED:
      place = event["id"]["testResult"]
      # A test that was retried counts by its last attempt.
      key = place["label"], place.get("run"), place.get("shard")
      results[key] = _read(place["label"], result)
    configured = event.get("configured", {})
    if configured.get("targetKind", "").endswith("_test rule"):
      label = event["id"]["targetConfigured"]["label"]
      tests.add(label)
      if "nightly" in configured.get("tag", ()):
        nightly.add(label)
  seconds: collections.Counter[str] = collections.Counter()
  # Each shard of a target prints the cases of all of them.
  left_out: dict[str, int] = {}
  for (label, *_), result in results.items():
    seconds[label] += result.seconds
    left_out[label] = max(left_out.get(label, 0), result.left_out)
  found = list(results.values())
  _print_slowest("targets", [(s, label) for label, s in seconds.items()])
  _print_slowest("cases", [case for result in found for case in result.cases])
  if missed := sorted(tests - seconds.keys() - (nightly if page else set())):
    print(f"NOT RUN before Bazel was stopped: {len(missed)} targets")
    print("\n".join(f"    {label}" for label in missed))
  print(
    f"Left to --config=all: {sum(left_out.values())} cases of the targets that"
    f" ran, and {len(nightly - seconds.keys())} targets"
  )
  is_fast = not page or _check_minutes(found, page)
  passed, failed, skipped = (
    sum(getattr(result, name) for result in found)
    for name in ("passed", "failed", "skipped")
  )
  more = f", {skipped} skipped" if skipped else ""
  print(f"{passed} passed, {failed} failed{more}")
  return 0 if is_fast else 1


if __name__ == "__main__":
  sys.exit(main(*sys.argv[1:]))

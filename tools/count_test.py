"""CI's counts of a run of Bazel."""

import json
import pathlib
import subprocess
import sys

_COUNT = pathlib.Path(__file__).parent.parent / ".ci" / "count.py"
_REPORT = """<testsuites><testsuite>
<testcase name="test_fast" time="0.1"/>
<testcase name="test_slow" time="7.5"/>
<testcase name="test_none" time="0"><skipped/></testcase>
{more}
</testsuite></testsuites>"""
_FAILURE = (
  '<testcase name="test_bad" time="1"><failure>no: 1</failure></testcase>'
)


def _configured(label, *tags):
  return {
    "id": {"targetConfigured": {"label": label}},
    "configured": {"targetKind": "py_test rule", "tag": [*tags]},
  }


def _result(
  folder, label, *, shard=1, attempt=1, cpu=60.0, more="", status="PASSED"
):
  name = f"{label.rpartition(':')[2]}-{shard}-{attempt}"
  log, report = folder / f"{name} log", folder / f"{name}.xml"
  log.write_text(
    "5 cases are left to `bazel test --config=all`.\n"
    f"the last line\nCPU: {cpu} s\n"
  )
  if more is not None:
    report.write_text(_REPORT.format(more=more))
  place = {"label": label, "run": 1, "shard": shard, "attempt": attempt}
  return {
    "id": {"testResult": place},
    "testResult": {
      "testActionOutput": [
        {"name": "test.log", "uri": log.as_uri()},
        {"name": "test.xml", "uri": report.as_uri()},
      ],
      "testAttemptDurationMillis": "2500",
      "status": status,
    },
  }


def _count(folder, events, *page):
  path = folder / "events.json"
  # Bazel may be stopped in the middle of a line.
  path.write_text("\n".join([*map(json.dumps, events), '{"id": {']))
  return subprocess.run(
    [sys.executable, str(_COUNT), str(path), *page],
    capture_output=True,
    text=True,
    check=False,
  )


def test_cases_targets_and_failures_are_counted(tmp_path):
  run = _count(
    tmp_path,
    [
      _configured("//a:b", "multihost"),
      _configured("//a:later", "nightly"),
      _result(tmp_path, "//a:b", shard=1),
      # The second attempt counts, and shards print the same number.
      _result(tmp_path, "//a:b", shard=2, more=_FAILURE, status="FAILED"),
      _result(tmp_path, "//a:b", shard=2, attempt=2),
      _result(tmp_path, "//a:c", more=_FAILURE, status="FAILED"),
      _result(tmp_path, "//a:hangs", more=None, status="TIMEOUT"),
    ],
  )
  assert run.returncode == 0, run.stderr
  lines = run.stdout.splitlines()
  assert "FAILED //a:c: test_bad" in lines
  assert lines[lines.index("FAILED //a:hangs: TIMEOUT") + 2] == (
    "    the last line"
  )
  targets = lines.index("Slowest targets:")
  assert lines[targets + 1] == "     5.0 s  //a:b"
  cases = lines.index("Slowest cases:")
  assert lines[cases + 1] == "     7.5 s  //a:c: test_slow"
  # 5 of each of the targets that ran.
  assert lines[-2:] == [
    "Left to --config=all: 15 cases of the targets that ran, and 1 targets",
    "6 passed, 2 failed, 3 skipped",
  ]


def test_targets_that_were_not_reached_are_named(tmp_path):
  events = [
    *(_configured(f"//a:{name}") for name in ("ran", "cut", "waits")),
    _configured("//a:later", "nightly"),
    _result(tmp_path, "//a:ran"),
    _result(tmp_path, "//a:cut", status="INCOMPLETE"),
  ]
  page = tmp_path / "page.md"
  page.write_text("at most 20 minutes on two cores, which")
  for pages, missed in (
    ((), ["//a:cut", "//a:later", "//a:waits"]),
    # Those of the night are left out there on purpose.
    ((str(page),), ["//a:cut", "//a:waits"]),
  ):
    lines = _count(tmp_path, events, *pages).stdout.splitlines()
    at = lines.index(f"NOT RUN before Bazel was stopped: {len(missed)} targets")
    assert [line.strip() for line in lines[at + 1 :]][: len(missed)] == missed
    assert lines[-1] == "2 passed, 0 failed, 1 skipped"


def test_at_most_twenty_of_the_slowest_are_printed(tmp_path):
  events = [_result(tmp_path, f"//a:t{number}") for number in range(30)]
  lines = _count(tmp_path, events).stdout.splitlines()
  assert lines.index("Slowest cases:") - lines.index("Slowest targets:") == 21


def test_minutes_of_the_page_are_compared_with_cpu_time(tmp_path):
  page = tmp_path / "page.md"
  page.write_text("at most 20 minutes on two cores, which")
  for seconds, said, status in (
    (2400, "20.0 of 20 minutes on two cores: as promised", 0),
    (2500, "20.8 of 20 minutes on two cores: MORE THAN PROMISED", 0),
    (4900, "40.8 of 20 minutes on two cores: MORE THAN PROMISED", 1),
    (0, "20 minutes on two cores: no log has CPU seconds", 0),
  ):
    events = [_result(tmp_path, "//a:b", cpu=float(seconds))]
    run = _count(tmp_path, events, str(page))
    assert (run.stdout.splitlines()[-2], run.returncode) == (said, status)
  page.write_text("soon")
  run = _count(tmp_path, events, str(page))
  assert "does not say `N minutes on two cores`" in run.stdout
  assert run.returncode == 1


def test_a_run_without_tests_has_no_cases(tmp_path):
  assert _count(tmp_path, []).stdout.splitlines()[-1] == "0 passed, 0 failed"

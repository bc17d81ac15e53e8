"""Tests of checks in processes: none stops the next."""

import json

import pytest

from paxon.tasks.gpu_check import isolation, testing


def _check(name, run, process="one", limit=60.0):
  return isolation.Check(name=name, process=process, limit=limit, run=run)


def _run(checks, folder, *, total=300.0):
  path = folder / "results.json"
  results = isolation.Results(path, {"dry_run": True})
  settings = isolation.Settings(folder=folder, is_dry=True)
  isolation.run(checks, settings, results, total=total)
  return json.loads(path.read_text()), results


@pytest.mark.nightly
def test_no_check_stops_the_next(tmp_path, monkeypatch):
  monkeypatch.setattr(isolation, "_LEAST", 0.1)
  found, results = _run(
    [
      _check("a.fails", testing.fail),
      _check("b.has_a_bug", testing.raise_bug),
      _check("c.crashes", testing.crash),
      _check("d.passes", testing.succeed),
      _check("e.hangs", testing.hang, limit=0.5),
      _check("f.passes", testing.succeed, process="two"),
    ],
    tmp_path,
  )
  checks = found["checks"]
  assert {name: one["status"] for name, one in checks.items()} == {
    "a.fails": "failed",
    "b.has_a_bug": "failed",
    "c.crashes": "crashed",
    "d.passes": "passed",
    "e.hangs": "timed out",
    "f.passes": "passed",
  }
  assert checks["a.fails"]["error"] == "it differs"
  assert checks["a.fails"]["error_size"] == 0.5
  assert "KeyError" in checks["b.has_a_bug"]["traceback"]
  assert checks["c.crashes"]["error"] == "exit status 3"
  # JSON has no NaN.
  assert checks["f.passes"]["number"] == "nan"
  assert results.count(isolation.Status.PASSED) == 2
  assert found["started"].startswith("20")


def test_checks_without_time_are_skipped(tmp_path, capsys):
  found, _ = _run(
    [_check("a.passes", testing.succeed), _check("b.passes", testing.succeed)],
    tmp_path,
    total=1.0,
  )
  for one in found["checks"].values():
    assert one["status"] == "skipped"
    assert one["reason"] == "no time was left of 1 s"
  assert "a.passes" in capsys.readouterr().out

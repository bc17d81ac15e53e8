"""Tests for the status of a run, its lines, liveness file and HTTP server."""

import json
import math
import time
import urllib.error
import urllib.request

from prometheus_client import parser
import pytest

from paxon.runner import user_error
from paxon.runner.monitoring import (
  goodput,
  launch,
  metrics_server,
  run_status,
  step_metrics,
)


class _Clock:
  def __init__(self):
    self.now = 1000.0

  def __call__(self):
    return self.now


@pytest.fixture(name="clock")
def _clock():
  return _Clock()


@pytest.fixture(name="ledger")
def _ledger(clock):
  return goodput.Ledger(clock=clock)


def _make(ledger, clock, **options):
  return run_status.RunStatus(
    ledger, num_train_steps=50, clock=clock, **options
  )


def _get(port, path):
  with urllib.request.urlopen(f"http://localhost:{port}{path}") as answer:
    return answer.status, answer.read().decode()


def _scrape(port):
  """Samples by name and labels, as Prometheus' own parser reads them."""
  _, text = _get(port, "/metrics")
  families = parser.text_string_to_metric_families(text)
  return {
    (sample.name, *dict(sorted(sample.labels.items())).values()): sample.value
    for family in families
    for sample in family.samples
  }


def test_line_has_step_activity_and_memory(ledger, clock, monkeypatch):
  memory = {"host_memory_bytes": 3 * 2.0**30}
  monkeypatch.setattr(step_metrics, "host_memory", lambda: memory)
  status = _make(ledger, clock)
  clock.now += 5
  assert status.snapshot().line() == (
    "step 0/50; starting for 5.0 s; 3.00 GiB on the host"
  )
  ledger.start(10)
  with ledger.span(goodput.Cause.PRODUCTIVE):
    clock.now += 2
    ledger.record_step(11)
    clock.now += 3
    status.write(11, "train", {"device_memory_bytes": 2.0**20})
    with ledger.span(goodput.Cause.DATA):
      clock.now += 4
      # A scrape is no change of activity.
      status.snapshot()
      clock.now += 1
      status.is_hanging = lambda: True
      assert status.snapshot().line() == (
        "step 11/50, 8.0 s ago; waiting for data for 5.0 s, hanging; 3.00 GiB"
        " on the host; 1.00 MiB on a device"
      )


def test_reads_of_other_threads_change_no_account(ledger, clock):
  status = _make(ledger, clock)
  with ledger.span(goodput.Cause.DATA):
    for _ in range(3):
      clock.now += 1
      status.snapshot()
  clock.now += 2
  account = ledger.account()
  assert account.seconds[goodput.Cause.DATA] == 3.0
  assert account.seconds[goodput.Cause.STARTUP] == 2.0
  assert account.wall_seconds == 5.0


def test_metrics_are_those_that_were_written(ledger, clock):
  status = _make(ledger, clock)
  ledger.start(10)
  with ledger.span(goodput.Cause.DATA):
    clock.now += 3
  ledger.record_step(12)
  status.flush()
  clock.now += 7
  values = {"loss": 2.5, "mfu": 0.4, "tokens_per_second": 1e3}
  values |= {"late_seconds": 0.25, "straggler_process": 3.0}
  status.write(12, "train", values)
  status.write(12, "validation", {"loss": float("nan")})
  status.write(0, "baseline/xz", {"bits_per_byte": 2.0})
  with metrics_server.serve(status, 0) as port:
    found = _scrape(port)
  assert found["paxon_step",] == 12
  assert found["paxon_train_steps",] == 50
  assert found["paxon_step_age_seconds",] == 7
  assert found["paxon_checkpoint_age_seconds",] == 7
  assert found["paxon_hanging",] == 0
  assert found["paxon_loss",] == 2.5
  assert found["paxon_mfu",] == 0.4
  assert found["paxon_late_seconds",] == 0.25
  assert found["paxon_straggler_process",] == 3
  assert found["paxon_rate", "tokens"] == 1e3
  assert found["paxon_time_seconds", "data wait"] == 3
  assert found["paxon_metric", "loss", "train"] == 2.5
  assert math.isnan(found["paxon_metric", "loss", "validation"])
  assert not any("baseline/xz" in key for key in found)


def test_health_and_unknown_paths(ledger, clock):
  status = _make(ledger, clock)
  with metrics_server.serve(status, 0) as port:
    code, text = _get(port, "/healthz")
    assert code == 200
    assert json.loads(text)["activity"] == "starting"
    status.is_hanging = lambda: True
    with pytest.raises(urllib.error.HTTPError, match="503"):
      _get(port, "/healthz")
    with pytest.raises(urllib.error.HTTPError, match="404"):
      _get(port, "/")


def test_liveness_file_is_rewritten_unless_a_step_hangs(ledger, tmp_path):
  path = tmp_path / "new" / "alive"
  status = run_status.RunStatus(
    ledger, num_train_steps=50, liveness_file=str(path), line_seconds=0.05
  )
  with status:
    before = json.loads(path.read_text())
    assert before["activity"] == "starting"
    while json.loads(path.read_text())["time"] == before["time"]:
      time.sleep(0.01)
    status.is_hanging = lambda: True
    time.sleep(0.2)
    last = path.read_text()
    time.sleep(0.2)
    assert path.read_text() == last


def test_a_line_a_minute(ledger, monkeypatch, capsys):
  monkeypatch.delenv("PAXON_NO_HEARTBEAT", raising=False)
  status = run_status.RunStatus(ledger, num_train_steps=50, line_seconds=0.05)
  said = ""
  with status:
    while said.count("\n") < 2:
      time.sleep(0.01)
      said += capsys.readouterr().out
  assert said.startswith("process 0 of 1 (")
  assert "): step 0/50; starting for 0.0 s; " in said


def test_no_lines_where_outputs_are_compared(ledger, monkeypatch, capsys):
  monkeypatch.setenv("PAXON_NO_HEARTBEAT", "1")
  with run_status.RunStatus(ledger, num_train_steps=50, line_seconds=0.01):
    time.sleep(0.1)
  assert capsys.readouterr().out == ""


def test_what_cannot_be_used_is_one_line(ledger, tmp_path):
  (tmp_path / "file").write_text("")
  asked = launch.Launch(liveness_file=f"{tmp_path}/file/alive")
  with (
    pytest.raises(user_error.UserError, match=r"--liveness_file=.*/file/alive"),
    metrics_server.report_status(ledger, asked, num_train_steps=1),
  ):
    pass
  asked = launch.Launch(metrics_port=0)
  with (
    metrics_server.report_status(ledger, asked, num_train_steps=1) as status,
    metrics_server.serve(status, 0) as port,
    pytest.raises(user_error.UserError, match=r"port=.*cannot be used"),
    metrics_server.serve(status, port),
  ):
    pass

"""Tests that a real Prometheus scrapes a training run, for each panel."""

import json
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request

import pytest

FOLDER = pathlib.Path(__file__).parent
# A CPU has no peak, so its runs have no MFU, and one process is never late.
_WITHOUT_A_VALUE = {
  "paxon_mfu",
  "paxon_late_seconds * on (instance) group_left (process, host)"
  " paxon_process_info",
}


def _free_port():
  with socket.socket() as listener:
    listener.bind(("localhost", 0))
    return listener.getsockname()[1]


def _require(program):
  if shutil.which(program) is None:
    pytest.skip(f"requires the program {program} (Debian: prometheus)")


def test_configuration_is_valid():
  _require("promtool")
  path = FOLDER / "prometheus.yml"
  subprocess.run(["promtool", "check", "config", path], check=True)


def _expressions():
  dashboard = json.loads((FOLDER / "dashboard.json").read_text())
  return {
    target["expr"]: panel["title"]
    for panel in dashboard["panels"]
    for target in panel["targets"]
  }


@pytest.fixture(name="training")
def _training(tmp_path):
  """A run with its port, which trains until the test ends."""
  port = _free_port()
  command = [
    *(sys.executable, "-m", "paxon.runner.main"),
    "--exp=runner.training.testing.TinyLm",
    f"--job_log_dir={tmp_path}/run",
    "--fdl.num_train_steps=10000",
    "--fdl.delay=0.2",
    "--fdl.eval_every_steps=5",
    "--fdl.checkpoint_every_steps=5",
    f"--metrics_port={port}",
  ]
  environ = os.environ | {"PYTHONPATH": ":".join(filter(None, sys.path))}
  log = tmp_path / "training.log"
  with log.open("w") as file:
    process = subprocess.Popen(
      command, env=environ, stdout=file, stderr=subprocess.STDOUT
    )
  yield process, port, log
  process.kill()
  process.wait()


@pytest.fixture(name="server")
def _server(training, tmp_path):
  """The port of a Prometheus that scrapes the run every second."""
  _require("prometheus")
  _, target, _ = training
  port = _free_port()
  config = {
    "global": {"scrape_interval": "1s"},
    "scrape_configs": [
      {
        "job_name": "paxon",
        "static_configs": [{"targets": [f"localhost:{target}"]}],
      }
    ],
  }
  path = tmp_path / "prometheus.json"
  path.write_text(json.dumps(config))
  command = [
    "prometheus",
    f"--config.file={path}",
    f"--storage.tsdb.path={tmp_path}/series",
    f"--web.listen-address=127.0.0.1:{port}",
  ]
  with (tmp_path / "prometheus.log").open("w") as file:
    process = subprocess.Popen(command, stdout=file, stderr=file)
  yield port
  process.terminate()
  process.wait()


def _query(port, expression):
  """The samples of an instant query, as the HTTP API answers."""
  text = urllib.parse.urlencode({"query": expression})
  url = f"http://127.0.0.1:{port}/api/v1/query?{text}"
  try:
    with urllib.request.urlopen(url) as answer:
      found = json.load(answer)
  except urllib.error.URLError:
    return []  # Not started yet.
  assert found["status"] == "success", (expression, found)
  return found["data"]["result"]


@pytest.mark.nightly
def test_every_panel_shows_a_value(training, server):
  process, _, log = training
  missing = {*_expressions()}
  assert missing > _WITHOUT_A_VALUE
  missing -= _WITHOUT_A_VALUE
  limit = time.monotonic() + 200
  while missing and time.monotonic() < limit:
    assert process.poll() is None, log.read_text()
    missing = {each for each in missing if not _query(server, each)}
    time.sleep(1)
  assert not missing, log.read_text()
  # An expression that is wrong shows nothing, but is answered.
  assert [_query(server, each) for each in _WITHOUT_A_VALUE] == [[], []]
  [step] = _query(server, "paxon_step")
  shown = log.read_text().count("tokens/s")
  assert 0 < float(step["value"][1]) <= shown + 3
  [loss] = _query(server, "paxon_loss")
  assert 0 < float(loss["value"][1]) < 20

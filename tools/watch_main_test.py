import itertools
import json
import math
import socket
import struct
import threading
import time
from urllib import error, request

from etils import epath
import pytest

from paxon.runner import user_error
from paxon.runner.monitoring import goodput, metrics_file
from paxon.tools import watch_main


def _write(folder, count, *, value=lambda step: 1 / step, evaluated=()):
  folder.mkdir(parents=True)
  writer = metrics_file.MetricsFile(folder / "metrics.jsonl", resume_step=0)
  for step in range(1, count + 1):
    writer.write(step, "train", {"loss": value(step)})
  for step in evaluated:
    writer.write(step, "validation", {"loss": float(step)})
  writer.close()


def test_runs_are_found_at_any_depth_but_not_inside_runs(tmp_path):
  _write(tmp_path / "a", 1)
  _write(tmp_path / "a/eval", 1)
  _write(tmp_path / "study/b", 1)
  (tmp_path / "empty").mkdir()
  assert set(watch_main.find_runs(tmp_path)) == {"a", "study/b"}
  assert list(watch_main.find_runs(tmp_path / "a")) == ["a"]


def test_all_lines_of_a_short_run_are_read(tmp_path):
  _write(tmp_path / "a", 10, evaluated=[5, 10])
  curves = watch_main.read_curves(tmp_path / "a", max_lines=100)["loss"]
  assert curves["train"] == [(step, 1 / step) for step in range(1, 11)]
  assert curves["validation"] == [(5, 5.0), (10, 10.0)]


def test_of_a_long_run_lines_are_spaced_and_no_evaluation_is_lost(tmp_path):
  evaluated = [*range(100, 5001, 100)]
  _write(tmp_path / "a", 5000, evaluated=evaluated)
  curves = watch_main.read_curves(tmp_path / "a", max_lines=300)["loss"]
  steps = [step for step, _ in curves["train"]]
  assert 250 <= len(steps) <= 301
  assert steps[0] == 1
  assert max(b - a for a, b in itertools.pairwise(steps)) < 50
  assert all(value == 1 / step for step, value in curves["train"])
  assert [step for step, _ in curves["validation"]] == evaluated


def test_a_new_line_is_read_and_a_damaged_one_skipped(tmp_path):
  _write(tmp_path / "a", 3)
  path = tmp_path / "a/metrics.jsonl"
  assert len(watch_main.read_curves(path.parent, max_lines=9)["loss"]) == 1
  line = '{"step": 4, "split": "train", "loss": "NaN"}\n'
  path.write_text(path.read_text() + "{damaged\n" + line)
  curve = watch_main.read_curves(path.parent, max_lines=9)["loss"]["train"]
  assert [step for step, _ in curve] == [1, 2, 3, 4]
  table = watch_main.collect({"a": path.parent}, ["loss"])["curves"]
  assert table["loss"]["a"]["train"][1][-1] is None


def test_thin_keeps_spikes_and_the_last_point():
  curve = [(step, 1.0) for step in range(10_000)]
  curve[5_555] = (5_555, 99.0)
  curve[7_777] = (7_777, -99.0)
  kept = watch_main.thin(curve, 1_000)
  assert len(kept) <= 1_001
  assert {(5_555, 99.0), (7_777, -99.0), curve[-1]} <= set(kept)
  assert kept == sorted(kept)
  assert watch_main.thin(curve[:10]) == curve[:10]


@pytest.fixture(name="address")
def _address(tmp_path):
  _write(tmp_path / "a", 3)
  settings = {"experiment": "x.Y", "overrides": ["--fdl.num_layers=2"]}
  (tmp_path / "a/settings.json").write_text(json.dumps(settings))
  server = watch_main.make_server(tmp_path, 0)
  thread = threading.Thread(target=server.serve_forever)
  thread.start()
  yield f"http://localhost:{server.server_port}"
  server.shutdown()
  thread.join()
  server.server_close()


def _get(address):
  with request.urlopen(address) as answer:
    return answer.read().decode()


def test_the_server_serves_the_page_runs_and_curves(address):
  page = _get(address)
  assert "/* uPlot" not in page
  assert "uPlot=function" in page
  assert "src=" not in page  # It loads nothing from elsewhere.
  (run,) = json.loads(_get(f"{address}/runs"))
  assert run == {
    "name": "a",
    "experiment": "x.Y",
    "knobs": ["num_layers=2"],
    "finished": False,
  }
  found = json.loads(_get(f"{address}/curves?run=a&run=../b&metric=loss"))
  assert found["metrics"] == ["loss"]
  assert list(found["curves"]["loss"]) == ["a"]
  assert found["curves"]["loss"]["a"]["train"][0] == [1, 2, 3]


@pytest.mark.parametrize(
  ("path", "headers", "status"),
  [("/other", {}, 404), ("/runs", {"Host": "evil.example:8008"}, 403)],
)
def test_other_paths_and_hosts_are_rejected(address, path, headers, status):
  with pytest.raises(error.HTTPError) as caught:
    request.urlopen(request.Request(address + path, headers=headers))
  assert caught.value.code == status
  caught.value.close()


def test_details_have_goodput_spikes_and_samples(tmp_path):
  _write(tmp_path / "a", 1)
  empty = {"goodput": "", "spikes": [], "samples": ""}
  assert watch_main.read_details(tmp_path / "a") == empty
  ledger = goodput.Ledger(epath.Path(tmp_path / "a" / "goodput.jsonl"))
  ledger.start(0)
  ledger.finish(complete=True)
  spike = {"step": 3, "metric": "loss", "value": math.nan, "documents": [5]}
  lines = [json.dumps({**spike, "step": step}) for step in range(12)]
  (tmp_path / "a/spikes.jsonl").write_text("\n".join([*lines, "{damaged"]))
  (tmp_path / "a/samples.txt").write_text("<b>x")
  found = watch_main.read_details(tmp_path / "a")
  assert found["goodput"].startswith("goodput ")
  assert [each["step"] for each in found["spikes"]] == [*range(3, 12)]
  assert found["samples"] == "<b>x"
  # A browser reads no NaN.
  read = json.loads(watch_main.to_json(found), parse_constant=pytest.fail)
  assert read["spikes"][0]["value"] == "nan"


def test_a_page_that_leaves_prints_nothing(address, capfd):
  host, port = address.removeprefix("http://").split(":")
  for _ in range(3):
    with socket.create_connection((host, int(port))) as client:
      client.sendall(f"GET / HTTP/1.0\r\nHost: {host}:{port}\r\n\r\n".encode())
      # Closed with a reset while the answer is written.
      client.setsockopt(
        socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
      )
  with request.urlopen(f"{address}/runs") as response:
    assert response.status == 200
  assert capfd.readouterr().err == ""


def test_a_missing_folder_is_one_line(tmp_path, capsys):
  with pytest.raises(user_error.UserError, match="is not a folder of runs"):
    watch_main.make_server(tmp_path / "none", 0)
  assert watch_main.main([str(tmp_path / "none")]) == 2
  assert capsys.readouterr().err.count("\n") == 1


def test_many_long_runs_are_read_in_seconds(tmp_path):
  # 20 runs of 10,000 points; the limit is loose, as other tests run beside.
  _write(tmp_path / "r0", 10_000)
  data = (tmp_path / "r0/metrics.jsonl").read_bytes()
  for number in range(1, 20):
    folder = tmp_path / f"r{number}"
    folder.mkdir()
    (folder / "metrics.jsonl").write_bytes(data)
  start = time.monotonic()
  found = watch_main.collect(watch_main.find_runs(tmp_path), ["loss"])
  assert time.monotonic() - start < 5
  assert len(found["curves"]["loss"]) == 20

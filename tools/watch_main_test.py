import json
import socket
import struct
import threading
import time
from urllib import error, request

from etils import epath
import pytest

from paxon.inputs.store_servers import memory_store
from paxon.runner import user_error
from paxon.runner.monitoring import metrics_file
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


def test_runs_in_a_store_are_found_and_read():
  with memory_store.serve("s3"):
    folder = epath.Path("s3://bucket/runs")
    text = '{"step": 1, "split": "train", "loss": 2.0}\n'
    for name in ("a", "study/b", "study/b/eval"):
      (folder / name / "metrics.jsonl").write_text(text)
    runs = watch_main.find_runs(folder)
    assert set(runs) == {"a", "study/b"}
    assert list(watch_main.find_runs(folder / "a")) == ["a"]
    (folder / "a" / "metrics.jsonl").write_text(text + text.replace("1", "2"))
    curves = watch_main.collect(runs, ["loss"])["curves"]["loss"]
    assert curves["a"]["train"] == [[1, 2], [2.0, 2.0]]
    assert curves["study/b"]["train"] == [[1], [2.0]]


def test_a_new_line_is_read(tmp_path):
  _write(tmp_path / "a", 3)
  runs = watch_main.find_runs(tmp_path)
  first = watch_main.read(runs["a"], max_lines=9)
  assert watch_main.read(runs["a"], max_lines=9) is first
  path = tmp_path / "a/metrics.jsonl"
  line = '{"step": 4, "split": "train", "loss": "NaN"}\n'
  path.write_text(path.read_text() + line)
  curve = watch_main.collect(runs, ["loss"])["curves"]["loss"]["a"]["train"]
  assert curve == [[1, 2, 3, 4], [1.0, 0.5, 0.333333, None]]


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
  assert "uPlot=function" in page
  assert "src=" not in page  # It loads nothing from elsewhere.
  (run,) = json.loads(_get(f"{address}/runs"))
  assert run == {
    "name": "a",
    "experiment": "x.Y",
    "knobs": ["num_layers=2"],
    "finished": False,
    "problem": "",
  }
  found = json.loads(_get(f"{address}/curves?run=a&run=../b&metric=loss"))
  assert found["metrics"] == ["loss"]
  assert list(found["curves"]["loss"]) == ["a"]
  assert found["curves"]["loss"]["a"]["train"][0] == [1, 2, 3]


@pytest.mark.parametrize(
  ("path", "headers", "status"),
  [
    ("/other", {}, 404),
    ("/other", {"Host": "[::1]"}, 404),
    ("/runs", {"Host": "evil.example:8008"}, 403),
    ("/runs", {"Host": "localhost.evil.example"}, 403),
    ("/runs", {"Host": ""}, 403),
  ],
)
def test_other_paths_and_hosts_are_rejected(address, path, headers, status):
  with pytest.raises(error.HTTPError) as caught:
    request.urlopen(request.Request(address + path, headers=headers))
  assert caught.value.code == status
  caught.value.close()


def test_sections_are_sent_until_the_page_has_them(tmp_path, address):
  # The same text in two runs.
  _write(tmp_path / "b", 3)
  runs = "run=a&run=b&run=../c"
  found = json.loads(_get(f"{address}/sections?{runs}"))
  assert list(found) == ["a", "b"]
  ((name, digest, html),) = found["a"]
  assert (name, found["b"][0][2]) == ("metrics", html)
  assert "Final metrics" in html
  known = f"known={digest}"
  again = json.loads(_get(f"{address}/sections?{runs}&{known}"))
  assert again["a"] == [["metrics", digest, None]]
  assert again["b"] == found["b"]
  (tmp_path / "a/samples.txt").write_text("<b>x")
  again = json.loads(_get(f"{address}/sections?{runs}&{known}"))
  assert again["a"][0] == ["metrics", digest, None]
  assert "&lt;b&gt;x" in again["a"][1][2]


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
  # 20 runs of 10,000 points; seconds of CPU, as other tests run at the same
  # time.
  _write(tmp_path / "r0", 10_000)
  data = (tmp_path / "r0/metrics.jsonl").read_bytes()
  for number in range(1, 20):
    folder = tmp_path / f"r{number}"
    folder.mkdir()
    (folder / "metrics.jsonl").write_bytes(data)
  start = time.process_time()
  found = watch_main.collect(watch_main.find_runs(tmp_path), ["loss"])
  assert time.process_time() - start < 5
  assert len(found["curves"]["loss"]) == 20

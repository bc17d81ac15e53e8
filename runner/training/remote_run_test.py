"""Tests of runs in object stores, with servers that run on this machine."""

import dataclasses
import json
import os
import signal
import struct
import subprocess
import sys
import time

from etils import epath
import fiddle as fdl
import numpy as np
import pytest

from paxon.inputs import byte_tokenizer, packed_input
from paxon.inputs.sources import json_lines
from paxon.inputs.store_servers import servers
from paxon.runner import run_dir as run_dirs
from paxon.runner import user_error
from paxon.runner.checkpoints import stored_checkpoint
from paxon.runner.evaluation import evaluate
from paxon.runner.generation import decode
from paxon.runner.monitoring import launch, metrics_file
from paxon.runner.settings import training
from paxon.runner.training import testing, train

KNOBS = {
  "num_train_steps": 3,
  "checkpoint_every_steps": 2,
  "eval_every_steps": 2,
  "max_new_tokens": 2,
}


@pytest.fixture(
  name="store",
  scope="module",
  params=[
    "gs",
    pytest.param("s3", marks=pytest.mark.nightly),
    pytest.param("az", marks=pytest.mark.nightly),
  ],
)
def _store(request, tmp_path_factory):
  with servers.run(request.param, tmp_path_factory.mktemp("store")) as store:
    yield store


def _events(content):
  """The number of records of an event file, by their lengths."""
  count, at = 0, 0
  while at < len(content):
    at += 16 + struct.unpack_from("<Q", content, at)[0]
    count += 1
  assert at == len(content)
  return count


def _arrays(folder, step=None):
  checkpoint = stored_checkpoint.find_checkpoint(folder, step=step)
  return stored_checkpoint.read_numpy(checkpoint, checkpoint.arrays)


def _assert_equal(one, other):
  assert one.keys() == other.keys()
  for name, array in one.items():
    np.testing.assert_array_equal(array, other[name], err_msg=name)


# aiohttp's, for what gcsfs uploads in one piece.
@pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")
def test_all_files_of_a_run_are_in_the_store(store, tmp_path, monkeypatch):
  # Whoever takes the address for a relative path writes here.
  monkeypatch.chdir(tmp_path)
  folder = store.path("runs", "files")
  start = launch.Launch(profile=range(2, 3))
  train.run(*testing.make(**KNOBS), folder, launch=start)
  # It goes on from what it has written there.
  more = KNOBS | {"num_train_steps": 5}
  train.run(*testing.make(**more), folder)
  job, _ = testing.make(**more)
  assert evaluate.run(job, folder) == 0
  assert decode.run(job, folder, "x") == 0

  names = store.find(folder)
  for name in (
    *(run_dirs.CONFIG_TEXT, run_dirs.SETTINGS),
    *(run_dirs.METRICS, run_dirs.REPORT, run_dirs.FINISHED, run_dirs.SAMPLES),
    *(run_dirs.GOODPUT, run_dirs.SAMPLES_BY_STEP),
    f"{run_dirs.EVAL}/{run_dirs.METRICS}",
  ):
    assert name in names
  for folder_name in (run_dirs.EVENTS, run_dirs.DECODE, run_dirs.PROFILE):
    assert any(name.startswith(f"{folder_name}/") for name in names)
  # A run in another folder that starts with the same letters is another one.
  assert not store.path("runs", "file").exists()

  records = metrics_file.read(folder / run_dirs.METRICS)
  assert [r.step for r in records if r.split == "train"] == [1, 2, 3, 4, 5]
  assert {r.step for r in records if r.split == "validation"} >= {2, 4, 5}
  train_events = [
    (folder / name).read_bytes()
    for name in sorted(names)
    if name.startswith(f"{run_dirs.EVENTS}/train/")
  ]
  # One file a process: a version, a start where it resumes, two records of
  # hyperparameters, the texts of the configuration and samples, and the steps.
  assert [_events(content) for content in train_events] == [8, 8]
  for name in names:
    if name.endswith(".json"):
      json.loads((folder / name).read_text())
    elif name.endswith(".jsonl"):
      lines = (folder / name).read_text().splitlines()
      assert all(json.loads(line) for line in lines)
  assert not list(tmp_path.iterdir())


def test_checkpoints_equal_those_of_a_disk(store, tmp_path):
  folder = store.path("runs", "equal")
  for place in (folder, tmp_path / "local"):
    train.run(*testing.make(**KNOBS), epath.Path(place))
  _assert_equal(_arrays(folder), _arrays(epath.Path(tmp_path / "local")))


def _start(store, folder, **knobs):
  command = [sys.executable, "-m", "paxon.runner.training.testing"]
  return subprocess.Popen(
    [*command, os.fspath(folder), *(f"{k}={v!r}" for k, v in knobs.items())],
    env={**os.environ, **store.environ},
  )


@pytest.mark.nightly
@pytest.mark.parametrize(
  "wait_for",
  [
    # While a first checkpoint is written, and after one.
    "2/_CHECKPOINT_METADATA",
    "2/commit_success.txt",
  ],
)
def test_a_killed_run_resumes_bitwise(store, tmp_path, wait_for):
  knobs = KNOBS | {"num_train_steps": 8, "delay": 0.2}
  folder = store.path("runs", f"killed {len(wait_for)}")
  process = _start(store, folder, **knobs)
  while not (folder / run_dirs.CHECKPOINTS / wait_for).exists():
    assert process.poll() is None
    time.sleep(0.1)
  process.send_signal(signal.SIGKILL)
  assert process.wait() == -signal.SIGKILL
  process = _start(store, folder, **knobs)
  assert process.wait() == 0
  local = epath.Path(tmp_path / "undisturbed")
  train.run(*testing.make(**knobs), local)
  _assert_equal(_arrays(folder), _arrays(local))
  found, wanted = (
    [
      (r.step, r.values["loss"])
      for r in metrics_file.read(each / run_dirs.METRICS)
      if r.split == "train"
    ]
    for each in (folder, local)
  )
  assert found == wanted


@pytest.mark.nightly
def test_retention_deletes_old_checkpoints(store):
  folder = store.path("runs", "retention")
  job, config = testing.make(**KNOBS | {"num_train_steps": 8})
  job = dataclasses.replace(job, retention=training.Retention(newest=1))
  train.run(job, config, folder)
  _, steps = stored_checkpoint.find_steps(folder)
  assert steps == [8]
  names = store.find(folder / run_dirs.CHECKPOINTS)
  assert {name.partition("/")[0] for name in names} == {"8"}


@pytest.mark.nightly
def test_an_incomplete_checkpoint_is_not_read(store):
  folder = store.path("runs", "incomplete")
  train.run(*testing.make(**KNOBS), folder)
  (folder / run_dirs.CHECKPOINTS / "3" / "commit_success.txt").unlink()
  assert stored_checkpoint.find_checkpoint(folder).step == 2
  with pytest.raises(user_error.UserError, match="3"):
    stored_checkpoint.find_checkpoint(folder, step=3)


@pytest.mark.nightly
def test_a_damaged_checkpoint_is_named(store):
  folder = store.path("runs", "damaged")
  train.run(*testing.make(**KNOBS), folder)
  state = folder / run_dirs.CHECKPOINTS / "3" / "state"
  name = next(n for n in sorted(store.find(state)) if "/d/" in n)
  content = bytearray((state / name).read_bytes())
  content[len(content) // 2] ^= 1
  (state / name).write_bytes(bytes(content))
  train.run(*testing.make(**KNOBS | {"num_train_steps": 4}), folder)
  records = metrics_file.read(folder / run_dirs.METRICS)
  assert [r.step for r in records if r.split == "train"][-1] == 4


@pytest.mark.parametrize("url", ["{0}-missing/run", "{0}-missing"])
def test_a_missing_bucket_is_named(store, url):
  path = epath.Path(url.format(store.url))
  with pytest.raises(user_error.UserError, match="missing") as raised:
    run_dirs.create(path)
  assert "\n" not in str(raised.value)


def _job_on(files, shuffle_window):
  """The tiny experiment on JSON lines."""
  _, config = testing.make(**KNOBS, scan=False)
  config.train_input = fdl.Config(
    packed_input.pack_documents,
    source=fdl.Config(json_lines.JsonLines, files=files),
    tokenizer=fdl.Config(byte_tokenizer.ByteTokenizer),
    global_batch_size=config.train_input.global_batch_size,
    length=16,
    shuffle_seed=1,
    shuffle_window=shuffle_window,
  )
  return fdl.build(config), config


@pytest.mark.nightly
@pytest.mark.parametrize("shuffle_window", [None, 7])
def test_data_in_the_store_is_that_of_a_disk(
  store, tmp_path, monkeypatch, shuffle_window
):
  monkeypatch.setenv("PAXON_DATA_CACHE", str(tmp_path / "cache"))
  data = tmp_path / "data"
  data.mkdir()
  for shard in range(3):
    texts = testing.documents(20, seed=shard)
    content = "".join(f"{json.dumps({'text': text})}\n" for text in texts)
    for place in (epath.Path(data), store.path("data")):
      (place / f"{shard}.jsonl").write_text(content)
  runs = []
  for files, folder in (
    (f"{data}/*.jsonl", epath.Path(tmp_path / "run")),
    (f"{store.url}/data/*.jsonl", store.path("runs", f"data{shuffle_window}")),
  ):
    # Stopped after two steps and resumed, so that positions are read.
    for steps in (2, 4):
      job, config = _job_on(files, shuffle_window)
      config.num_train_steps = steps
      train.run(dataclasses.replace(job, num_train_steps=steps), config, folder)
    runs.append(_arrays(folder))
  _assert_equal(*runs)


@pytest.mark.nightly
def test_a_store_that_fails_for_good_is_one_line(tmp_path):
  with servers.run("gs", tmp_path) as store:
    assert store.gcs is not None
    folder = store.path("runs", "lost")
    arguments = [
      "--exp=paxon.runner.training.testing.TinyLm",
      f"--job_log_dir={folder}",
      "--fdl.num_train_steps=2000",
      "--fdl.delay=0.1",
    ]
    with (tmp_path / "output").open("wb") as output:
      process = subprocess.Popen(
        [sys.executable, "-m", "paxon.runner.main", *arguments],
        env={**os.environ, **store.environ},
        stdout=output,
        stderr=output,
      )
    while not (folder / run_dirs.METRICS).exists():
      assert process.poll() is None
      time.sleep(0.2)
    # As without permission: not worth another attempt.
    store.gcs.faults["runs/lost"] = lambda: 403
    assert process.wait(300) == 74
    last = (tmp_path / "output").read_text().splitlines()[-1]
    assert "gs://bucket/runs/lost" in last

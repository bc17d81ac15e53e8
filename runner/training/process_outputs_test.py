"""Tests that several processes write the outputs of one, byte by byte."""

import json
import os
import signal

from etils import epath
import pytest

from paxon.runner import run_dir
from paxon.runner.hosts import testing as forks_lib
from paxon.runner.training import process_programs, testing, train

_KNOBS = {
  "num_layers": 1,
  "num_train_steps": 2,
  "checkpoint_every_steps": 2,
  "eval_every_steps": None,
  "max_new_tokens": 4,
  "mesh": "data=2,tensor=2",
}
_PROMPTS = ("def ", "x", "return x = 1 + y", "()" * 12, "y  x = ", "é", "a")


@pytest.fixture(scope="module", name="forks")
def _forks(tmp_path_factory):
  folder = tmp_path_factory.mktemp("processes")
  with forks_lib.Forks(process_programs.__name__, folder) as made:
    yield made


@pytest.fixture(scope="module", name="folder")
def _folder(tmp_path_factory):
  folder = tmp_path_factory.mktemp("run")
  job, config = testing.make(**_KNOBS | {"mesh": "data=8"})
  train.run(job, config, epath.Path(folder))
  lines = [
    json.dumps({"prompt": prompt, "temperature": 1}) for prompt in _PROMPTS
  ]
  (folder / "prompts.jsonl").write_text("\n".join(lines))
  return folder


def _start(forks, folder, count, *, parts=0):
  address = f"localhost:{forks_lib.free_port()}"
  prompts, knobs = folder / "prompts.jsonl", json.dumps(_KNOBS)
  given = [os.fspath(folder), os.fspath(prompts), knobs]
  return [
    forks.start(
      "outputs",
      [*given, str(parts), address, str(count), str(index)],
      devices=4 // count,
    )
    for index in range(count)
  ]


def _take(folder):
  """Returns what was written, and moves it away."""
  found = {}
  for name in (run_dir.INFER, run_dir.DECODE):
    for path in sorted((folder / name).iterdir()):
      found[f"{name}/{path.name}"] = path.read_bytes()
      path.unlink()
  return found


@pytest.fixture(scope="module", name="by_one")
def _by_one(forks, folder):
  [process] = _start(forks, folder, 1)
  assert process.wait() == 0, process.output()
  found = _take(folder)
  assert set(found) == {
    f"{name}{end}"
    for name in ("decode/2-prompts.jsonl", "infer/2-validation.jsonl")
    for end in ("", ".json")
  }
  return found


def _check(forks, folder, count, expected):
  processes = _start(forks, folder, count)
  for process in processes:
    assert process.wait() == 0, process.output()
  assert _take(folder) == expected
  first, *others = [process.stdout.read_text() for process in processes]
  assert "examples" in first
  assert "samples" in first
  assert not any(others)


def test_two_processes_write_as_one(forks, folder, by_one):
  _check(forks, folder, 2, by_one)


@pytest.mark.nightly
@pytest.mark.parametrize("count", [2, 4])
def test_killed_processes_go_on(forks, folder, by_one, count):
  # In the four parts of the predictions, and in those of the samples.
  for parts in (1, 4):
    *others, last = _start(forks, folder, count, parts=parts)
    assert last.wait() == -signal.SIGKILL, last.output()
    for each in others:
      assert each.wait() in (75, -signal.SIGABRT), each.output()
    assert list(folder.glob("*/*.parts/*.jsonl"))
  _check(forks, folder, count, by_one)

"""Tests that log probabilities of several processes are those of one."""

import functools
import signal

import pytest

from paxon.runner.hosts import testing as forks_lib
from paxon.tasks.lm.params import distillation, imported_model, preferences

_KINDS = {
  "reference": preferences.HuggingFacePreferences,
  "teacher": distillation.HuggingFaceStudent,
}


@pytest.fixture(scope="module", name="folder")
def _folder(tmp_path_factory):
  folder = tmp_path_factory.mktemp("inputs")
  imported_model.write(folder / "model")
  imported_model.write(folder / "large", scale=0.9)
  imported_model.write_pairs(folder / "pairs.jsonl")
  lines = [f'{{"text": "{letter * 300}"}}\n' for letter in "abcdefgh"]
  (folder / "text.jsonl").write_text("".join(lines))
  return folder


@pytest.fixture(scope="module", name="forks")
def _forks(tmp_path_factory):
  folder = tmp_path_factory.mktemp("processes")
  with forks_lib.Forks(imported_model.__name__, folder) as made:
    yield made


def _start(forks, kind, folder, output, count, *, limit=0):
  """Starts processes on 4 devices; the last one dies before a batch."""
  knobs = {
    "weights": folder / "model",
    "length": 32,
    "global_batch_size": 2,
    "num_train_steps": 4,
    "mesh": "data=2,tensor=2",
  }
  if kind == "reference":
    knobs |= {"train_files": folder / "pairs.jsonl"}
    more = []
  else:
    knobs |= {
      "teacher": folder / "large",
      "train_files": folder / "text.jsonl",
      "prompts": None,
      "max_new_tokens": None,
    }
    more = ["--top=8"]
  name = _KINDS[kind].import_path()
  arguments = [str(output), f"--exp={name}", *more]
  arguments += [f"--fdl.{name}={value}" for name, value in knobs.items()]
  address = f"localhost:{forks_lib.free_port()}"
  started = []
  for index in range(count):
    flags = [
      f"--coordinator_address={address}",
      f"--num_processes={count}",
      f"--process_id={index}",
    ]
    dies = limit if index == count - 1 else 0
    given = [kind, str(dies), *arguments, *(flags if count > 1 else ())]
    started.append(forks.start("log_probs", given, devices=4 // count))
  return started


def _read(output):
  """Returns the bytes of a file or of the files of a folder."""
  if output.is_file():
    return output.read_bytes()
  return {path.name: path.read_bytes() for path in output.iterdir()}


def _finish(forks, kind, folder, output, count):
  processes = _start(forks, kind, folder, output, count)
  for process in processes:
    assert process.wait() == 0, process.output()
  first, *others = [process.stdout.read_text() for process in processes]
  assert not any(others)
  return first


@pytest.fixture(scope="module", name="by_one")
def _by_one(forks, folder):
  @functools.cache
  def compute(kind):
    output = folder / f"{kind}_one"
    assert "wrote the" in _finish(forks, kind, folder, output, 1)
    return _read(output)

  return compute


@pytest.mark.parametrize(
  "kind", ["reference", pytest.param("teacher", marks=pytest.mark.nightly)]
)
def test_two_processes_write_as_one(forks, folder, by_one, kind):
  output = folder / f"{kind}_two"
  _finish(forks, kind, folder, output, 2)
  assert _read(output) == by_one(kind)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize("count", [1, 2, 4])
def test_killed_processes_resume(forks, folder, by_one, kind, count):
  output = folder / f"{kind}_killed_{count}"
  *others, last = _start(forks, kind, folder, output, count, limit=3)
  assert last.wait() == -signal.SIGKILL, last.output()
  for each in others:
    assert each.wait() in (75, -signal.SIGABRT), each.output()
  assert not output.exists()
  unit = "pairs" if kind == "reference" else "batches"
  first = _finish(forks, kind, folder, output, count)
  assert "resuming after" in first
  assert unit in first
  assert _read(output) == by_one(kind)
  left = {path.name for path in folder.glob(f"{output.name}*")}
  assert left == {output.name}

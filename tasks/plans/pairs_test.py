"""Tests for golden plan files, their page and the command line."""

import dataclasses
import os
import pathlib
import re

import pytest

from paxon.layers.attention import cudnn_attention
from paxon.runner import user_error
from paxon.runner.configuration import dump, find_experiment, resolving
from paxon.tasks.plans import main, measuring, pairs, table

_LOCKS = ("requirements", "requirements_plan_cuda", "requirements_tpu")


def _checkout() -> pathlib.Path:
  """Returns the folder that holds docs and third_party."""
  return pathlib.Path(pairs.__file__).parents[2]


def test_every_pair_has_its_file_and_every_file_its_pair():
  names = {pair.name for pair in pairs.PAIRS}
  assert len(names) == len(pairs.PAIRS)
  files = {path.stem for path in pairs.FOLDER.glob("*.json")}
  assert files == names, "run `tools/plans --update`, or remove files"


@pytest.mark.parametrize("pair", pairs.PAIRS, ids=lambda pair: pair.name)
def test_file_matches_its_pair(pair):
  made = pair.read()
  assert (made.experiment, made.target) == (pair.experiment, pair.target)
  assert made.overrides == tuple(map(str, pair.overrides))
  devices = pair.parsed_target.num_devices
  assert made.figures["devices"] == devices
  sizes = [1, *made.figures["mesh"].values()]
  product = 1
  for size in sizes:
    product *= size
  assert product == devices


@pytest.mark.nightly(keep=19)
@pytest.mark.parametrize("pair", pairs.PAIRS, ids=lambda pair: pair.name)
def test_a_pair_is_planned_at_the_size_of_its_experiment(pair):
  """Only knobs for the target are set: no smaller model is planned."""
  assert set(pair.assigned) <= {"mesh", "global_batch_size"}
  config = resolving.resolve(pair.experiment, pair.overrides).config
  if pair.attention == "plain":
    config.task.model.stack.blocks[0].attention.kernel = cudnn_attention.cudnn
  knobs = {"quantization": pair.quantization} if pair.quantization else {}
  experiment = find_experiment.find_experiment(pair.experiment)(**knobs)
  assert dump.to_text(config.task) == dump.to_text(experiment.job().task)


def test_files_were_made_with_the_locked_versions():
  """A new lock needs new files, on any Python."""
  text = "\n".join(
    (_checkout() / "third_party" / "python" / f"{name}_lock.txt").read_text()
    for name in _LOCKS
  )
  # The lock of the oldest Python, which made the files.
  lines = re.findall(r"^([a-z0-9-]+)==([^ ]+)(.*)$", text, re.MULTILINE)
  locked = {
    name: version for name, version, only in lines if ">= '3.12'" not in only
  }
  for pair in pairs.PAIRS:
    for name, version in pair.read().versions.items():
      assert locked[name] == version, f"tools/plans --update {pair.name}"


def test_page_matches_files():
  page = (_checkout() / "docs" / "plans.md").read_text()
  assert page == table.text(), "run `tools/plans --table`"


def test_find_takes_names_and_patterns():
  assert pairs.find([]) == list(pairs.PAIRS)
  names = [pair.name for pair in pairs.find(["LmCloudSpmd2B.h200*"])]
  sizes = ("1x1", "1x8", "4x8", "64x8", "1x8.fp8")
  assert names == [f"LmCloudSpmd2B.h200_{size}" for size in sizes]
  with pytest.raises(
    user_error.UserError, match=r"no pair 'LmCloudSpmd2B.h200"
  ):
    pairs.find(["LmCloudSpmd2B.h200_9x9"])


def _measured(monkeypatch, change):
  """Makes `measure` return the stored plan with other values."""

  def measure(pair):
    read = pair.read()
    return dataclasses.replace(read, figures=change(read.figures))

  monkeypatch.setattr(measuring, "measure", measure)


_NAME = "PythonStdlibLm.cpu_8"


def test_command_prints_differences(monkeypatch, capsys):
  _measured(monkeypatch, lambda figures: {**figures, "devices": 9})
  assert main.main([_NAME]) == 1
  out = capsys.readouterr().out
  assert f"{_NAME}: " in out
  assert "devices: 8 -> 9 (+12.5 %)" in out
  _measured(monkeypatch, lambda figures: figures)
  assert main.main([_NAME]) == 0


def test_update_writes_files(tmp_path, monkeypatch):
  (pair,) = pairs.find([_NAME])
  old = pair.path.read_text()
  monkeypatch.setattr(pairs, "FOLDER", tmp_path / "files")
  (tmp_path / "files").mkdir()
  pair.path.write_text(old)
  _measured(monkeypatch, lambda figures: {**figures, "devices": 9})
  assert main.main(["--update", _NAME]) == 0
  assert pair.read().figures["devices"] == 9
  _measured(monkeypatch, lambda figures: figures)
  assert main.main([_NAME]) == 0


def test_wrong_use_is_one_line(capsys, tmp_path, monkeypatch):
  assert main.main(["--update", "Nothing"]) == 2
  assert "There is no pair 'Nothing'" in capsys.readouterr().err
  monkeypatch.chdir(tmp_path)
  assert main.main(["--table"]) == 2
  assert "run this in the checkout" in capsys.readouterr().err
  monkeypatch.setattr(pairs, "FOLDER", tmp_path)
  with pytest.raises(user_error.UserError, match="tools/plans --update"):
    pairs.PAIRS[0].read()


def test_list_prints_every_pair(capsys):
  assert main.main(["--list"]) == 0
  lines = capsys.readouterr().out.splitlines()
  assert lines == [pair.name for pair in pairs.PAIRS]
  assert os.sep not in "".join(lines)

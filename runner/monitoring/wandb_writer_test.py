"""Tests for figures sent to Weights & Biases, with a stand-in for it."""

import sys
import types

from etils import epath
import pytest

from paxon.runner import user_error
from paxon.runner.monitoring import wandb_writer


class _Run:
  def __init__(self, options):
    self.options, self.logged, self.metrics = options, [], []
    self.summary, self.finished = {}, 0

  def define_metric(self, name, step_metric=None):
    self.metrics.append((name, step_metric))

  def log(self, values):
    self.logged.append(values)

  def finish(self):
    self.finished += 1


@pytest.fixture(name="runs")
def _runs(monkeypatch):
  """Puts a module `wandb` in place; returns the runs it began."""
  runs = []

  def init(**options):
    runs.append(_Run(options))
    return runs[-1]

  module = types.ModuleType("wandb")
  monkeypatch.setattr(module, "init", init, raising=False)
  monkeypatch.setitem(sys.modules, "wandb", module)
  return runs


def test_figures_are_sent_by_split(tmp_path, runs):
  writer = wandb_writer.WandbWriter(
    epath.Path(tmp_path), project="p", entity="team", config={"seed": 3}
  )
  writer.write(5, "train", {"loss": 2.0, "summaries/stack/rms": 1.5})
  writer.write(5, "validation", {"loss": 3.0})
  writer.write(0, "baseline/xz", {"bits_per_byte": 2.5})
  writer.flush()
  writer.close()
  [run] = runs
  assert run.logged == [
    {"step": 5, "train/loss": 2.0, "train/summaries/stack/rms": 1.5},
    {"step": 5, "validation/loss": 3.0},
  ]
  assert run.summary == {"baseline/xz/bits_per_byte": 2.5}
  assert run.metrics == [("step", None), ("*", "step")]
  assert run.finished == 1
  assert run.options["project"] == "p"
  assert run.options["entity"] == "team"
  assert run.options["config"] == {"seed": 3}
  assert run.options["name"] == tmp_path.name
  assert run.options["resume"] == "allow"


def test_a_run_that_goes_on_is_the_same_run(tmp_path, runs):
  for name in ("a", "a", "b"):
    folder = epath.Path(tmp_path) / name
    wandb_writer.WandbWriter(folder, project="p").close()
  ids = [run.options["id"] for run in runs]
  assert ids[0] == ids[1] != ids[2]


def test_without_the_package_it_is_one_line(tmp_path, monkeypatch):
  # What Python does for a package that is not there.
  monkeypatch.setitem(sys.modules, "wandb", None)
  message = r"wandb_project is set, but the package wandb cannot .*pip install"
  with pytest.raises(user_error.UserError, match=message):
    wandb_writer.check_installed()
  with pytest.raises(user_error.UserError, match=message):
    wandb_writer.WandbWriter(epath.Path(tmp_path), project="p")

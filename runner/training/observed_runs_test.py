"""Tests for what training runs tell about themselves."""

import dataclasses
import json
import sys
import time
import types

from etils import epath
from flax import linen as nn
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.inputs import packed_input
from paxon.layers import summaries
from paxon.layers.norms import rms_norm
from paxon.runner import user_error
from paxon.runner.checkpoints import checkpointer
from paxon.runner.monitoring import (
  goodput,
  launch,
  mlflow_stand_in,
  spikes,
)
from paxon.runner.session import restore
from paxon.runner.session import session as session_lib
from paxon.runner.settings import monitoring
from paxon.runner.training import testing, train

# All compare whole runs.
pytestmark = pytest.mark.nightly

STEPS, POISONED_STEP = 30, 26
POISON = 200
NOTHING = monitoring.MonitoringSettings(watchdog=None, spikes=None)
EVERYTHING = monitoring.MonitoringSettings(
  watchdog=monitoring.WatchdogSettings(min_seconds=600.0),
  spikes=monitoring.SpikeSettings(window=20, min_steps=10),
  norm_groups={},
  summary_level=1,
  wandb_project="tests",
  mlflow_experiment="tests",
)


class _TellingNorm(nn.Module):
  """A norm that tells the size of what it gets."""

  @nn.compact
  def __call__(self, x):
    size = jnp.sqrt(jnp.mean(jnp.square(x.astype(jnp.float32))))
    summaries.summarize(self, "rms", size)
    summaries.record_histogram(self, "values", x)
    return rms_norm.RmsNorm(name="norm")(x)


@dataclasses.dataclass(kw_only=True, eq=False)
class _PoisonedInput(packed_input.PackedInput):
  """Has one batch whose targets nobody can guess."""

  poisoned_at: dict

  def get_next(self):
    is_poisoned = self.get_state() == self.poisoned_at
    batch = super().get_next()
    if is_poisoned:
      batch["targets"] = np.full_like(batch["targets"], POISON)
    return batch


@dataclasses.dataclass(kw_only=True, eq=False)
class _BreakingInput(packed_input.PackedInput):
  """Fails, or hangs, at a batch, once."""

  after: int = 0
  hang: float = 0.0

  def get_next(self):
    self.after -= 1
    if self.after == 0 and not self.hang:
      raise OSError("the disk is gone")
    if self.after == 0:
      time.sleep(self.hang)
    return super().get_next()


def _input(cls, job, **fields):
  given = job.train_input
  names = ("examples", "tokenizer", "global_batch_size", "length")
  return cls(**{name: getattr(given, name) for name in names}, **fields)


def _make(cls, observability, *, knobs=None, **fields):
  job, config = testing.make(mesh="data=8", **(knobs or {}))
  model = job.task.model.copy(final_norm=_TellingNorm())
  job = dataclasses.replace(
    job,
    task=dataclasses.replace(job.task, model=model),
    train_input=_input(cls, job, **fields),
    observability=observability,
  )
  return job, config


def _poisoned(observability):
  job, _ = testing.make(mesh="data=8")
  source = _input(packed_input.PackedInput, job)
  for _ in range(POISONED_STEP - 1):
    source.get_next()
  knobs = {
    "num_train_steps": STEPS,
    "summary_every_steps": 5,
    "checkpoint_every_steps": None,
    "eval_every_steps": None,
  }
  return _make(
    _PoisonedInput,
    observability,
    knobs=knobs,
    poisoned_at=source.get_state(),
  )


@pytest.fixture(name="all_runs", scope="module")
def _all_runs(tmp_path_factory):
  """One run that watches everything and one that watches nothing."""
  sent = []
  run = types.SimpleNamespace(
    define_metric=lambda *args, **options: None,
    log=sent.append,
    finish=lambda: sent.append("finished"),
    summary={},
  )
  module = types.ModuleType("wandb")
  module.__dict__["init"] = lambda **options: run
  mlflow = mlflow_stand_in.Mlflow()
  folders = {}
  with pytest.MonkeyPatch.context() as patch:
    patch.setitem(sys.modules, "wandb", module)
    patch.setitem(sys.modules, "mlflow", mlflow)
    for name, observability in (("on", EVERYTHING), ("off", NOTHING)):
      folder = epath.Path(tmp_path_factory.mktemp(name))
      job, config = _poisoned(observability)
      window = launch.parse_window("3:5") if name == "on" else None
      started = launch.Launch(profile=window, begin=time.time() - 3.0)
      train.run(job, config, folder, launch=started)
      folders[name] = folder
  return folders, sent, mlflow


@pytest.fixture(name="runs", scope="module")
def _runs(all_runs):
  return all_runs[:2]


def _digest(folder):
  session = session_lib.open_session(_poisoned(NOTHING)[0])
  path = folder / "checkpoints"
  with checkpointer.Checkpointer(path, read_only=True) as checkpoints:
    state = restore.restore_for_evaluation(session, checkpoints, path)
  return testing.digest(state)


def _records(folder, split="train"):
  lines = (folder / "metrics.jsonl").read_text().splitlines()
  records = [json.loads(line) for line in lines]
  return {r["step"]: r for r in records if r["split"] == split}


def test_watching_changes_no_bit(runs):
  folders, _ = runs
  assert _digest(folders["on"]) == _digest(folders["off"])
  on, off = (_records(folders[name]) for name in ("on", "off"))
  for step, values in off.items():
    for name in ("loss", "grad_norm", "summaries/final_norm/rms"):
      assert on[step][name] == values[name]


def test_summaries_have_speed_memory_and_time(runs):
  folders, _ = runs
  for folder in folders.values():
    records = _records(folder)
    assert list(records) == [5, 10, 15, 20, 25, 30]
    for values in records.values():
      assert values["step_seconds"] > 0
      assert values["model_tflops_per_device"] > 0
      assert "mfu" not in values  # Nobody knows the peak of these devices.
      assert values["step_memory_bytes"] > 0
      assert values["host_memory_peak_bytes"] > 1e8
      assert 0 < values["goodput"] < 1
      assert values["summaries/final_norm/rms"] > 0


def test_norms_of_groups_add_up_to_the_norm(runs):
  folders, _ = runs
  for values in _records(folders["on"]).values():
    for name in ("grad_norm", "param_norm"):
      parts = {k: v for k, v in values.items() if k.startswith(f"{name}/")}
      groups = {k.partition("/")[2] for k in parts}
      assert groups == {"embedding", "stack", "final_norm"}
      total = np.sqrt(sum(v**2 for v in parts.values()))
      assert total == pytest.approx(values[name], rel=1e-5)
  prefixes = ("grad_norm/", "param_norm/")
  assert not [k for k in _records(folders["off"])[5] if k.startswith(prefixes)]


def test_model_flops_are_those_of_the_formula(runs):
  folders, _ = runs
  job, _ = _poisoned(NOTHING)
  D, N, H, F, V, L = 16, 2, 8, 32, 264, 2
  B, T = job.train_input.global_batch_size, job.train_input.length
  weights = L * (4 * D * N * H + 3 * D * F) + D * V
  attention = 12 * L * N * H * B * T * (T + 1) / 2
  flops = 6 * weights * B * T + attention
  for values in _records(folders["on"]).values():
    rate = values["model_tflops_per_device"] * 1e12 * 8
    assert rate * values["step_seconds"] == pytest.approx(flops, rel=1e-6)


def test_profile_of_the_window_is_written(runs):
  folders, _ = runs
  assert list(folders["on"].glob("profile/plugins/profile/*/*.xplane.pb"))
  assert not (folders["off"] / "profile").exists()


def test_the_poisoned_batch_is_found_again(runs):
  folders, _ = runs
  assert not (folders["off"] / "spikes.jsonl").exists()
  found = spikes.read(folders["on"] / "spikes.jsonl")
  losses = [spike for spike in found if spike.metric == "loss"]
  assert [spike.step for spike in losses] == [POISONED_STEP]
  job, _ = _poisoned(NOTHING)
  batch = spikes.read_batch(losses[0], job.train_input)
  assert (batch["targets"] == POISON).all()
  assert job.train_input.get_state() == losses[0].position_after
  assert losses[0].documents


def test_weights_and_biases_gets_the_metrics(runs):
  folders, sent = runs
  *figures, last = sent
  assert last == "finished"
  steps = [each["step"] for each in figures if "train/loss" in each]
  assert steps == [5, 10, 15, 20, 25, 30]
  assert figures[0]["train/loss"] == _records(folders["on"])[5]["loss"]
  assert any("validation/loss" in each for each in figures)


def test_mlflow_gets_the_metrics_and_the_configuration(all_runs):
  folders, _, mlflow = all_runs
  [run] = mlflow.runs.values()
  assert run.status == "FINISHED"
  losses = [m for m in run.metrics if m.key == "train/loss"]
  assert [m.step for m in losses] == [5, 10, 15, 20, 25, 30]
  assert losses[0].value == _records(folders["on"])[5]["loss"]
  assert run.params["num_train_steps"] == "30"


def test_tensorboard_gets_the_histograms_of_layers(runs):
  folders, _ = runs
  tag = b"summaries/final_norm/values"
  for name, count in (("on", 6), ("off", 0)):
    (path,) = (folders[name] / "events" / "train").iterdir()
    assert path.read_bytes().count(tag) == count


def test_time_is_accounted_for(runs):
  folders, _ = runs
  for folder in folders.values():
    [attempt] = goodput.read(folder / "goodput.jsonl")
    account = goodput.account([attempt])
    assert sum(account.seconds.values()) == pytest.approx(
      attempt.end - attempt.begin, rel=1e-6
    )
    assert account.seconds[goodput.Cause.STARTUP] > 3.0
    for cause in ("PRODUCTIVE", "COMPILE", "CHECKPOINT", "EVALUATION"):
      assert account.seconds[goodput.Cause[cause]] > 0
    assert account.seconds[goodput.Cause.SAMPLING] > 0
    assert account.seconds[goodput.Cause.REPEATED] == 0


def test_a_crash_costs_the_steps_made_again(tmp_path, capsys):
  folder = epath.Path(tmp_path)
  # No evaluation, during which batches could be read ahead.
  knobs = {"eval_every_steps": None}
  job, config = _make(_BreakingInput, NOTHING, knobs=knobs, after=9)
  with pytest.raises(user_error.UserError, match="the disk is gone"):
    train.run(job, config, folder)
  watching = monitoring.MonitoringSettings(
    watchdog=monitoring.WatchdogSettings(min_seconds=0.5, factor=1e-6)
  )
  job, config = _make(_BreakingInput, watching, knobs=knobs, after=6, hang=4.0)
  train.run(job, config, folder)
  first, second = goodput.read(folder / "goodput.jsonl")
  assert first.last_step > second.first_step == 4
  assert not first.finished
  assert second.finished
  account = goodput.account([first, second])
  assert account.seconds[goodput.Cause.REPEATED] > 0
  assert account.seconds[goodput.Cause.RESTORE] > 0
  # The input hung, for longer than what had been read ahead lasted.
  assert account.seconds[goodput.Cause.DATA] > 1.5
  captured = capsys.readouterr()
  assert "goodput " in captured.out
  assert "in 2 attempts; lost: " in captured.out
  assert "No step has finished for" in captured.err
  assert list(folder.glob("stacks-*.txt"))


@pytest.mark.parametrize(
  ("settings", "package"),
  [
    (monitoring.MonitoringSettings(wandb_project="tests"), "wandb"),
    (monitoring.MonitoringSettings(mlflow_experiment="tests"), "mlflow"),
  ],
)
def test_packages_must_be_there_before_anything_starts(
  tmp_path, monkeypatch, settings, package
):
  monkeypatch.setitem(sys.modules, package, None)
  job, config = _poisoned(settings)
  with pytest.raises(user_error.UserError, match=f"pip install {package}"):
    train.run(job, config, epath.Path(tmp_path))
  assert list(tmp_path.iterdir()) == []

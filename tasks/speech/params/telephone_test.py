"""Tests for the telephone experiment, on made-up words of chords."""

import functools

from etils import epath
import fiddle as fdl
import jax
import numpy as np
import pytest

from paxon.runner.checkpoints import checkpointer
from paxon.runner.evaluation import evaluate
from paxon.runner.session import compiled_steps, restore, session
from paxon.runner.training import testing, train
from paxon.tasks.speech.params import telephone

MESH = "data=2,fsdp=2,tensor=2"


def _toy(**knobs):
  toy = telephone.TelephoneConformer().shrink()
  sizes = {"max_seconds": 3.0, "max_labels": 24}
  tests = {f"max_test_{k[4:]}": v for k, v in sizes.items()}
  return toy.replace(**sizes, **tests, **knobs)


@functools.cache
def _run(mesh):
  devices = jax.devices()[:1] if mesh == "data=1" else None
  job = fdl.build(_toy(mesh=mesh).job())
  opened = session.open_session(job, devices=devices)
  return opened, compiled_steps.compile_train_step(opened)


def test_trains_and_evaluates(tmp_path, capsys):
  run = epath.Path(tmp_path / "run")
  config = _toy(
    num_train_steps=30, peak_learning_rate=1e-2, mesh="data=8"
  ).job()
  train.run(fdl.build(config), config, run)
  report = (run / "report.html").read_text()
  assert report.count('src="data:audio/wav;base64,') == 8
  assert report.count('<img src="data:image/png;base64,') == 8
  assert " — predicted: " in report
  assert "clips per second" in report
  printed = capsys.readouterr().out
  assert "batch: 8 clips; 30 steps = 240 clips" in printed
  losses = [
    float(line.split("loss ")[1].split()[0])
    for line in printed.splitlines()
    if line.startswith("step ") and "/30  loss " in line
  ]
  # Of letters that are equally likely: log(29) a frame.
  assert losses[-1] < 0.5 * losses[0]
  assert evaluate.run(fdl.build(config), run) == 0
  found = capsys.readouterr().out
  assert "word_error_rate" in found
  assert "character_error_rate" in found


def test_sharded_is_unsharded():
  losses = []
  initial = None
  for layout in ("data=1", MESH):
    opened, step = _run(layout)
    if initial is None:
      initial = jax.device_get(opened.initial_state())
    state = jax.device_put(initial, opened.state_shardings)
    source = opened.job.train_input
    source.reset()
    for _ in range(3):
      state, metrics = step(state, opened.place(source.get_next()))
      total, weight = metrics["loss"]
      losses.append(float(total) / float(weight))
  np.testing.assert_allclose(losses[3:], losses[:3], rtol=1e-5)


def test_resumed_is_uninterrupted(tmp_path):
  opened, step = _run(MESH)
  source = opened.job.train_input
  source.reset()

  def trained(state):
    for _ in range(2):
      state, _ = step(state, opened.place(source.get_next()))
    return jax.tree.map(np.array, state), state

  with checkpointer.Checkpointer(epath.Path(tmp_path)) as checkpoints:
    _, state = trained(restore.restore_or_start(opened, checkpoints))
    data = source.get_state()
    checkpoints.save(2, state, specs=opened.state_specs, data=data)
    checkpoints.wait()
    expected, _ = trained(state)
    state = restore.restore_or_start(opened, checkpoints)
  found, _ = trained(state)
  assert testing.digest(found) == testing.digest(expected)


def test_error_without_data_names_the_command():
  config = telephone.TelephoneConformer(data="/none").datasets()["train"]
  with pytest.raises(
    ValueError,
    match=r"Cannot read /none/train.tsv: No such file.*telephone_data.py",
  ):
    fdl.build(config).check_readable()

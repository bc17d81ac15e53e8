"""Tests for the experiments on Fashion-MNIST, with generated files."""

import functools
import gzip
import struct

from etils import epath
import fiddle as fdl
import jax
import numpy as np
import pytest

from paxon.runner.checkpoints import checkpointer
from paxon.runner.evaluation import evaluate
from paxon.runner.session import compiled_steps, restore, session
from paxon.runner.training import testing, train
from paxon.tasks.vision.params import fashion_mnist

NAMES = ("FashionMnistResNet", "FashionMnistViT")
MESH = "data=2,fsdp=2,tensor=2"


def _toy(name, **knobs):
  return getattr(fashion_mnist, name)().shrink().replace(**knobs)


@functools.cache
def _run(name, mesh):
  devices = jax.devices()[:1] if mesh == "data=1" else None
  job = fdl.build(_toy(name, mesh=mesh).job())
  opened = session.open_session(job, devices=devices)
  return opened, compiled_steps.compile_train_step(opened)


def _write(folder, split, count):
  rng = np.random.default_rng(0)
  labels = (np.arange(count) % 10).astype(np.uint8)
  images = rng.integers(0, 30, (count, 28, 28), np.uint8)
  images[np.arange(count), labels] += 200
  for kind, array in (("images-idx3", images), ("labels-idx1", labels)):
    head = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
    path = folder / f"{split}-{kind}-ubyte.gz"
    path.write_bytes(gzip.compress(head + array.tobytes()))


@pytest.mark.nightly
def test_trains_and_evaluates_on_files(tmp_path, capsys):
  data, run = tmp_path / "data", epath.Path(tmp_path / "run")
  data.mkdir()
  _write(data, "train", 400)
  _write(data, "t10k", 37)
  toy = _toy(
    "FashionMnistViT",
    images="files",
    data=str(data),
    num_train_steps=50,
    global_batch_size=16,
    peak_learning_rate=1e-2,
  )
  config = toy.job()
  train.run(fdl.build(config), config, run)
  report = (run / "report.html").read_text()
  assert report.count('<img src="data:image/png;base64,') == 24
  assert "<figcaption>label 3, predicted " in report
  assert "images per second" in report
  printed = capsys.readouterr().out
  assert "batch: 16 images; 50 steps = 800 images" in printed
  assert " images/s" in printed
  assert "token" not in printed + report.partition("Configuration")[0]
  assert evaluate.run(fdl.build(config), run) == 0
  found = capsys.readouterr().out
  # Each class has one bright row; guessing gives 0.1.
  assert float(found.partition("accuracy ")[2].split()[0].strip(",")) > 0.3


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("name", NAMES)
def test_sharded_is_unsharded(name):
  losses = []
  initial = None
  for layout in ("data=1", MESH):
    opened, step = _run(name, layout)
    if initial is None:
      initial = jax.device_get(opened.initial_state())
    state = jax.device_put(initial, opened.state_shardings)
    source = opened.job.train_input
    source.reset()
    for _ in range(3):
      state, metrics = step(state, opened.place(source.get_next()))
      total, weight = metrics["loss"]
      losses.append(float(total) / float(weight))
  np.testing.assert_allclose(losses[3:], losses[:3], rtol=2e-6)


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("name", NAMES)
def test_resumed_is_uninterrupted(name, tmp_path):
  opened, step = _run(name, MESH)
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


def test_error_without_data_names_the_package():
  config = fashion_mnist.FashionMnistResNet(data="/none").datasets()["train"]
  with pytest.raises(
    ValueError,
    match=r"Cannot read /none/train-images-idx3-ubyte.gz: No such file.*"
    r"dataset-fashion-mnist",
  ):
    fdl.build(config).check_readable()

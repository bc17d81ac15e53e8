"""Tests that sizes which the mesh does not divide change no number.

Each case trains five steps on eight devices; losses, gradient norms and the
trained state are those of one device.
"""

import functools
from typing import Any

from etils import epath
import fiddle as fdl
import jax
import numpy as np
import pytest

from paxon.layers.moe import (
  balance,
  dispatch,
  experts,
  mixture,
  pax_routers,
  routers,
)
from paxon.learners import metrics as metrics_lib
from paxon.runner.monitoring import metrics_file
from paxon.runner.session import batch_padding, compiled_steps
from paxon.runner.session import session as session_lib
from paxon.runner.training import testing, train

STEPS = 5
# Arrays of batches of text.
_TEXT = ("inputs", "segment_ids", "weights")

# Mesh, and sizes: heads, key/value heads, width of a head, of the residual
# stream and of the feed-forward layers, and the vocabulary.
CASES: dict[str, tuple[str, dict[str, int]]] = {
  "vocabulary": ("tensor=8", {"vocab": 263, "heads": 8, "kv_heads": 8}),
  "vocabulary and fsdp": ("fsdp=4,tensor=2", {"vocab": 263}),
  "heads": ("data=2,tensor=4", {"heads": 6, "kv_heads": 6}),
  "fewer heads than devices": ("tensor=8", {"heads": 6, "kv_heads": 3}),
  "grouped heads": ("data=2,tensor=4", {"heads": 8, "kv_heads": 2}),
  "one key head": ("data=2,tensor=4", {"heads": 6, "kv_heads": 1}),
  "feed-forward": ("data=2,tensor=4", {"mlp": 30, "heads": 4, "kv_heads": 4}),
  "residual stream": ("fsdp=8", {"embed": 20}),
  "residual stream and heads": (
    "fsdp=4,tensor=2",
    {"embed": 18, "heads": 3, "kv_heads": 3},
  ),
  "nothing divides": ("data=2,fsdp=4", {"embed": 18, "mlp": 22, "vocab": 263}),
  "all": (
    "data=2,fsdp=2,tensor=2",
    {
      "vocab": 263,
      "heads": 5,
      "kv_heads": 5,
      "head_dim": 6,
      "embed": 17,
      "mlp": 33,
    },
  ),
  "three of tensor": (
    "data=2,tensor=3",
    {"vocab": 263, "heads": 4, "kv_heads": 2, "mlp": 32},
  ),
}


def _config(sizes, **knobs) -> Any:
  config: Any = testing.TinyLm(**knobs).job()
  model, sizes = config.task.model, dict(sizes)
  (block,) = model.stack.blocks
  embed = sizes.get("embed", 16)
  model.embedding.vocab_size = sizes.get("vocab", 264)
  model.embedding.embed_dim = embed
  block.attention.num_heads = sizes.get("heads", 2)
  block.attention.num_kv_heads = sizes.get("kv_heads", 2)
  block.attention.head_dim = sizes.get("head_dim", 8)
  block.feed_forward.mlp_dim = sizes.get("mlp", 2 * embed)
  return config


@functools.cache
def _session(sizes, mesh, **knobs):
  config = _config(
    sizes,
    mesh=mesh,
    num_train_steps=20,
    **{"global_batch_size": 16, **knobs},
  )
  count = int(np.prod([int(p.split("=")[1]) for p in mesh.split(",")]))
  return session_lib.open_session(
    fdl.build(config), devices=jax.devices()[:count]
  )


@functools.cache
def _initial(sizes):
  return jax.device_get(_session(sizes, "data=1").initial_state())


@functools.cache
def _train(sizes, mesh):
  session = _session(sizes, mesh)
  step = compiled_steps.compile_train_step(session)
  source = session.job.train_input
  source.reset()
  state = jax.device_put(_initial(sizes), session.state_shardings)
  found = []
  for _ in range(STEPS):
    state, metrics = step(state, session.place(source.get_next()))
    totals = metrics_lib.Totals()
    totals.add(metrics)
    means = totals.means()
    found.append([means["loss"], means["grad_norm"]])
  return np.asarray(found), jax.device_get(state.variables)


@pytest.mark.nightly(keep=2)
@pytest.mark.parametrize("name", CASES)
def test_training_equals_one_device(name):
  mesh, sizes = CASES[name]
  sizes = tuple(sizes.items())
  expected, actual = (_train(sizes, each) for each in ("data=1", mesh))
  np.testing.assert_allclose(actual[0], expected[0], rtol=1e-5)
  jax.tree.map(
    functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-5),
    actual[1],
    expected[1],
  )


@pytest.mark.parametrize(("mesh", "size"), [("data=4", 6), ("fsdp=8", 5)])
def test_batch_that_does_not_divide_trains_as_on_one_device(mesh, size):
  found = []
  for each in ("data=1", mesh):
    session = _session((), each, global_batch_size=size)
    step = compiled_steps.compile_train_step(session)
    session.job.train_input.reset()
    state = jax.device_put(_initial(()), session.state_shardings)
    losses = []
    for _ in range(3):
      batch = session.place(session.job.train_input.get_next())
      state, metrics = step(state, batch)
      totals = metrics_lib.Totals()
      totals.add(metrics)
      means = totals.means()
      losses.append([means["loss"], means["grad_norm"]])
    found.append(losses)
  np.testing.assert_allclose(*found, rtol=1e-5)
  assert session.batch["inputs"].shape[0] > size


@pytest.mark.parametrize(
  ("fields", "names", "expected"),
  [
    ({"dispatch": dispatch.Capacity(factor=1.0)}, _TEXT, "counts the tokens"),
    ({"losses": (balance.gshard(0.1),)}, _TEXT, "counts the tokens"),
    (
      {"router": fdl.Config(pax_routers.ExpertChoice, factor=1.0)},
      _TEXT,
      "counts the tokens",
    ),
    ({"losses": (balance.switch(),)}, ["images"], "without segment_ids"),
    ({"losses": (balance.switch(),)}, _TEXT, None),
    ({}, ["images"], None),
  ],
)
def test_experts_that_count_empty_examples(fields, names, expected):
  config = _config(())
  (block,) = config.task.model.stack.blocks
  block.feed_forward = fdl.Config(
    mixture.MixtureOfExperts,
    num_experts=4,
    experts=fdl.Config(experts.GatedExperts, mlp_dim=16),
    **{"router": fdl.Config(routers.TopK, k=2), **fields},
  )
  found = batch_padding.find_training_obstacle(fdl.build(config), {}, names)
  assert (expected is None) == (found is None)
  assert expected is None or expected in found


_RUN = (("heads", 6), ("kv_heads", 3), ("mlp", 30), ("embed", 20))


def _run(folder, mesh, steps):
  """Trains and returns the metrics of all splits and the samples."""
  config = _config(_RUN, mesh=mesh, num_train_steps=steps, global_batch_size=6)
  # A schedule must not depend on the number of steps.
  config.task.learner.optimizer.schedule.total_steps = 4
  config.eval_every_steps = config.checkpoint_every_steps = 2
  train.run(fdl.build(config), config, epath.Path(folder))
  return {
    (r.step, r.split): r.values
    for r in metrics_file.read(folder / "metrics.jsonl")
  }


@pytest.mark.nightly
def test_a_run_goes_on_where_sizes_do_not_divide(tmp_path):
  devices = jax.devices()
  assert len(devices) == 8
  expected = _run(tmp_path / "whole", "data=2,fsdp=2,tensor=2", 4)
  _run(tmp_path / "moved", "fsdp=8", 2)
  actual = _run(tmp_path / "moved", "data=2,tensor=4", 4)
  assert actual.keys() == expected.keys()
  assert (4, "validation") in expected
  for key, values in expected.items():
    for name in ("loss", "grad_norm", "bits_per_byte"):
      if name in values:
        np.testing.assert_allclose(
          actual[key][name], values[name], rtol=1e-5, err_msg=f"{key} {name}"
        )

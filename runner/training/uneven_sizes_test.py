"""Tests that sizes which the mesh does not divide change no number.

Each case trains three steps on several devices; losses, gradient norms and the
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
from paxon.runner import user_error
from paxon.runner.monitoring import metrics_file
from paxon.runner.session import batch_padding, compiled_steps
from paxon.runner.session import session as session_lib
from paxon.runner.training import testing, train
from paxon.sharding import rules

STEPS = 3
# Of no data axis below. Empty examples fill the batch up.
_BATCH = 6
# Arrays of batches of text.
_TEXT = ("inputs", "segment_ids", "weights")

# Sizes: heads, key/value heads, width of a head, of the residual stream and of
# the feed-forward layers, and the vocabulary. Cases share those of one device.
SIZES: dict[str, dict[str, int]] = {
  # Most variables are stored whole.
  "odd": {
    "vocab": 263,
    "heads": 5,
    "kv_heads": 5,
    "head_dim": 6,
    "embed": 17,
    "mlp": 33,
  },
  # Variables are stored split along another dimension.
  "grouped": {"vocab": 263, "heads": 6, "kv_heads": 3, "mlp": 30},
  "one key head": {"vocab": 262, "heads": 6, "kv_heads": 1, "mlp": 44},
}
CASES: list[tuple[str, str]] = [
  ("grouped", "data=2,fsdp=2,tensor=2"),
  ("grouped", "tensor=8"),
  ("grouped", "data=2,tensor=4"),
  ("grouped", "fsdp=4,tensor=2"),
  ("odd", "data=2,fsdp=2,tensor=2"),
  ("odd", "tensor=8"),
  ("odd", "fsdp=8"),
  ("odd", "data=2,fsdp=4"),
  ("odd", "data=2,tensor=3"),
  ("one key head", "data=2,tensor=4"),
  ("one key head", "fsdp=4,tensor=2"),
  ("one key head", "tensor=8"),
]


def _config(sizes, **knobs) -> Any:
  config: Any = testing.TinyLm(**knobs).job()
  model, sizes = config.task.model, SIZES.get(sizes, {})
  (block,) = model.stack.blocks
  embed = sizes.get("embed", 16)
  model.embedding.vocab_size = sizes.get("vocab", 264)
  model.embedding.embed_dim = embed
  block.attention.num_heads = sizes.get("heads", 2)
  block.attention.num_kv_heads = sizes.get("kv_heads", 2)
  block.attention.head_dim = sizes.get("head_dim", 8)
  block.feed_forward.mlp_dim = sizes.get("mlp", 2 * embed)
  return config


def _open(sizes, mesh, **knobs):
  config = _config(sizes, mesh=mesh, global_batch_size=_BATCH, **knobs)
  count = int(np.prod([int(p.split("=")[1]) for p in mesh.split(",")]))
  return session_lib.open_session(
    fdl.build(config), devices=jax.devices()[:count]
  )


@functools.cache
def _train(sizes, mesh):
  """Returns metrics of each step, the state, the program and the session."""
  session = _open(sizes, mesh)
  step = compiled_steps.compile_train_step(session)
  source = session.job.train_input
  source.reset()
  state = session.initial_state()
  found = []
  for _ in range(STEPS):
    state, metrics = step(state, session.place(source.get_next()))
    totals = metrics_lib.Totals()
    totals.add(metrics)
    means = totals.means()
    found.append([means["loss"], means["grad_norm"]])
  return np.asarray(found), jax.device_get(state.variables), step, session


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize(("sizes", "mesh"), CASES)
def test_training_equals_one_device(sizes, mesh):
  expected, actual = (_train(sizes, each) for each in ("data=1", mesh))
  np.testing.assert_allclose(actual[0], expected[0], rtol=1e-5)
  jax.tree.map(
    functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-5),
    actual[1],
    expected[1],
  )


def test_a_variable_and_its_gradient_move_once():
  _, _, step, session = _train(*CASES[0])
  given = {"rules": session.layout.rules, "mesh": session.layout.mesh.shape}
  moved = [
    spec.name.rpartition("/")[2]
    for spec in jax.tree.leaves(session.specs)
    if rules.fit_stored(spec.shape, spec.axes, **given)
    != rules.fit_computed(spec.shape, spec.axes, **given)
  ]
  assert sorted(moved) == ["key", "table", "value"]
  assert step.as_text().count(" all-to-all(") == 2 * len(moved)


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
  model = fdl.build(_mixture(fields).task.model)
  found = batch_padding.find_expert_obstacle(model, {}, names)
  assert (expected is None) == (found is None)
  assert expected is None or expected in found


def _mixture(fields, **knobs):
  config = _config(None, **knobs)
  (block,) = config.task.model.stack.blocks
  block.feed_forward = fdl.Config(
    mixture.MixtureOfExperts,
    num_experts=4,
    experts=fdl.Config(experts.GatedExperts, mlp_dim=16),
    **{"router": fdl.Config(routers.TopK, k=2), **fields},
  )
  return config


def test_rejects_evaluation_batches_whose_padding_experts_count():
  config = _mixture({"dispatch": dispatch.Capacity(factor=1.0)}, mesh="fsdp=8")
  config.eval_inputs["validation"].global_batch_size = 6
  with pytest.raises(
    user_error.UserError,
    match=r"\(6\) of the split 'validation' must .* counts the tokens",
  ):
    session_lib.open_session(fdl.build(config))


def _run(folder, mesh, steps):
  """Trains and returns the metrics of all splits and the samples."""
  config = _config(
    "grouped", mesh=mesh, num_train_steps=steps, global_batch_size=_BATCH
  )
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

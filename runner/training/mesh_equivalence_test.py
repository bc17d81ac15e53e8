"""Tests that scan, unrolling and the mesh change nothing but the layout."""

import functools

import jax
import numpy as np
import pytest

from paxon.learners import metrics as metrics_lib
from paxon.runner.session import compiled_steps
from paxon.runner.session import session as session_lib
from paxon.runner.training import testing

STEPS = 20
REFERENCE = ("data=1", True)
LAYOUTS = {
  "unrolled": ("data=1", False),
  "data": ("data=8", True),
  "fsdp and tensor": ("fsdp=4,tensor=2", True),
  "all": ("data=2,fsdp=2,tensor=2", True),
  "all unrolled": ("data=2,fsdp=2,tensor=2", False),
}
# How the mesh of "all" splits kernels [layers, embed, mlp] and the rest.
EXPECTED = {
  "params/stack/layers/blocks_0/feed_forward/gate": (
    (None, "fsdp", "tensor"),
    (2, 16 // 2, 32 // 2),
  ),
  "params/stack/layers/blocks_0/feed_forward/down": (
    (None, "tensor", "fsdp"),
    (2, 32 // 2, 16 // 2),
  ),
  "params/embedding/table": (("tensor", "fsdp"), (264 // 2, 16 // 2)),
}


@functools.cache
def _session(mesh, scan):
  job, _ = testing.make(
    mesh=mesh, scan=scan, num_train_steps=STEPS, global_batch_size=16
  )
  devices = jax.devices()[:1] if mesh == "data=1" else None
  return session_lib.open_session(job, devices=devices)


@functools.cache
def _compiled(mesh, scan):
  return compiled_steps.compile_train_step(_session(mesh, scan))


@functools.cache
def _initial(mesh, scan):
  return jax.device_get(_session(mesh, scan).initial_state())


@functools.cache
def _losses(mesh, scan):
  session = _session(mesh, scan)
  source = session.job.train_input
  source.reset()
  state = jax.device_put(_initial(mesh, scan), session.state_shardings)
  losses = []
  for _ in range(STEPS):
    batch = session.place(source.get_next())
    state, metrics = _compiled(mesh, scan)(state, batch)
    totals = metrics_lib.Totals()
    totals.add(metrics)
    losses.append(totals.means()["loss"])
  return np.asarray(losses)


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_initial_values_are_the_same(layout):
  expected, actual = _initial(*REFERENCE), _initial(*layout)
  jax.tree.map(np.testing.assert_array_equal, actual, expected)


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_losses_agree(layout):
  expected, actual = _losses(*REFERENCE), _losses(*layout)
  # The first one is of equal parameters: only the order of sums may differ.
  np.testing.assert_allclose(actual[0], expected[0], rtol=2e-7)
  np.testing.assert_allclose(actual, expected, rtol=1e-6)
  assert expected[-1] < 0.9 * expected[0]


def test_another_seed_has_another_loss():
  # Otherwise the tests above would compare constants.
  job, _ = testing.make(seed=1, mesh="data=1", global_batch_size=16)
  session = session_lib.open_session(job, devices=jax.devices()[:1])
  other = jax.device_get(session.initial_state()).variables["params"]
  same = _initial(*REFERENCE).variables["params"]
  difference = other["embedding"]["table"] - same["embedding"]["table"]
  assert np.abs(difference).max() > 0.01


def _by_name(tree, session):
  names = [spec.name for spec in jax.tree.leaves(session.state_specs)]
  return dict(zip(names, jax.tree.leaves(tree), strict=True))


def test_the_compiled_step_splits_parameters_and_moments():
  session, compiled = _session(*LAYOUTS["all"]), _compiled(*LAYOUTS["all"])
  (state_in, batch_in), _ = compiled.input_shardings
  state_out, _ = compiled.output_shardings
  for shardings in (_by_name(s, session) for s in (state_in, state_out)):
    for name, (axes, local) in EXPECTED.items():
      spec = {s.name: s for s in jax.tree.leaves(session.specs)}[name]
      wanted = jax.sharding.NamedSharding(
        session.layout.mesh, jax.sharding.PartitionSpec(*axes)
      )
      moments = [f"opt_state/0/{moment}/{name}" for moment in ("mu", "nu")]
      for each in (name, *moments):
        assert shardings[each].is_equivalent_to(wanted, len(spec.shape)), each
        assert shardings[each].shard_shape(spec.shape) == local, each
  for sharding in batch_in.values():
    assert sharding.shard_shape((16, 16)) == (4, 16)


@pytest.mark.parametrize(
  ("layout", "present", "absent"),
  [
    (REFERENCE, (), ("all-reduce", "all-gather", "reduce-scatter")),
    (LAYOUTS["data"], ("all-reduce",), ("all-gather",)),
    (LAYOUTS["all"], ("all-reduce", "all-gather"), ()),
  ],
  ids=["one device", "data", "all"],
)
def test_collectives_of_the_compiled_step(layout, present, absent):
  text = _compiled(*layout).as_text()
  assert all(f" {name}" in text for name in present)
  assert not any(f" {name}" in text for name in absent)


@pytest.mark.parametrize("layout", [REFERENCE, LAYOUTS["all"]])
def test_the_whole_state_is_donated(layout):
  session, compiled = _session(*layout), _compiled(*layout)
  text = compiled.as_text()
  aliases = text.partition("input_output_alias={")[2].partition("\n")[0]
  count = len(jax.tree.leaves(session.state_specs))
  for parameter in range(count):
    assert f"({parameter}, {{}}, may-alias)" in aliases or (
      f"({parameter}, {{}}, must-alias)" in aliases
    ), parameter

"""Tests of replayed steps with injected bit flips."""

from etils import epath
import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.learners import train_state
from paxon.runner.session import session as session_lib
from paxon.runner.settings import monitoring
from paxon.runner.training import replay, testing, train

KNOBS = {"num_train_steps": 4, "eval_every_steps": None, "max_new_tokens": 0}


def _flip(array, device):
  """Returns the array with one bit of one device's shard flipped."""
  shards = []
  for shard in array.addressable_shards:
    data = np.array(shard.data)
    if shard.device == device:
      data.view(np.uint8).reshape(-1)[-1] ^= 1
    shards.append(jax.device_put(data, shard.device))
  return jax.make_array_from_single_device_arrays(
    array.shape, array.sharding, shards
  )


def _train(folder, *, every, mesh="fsdp=8"):
  config = testing.TinyLm(mesh=mesh, **KNOBS).job()
  config.observability.replay_every_steps = every
  folder.mkdir()
  job = fdl.build(config)
  return train.run(job, config, epath.Path(folder))


def _names():
  job, _ = testing.make(**KNOBS)
  specs = session_lib.open_session(job).state_specs
  return [spec.name for spec in jax.tree.leaves(specs)]


def _inject(monkeypatch, *, call=None, devices=()):
  """Flips a bit after one of the training steps; returns their calls."""
  index = next(i for i, n in enumerate(_names()) if n.startswith("params/"))
  run, calls = jax.stages.Compiled.__call__, []

  def faulty(self, *args, **kwargs):
    result = run(self, *args, **kwargs)
    state = result[0] if isinstance(result, tuple) else None
    if not isinstance(state, train_state.TrainState):
      return result
    calls.append(self)
    if len(calls) != call:
      return result
    leaves, tree = jax.tree.flatten(state)
    for device in devices:
      leaves[index] = _flip(leaves[index], device)
    return tree.unflatten(leaves), result[1]

  monkeypatch.setattr(jax.stages.Compiled, "__call__", faulty)
  return calls


@pytest.mark.nightly
def test_a_replayed_run_is_the_same(tmp_path, monkeypatch):
  calls = _inject(monkeypatch)
  whole = _train(tmp_path / "whole", every=None)
  assert len(calls) == 4
  calls.clear()
  replayed = _train(tmp_path / "replayed", every=2)
  # Steps 2 and 4 are computed twice.
  assert len(calls) == 6
  assert testing.digest(replayed.state) == testing.digest(whole.state)
  losses = [
    [record.values["loss"] for record in each.history() if record.step]
    for each in (whole, replayed)
  ]
  assert losses[0] == losses[1]


def test_a_flipped_bit_ends_the_run_and_names_step_and_device(
  tmp_path, monkeypatch
):
  devices = jax.devices()
  # The second call of step 2.
  _inject(monkeypatch, call=3, devices=[devices[5]])
  with pytest.raises(replay.CorruptionError) as caught:
    _train(tmp_path / "run", every=2)
  assert caught.value.status == 69
  leaf = next(name for name in _names() if name.startswith("params/"))
  assert str(caught.value) == (
    "Step 2, computed twice from the same state and batch, has other bits the"
    f" second time on device {devices[5]} of process 0; the first value that"
    f" differs is {leaf}. Check the hardware, and resume from the newest"
    " checkpoint without it."
  )
  # No checkpoint has the wrong values.
  steps = (tmp_path / "run" / "checkpoints").iterdir()
  assert not [path for path in steps if path.name.isdigit()]


def test_a_fault_that_reached_all_devices_is_called_so(tmp_path, monkeypatch):
  _inject(monkeypatch, call=2, devices=jax.devices())
  with pytest.raises(
    replay.CorruptionError,
    match=r"Step 1, .* on all 8 devices \(.* and 4 more\), one of which spread",
  ):
    _train(tmp_path / "run", every=1, mesh="data=8")


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32, jnp.int32])
def test_equal_values_with_other_bits_differ(dtype):
  zeros = jnp.zeros(3, dtype)
  assert replay.find_differences([zeros], [zeros + 0]) == []
  other = -zeros if jnp.issubdtype(dtype, jnp.floating) else zeros + 1
  [(device, index)] = replay.find_differences([zeros, zeros], [zeros, other])
  assert (device, index) == (jax.devices()[0], 1)
  # A NaN is equal to itself here.
  if jnp.issubdtype(dtype, jnp.floating):
    nan = jnp.full(3, jnp.nan, dtype)
    assert replay.find_differences([nan], [jnp.copy(nan)]) == []


def test_every_steps_must_be_positive():
  with pytest.raises(ValueError, match="replay_every_steps must be positive"):
    monitoring.MonitoringSettings(replay_every_steps=0)

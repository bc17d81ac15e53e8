"""Tests of runs that train only some variables, or adapters."""

import functools

from etils import epath
import fiddle as fdl
import jax
import numpy as np
import pytest

from paxon.layers import feed_forward
from paxon.layers.moe import experts, mixture, routers
from paxon.quantization import lora, stored_kernels
from paxon.runner import knobs as knobs_lib
from paxon.runner import user_error
from paxon.runner.session import compiled_steps
from paxon.runner.session import session as session_lib
from paxon.runner.training import preflight, testing

PATTERN = ".*/feed_forward/.*"


def _open(*, num_devices=1, **knobs):
  given = {"num_layers": 2, "mesh": "data=1", **knobs}
  return session_lib.open_session(
    fdl.build(testing.TinyLm(**given).job()),
    devices=jax.devices()[:num_devices],
  )


def _names(tree):
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  return {
    "/".join(str(getattr(k, "key", k)) for k in p): leaf for p, leaf in leaves
  }


def test_only_matching_variables_change_and_have_slots():
  session = _open(trainable=(PATTERN,), learning_rate=1e-2)
  full = _open(learning_rate=1e-2)
  step = compiled_steps.compile_train_step(session)
  state = session.initial_state()
  old = _names(jax.device_get(state.variables))
  batch = session.place(session.job.train_input.get_next())
  new_state, metrics = step(state, batch)
  new = _names(jax.device_get(new_state.variables))
  changed = {name for name in old if np.any(old[name] != new[name])}
  expected = {name for name in old if "/feed_forward/" in name}
  assert changed == expected
  for name in _names(new_state.opt_state):
    if "/" in name and "params" in name:
      assert "feed_forward" in name
  # The first loss is that of the run that trains everything.
  whole = compiled_steps.compile_train_step(full)
  _, metrics_of_all = whole(full.initial_state(), batch)
  np.testing.assert_array_equal(metrics["loss"][0], metrics_of_all["loss"][0])
  # No gradients of the frozen kernels: fewer FLOPs in the compiled program.
  flops = [each.cost_analysis()["flops"] for each in (step, whole)]
  assert flops[0] < 0.9 * flops[1]
  assert session.num_parameters() < full.num_parameters()


def test_a_pattern_without_variables_is_an_error():
  with pytest.raises(user_error.UserError, match=r"Job.frozen: 'up' matches"):
    _open(frozen=("up",))


@functools.cache
def _trained(num_steps, **knobs):
  """Returns losses and the last state of a run on one batch."""
  session = _open(**knobs)
  step = compiled_steps.compile_train_step(session)
  state, losses = session.initial_state(), []
  batch = session.place(session.job.train_input.get_next())
  for _ in range(num_steps):
    state, metrics = step(state, batch)
    losses.append(np.asarray(metrics["loss"][0]))
  return losses, jax.device_get(state)


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_adapters_start_at_the_base_and_learn(kind):
  losses, state = _trained(4, lora_rank=2, lora_kind=kind, learning_rate=1e-2)
  (base,), _ = _trained(1, learning_rate=1e-2)
  np.testing.assert_array_equal(losses[0], base)
  assert losses[-1] < losses[0]
  slots = [n for n in _names(state.opt_state) if "params" in n]
  assert slots
  assert all("/lora_" in name for name in slots)


@pytest.mark.nightly
def test_adapters_do_not_depend_on_the_mesh():
  knobs = {"lora_rank": 2, "lora_kind": "dora", "learning_rate": 1e-2}
  expected, state = _trained(4, **knobs)
  sharded, other = _trained(4, mesh="fsdp=2,tensor=2", num_devices=4, **knobs)
  np.testing.assert_allclose(sharded, expected, rtol=1e-5)
  for name, value in _names(state.variables).items():
    np.testing.assert_allclose(
      _names(other.variables)[name], value, rtol=1e-3, atol=1e-4
    )


@pytest.mark.nightly
def test_adapters_are_the_same_scanned_and_unrolled():
  knobs = {"lora_rank": 2, "lora_kind": "dora", "learning_rate": 1e-2}
  expected, state = _trained(4, **knobs)
  unrolled, other = _trained(4, scan=False, **knobs)
  np.testing.assert_allclose(unrolled, expected, rtol=1e-5)
  values = _names(other.variables)
  for name, value in _names(state.variables).items():
    np.testing.assert_allclose(values[name], value, rtol=1e-3, atol=1e-4)


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("storage", ["nf4", "int8", "int4", "fp8"])
def test_stored_kernels(storage):
  knobs = {"lora_rank": 2, "lora_kind": "dora", "learning_rate": 1e-2}
  session = _open(frozen_storage=storage, dtype="bfloat16", **knobs)
  state = session.initial_state()
  specs = {spec.name: spec for spec in jax.tree.leaves(session.specs)}
  # Neither a float copy nor optimizer state of what is frozen.
  assert not any(name in specs for name in session.absent)
  frozen = [s for s in specs.values() if s.name.startswith("params/")]
  frozen = [s for s in frozen if "/lora_" not in s.name]
  assert frozen
  assert {str(spec.dtype) for spec in frozen} == {"bfloat16"}
  slots = [n for n in _names(state.opt_state) if "params" in n]
  assert slots
  assert all("/lora_" in name for name in slots)
  # Each layer is quantized alone, from the initial values of float kernels.
  float_state = _open(**knobs).initial_state()
  kernels = _names(float_state.variables)
  for name, spec in session.absent.items():
    origin = session.find_stored(name)[0].initializer
    for layer in range(2):
      made = stored_kernels.quantize(
        kernels[name][layer], origin.storage, inputs=origin.inputs
      )
      for each in session.find_stored(name):
        stored = _names(state.variables)[each.name][layer]
        np.testing.assert_allclose(
          stored.astype(np.float32),
          made[each.initializer.field].astype(np.float32),
          rtol=1e-6,
          err_msg=f"{each.name} of {spec.shape}",
        )
  step = compiled_steps.compile_train_step(session)
  batch = session.place(session.job.train_input.get_next())
  old, losses = jax.device_get(state.variables), []
  for _ in range(3):
    state, metrics = step(state, batch)
    losses.append(float(metrics["loss"][0]))
  assert losses[-1] < losses[0]
  new = _names(jax.device_get(state.variables))
  for name, value in _names(old).items():
    assert np.any(value != new[name]) == ("/lora_" in name), name


class _Mixture(testing.TinyLm):
  """Has a dropless mixture of experts with a shared one."""

  def adjust(self, config):
    """Replaces the feed-forward layers."""
    for block in config.task.model.stack.blocks:
      block.feed_forward = fdl.Config(
        mixture.MixtureOfExperts,
        num_experts=4,
        router=fdl.Config(routers.TopK, k=2),
        experts=fdl.Config(experts.GatedExperts, mlp_dim=16),
        shared=fdl.Config(feed_forward.GatedFeedForward, mlp_dim=16),
      )


def _open_mixture(**knobs):
  given = {"num_layers": 1, "mesh": "data=1", "learning_rate": 1e-2, **knobs}
  return session_lib.open_session(
    fdl.build(_Mixture(**given).job()), devices=jax.devices()[:1]
  )


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize(
  ("knobs", "adapted", "stored"),
  [
    ({}, {"attention", "shared"}, set()),
    ({"lora_matmuls": ("query", "value")}, {"attention"}, set()),
    ({"lora_experts": True}, {"attention", "shared", "experts"}, set()),
    (
      {"frozen_storage": "nf4", "dtype": "bfloat16"},
      {"attention", "shared"},
      {"attention", "shared", "experts"},
    ),
  ],
)
def test_adapters_of_mixtures(knobs, adapted, stored):
  session = _open_mixture(lora_rank=2, **knobs)
  names = {spec.name for spec in jax.tree.leaves(session.specs)}

  def layers(end):
    return {
      n.split("/einsum/")[0].split("/")[-1] for n in names if n.endswith(end)
    }

  assert layers("lora_a") == adapted
  assert layers("/block_values") == stored
  says = [
    line
    for line in preflight.summary(session, epath.Path("run"))
    if "--fdl.lora_experts=True" in line
  ]
  assert len(says) == ("lora_experts" not in knobs)
  if "frozen_storage" not in knobs:
    return
  state = session.initial_state()
  batch = session.place(session.job.train_input.get_next())
  step, losses = compiled_steps.compile_train_step(session), []
  for _ in range(3):
    state, metrics = step(state, batch)
    losses.append(float(metrics["loss"][0]))
  assert losses[-1] < losses[0]


def test_lora_experts_without_experts_is_an_error():
  with pytest.raises(user_error.UserError, match="'experts' matches nothing"):
    _open(lora_rank=2, lora_experts=True)


class _Misnamed(testing.TinyLm):
  """Has an adapter for a layer that does not exist."""

  def adapter_rules(self):
    """Returns a rule without a layer."""
    return (lora.LoraRule("model.decoder.up", lora.Lora(rank=2)),)


def test_an_adapter_of_no_layer_is_an_error():
  with pytest.raises(
    user_error.UserError,
    match=r"adapter_rules\(\): the rule for 'model.decoder.up' matches nothing",
  ):
    _Misnamed().job()


@pytest.mark.parametrize(
  ("knobs", "error"),
  [
    ({"lora_rank": 0}, "Lora.rank must be positive, got 0"),
    (
      {"lora_rank": 2, "lora_matmuls": ("qurey",)},
      r"'.*/einsum/qurey/lora_.*' matches no",
    ),
    ({"lora_kind": "dora"}, "lora_kind"),
    ({"frozen_storage": "nf4"}, "frozen_storage = .nf4. requires adapters"),
    ({"lora_rank": 2, "quantization": "int8"}, "RECIPE:convert merges"),
  ],
)
def test_invalid_adapters(knobs, error):
  with pytest.raises((user_error.UserError, knobs_lib.KnobError), match=error):
    _open(**knobs)

"""Tests for train states and for optimizer states."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from paxon.learners import (
  learner,
  loss_function,
  optimizer_state,
  schedules,
  skipping,
  testing,
  train_state,
  train_step,
)
from paxon.learners import learner as learner_lib
from paxon.learners.optimizers import adamw, sgd
from paxon.sharding import layout as layouts
from paxon.sharding import mesh as meshes
from paxon.sharding import variables

SPECS = {
  "params": {
    "up": testing.spec(
      "params/up",
      (3, 4, 8),
      axes=("layers", "embed", "mlp"),
      stacked=(("layers", 1),),
      dtype=jnp.dtype(jnp.bfloat16),
    ),
    "scale": testing.spec("params/scale", (4,), axes=("embed",)),
    "frozen": testing.spec("params/frozen", (5,), trainable=False),
  },
  "stats": {
    "mean": testing.spec(
      "stats/mean", (), update=variables.UpdateRule.REPLACE, trainable=False
    )
  },
}
LEARNER = learner_lib.Learner(
  optimizer=adamw.AdamW(
    schedule=schedules.WarmupCosine(peak=0.1, warmup_steps=1, total_steps=5),
    weight_decay=0.1,
  ),
  max_grad_norm=1.0,
)


def _state():
  values = jax.tree.map(lambda s: jnp.ones(s.shape, s.dtype), SPECS)
  return train_state.make_initial(values, learner=LEARNER, specs=SPECS)


def _moments(tree):
  """The two moments of Adam, wherever they are in the state."""
  adam = optax.tree_utils.tree_get
  return adam(tree, "mu"), adam(tree, "nu")


def test_specs_describe_the_state_exactly():
  specs = train_state.state_specs(SPECS, learner=LEARNER)
  state = _state()
  assert jax.tree.structure(specs) == jax.tree.structure(state)
  described = jax.tree.map(lambda s: (s.shape, s.dtype.name), specs)
  real = jax.tree.map(lambda x: (x.shape, x.dtype.name), state)
  assert described == real


def test_moments_are_float32_and_have_the_axes_of_their_parameter():
  specs = train_state.state_specs(SPECS, learner=LEARNER)
  for moment in _moments(specs.opt_state):
    up, scale = moment["params"]["up"], moment["params"]["scale"]
    assert (up.axes, up.stacked) == (
      ("layers", "embed", "mlp"),
      (("layers", 1),),
    )
    assert scale.axes == ("embed",)
    assert {up.dtype, scale.dtype} == {jnp.dtype(jnp.float32)}


def test_only_optimized_variables_have_moments():
  for moment in _moments(_state().opt_state):
    assert set(moment) == {"params"}
    assert set(moment["params"]) == {"up", "scale"}


def test_names_are_unique_paths():
  specs = jax.tree.leaves(train_state.state_specs(SPECS, learner=LEARNER))
  names = [spec.name for spec in specs]
  assert len(set(names)) == len(names)
  assert {"step", "params/up", "stats/mean"} <= set(names)
  assert any(
    name.startswith("opt_state/") and name.endswith("/mu/params/up")
    for name in names
  )


def test_moments_are_sharded_like_their_parameter():
  layout = layouts.Layout(
    meshes.make_mesh(meshes.MeshSpec.parse("fsdp=4,tensor=2"))
  )
  specs = train_state.state_specs(SPECS, learner=LEARNER)
  shardings = layout.shardings(specs)
  state = layout.jit(_state, out_shardings=shardings)()
  for moment in _moments(state.opt_state):
    up = moment["params"]["up"]
    assert up.sharding == state.variables["params"]["up"].sharding
    assert up.addressable_shards[0].data.shape == (3, 1, 4)


def test_states_of_another_shape_keep_stacked_axes():
  factored = optax.GradientTransformation(
    lambda params: jax.tree.map(lambda p: p.sum(-1), params),
    lambda updates, state, params=None: (updates, state),
  )
  params = {"params": {"up": SPECS["params"]["up"]}}
  specs = optimizer_state.specs(factored, params)
  up = specs["params"]["up"]
  assert up.shape == SPECS["params"]["up"].shape[:-1]
  depth = len(SPECS["params"]["up"].stacked)
  assert up.axes[:depth] == SPECS["params"]["up"].axes[:depth]
  assert set(up.axes[depth:]) <= {None}


def _data(seed, step, stream):
  key = train_state.make_key(seed, step=step, stream=stream)
  return tuple(np.asarray(jax.random.key_data(key)).tolist())


def test_differs_by_seed_step_and_stream():
  keys = {
    _data(seed, step, stream)
    for seed, step, stream in itertools.product(
      (0, 1), (0, 1, 1000), ("dropout", "noise")
    )
  }
  assert len(keys) == 12


def test_key_is_independent_of_process_and_version():
  # Another value here would change every run that is resumed.
  assert _data(7, 3, "dropout") == (2685232904, 4161269239)
  # From the definition, with the checksum as `crc32 <(printf dropout)` has it.
  key = jax.random.fold_in(jax.random.fold_in(jax.random.key(7), 3), 0x9289EFC9)
  assert _data(7, 3, "dropout") == tuple(jax.random.key_data(key).tolist())


def test_traced_step_gives_the_same_key():
  @jax.jit
  def traced(step):
    return jax.random.key_data(
      train_state.make_key(5, step=step, stream="dropout")
    )

  assert tuple(np.asarray(traced(11)).tolist()) == _data(5, 11, "dropout")


COUNT_SPECS = {"params": {"w": testing.spec("params/w", (2,))}}
BATCH = {
  "x": jax.device_put(
    np.float32([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]])
  ),
  "weights": jax.device_put(np.float32([2.0, 0.0, 3.0, 1.0])),
}


def _tokens_as_int(count):
  return (int(count[0]) << 30) + int(count[1])


def test_counts_exactly_far_beyond_float32():
  add = jax.jit(train_state.add_tokens)
  count, exact = train_state.zero_tokens(), 0
  for tokens in (2**30 - 64, 2**20 + 1, 2**30 - 64, 7, 2**30 - 64, 1, 16383):
    count, exact = add(count, jnp.float32(tokens)), exact + tokens
    assert _tokens_as_int(count) == exact
    np.testing.assert_allclose(
      train_state.tokens_as_float(count), exact, rtol=1e-6
    )
  assert exact > 2**31
  assert count.dtype == jnp.int32
  large = jax.device_put(np.int32([2**29, 2**30 - 1]))
  added = train_state.add_tokens(large, jnp.float32(3))
  assert _tokens_as_int(added) == _tokens_as_int(large) + 3


def _loss(variables, batch, rngs):
  del rngs
  weights = batch["weights"]
  loss = jnp.sum((batch["x"] @ variables["params"]["w"]) * weights)
  return loss_function.LossOutput((loss, jnp.sum(weights)), {}, {}, {})


def _run(how, batches):
  values = {"params": {"w": jnp.ones(2)}}
  state = train_state.make_initial(values, learner=how, specs=COUNT_SPECS)
  step = jax.jit(
    train_step.make_train_step(_loss, learner=how, specs=COUNT_SPECS, seed=0)
  )
  metrics = {}
  for batch in batches:
    state, metrics = step(state, batch)
  return state, metrics


def _learner(**fields):
  schedule = schedules.Constant(value=0.1)
  return learner.Learner(optimizer=sgd.Sgd(schedule=schedule), **fields)


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_steps_count_the_weights_of_their_losses(num_microbatches):
  how = _learner(count_tokens=True, num_microbatches=num_microbatches)
  state, metrics = _run(how, [BATCH] * 3)
  assert _tokens_as_int(state.tokens) == 18
  assert metrics["tokens_trained"] == (18, 1)
  specs = train_state.state_specs(COUNT_SPECS, learner=how)
  assert specs.tokens.shape == state.tokens.shape
  assert specs.tokens.dtype == state.tokens.dtype
  assert specs.tokens.name == "tokens"


def test_a_skipped_update_counts_no_tokens():
  how = _learner(count_tokens=True, skip=skipping.SkipUpdates())
  bad = {**BATCH, "x": BATCH["x"].at[0, 0].set(jnp.nan)}
  state, metrics = _run(how, [BATCH, bad, BATCH])
  assert int(state.skipped) == 1
  assert _tokens_as_int(state.tokens) == 12
  assert metrics["tokens_trained"] == (12, 1)


def test_tokens_are_not_counted_by_default():
  state, metrics = _run(_learner(), [BATCH])
  assert state.tokens is None
  assert "tokens_trained" not in metrics

"""Tests for train states and for optimizer states."""

import jax
import jax.numpy as jnp
import optax
import pytest

from paxon.learners import (
  adamw,
  optimizer_state,
  testing,
  train_state,
  warmup_cosine,
)
from paxon.learners import learner as learner_lib
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
    schedule=warmup_cosine.WarmupCosine(
      peak=0.1, warmup_steps=1, total_steps=5
    ),
    weight_decay=0.1,
  ),
  max_grad_norm=1.0,
)


def _state():
  values = jax.tree.map(lambda s: jnp.ones(s.shape, s.dtype), SPECS)
  return train_state.initial(values, learner=LEARNER, specs=SPECS)


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


def test_there_are_no_moments_for_what_is_not_optimized():
  for moment in _moments(_state().opt_state):
    assert set(moment) == {"params"}
    assert set(moment["params"]) == {"up", "scale"}


def test_names_are_unique_and_say_where_a_value_belongs():
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


def test_a_state_of_another_shape_than_its_parameter_is_refused():
  factored = optax.GradientTransformation(
    lambda params: jax.tree.map(lambda p: p.sum(-1), params),
    lambda updates, state, params=None: (updates, state),
  )
  params = {"params": {"up": SPECS["params"]["up"]}}
  with pytest.raises(
    ValueError, match=r"up has the shape \(3, 4\) and belongs to params/up of"
  ):
    optimizer_state.specs(factored, params)

"""Tests of what is held for the backward pass, and under which name."""

import jax
from jax import ad_checkpoint
import jax.numpy as jnp
import pytest

from paxon.runner.plan import saved
from paxon.sharding import axes

LAYERS, ROWS, WIDTH = 3, 8, 4
_FLOAT = 4
_STACK = _FLOAT * LAYERS * ROWS * WIDTH


def _step(policy, *, microbatches=1):
  def block(x, w):
    hidden = ad_checkpoint.checkpoint_name(x @ w, "hidden")
    return jnp.sin(hidden) @ w.T

  kept = block if policy is None else jax.checkpoint(block, policy=policy)

  def loss(w, x):
    return jnp.sum(jax.lax.scan(lambda x, w: (kept(x, w), None), x, w)[0])

  def step(w, x):
    if microbatches == 1:
      return w - jax.grad(loss)(w, x)
    parts = x.reshape(microbatches, -1, WIDTH)

    def add(total, part):
      return total + jax.grad(loss)(w, part), None

    return w - jax.lax.scan(add, jnp.zeros_like(w), parts)[0]

  return _trace(step, _array(LAYERS, WIDTH, WIDTH), _array(ROWS, WIDTH))


def _array(*shape):
  return jax.ShapeDtypeStruct(shape, jnp.float32)


def _trace(step, *arguments):
  return jax.jit(step).trace(*arguments).jaxpr


def _saved(jaxpr, **shards):
  return saved.measure_saved(jaxpr, shards=lambda axis: shards.get(axis, 1))


_POLICIES = jax.checkpoint_policies


@pytest.mark.parametrize(
  ("policy", "expected"),
  [
    (_POLICIES.nothing_saveable, {"layer inputs"}),
    (
      _POLICIES.save_only_these_names("hidden"),
      {"layer inputs", "hidden"},
    ),
    (
      _POLICIES.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["hidden"],
        offload_src="device",
        offload_dst="pinned_host",
      ),
      {"layer inputs"},
    ),
  ],
)
def test_names_and_sizes_are_those_of_the_policy(policy, expected):
  found = _saved(_step(policy))
  assert found == dict.fromkeys(expected, _STACK)


def test_without_a_policy_there_is_more():
  found = _saved(_step(None))
  assert found["layer inputs"] == _STACK
  # The sine and its cosine, beside what has a name.
  assert found["unnamed"] >= _STACK


def test_microbatches_save_a_part_each():
  policy = _POLICIES.save_only_these_names("hidden")
  found = _saved(_step(policy, microbatches=2))
  assert found == dict.fromkeys(("layer inputs", "hidden"), _STACK // 2)


def test_values_are_split_by_the_axes_of_their_name():
  policy = _POLICIES.save_only_these_names("hidden")
  found = _saved(_step(policy), **{axes.BATCH: 2, axes.ACTIVATION_EMBED: 4})
  assert found == {"hidden": _STACK // 2, "layer inputs": _STACK // 8}


def test_a_function_without_gradients_saves_nothing():
  assert _saved(_trace(jnp.sin, _array(4))) == {}

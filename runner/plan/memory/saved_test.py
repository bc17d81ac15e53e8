"""Tests of what is held for the backward pass, and under which name."""

import jax
from jax import ad_checkpoint
import jax.numpy as jnp
import pytest

from paxon.runner.plan.memory import saved, testing

LAYERS, ROWS, WIDTH = 3, 8, 4
_STACK = testing.FLOAT * LAYERS * ROWS * WIDTH


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

  return testing.graph(
    step, testing.array(LAYERS, WIDTH, WIDTH), testing.array(ROWS, WIDTH)
  )


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
  found = saved.saved(_step(policy), testing.mesh())
  assert found == dict.fromkeys(expected, _STACK)


def test_without_a_policy_there_is_more():
  found = saved.saved(_step(None), testing.mesh())
  assert found["layer inputs"] == _STACK
  # The sine and its cosine, beside what has a name.
  assert found["unnamed"] >= _STACK


def test_microbatches_save_a_part_each():
  policy = _POLICIES.save_only_these_names("hidden")
  found = saved.saved(_step(policy, microbatches=2), testing.mesh())
  assert found == dict.fromkeys(("layer inputs", "hidden"), _STACK // 2)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_gradients_are_what_the_update_reads(microbatches):
  graph = _step(_POLICIES.nothing_saveable, microbatches=microbatches)
  expected = testing.FLOAT * LAYERS * WIDTH * WIDTH
  assert saved.gradients(graph, testing.mesh()) == expected


def test_a_function_without_gradients_saves_nothing():
  graph = testing.graph(jnp.sin, testing.array(4))
  assert saved.saved(graph, testing.mesh()) == {}
  assert saved.gradients(graph, testing.mesh()) == 0

"""Tests of dropout of attention weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers import testing
from paxon.layers.attention import (
  grouped_query,
  kernels,
  mask,
  weight_dropout,
)
from paxon.layers.stacks import stack

RATE, LENGTH = 0.25, 32


def _kernel():
  return kernels.PlainKernel(einsum=weight_dropout.DropoutEinsum(RATE))


def _arguments(heads=2):
  query, key = (
    jax.random.normal(jax.random.key(i), (3, LENGTH, heads, 8)) for i in (0, 1)
  )
  # One-hot values show the weights.
  value = jnp.broadcast_to(
    jnp.eye(LENGTH)[None, :, None], (3, LENGTH, heads, LENGTH)
  )
  positions = jnp.tile(jnp.arange(LENGTH, dtype=jnp.int32), (3, 1))
  segments = jnp.ones_like(positions)
  rules = mask.MaskRules(causal=False)
  return (
    query,
    key,
    value,
    mask.AttentionMask(
      rules=rules,
      q_positions=positions,
      kv_positions=positions,
      q_segment_ids=segments,
      kv_segment_ids=segments,
    ),
  )


def test_weights_are_dropped_and_scaled():
  arguments = _arguments()
  weights = kernels.plain(*arguments)
  dropped = _kernel().apply({}, *arguments, rngs={"dropout": jax.random.key(2)})
  kept = np.asarray(dropped) != 0
  np.testing.assert_allclose(
    dropped, np.where(kept, weights / (1 - RATE), 0), rtol=1e-5, atol=1e-7
  )
  # 6,144 weights: a standard error of 0.6 %.
  assert abs(1 - kept.mean() - RATE) < 0.02
  # Another mask for each example and head.
  masks = np.moveaxis(kept, 2, 1).reshape(6, -1)
  assert len(np.unique(masks, axis=0)) == 6


def test_without_a_key_nothing_is_dropped():
  arguments = _arguments()
  np.testing.assert_allclose(
    _kernel().apply({}, *arguments),
    kernels.plain(*arguments),
    rtol=1e-6,
  )


def test_in_a_stack_each_layer_has_its_mask():
  class Residual(grouped_query.GroupedQueryAttention):
    def __call__(self, x, *args, **more):
      return x + super().__call__(x, *args, **more)

  def make(kernel):
    layer = Residual(2, num_kv_heads=1, head_dim=4, kernel=kernel)
    return stack.Stack((layer,), num_layers=2)

  x = jax.random.normal(jax.random.key(0), (2, 8, 6))
  positions = jnp.tile(jnp.arange(8, dtype=jnp.int32), (2, 1))
  arguments = testing.in_context(x, positions, jnp.ones_like(positions))
  module = make(_kernel())
  variables = module.init(jax.random.key(1), *arguments)
  plain = make(kernels.plain).apply(variables, *arguments)
  np.testing.assert_allclose(
    module.apply(variables, *arguments),
    plain,
    rtol=1e-5,
    atol=1e-6,
  )

  def loss(variables, seed):
    rngs = {"dropout": jax.random.key(seed)}
    return jnp.sum(module.apply(variables, *arguments, rngs=rngs))

  assert loss(variables, 2) == loss(variables, 2)
  assert loss(variables, 2) != loss(variables, 3)
  gradient = jax.jit(jax.grad(loss))(variables, 2)
  assert all(bool(jnp.any(g != 0)) for g in jax.tree.leaves(gradient))


def test_wrong_rates():
  with pytest.raises(ValueError, match=r"rate must be in \[0, 1\), got 1"):
    weight_dropout.DropoutEinsum(1.0)

"""Tests for configurations whose weights are stored in few bits."""

import fiddle as fdl
from jax import numpy as jnp
import pytest

from paxon.layers import feed_forward, precision, stack, unembedding
from paxon.layers.attention import grouped_query, kernels
from paxon.quantization import number_formats, recipes, rules, served_einsum
from paxon.runner import user_error
from paxon.runner.configuration import quantizing, serving_weights


def _config(*targets):
  config = fdl.Config(
    dict,
    attention=fdl.Config(
      grouped_query.GroupedQueryAttention, 4, num_kv_heads=2, head_dim=4
    ),
    mlp=fdl.Config(feed_forward.GatedFeedForward, mlp_dim=4),
    head=fdl.Config(unembedding.Unembedding, vocab_size=8),
  )
  recipe = recipes.named("fp8_current")
  quantizing.apply(config, [rules.Rule(target, recipe) for target in targets])
  return config


def test_weights_are_stored_where_products_were_quantized():
  targets = ("attention_projections", "attention_products", "head")
  config = _config(*targets)
  assert serving_weights.serve(config) == ["attention"]
  built = fdl.build(config)
  provider = built["attention"].einsum
  assert isinstance(provider, served_einsum.ServedEinsum)
  e4m3 = number_formats.FP8_E4M3
  assert provider.recipe.rhs.format == provider.recipe.lhs.format == e4m3
  assert provider.recipe.gradient is None
  # Products of activations, and the head's, are as they were without rules.
  assert built["attention"].kernel is kernels.plain
  assert built["head"].einsum is precision.wide_einsum
  assert built["mlp"].einsum is jnp.einsum


def test_rules_that_leave_no_weights_are_refused():
  config = _config("attention_products")
  with pytest.raises(user_error.UserError, match=r"no layer has weights that"):
    serving_weights.serve(config)


def test_layers_of_a_stack_are_stored_together():
  mlp = fdl.Config(feed_forward.GatedFeedForward, mlp_dim=4)
  config = fdl.Config(
    dict,
    stack=fdl.Config(stack.Stack, blocks=[mlp], num_layers=3),
    attention=fdl.Config(
      grouped_query.GroupedQueryAttention, 4, num_kv_heads=2, head_dim=4
    ),
  )
  recipe = recipes.named("int8")
  given = [rules.ExemptLayers(first=1), rules.Rule("*attention", recipe)]
  quantizing.apply(config, given)
  # Nothing of the stack is quantized.
  assert serving_weights.serve(config) == ["attention"]
  config.stack = fdl.Config(stack.Stack, blocks=[mlp], num_layers=3)
  quantizing.apply(
    config, [rules.ExemptLayers(first=1), rules.Rule("feed_forward", recipe)]
  )
  with pytest.raises(user_error.UserError, match=r"layers of stack are stored"):
    serving_weights.serve(config)

"""Tests for quantization of configurations by rules."""

import fiddle as fdl
from jax import numpy as jnp
import pytest

from paxon.layers import (
  block,
  edged_stack,
  embedding,
  feed_forward,
  linear,
  rms_norm,
  stack,
  unembedding,
)
from paxon.layers.attention import grouped_query, kernels
from paxon.pipeline import spmd_pipeline
from paxon.quantization import einsum, recipes, rules
from paxon.runner import toy_experiment, user_error
from paxon.runner.configuration import quantizing

FP8, CURRENT = recipes.named("fp8"), recipes.named("fp8_current")
# What a served or quantized layer of one's own would hold.
OTHER = einsum.QuantizedEinsum(CURRENT, parent=None)


def _block():
  return fdl.Config(
    block.TransformerBlock,
    attention_norm=fdl.Config(rms_norm.RmsNorm),
    attention=fdl.Config(
      grouped_query.GroupedQueryAttention,
      num_heads=2,
      num_kv_heads=1,
      head_dim=4,
    ),
    feed_forward_norm=fdl.Config(rms_norm.RmsNorm),
    feed_forward=fdl.Config(feed_forward.GatedFeedForward, mlp_dim=8),
  )


def _config(**fields):
  return fdl.Config(
    toy_experiment.Model,
    layers=(
      fdl.Config(embedding.Embedding, vocab_size=8, embed_dim=4),
      fdl.Config(stack.Stack, blocks=[_block(), _block()], num_layers=4),
      fdl.Config(linear.Linear, output_dim=4),
    ),
    head=fdl.Config(unembedding.Unembedding, vocab_size=8),
    **fields,
  )


def _recipes(config):
  """The recipe of each layer by a short name; None where it is plain."""
  embed, layers, mapped = config.layers
  nodes = {"embedding": embed, "linear": mapped, "head": config.head}
  for i, one in enumerate(layers.blocks):
    nodes |= {f"a{i}": one.attention, f"f{i}": one.feed_forward}
  found = {}
  for name, node in nodes.items():
    provider = node.einsum
    is_provider = isinstance(provider, fdl.Config)
    found[name] = provider.recipe if is_provider else None
  return found


def test_the_first_rule_that_matches_has_a_layer():
  config = _config()
  quantizing.apply(
    config,
    (
      rules.Rule("*.blocks[1].attention", None),
      rules.Rule("*.blocks[1].*", CURRENT),
      rules.Rule(("attention_projections", "feed_forward"), FP8),
      rules.Rule("layers[2]", CURRENT),
    ),
  )
  assert _recipes(config) == {
    "embedding": None,
    "linear": CURRENT,
    "head": None,
    "a0": FP8,
    "f0": FP8,
    "a1": None,
    "f1": CURRENT,
  }
  blocks = config.layers[1].blocks
  # Each has its own, so that one can be changed from the command line.
  assert blocks[0].attention.einsum is not blocks[0].feed_forward.einsum
  model = fdl.build(config)
  assert model.layers[1].blocks[0].attention.einsum.recipe == FP8


def test_a_head_is_its_own_kernel_or_a_table():
  config = _config()
  quantizing.apply(config, (rules.Rule("head", CURRENT),))
  found = _recipes(config)
  assert [n for n, r in found.items() if r] == ["embedding", "head"]


def test_products_of_attention():
  config = _config()
  quantizing.apply(config, (rules.Rule("attention_products", FP8),))
  attention = config.layers[1].blocks[1].attention
  assert fdl.get_callable(attention.kernel) is kernels.PlainKernel
  assert attention.kernel.einsum.recipe == FP8
  assert attention.einsum is jnp.einsum


def test_what_is_no_plain_contraction_stays():
  config = _config()
  config.layers[2].einsum = OTHER
  quantizing.apply(config, (rules.Rule(("linear", "head"), CURRENT),))
  assert config.layers[2].einsum is OTHER


def test_exempt_layers_are_copies_of_what_blocks_were():
  config = _config()
  quantizing.apply(
    config,
    (rules.ExemptLayers(first=1, last=2), rules.Rule("feed_forward", FP8)),
  )
  made = config.layers[1]
  assert fdl.get_callable(made) is edged_stack.EdgedStack
  assert (made.num_first, made.num_last) == (1, 2)
  assert made.blocks[0].feed_forward.einsum.recipe == FP8
  assert made.edge_blocks[0].feed_forward.einsum is jnp.einsum
  assert made.edge_blocks[1].feed_forward.mlp_dim == 8
  assert fdl.build(made).edge_blocks[0].attention.num_heads == 2


def test_one_part_in_two_places_has_one_recipe():
  config = _config()
  config.layers[1].blocks = [shared := _block(), shared]
  with pytest.raises(user_error.UserError, match="are the same part"):
    quantizing.apply(
      config,
      (
        rules.Rule("*.blocks[0].feed_forward", FP8),
        rules.Rule("feed_forward", CURRENT),
      ),
    )


def _with_other_kernel(config):
  config.layers[1].blocks[1].attention.kernel = kernels.fused


def _pipelined(config):
  fdl.update_callable(config.layers[1], spmd_pipeline.PipelinedStack)


def _without_stack(config):
  config.layers = config.layers[2:]


@pytest.mark.parametrize(
  ("given", "change", "message"),
  [
    pytest.param(
      (rules.Rule("*.feed_forwards", FP8),),
      None,
      r"'\*.feed_forwards' matches nothing; the roles are .*the closest paths"
      r" layers\[1\].blocks",
      id="no_path",
    ),
    pytest.param(
      (rules.Rule("experts", FP8),),
      None,
      "rule for 'experts' matches nothing; the roles are attention_products",
      id="no_role",
    ),
    pytest.param(
      (rules.Rule("feed_forward", FP8), rules.Rule("*.feed_forward", None)),
      None,
      "matches nothing that the rules before it leave; put it before them",
      id="too_late",
    ),
    pytest.param(
      (rules.Rule("head", FP8),),
      None,
      r"layers\[0\] is a head, .*current scales",
      id="delayed_head",
    ),
    pytest.param(
      (rules.Rule("head", recipes.named("int8")),),
      None,
      "is a head, .* round to the nearest",
      id="random_head",
    ),
    pytest.param(
      (rules.Rule("attention_products", FP8),),
      _with_other_kernel,
      r"blocks\[1\].attention.kernel is fused, whose products no rule can",
      id="kernel",
    ),
    pytest.param(
      (rules.ExemptLayers(first=1),),
      _pipelined,
      r"layers\[1\] is PipelinedStack, all of whose layers are one program",
      id="pipeline",
    ),
    pytest.param(
      (rules.ExemptLayers(first=1), rules.ExemptLayers(last=1)),
      None,
      r"may stand once for the stack layers\[1\]; give first and last together",
      id="exempt_twice",
    ),
    pytest.param(
      (rules.ExemptLayers(first=1),),
      _without_stack,
      "ExemptLayers matches nothing, because the configuration has no Stack",
      id="no_stack",
    ),
  ],
)
def test_refusals(given, change, message):
  config = _config()
  if change is not None:
    change(config)
  with pytest.raises(user_error.UserError, match=message):
    quantizing.apply(config, given)

"""Tests for rewrites of configurations."""

import fiddle as fdl
from jax import numpy as jnp
import pytest

from paxon.layers import embedding, feed_forward, linear, precision, unembedding
from paxon.layers.attention import (
  grouped_query,
  kernels,
  kv_cache,
  quantized_rows,
  sliding_cache,
)
from paxon.layers.norms import rms_norm
from paxon.layers.stacks import block, edged_stack, stack
from paxon.pipeline import spmd_pipeline
from paxon.quantization import (
  einsum,
  number_formats,
  recipes,
  rules,
  served_einsum,
)
from paxon.runner import knobs, toy_experiment, user_error
from paxon.runner.configuration import rewrites


def _attention(**fields):
  return fdl.Config(
    grouped_query.GroupedQueryAttention,
    4,
    num_kv_heads=2,
    head_dim=4,
    **fields,
  )


def test_unset_cache_storage_is_set():
  ring = fdl.Config(sliding_cache.SlidingCache, window=3)
  cast = fdl.Config(kv_cache.ContiguousCache, storage=fdl.Config(kv_cache.AsIs))
  config = fdl.Config(
    dict,
    default=_attention(),
    ring=_attention(cache=ring),
    cast=_attention(cache=cast),
    none=_attention(cache=fdl.Config(kv_cache.NoCache)),
  )
  assert rewrites.set_kv_cache_storage(config, "int8") == [
    "default.cache.storage",
    "ring.cache.storage",
  ]
  built = fdl.build(config)
  assert built["default"].cache.storage == quantized_rows.QuantizedRows("int8")
  assert isinstance(built["default"].cache, kv_cache.ContiguousCache)
  assert built["ring"].cache.storage == quantized_rows.QuantizedRows("int8")
  assert built["ring"].cache.window == 3
  assert built["cast"].cache.storage == kv_cache.AsIs()
  assert isinstance(built["none"].cache, kv_cache.NoCache)


def test_module_without_a_cache_is_kept():
  config = fdl.Config(block.TransformerBlock)
  assert rewrites.set_kv_cache_storage(config, "int8") == []


def test_unknown_cache_format_is_rejected():
  with pytest.raises(
    ValueError, match=r"must be int8, fp8 or int4, got 'int2'"
  ):
    rewrites.set_kv_cache_storage(fdl.Config(dict), "int2")


def test_kv_cache_knob_without_a_cache_is_rejected():
  made = toy_experiment.Toy(kv_cache="int8")
  with pytest.raises(
    knobs.KnobError, match=r"Toy.kv_cache has no effect: .* field 'storage'"
  ):
    made.job()


FP8, CURRENT = recipes.find_recipe("fp8"), recipes.find_recipe("fp8_current")
# An einsum that is quantized already.
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
  rewrites.quantize(
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
  rewrites.quantize(config, (rules.Rule("head", CURRENT),))
  found = _recipes(config)
  assert [n for n, r in found.items() if r] == ["embedding", "head"]


def test_products_of_attention():
  config = _config()
  rewrites.quantize(config, (rules.Rule("attention_matmuls", FP8),))
  attention = config.layers[1].blocks[1].attention
  assert fdl.get_callable(attention.kernel) is kernels.PlainKernel
  assert attention.kernel.einsum.recipe == FP8
  assert attention.einsum is jnp.einsum


def test_what_is_no_plain_contraction_stays():
  config = _config()
  config.layers[2].einsum = OTHER
  rewrites.quantize(config, (rules.Rule(("linear", "head"), CURRENT),))
  assert config.layers[2].einsum is OTHER


def test_exempt_layers_are_copies_of_what_blocks_were():
  config = _config()
  rewrites.quantize(
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


def test_exempt_layers_need_one_stack():
  config = _config()
  layers = list(config.layers)
  layers[1] = fdl.Config(stack.Stacks, stacks=[layers[1]])
  config.layers = layers
  with pytest.raises(
    user_error.UserError, match=r"requires one Stack, but layers\[1\] has"
  ):
    rewrites.quantize(config, (rules.ExemptLayers(first=1),))


def test_shared_module_has_one_recipe():
  config = _config()
  config.layers[1].blocks = [shared := _block(), shared]
  with pytest.raises(user_error.UserError, match="are the same module"):
    rewrites.quantize(
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
      "rule for 'experts' matches nothing; the roles are attention_matmuls",
      id="no_role",
    ),
    pytest.param(
      (rules.Rule("feed_forward", FP8), rules.Rule("*.feed_forward", None)),
      None,
      "feed_forward' has no effect: earlier rules match all its layers",
      id="too_late",
    ),
    pytest.param(
      (rules.Rule("head", FP8),),
      None,
      r"layers\[0\] is a head, .*current scales",
      id="delayed_head",
    ),
    pytest.param(
      (rules.Rule("head", recipes.find_recipe("int8")),),
      None,
      "is a head, .* round to nearest",
      id="random_head",
    ),
    pytest.param(
      (rules.Rule("attention_matmuls", FP8),),
      _with_other_kernel,
      r"blocks\[1\].attention.kernel is fused, whose matmuls cannot be",
      id="kernel",
    ),
    pytest.param(
      (rules.ExemptLayers(first=1),),
      _pipelined,
      r"layers\[1\] is PipelinedStack, which runs all layers as one program",
      id="pipeline",
    ),
    pytest.param(
      (rules.ExemptLayers(first=1), rules.ExemptLayers(last=1)),
      None,
      r"only one ExemptLayers can apply to the stack layers\[1\]; set first",
      id="exempt_twice",
    ),
    pytest.param(
      (rules.ExemptLayers(first=1),),
      _without_stack,
      "ExemptLayers has no effect, because the configuration has no Stack",
      id="no_stack",
    ),
  ],
)
def test_rules_without_effect_are_rejected(given, change, message):
  config = _config()
  if change is not None:
    change(config)
  with pytest.raises(user_error.UserError, match=message):
    rewrites.quantize(config, given)


def _served_config(*targets):
  config = fdl.Config(
    dict,
    attention=fdl.Config(
      grouped_query.GroupedQueryAttention, 4, num_kv_heads=2, head_dim=4
    ),
    mlp=fdl.Config(feed_forward.GatedFeedForward, mlp_dim=4),
    head=fdl.Config(unembedding.Unembedding, vocab_size=8),
  )
  recipe = recipes.find_recipe("fp8_current")
  rewrites.quantize(config, [rules.Rule(target, recipe) for target in targets])
  return config


def test_weights_of_quantized_matmuls_are_stored():
  targets = ("attention_projections", "attention_matmuls", "head")
  config = _served_config(*targets)
  assert rewrites.serve_quantized_weights(config) == ["attention"]
  built = fdl.build(config)
  provider = built["attention"].einsum
  assert isinstance(provider, served_einsum.ServedEinsum)
  e4m3 = number_formats.FP8_E4M3
  assert provider.recipe.rhs.format == provider.recipe.lhs.format == e4m3
  assert provider.recipe.gradient is None
  # Matmuls of activations and the head are not quantized.
  assert built["attention"].kernel is kernels.auto
  assert built["head"].einsum is precision.wide_einsum
  assert built["mlp"].einsum is jnp.einsum


def test_rules_without_weights_are_rejected():
  config = _served_config("attention_matmuls")
  with pytest.raises(user_error.UserError, match=r"no layer has weights that"):
    rewrites.serve_quantized_weights(config)


def test_layers_of_a_stack_are_stored_together():
  mlp = fdl.Config(feed_forward.GatedFeedForward, mlp_dim=4)
  config = fdl.Config(
    dict,
    stack=fdl.Config(stack.Stack, blocks=[mlp], num_layers=3),
    attention=fdl.Config(
      grouped_query.GroupedQueryAttention, 4, num_kv_heads=2, head_dim=4
    ),
  )
  recipe = recipes.find_recipe("int8")
  given = [rules.ExemptLayers(first=1), rules.Rule("*attention", recipe)]
  rewrites.quantize(config, given)
  # Nothing of the stack is quantized.
  assert rewrites.serve_quantized_weights(config) == ["attention"]
  config.stack = fdl.Config(stack.Stack, blocks=[mlp], num_layers=3)
  rewrites.quantize(
    config, [rules.ExemptLayers(first=1), rules.Rule("feed_forward", recipe)]
  )
  with pytest.raises(
    user_error.UserError, match=r"layers of stack share their arrays"
  ):
    rewrites.serve_quantized_weights(config)

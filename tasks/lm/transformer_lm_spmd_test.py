"""Tests for the family of Pax's dense models."""

from flax import linen as nn
import pytest

from paxon.runner import knobs
from paxon.sharding import axes
from paxon.sharding import rules as rules_lib
from paxon.tasks.lm import lm_data, transformer_lm_spmd


class _Model(lm_data.Synthetic, transformer_lm_spmd.TransformerLmSpmd):
  global_batch_size = 8
  num_layers = 2
  embed_dim = 64
  head_dim = 16
  learning_rate = 1e-3


def test_widths_follow_from_embed_dim():
  (block,) = _Model().job().task.model.stack.blocks
  assert block.feed_forward.mlp_dim == 256
  assert block.attention.num_heads == block.attention.num_kv_heads == 4
  (block,) = _Model(mlp_dim=8, num_heads=2).job().task.model.stack.blocks
  assert (block.feed_forward.mlp_dim, block.attention.num_heads) == (8, 2)


def test_the_residual_stream_is_split_over_tensor_too():
  changed = set(_Model().sharding_rules()) - set(rules_lib.DEFAULT_RULES)
  assert changed == {(axes.ACTIVATION_EMBED, axes.TENSOR)}
  assert len(_Model().sharding_rules()) == len(rules_lib.DEFAULT_RULES)


def test_knobs_reach_the_configuration():
  task = _Model(
    activation=nn.gelu,
    attention_logit_cap=None,
    logit_cap=None,
    loss_chunk_length=8,
    num_microbatches=2,
    max_grad_norm=2.0,
    dtype="float32",
  )
  config = task.job().task
  (block,) = config.model.stack.blocks
  assert block.feed_forward.activation is nn.gelu
  assert block.attention.logits.cap is None
  assert config.model.logit_cap is None
  assert config.model.token_loss.chunk_length == 8
  assert config.learner.num_microbatches == 2
  assert config.learner.max_grad_norm == 2.0
  assert block.attention.dtype.name == "float32"


def test_toy_keeps_the_submodules():
  whole, toy = (m.job().task.model for m in (_Model(), _Model().shrink()))
  (block,), (small,) = whole.stack.blocks, toy.stack.blocks
  for name in ("attention", "feed_forward", "attention_norm"):
    assert type(getattr(block, name)) is type(getattr(small, name))
  assert small.attention.logits.cap == block.attention.logits.cap == 50.0
  assert toy.stack.remat_policy is whole.stack.remat_policy


def test_rejects_knob_names_of_pax():
  with pytest.raises(knobs.KnobError, match=r"no knob 'num_layer'.*num_layers"):
    _Model(num_layer=3)

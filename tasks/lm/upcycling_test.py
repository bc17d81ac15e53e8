"""Tests for upcycling; those of quickstart_moe compare the functions."""

import fiddle as fdl
import pytest

from paxon.layers import feed_forward
from paxon.runner import user_error
from paxon.tasks.lm import llama_lm, lm_data, upcycling


class _Dense(lm_data.Synthetic, llama_lm.LlamaLm):
  num_kv_heads = 2
  length = 8
  num_layers = 2
  embed_dim = 8
  mlp_dim = 16
  num_heads = 2
  head_dim = 4
  vocab_size = 32
  global_batch_size = 2
  learning_rate = 1e-3
  num_train_steps = 1
  warmup_steps = 1
  weight_decay = 0.0


def test_only_dense_blocks_are_upcycled():
  model = _Dense().job().task.model
  fields = {"num_experts": 4, "num_choices": 2}
  model.stack.blocks[0].feed_forward.dropout = fdl.Config(object)
  with pytest.raises(user_error.UserError, match="supports no dropout"):
    upcycling.use_mixtures(model, **fields)
  model.stack.blocks[0].feed_forward = fdl.Config(
    feed_forward.FeedForward, mlp_dim=32
  )
  upcycling.use_mixtures(model, **fields)
  layer = model.stack.blocks[0].feed_forward
  assert fdl.build(layer.experts).use_bias
  with pytest.raises(user_error.UserError, match="needs blocks with"):
    upcycling.use_mixtures(model, **fields)

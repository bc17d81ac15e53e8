"""Tests for the family of Pax's dense models."""

import math

import fiddle as fdl
from flax import linen as nn
from flax import traverse_util
import jax
import numpy as np
import pytest

from paxon.runner import knobs
from paxon.sharding import axes
from paxon.sharding import rules as rules_lib
from paxon.tasks.lm import gpt3, lm_data, transformer_lm_spmd


class _Model(lm_data.Synthetic, transformer_lm_spmd.TransformerLmSpmd):
  global_batch_size = 8
  num_layers = 2
  embed_dim = 64
  head_dim = 16
  learning_rate = 1e-3


class _Gpt3(lm_data.Synthetic, gpt3.Gpt3):
  global_batch_size = 8
  num_layers = 2
  embed_dim = 64
  head_dim = 16


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


def _initial(experiment) -> dict[str, np.ndarray]:
  """Returns the initial parameters by name."""
  model = fdl.build(experiment.job().task.model)
  ids = np.ones((1, 4), np.int32)
  values = jax.jit(model.init)(jax.random.key(0), ids)["params"]
  flat = traverse_util.flatten_dict(nn.unbox(values), sep="/")
  return {name: np.asarray(value) for name, value in flat.items()}


def test_exact_restores_what_pax_computes():
  """The limits are Xavier's for the fans that Pax counts in its shapes."""
  values = _initial(_Model(exact=True))
  plain = _initial(_Model())
  added = values.keys() - plain.keys()
  block = "stack/layers/blocks_0/"
  assert added == {f"{block}attention/query_scale/scale", "embedding/bias"}
  D, N, H, F = 64, 4, 16, 256
  limits = {
    f"{block}attention/qkv": math.sqrt(6 / (3 * D * (N + H))),
    f"{block}attention/out": math.sqrt(6 / (D * (N + H))),
    f"{block}feed_forward/up": math.sqrt(6 / (D + F)),
    f"{block}feed_forward/down": math.sqrt(6 / (D + F)),
  }
  for name, limit in limits.items():
    largest = np.abs(values[name]).max()
    assert 0.99 * limit < largest <= limit, name
    # Uniform, not normal.
    assert values[name].std() == pytest.approx(limit / math.sqrt(3), rel=0.02)


def test_exact_keeps_what_gpt3_has_in_pax():
  assert _initial(_Gpt3(exact=True)).keys() == _initial(_Gpt3()).keys()


def test_variables_that_decay_and_the_average_are_knobs():
  assert _Model().job().task.learner.decayed_variables is None
  assert _Model(exact=True).job().task.learner.decayed_variables == ".*"
  learner = _Model(decayed_variables=".*/qkv", ema_decay=0.99).job()
  learner = fdl.build(learner.task.learner)
  assert learner.decayed_variables == ".*/qkv"
  assert learner.average.decay == 0.99
  assert not learner.average.before_update
  exact = _Model(exact=True, ema_decay=0.99).job()
  average = fdl.build(exact.task.learner).average
  assert average.warmup
  assert average.before_update

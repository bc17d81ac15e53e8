"""Tests for the base classes of experiments that are rewritten from Pax."""

import math

import fiddle as fdl
import jax
import pytest

from paxon.learners.optimizers import adafactor, adamw
from paxon.runner import user_error
from paxon.runner.planning import job_lint
from paxon.sharding import variables
from paxon.tasks.lm import pax_lm


class _Small(pax_lm.SyntheticDataset, pax_lm.TransformerLmSpmdAdam):
  """Two small layers on one device."""

  num_layers = 2
  num_heads = None
  head_dim = 16
  embed_dim = 64
  mlp_dim = 96
  vocab_size = 512
  length = 32
  per_device_batch_size = 2
  mesh = "fsdp=1"


class _Glam(pax_lm.Glam, _Small):
  """GLaM with four layers."""

  num_layers = 4
  num_experts = 4
  num_groups = 2


class _Grok(pax_lm.Grok, _Small):
  """Grok with two layers."""

  num_experts = 4
  num_groups = 2
  num_kv_heads = 2
  rotary = True


class _Bert(pax_lm.BertDataset, pax_lm.TransformerBertSpmdAdafactor):
  """BERT's base class at toy size."""

  num_layers = 2
  num_heads = 4
  embed_dim = 64
  mlp_dim = 96
  vocab_size = 512
  length = 32
  mesh = "fsdp=1"


class _Mlp(pax_lm.SyntheticDataset, pax_lm.ClassificationModelAdam):
  """Three layers of an MLP."""

  num_layers = 3
  embed_dim = 8
  mlp_dim = 16
  mesh = "data=1"


def _count(experiment):
  job = fdl.build(experiment.job())
  leaves = jax.tree.leaves(
    job_lint.get_shapes(job).specs,
    is_leaf=lambda x: isinstance(x, variables.VariableSpec),
  )
  return sum(math.prod(one.shape) for one in leaves)


_D, _F, _V, _H = 64, 96, 512, 16
_FFN = 2 * _D * _F + _F + _D
_LAYER = 4 * _D * _D + _H + _FFN + 4 * _D
_HEAD = _V * (_D + 1) + 2 * _D


@pytest.mark.parametrize(
  ("experiment", "expected"),
  [
    (_Small(), _HEAD + 2 * _LAYER),
    (_Small(use_bias=True), _HEAD + 2 * (_LAYER + 4 * _D)),
    (_Small(gated_activation=True), _HEAD + 2 * (_LAYER + _D * _F + _F)),
    (_Small(separate_embedding=True), _HEAD + _V * _D + 2 * _LAYER),
    (
      _Small(positions="learned", max_positions=None),
      _HEAD + 32 * _D + 2 * _LAYER,
    ),
    (_Small(rms_norm=True), _HEAD - _D + 2 * (_LAYER - 2 * _D)),
    (_Small(num_kv_heads=2), _HEAD + 2 * (_LAYER - 2 * _D * 2 * _H)),
    # Two layers of experts without gates, two gated ones; 32 relative biases
    # per head.
    (
      _Glam(),
      _V * _D
      + _D
      + 4 * (4 * _D * _D + 32 * 4 + 2 * _D)
      + 2 * (4 * 2 * _D * _F + 4 * _D + 3 * _D * _F),
    ),
    # Gated experts, two key/value heads, biases of all projections.
    (
      _Grok(),
      _V * _D
      + _D
      + 2 * (2 * _D * _D + 2 * _D * 2 * _H + _H * 8 + _D + 2 * _D)
      + 2 * (4 * 3 * _D * _F + 4 * _D),
    ),
    (_Bert(), _HEAD + 2 * _LAYER),
    (_Mlp(), 8 * 9 + 8 * 16 + 16 + 16 * 16 + 16 + 16 * 8 + 8),
  ],
)
def test_parameters_are_those_of_praxis(experiment, expected):
  assert _count(experiment) == expected


def test_norms_store_their_scale_as_in_praxis():
  # Weight decay applies to all variables, and must not pull scales to zero.
  assert _Small(norm_epsilon=1e-5).norm().scale_offset == 1
  assert _Small(norm_epsilon=1e-5).norm().epsilon == 1e-5
  assert _Glam().norm().scale_offset == 0


def test_glam_scales_the_input_of_the_head_and_no_attention_logits():
  model = _Glam().job().task.model
  assert model.embedding.attend_scale == _D**-0.5
  attention = model.stack.blocks[0].attention
  assert attention.logits.scale == 1
  assert attention.projections.query_init.stddev == (_D * _H) ** -0.5


def test_heads_must_make_up_the_width():
  with pytest.raises(user_error.UserError, match="must be embed_dim"):
    _Small(num_heads=3).job()


def test_missing_rates_are_those_of_mlperf():
  given = {
    "lr_schedule": "cosine",
    "learning_rate": None,
    "cosine_warmup_steps": None,
    "cosine_decay_start": None,
    "cosine_decay_steps": None,
  }
  schedule = _Small(global_batch_size=2048, **given).schedule()
  assert schedule.peak == 2e-5
  assert schedule.warmup_steps == math.ceil(265 * 1536 / 2048)
  assert schedule.decay_start == schedule.warmup_steps + 1
  assert schedule.decay_end == math.ceil(108_600 * 1536 / 2048)
  assert _Small(global_batch_size=8192, **given).schedule().peak == 3e-5


def test_optimizers():
  adam = _Small(adam_b2=0.95, max_update_rms=None).optimizer()
  assert fdl.get_callable(adam) is adamw.AdamW
  assert (adam.b2, adam.epsilon, adam.max_update_rms) == (0.95, 1e-6, None)
  other = _Small(optimizer_kind="adafactor", adam_b1=0.8).optimizer()
  assert fdl.get_callable(other) is adafactor.Adafactor
  assert other.b1 == 0.8


@pytest.mark.parametrize("experiment", [_Small(), _Glam(), _Grok(), _Bert()])
def test_toy_has_the_same_layers(experiment):
  assert fdl.build(experiment.shrink().job())

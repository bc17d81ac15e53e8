"""Tests for model families, beyond the table of Pax's sizes."""

import fiddle as fdl
from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers.models import random_masking
from paxon.pipeline import spmd_pipeline
from paxon.pipeline.schedules import (
  generators,
  lowering,
  scheduled_stack,
)
from paxon.runner import user_error
from paxon.sharding import axes
from paxon.tasks.lm import (
  gpt3,
  llama_lm,
  lm_data,
  masked_lm,
  mlp_lm,
)


class _Gpt3(lm_data.Synthetic, gpt3.Gpt3):
  global_batch_size = 8
  num_layers = 2
  embed_dim = 64
  head_dim = 16


class _MlPerf(lm_data.Synthetic, gpt3.MlPerfGpt3):
  global_batch_size = 1536
  num_layers = 2
  embed_dim = 64
  head_dim = 16


class _Llama(lm_data.Synthetic, llama_lm.LlamaLm):
  num_train_steps = 10
  global_batch_size = 8
  length = 32
  num_layers = 2
  embed_dim = 64
  mlp_dim = 96
  num_heads = 4
  num_kv_heads = 2
  head_dim = 16
  vocab_size = 64
  learning_rate = 1e-3
  warmup_steps = 1
  weight_decay = 0.1


class _Bert(lm_data.Synthetic, masked_lm.AdafactorMaskedLm):
  global_batch_size = 8
  num_layers = 2
  embed_dim = 64
  head_dim = 16


class _Mlp(lm_data.Synthetic, mlp_lm.MlpLm):
  global_batch_size = 8
  embed_dim = 16
  mlp_dim = 24


def test_gpt3_stops_at_target_loss():
  # MLPerf's target is for other tokens.
  assert _Gpt3().job().early_stopping is None
  # Synthetic tokens are evaluated too.
  rule = _Gpt3(target_log_pplx=1.5).job().early_stopping
  assert (rule.metric, rule.target) == ("validation/log_pplx", 1.5)


def test_gpt3_has_a_position_for_each_token():
  assert _Gpt3().job().task.model.position_embedding.max_length == 16_384
  rows = _Gpt3(max_positions=None).job().task.model.position_embedding
  assert rows.max_length == _Gpt3().length


@pytest.mark.parametrize(
  ("rows", "rate", "warmup", "end"),
  [(1536, 2e-5, 265, 108_600), (3584, 2e-5, 114, 46_543), (3585, 3e-5, 114, 0)],
)
def test_mlperf_rates_depend_on_the_batch(rows, rate, warmup, end):
  made = _MlPerf(global_batch_size=rows)
  assert (made.learning_rate, made.warmup_steps) == (rate, warmup)
  assert not end or made.num_train_steps == made.decay_steps == end


def test_llama_toy_has_grouped_heads():
  toy = _Llama().shrink()
  assert (toy.num_heads, toy.num_kv_heads) == (4, 2)
  model = toy.job().task.model
  assert model.head is not None
  assert model.position_embedding is None


def test_bert_is_bidirectional_and_masks_tokens():
  config = _Bert(label_smoothing=0.1).job().task
  (block,) = config.model.stack.blocks
  assert not block.attention.mask.causal
  masking = config.model.masking
  assert fdl.get_callable(masking) is random_masking.RandomMasking
  assert (masking.mask_id, masking.rate) == (103, 0.15)
  assert config.model.token_loss.label_smoothing == 0.1
  assert config.learner.optimizer.b1 == 0.9


def test_mlp_has_eight_layers_and_sees_one_token():
  model = fdl.build(_Mlp().job().task.model)
  tokens = jnp.asarray([[1, 2, 3, 2]], jnp.int32)
  places = jnp.arange(4, dtype=jnp.int32)[None]
  values = jax.jit(model.init)(
    jax.random.key(0), tokens, places, jnp.ones_like(tokens)
  )
  logits = jax.jit(model.apply)(values, tokens, places, jnp.ones_like(tokens))
  # Equal tokens have equal logits at all positions.
  np.testing.assert_array_equal(logits[0, 1], logits[0, 3])
  values = jax.tree.map(
    lambda v: np.asarray(v, np.float64), nn.unbox(values)["params"]
  )
  table, stack = values["embedding"]["table"], values["stack"]
  assert len(stack) == 8
  x = table[2]
  for i in range(8):
    part = stack[f"parts_{i}"]
    x = x @ part["kernel"] + part["bias"]
    x = np.maximum(x, 0) if i < 7 else x
  np.testing.assert_allclose(logits[0, 1], table @ x, rtol=1e-4, atol=1e-6)


def test_stages_do_not_change_the_model():
  made = _Gpt3(
    mesh="stage=2,fsdp=2",
    num_stages=2,
    pipeline_microbatch_size=4,
    stream_io=True,
  )
  config = made.job()
  stack = config.task.model.stack
  assert fdl.get_callable(stack) is spmd_pipeline.PipelinedStack
  assert (stack.num_stages, stack.microbatch_size) == (2, 4)
  rules = dict(config.rules)
  assert rules[axes.LAYERS] == axes.STAGE
  assert rules[axes.BATCH][0] == axes.STAGE
  plain = made.without_pipeline()
  assert plain.job().task.model == _Gpt3().job().task.model
  # The policy of layers becomes that of ticks.
  assert stack.iteration_policy is plain.job().task.model.stack.remat_policy


@pytest.mark.parametrize(
  ("knob", "value"),
  [
    ("num_pipeline_microbatches", 4),
    ("pipeline_microbatch_size", 4),
    ("circular_repeats", 2),
    ("stream_io", True),
    ("pipeline_schedule", "1f1b"),
    ("pipeline_residuals", "save"),
  ],
)
def test_knobs_of_a_pipeline_need_stages(knob, value):
  with pytest.raises(
    user_error.UserError,
    match=rf"_Gpt3\.{knob}={value} needs a pipeline; set num_stages, or",
  ):
    _Gpt3(**{knob: value}).job()


def test_schedule_does_not_change_the_model():
  made = _Gpt3(
    num_layers=4,
    mesh="stage=2,fsdp=2",
    num_stages=2,
    pipeline_microbatch_size=4,
    pipeline_schedule="interleaved_two_slots",
    pipeline_residuals="save",
  )
  stack = made.job().task.model.stack
  assert fdl.get_callable(stack) is scheduled_stack.ScheduledStack
  # Two chunks on each stage.
  assert stack.circular_repeats == 2
  assert stack.schedule is generators.interleaved_two_slots
  assert stack.residuals is lowering.Residuals.SAVE

  plain = made.without_pipeline()
  assert plain.job().task.model == _Gpt3(num_layers=4).job().task.model


def test_custom_schedule_is_a_method():
  class Own(_Gpt3):
    num_stages = 2
    num_pipeline_microbatches = 2
    mesh = "stage=2,fsdp=-1"

    def schedule_maker(self):
      """Returns a table of a test."""
      return generators.one_f_one_b

  stack = Own().job().task.model.stack
  assert stack.schedule is generators.one_f_one_b


@pytest.mark.parametrize(
  ("make", "chunks"),
  [(generators.one_f_one_b, 1), (generators.interleaved_two_slots, 2)],
)
def test_toy_of_custom_schedule_has_its_chunks(make, chunks):
  class Own(_Gpt3):
    num_layers = 8
    num_stages = 2
    pipeline_microbatch_size = 4
    mesh = "stage=2,fsdp=-1"

    def schedule_maker(self):
      """Returns a table of a test."""
      return make

  toy = Own().shrink()
  assert toy.num_layers == 2 * chunks
  assert toy.job().task.model.stack.circular_repeats == chunks


@pytest.mark.parametrize(
  ("knobs", "message"),
  [
    (
      {"pipeline_schedule": "1f1b_two_slot"},
      r"_Gpt3\.pipeline_schedule: '1f1b_two_slot' is not a schedule; .* Did you"
      r" mean '1f1b_two_slots'",
    ),
    (
      {"pipeline_schedule": "zb_h1"},
      r"_Gpt3\.pipeline_schedule: 'zb_h1' is not a schedule; use one of 1f1b,"
      r" 1f1b_two_slots, interleaved_two_slots, or unset it for GPipe\.",
    ),
    (
      {
        "pipeline_schedule": "interleaved_two_slots",
        "pipeline_microbatch_size": 8,
      },
      r"_Gpt3\.pipeline_schedule=interleaved_two_slots: num_microbatches \(1\)"
      r" must be a multiple of num_stages \(2\)",
    ),
    (
      {"pipeline_residuals": "save"},
      r"_Gpt3\.pipeline_residuals=save needs a schedule; set pipeline_sch",
    ),
  ],
)
def test_rejects_unsuitable_schedules(knobs, message):
  given = {"num_stages": 2, "pipeline_microbatch_size": 4, **knobs}
  with pytest.raises(user_error.UserError, match=message):
    _Gpt3(mesh="stage=2,fsdp=2", **given).job()


def test_rejects_zero_stages():
  with pytest.raises(ValueError, match=r"num_stages must be positive, got 0"):
    _Gpt3(num_stages=0, pipeline_microbatch_size=4).job()


def test_the_toy_of_a_pipeline_has_two_stages():
  made = _Gpt3(
    num_layers=12,
    mesh="stage=2,fsdp=2",
    num_stages=2,
    pipeline_microbatch_size=4,
    circular_repeats=3,
  )
  toy = made.shrink()
  assert (toy.mesh, toy.num_stages) == ("stage=2,fsdp=-1", 2)
  assert (toy.num_layers, toy.circular_repeats) == (4, 2)
  assert _Gpt3().shrink().num_stages is None


def test_mlp_axes_are_mesh_axes():
  parts = _Mlp().job().task.model.stack.parts
  assert parts[0].kernel_axes == (axes.EMBED, axes.MLP)
  assert parts[-1].kernel_axes == (axes.MLP, axes.EMBED)

"""Tests of Pax's mixtures of experts."""

import fiddle as fdl

from paxon.layers import feed_forward
from paxon.layers.moe import mixture
from paxon.tasks.lm import lm_data, mixture_lm


class _Mixture(mixture_lm.MixtureLm, lm_data.Synthetic):
  length = 8
  num_layers = 4
  embed_dim = 8
  head_dim = 4
  vocab_size = 32
  global_batch_size = 2
  mesh = "data=1"
  learning_rate = 1e-3
  num_train_steps = 1
  num_experts = 4
  num_groups = 2
  mixture_every = 2
  output_z_loss = 1e-4


def test_every_second_layer_is_a_mixture():
  model = fdl.build(_Mixture().job().task.model)
  mixed, dense = (block.feed_forward for block in model.stack.blocks)
  assert isinstance(mixed, mixture.MixtureOfExperts)
  assert isinstance(dense, feed_forward.GatedFeedForward)
  assert mixed.dispatch.groups == mixed.losses[0].groups
  assert model.token_loss.z_loss_weight == 1e-4

"""Mixtures of experts as in Pax, for its families of decoder-only models."""

from typing import Any

import fiddle as fdl

from paxon.layers import feed_forward, initializers
from paxon.layers.moe import (
  balance,
  dispatch,
  experts,
  mixture,
  pax_routers,
  routing,
)
from paxon.tasks.lm import transformer_lm_spmd

# A uniform distribution up to sqrt(3 / fan_in), as in Pax.
_EXPERT_INIT = initializers.FanScaled(
  1.0,
  initializers.Fan.IN,
  initializers.Distribution.UNIFORM,
  in_axes=(1,),
  out_axes=(2,),
)


class MixtureLm(transformer_lm_spmd.TransformerLmSpmd):
  """Layers with GShard's top-2 experts and a capacity.

  Use it as a base class before that of a family:

    class Mine(mixture_lm.MixtureLm, gpt3.Gpt3): ...

  Attributes:
    num_experts: Experts per layer.
    num_groups: Groups of tokens with separate capacities.
    capacity_factor: Factor of the capacity, which contains the two choices.
    load_balance_weight: Factor of GShard's auxiliary loss in each layer.
    gated_experts: Whether experts, and the dense layers among them, are gated.
    mixture_every: The first of so many layers is a mixture; others are dense.
    output_z_loss: Factor of the z-loss of the output softmax; 0 disables it.
  """

  num_experts: int
  num_groups: int
  capacity_factor: float = 2.0
  load_balance_weight: float = 0.01
  gated_experts: bool = True
  mixture_every: int = 1
  output_z_loss: float = 0.0

  def feed_forward(self) -> fdl.Config[Any]:
    """Returns a mixture of experts."""
    groups = routing.TokenGroups(num_groups=self.num_groups)
    if self.gated_experts:
      layer = fdl.Config(experts.GatedExperts, activation=self.activation)
    else:
      layer = fdl.Config(
        experts.PlainExperts, activation=self.activation, use_bias=False
      )
    layer.mlp_dim = self.mlp_dim
    layer.kernel_init = _EXPERT_INIT
    return fdl.Config(
      mixture.MixtureOfExperts,
      num_experts=self.num_experts,
      router=fdl.Config(pax_routers.TopTwo),
      experts=layer,
      # The compiler splits its einsums over experts and batch.
      dispatch=dispatch.OneHotEinsum(
        factor=self.capacity_factor, groups=groups
      ),
      losses=(balance.gshard(self.load_balance_weight, groups=groups),),
    )

  def dense_feed_forward(self) -> fdl.Config[Any]:
    """Returns the feed-forward layer of dense layers."""
    if not self.gated_experts:
      return super().feed_forward()
    return fdl.Config(
      feed_forward.GatedFeedForward,
      mlp_dim=self.mlp_dim,
      activation=self.activation,
    )

  def model(self) -> fdl.Config[Any]:
    """Returns the model."""
    model = super().model()
    model.token_loss.z_loss_weight = self.output_z_loss
    (block,) = model.stack.blocks
    dense = []
    for _ in range(self.mixture_every - 1):
      other = fdl.deepcopy_with(block)
      other.feed_forward = self.dense_feed_forward()
      dense.append(other)
    model.stack.blocks = [block, *dense]
    return model

  def shrink(self) -> Any:
    """Returns a toy-sized version for up to 8 devices."""
    return super().shrink().replace(num_experts=8, num_groups=8, mlp_dim=32)

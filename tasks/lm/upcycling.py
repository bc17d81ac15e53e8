"""Upcycling: mixtures of experts that start from a dense model.

Each expert starts as a copy of the dense feed-forward layer, and the router
with its usual random values (Komatsuzaki et al. 2022,
https://arxiv.org/abs/2212.05055). The weights of a token's choices add up to 1,
so the mixture starts as the same function as the dense model.
"""

from collections.abc import Mapping
from typing import Any

import fiddle as fdl

from paxon.layers import feed_forward
from paxon.layers.moe import balance, experts, mixture, routers
from paxon.runner import user_error
from paxon.runner.configuration import tree
from paxon.runner.settings import training
from paxon.sharding import axes

_EXPERTS: Mapping[Any, Any] = {
  feed_forward.GatedFeedForward: experts.GatedExperts,
  feed_forward.FeedForward: experts.PlainExperts,
}
_FIELDS = (
  "mlp_dim",
  "activation",
  "use_bias",
  "dtype",
  "param_dtype",
)


def use_mixtures(
  model: fdl.Buildable,
  *,
  num_experts: int,
  num_choices: int,
  load_balance_weight: float = 0.0,
) -> None:
  """Replaces the feed-forward layer of each block by a mixture, in place.

  Args:
    model: Configuration of a model whose `stack` has blocks.
    num_experts: Number of experts, each as wide as the dense layer.
    num_choices: Experts of a token.
    load_balance_weight: Factor of Switch's auxiliary loss.

  Raises:
    user_error.UserError: A block has no dense feed-forward layer, or one with
      dropout of its hidden activation, which experts do not have.
  """
  for block in model.stack.blocks:
    layer = block.feed_forward
    made = None
    if isinstance(layer, fdl.Buildable):
      made = _EXPERTS.get(fdl.get_callable(layer))
    if made is None:
      raise user_error.UserError(
        f"Upcycling needs blocks with GatedFeedForward or FeedForward, got"
        f" {layer!r}."
      )
    if tree.find_value(layer, "dropout") is not None:
      raise user_error.UserError(
        "Upcycling supports no dropout of the hidden activation; set"
        " feed_forward.dropout to None."
      )
    set_fields = fdl.ordered_arguments(layer)
    losses = ()
    if load_balance_weight:
      losses = (balance.switch(load_balance_weight),)
    block.feed_forward = fdl.Config(
      mixture.MixtureOfExperts,
      num_experts=num_experts,
      router=fdl.Config(routers.TopK, k=num_choices),
      experts=fdl.Config(
        made, **{k: set_fields[k] for k in _FIELDS if k in set_fields}
      ),
      losses=losses,
    )


def warm_start(
  checkpoint: str, *, noise: float = 0.0, **fields: Any
) -> fdl.Config[training.WarmStart]:
  """Returns the warm start of a model of `use_mixtures`.

  Args:
    checkpoint: A run of the dense model, or an imported model.
    noise: Standard deviation of noise in the experts, divided by the root mean
      square of the dense weights.
    **fields: Further fields of `WarmStart`.
  """
  return fdl.Config(
    training.WarmStart,
    checkpoint=checkpoint,
    patterns=(
      (r"(.*/feed_forward)/experts/(.*)", r"\1/\2"),
      (r".*/feed_forward/router/.*", None),
    ),
    repeated_axes=(axes.EXPERTS,),
    repeat_noise=noise,
    **fields,
  )

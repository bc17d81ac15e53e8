"""The mixture-of-experts layer, which replaces a feed-forward layer.

  y = sum_j weights_j * expert_{ids_j}(x) + shared(x)

It is composed of a router (`routers`, `pax_routers`), experts
(`experts`), a dispatch (`dispatch`) and auxiliary losses (`balance`).
"""

from collections.abc import Sequence
from typing import ClassVar

from flax import linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from paxon.layers import remat, summaries, token_context
from paxon.layers.losses import auxiliary_loss
from paxon.layers.moe import balance as balance_lib
from paxon.layers.moe import dispatch as dispatch_lib
from paxon.layers.moe import routing as routing_lib
from paxon.layers.stacks import block
from paxon.sharding import axes, checks, logical


class MixtureOfExperts(nn.Module, auxiliary_loss.Source):
  """A mixture of experts.

  Training reports the summaries `load_max` and `load_min`, the tokens of the
  most and least loaded expert divided by the mean; `entropy` of the normalized
  scores, in nats; and `dropped`, the share of choices beyond a capacity.

  Attributes:
    num_experts: Number of experts.
    router: Chooses the experts of each token.
    experts: The experts' parameters and function.
    dispatch: Moves tokens to experts.
    losses: Auxiliary losses of the router.
    shared: A feed-forward layer for all tokens, added; `None` is none.
    shared_gate: Maps tokens to the logit [B,T,1] of a factor of `shared`, by a
      sigmoid; `None` is the factor 1.
    summarize_loads: Whether training also reports the load of each expert, as
      `load_0`, `load_1` and so on.
  """

  num_experts: int
  router: nn.Module
  experts: nn.Module
  dispatch: dispatch_lib.Dispatch = dispatch_lib.Dropless()
  losses: Sequence[balance_lib.Loss] = ()
  shared: nn.Module | None = None
  shared_gate: nn.Module | None = None
  summarize_loads: bool = False

  # Blocks pass `segment_ids` and `deterministic`.
  takes_segment_ids: ClassVar[bool] = True

  def __post_init__(self) -> None:
    self.losses = tuple(self.losses)
    super().__post_init__()
    checks.check_size(self, "num_experts")
    if self.shared_gate is not None and self.shared is None:
      raise ValueError(
        "MixtureOfExperts.shared_gate is the factor of `shared`, which is None."
      )
    names = [loss.name for loss in self.losses]
    if len(set(names)) != len(names):
      raise ValueError(
        f"MixtureOfExperts.losses must have different names, got {names}."
      )

  def __call__(
    self,
    x: Float[Array, "batch length embed"],
    segment_ids: Int[Array, "batch length"] | None = None,
    *,
    deterministic: bool = True,
  ) -> Float[Array, "batch length embed"]:
    """Returns the transformed tokens; zero for padding.

    Args:
      x: Tokens.
      segment_ids: Segments; 0 is padding, which reaches no expert. `None` is
        one document without padding.
      deterministic: Disables jitter and sampling.

    Raises:
      ValueError: There are no tokens.
    """
    if 0 in x.shape:
      raise ValueError(
        f"MixtureOfExperts needs tokens [batch, length, embed], got the empty"
        f" shape {x.shape}."
      )
    mask = jnp.ones(x.shape[:2], jnp.bool_)
    if segment_ids is not None:
      mask = segment_ids != 0
      # Zero times NaN would be NaN in the gradient of the router.
      x = jnp.where(mask[..., None], x, jnp.zeros((), x.dtype))
    routing: routing_lib.Routing = self.router(
      x,
      mask,
      segment_ids,
      num_experts=self.num_experts,
      deterministic=deterministic,
    )
    for loss in self.losses:
      auxiliary_loss.add(self, loss.name, loss(routing))
    self._summarize(routing)
    stacks = self.experts(x, num_experts=self.num_experts)
    y = self.dispatch(x, routing.ids, routing.weights, stacks)
    y = logical.constrain(y, (axes.BATCH, axes.LENGTH, axes.ACTIVATION_EMBED))
    if self.shared is not None:
      y += self._run_shared(x, segment_ids, deterministic)
    return remat.tag(y, remat.FEED_FORWARD_OUTPUT)

  def _run_shared(
    self, x: jax.Array, segment_ids: jax.Array | None, deterministic: bool
  ) -> jax.Array:
    """Returns the output of the shared expert, zero for padding."""
    assert self.shared is not None
    context = token_context.TokenContext(
      segment_ids=segment_ids, deterministic=deterministic
    )
    y = block.bind_feed_forward(self.shared, context)(x)
    if self.shared_gate is not None:
      y *= jax.nn.sigmoid(self.shared_gate(x))
    if segment_ids is None:
      return y
    is_real = segment_ids[..., None] != 0
    return jnp.where(is_real, y, jnp.zeros((), y.dtype))

  @nn.nowrap
  def _summarize(self, routing: routing_lib.Routing) -> None:
    counts = routing.counts()
    mean = jnp.mean(counts)
    load = counts / jnp.where(mean > 0, mean, 1)
    scores = routing.scores.astype(jnp.float32)
    shares = scores / (jnp.sum(scores, -1, keepdims=True) + 1e-20)
    entropy = jnp.sum(jax.scipy.special.entr(shares), axis=-1)
    kept = routing.mask.astype(jnp.float32)
    values = {
      "load_max": jnp.max(load),
      "load_min": jnp.min(load),
      "entropy": jnp.sum(entropy * kept) / jnp.maximum(jnp.sum(kept), 1),
    }
    dropped = getattr(self.dispatch, "count_dropped", None)
    if dropped is not None:
      values["dropped"] = dropped(routing.ids, self.num_experts)
    if self.summarize_loads:
      values |= {f"load_{e}": load[e] for e in range(self.num_experts)}
    for name, value in values.items():
      summaries.summarize(self, name, value)

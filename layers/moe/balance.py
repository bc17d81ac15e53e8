"""Balance of experts: auxiliary losses, and a bias without a loss.

Losses are functions of a `Routing`, with f_e the share of tokens of expert e
and P_e its mean score,

  LoadBalance   weight * E * sum_e f_e P_e
  ZLoss         weight * mean(logsumexp(logits) ** 2)

Means are over the global batch, without padding, before the product: the mean
of the losses of shards would be another function. With microbatches they are
those of each microbatch.
"""

import dataclasses
import enum
from typing import Any, Protocol, runtime_checkable

from flax import linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from paxon.layers.losses import auxiliary_loss
from paxon.layers.moe import routing as routing_lib
from paxon.sharding import checks, logical, variables

COLLECTION = "balance"


@runtime_checkable
class Loss(Protocol):
  """An auxiliary loss of a router; `name` is that of its metric."""

  @property
  def name(self) -> str:
    """Name of the metric, `auxiliary_loss/<name>`."""
    ...

  def __call__(
    self, routing: routing_lib.Routing
  ) -> jax.Array | auxiliary_loss.Product:
    """Returns the weighted loss, a float32 scalar, or factors of it."""
    ...


class Scope(enum.Enum):
  """Tokens over which shares and scores are averaged before the product."""

  BATCH = "batch"
  SEQUENCE = "sequence"


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadBalance:
  """Product of the share of tokens and the mean score, summed over experts.

  It is `weight` for balanced experts, or `weight * k` with `per_choice=False`.
  The published forms are `gshard`, `switch`, `pooled` and `deepseek`.

  Attributes:
    weight: Factor of the loss.
    first_choice: Whether only first choices count for the shares.
    per_choice: Whether shares of all choices are divided by the mean number of
      choices of a token.
    scope: Tokens of one product; the loss is the mean over them.
    groups: Tokens of one product, instead of `scope`.
    with_padding: Whether the divisors count padding, as in Pax.
    normalize: Whether scores of a token are divided by their sum, for sigmoid
      scores.
    across_layers: Whether shares and scores are averaged over all layers, too.
  """

  weight: float
  first_choice: bool = False
  per_choice: bool = True
  scope: Scope = Scope.BATCH
  groups: routing_lib.TokenGroups | None = None
  with_padding: bool = False
  normalize: bool = False
  across_layers: bool = False
  name: str = "load_balance"

  def __post_init__(self) -> None:
    checks.check_non_negative(self, "weight")
    is_whole = self.groups is None and self.scope is Scope.BATCH
    if self.across_layers and not is_whole:
      raise ValueError(
        "LoadBalance.across_layers averages over the whole batch; leave groups"
        " and scope at their defaults."
      )

  def __call__(
    self, routing: routing_lib.Routing
  ) -> jax.Array | auxiliary_loss.Product:
    """Returns the weighted loss, a float32 scalar, or factors of it."""
    chosen = routing.ids[..., :1] if self.first_choice else routing.ids
    shares = routing_lib.one_hot(chosen, routing.num_experts).sum(-2)
    if self.per_choice:
      shares /= _mean_choices(shares, routing.mask)
    scores = routing.scores.astype(jnp.float32)
    if self.normalize:
      scores /= jnp.sum(scores, -1, keepdims=True) + 1e-20
    kept = routing.mask[..., None].astype(jnp.float32)
    tokens = jnp.ones_like(kept) if self.with_padding else kept
    parts = (shares * kept, scores * kept, tokens)
    if self.groups is not None:
      parts = tuple(map(self.groups.split, parts))
    elif self.scope is Scope.BATCH:
      parts = tuple(x.reshape(1, -1, x.shape[-1]) for x in parts)
    shares, scores, tokens = (jnp.sum(x, axis=1) for x in parts)
    # A sequence may be all padding.
    count = jnp.maximum(tokens, 1)
    shares, scores = shares / count, scores / count
    factor = self.weight * routing.num_experts
    if self.across_layers:
      return auxiliary_loss.Product(left=factor * shares[0], right=scores[0])
    products = jnp.sum(shares * scores, axis=-1)
    # Sequences of padding do not count.
    is_real = (tokens[:, 0] > 0).astype(jnp.float32)
    return factor * jnp.sum(products) / jnp.maximum(jnp.sum(is_real), 1)


def _mean_choices(shares: jax.Array, mask: jax.Array) -> jax.Array:
  """Returns the mean number of choices of a token, at least one.

  Some routers give tokens different numbers of experts.
  """
  tokens = jnp.sum(mask.astype(jnp.float32))
  return jnp.maximum(jnp.sum(shares) / jnp.maximum(tokens, 1), 1)


def gshard(
  weight: float, *, groups: routing_lib.TokenGroups | None = None
) -> LoadBalance:
  """Returns GShard's loss of first choices, as in Pax.

  Lepikhin et al. 2020, https://arxiv.org/abs/2006.16668, section 2.2: the mean
  over groups, whose divisors count padding.
  """
  return LoadBalance(
    weight=weight,
    first_choice=True,
    groups=groups or routing_lib.TokenGroups(),
    with_padding=True,
  )


def switch(weight: float = 0.01) -> LoadBalance:
  """Returns Switch's loss: all choices, divided by their number.

  Fedus et al. 2021, https://arxiv.org/abs/2101.03961, section 2.2, which has
  one choice.
  """
  return LoadBalance(weight=weight)


def pooled(weight: float) -> LoadBalance:
  """Returns the loss of Hugging Face's models.

  Shares are not divided by the number of choices, and the means are over all
  layers before the product.
  """
  return LoadBalance(weight=weight, per_choice=False, across_layers=True)


def deepseek(weight: float = 1e-4) -> LoadBalance:
  """Returns DeepSeek-V3's loss of each sequence, of normalized scores.

  https://arxiv.org/abs/2412.19437, equations 17 to 20.
  """
  return LoadBalance(weight=weight, scope=Scope.SEQUENCE, normalize=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ZLoss:
  """Keeps logits small (ST-MoE, https://arxiv.org/abs/2202.08906, eq. 5).

  Attributes:
    weight: Factor of the loss.
  """

  weight: float = 1e-3
  name: str = "router_z_loss"

  def __post_init__(self) -> None:
    checks.check_non_negative(self, "weight")

  def __call__(self, routing: routing_lib.Routing) -> jax.Array:
    """Returns the weighted loss, a float32 scalar."""
    squares = jax.nn.logsumexp(routing.logits.astype(jnp.float32), axis=-1) ** 2
    kept = routing.mask.astype(jnp.float32)
    total = jnp.sum(jnp.where(routing.mask, squares, 0))
    return self.weight * total / jnp.maximum(jnp.sum(kept), 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SelectionBias:
  """A bias of the selection that balances experts without a loss.

  Wang et al. 2024, https://arxiv.org/abs/2408.15664: after each step
  `bias += rate * sign(mean(count) - count)`. The bias selects experts and is no
  part of their weights.

  The variables are a collection of their own, `balance`, and not parameters: no
  weight decay, average or clipping applies. `count` [E] has the tokens of each
  expert since the first step, modulo 2**32, so that microbatches add up; `seen`
  has those before the last step, and `bias` the value that it selected with. So
  `next_bias` is the value for the next step and for evaluation, which changes
  no variable. A layer is called once in a step: each further call would change
  the bias again.

  Attributes:
    rate: Change of the bias in a step; 0 freezes it.
  """

  rate: float = 1e-3

  def __post_init__(self) -> None:
    checks.check_non_negative(self, "rate")

  def read(self, module: nn.Module, num_experts: int) -> "BoundBias":
    """Creates the variables of a layer in a compact method."""
    rules = variables.CombineRule

    def make(name: str, dtype: Any, combine: Any) -> Any:
      boxed = variables.make_boxed_init(
        nn.initializers.zeros,
        (None,),
        shape=(num_experts,),
        dtype=dtype,
        combine=combine,
      )
      return module.variable(COLLECTION, name, boxed)

    return BoundBias(
      module=module,
      # The same in all microbatches; a mean would round.
      bias=make("bias", jnp.float32, rules.MAX),
      seen=make("seen", jnp.uint32, rules.MAX),
      count=make("count", jnp.uint32, rules.SUM),
      rate=self.rate,
    )


def next_bias(
  bias: Float[Array, "*layers experts"],
  tokens: Float[Array, "*layers experts"],
  *,
  rate: float,
) -> Float[Array, "*layers experts"]:
  """Returns the bias after a step with these tokens of each expert."""
  mean = jnp.mean(tokens, axis=-1, keepdims=True)
  return bias + rate * jnp.sign(mean - tokens)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BoundBias:
  """The variables of `SelectionBias` in a layer."""

  module: nn.Module
  bias: nn.Variable
  seen: nn.Variable
  count: nn.Variable
  rate: float

  def value(self) -> Float[Array, " experts"]:
    """Returns the bias of this step."""
    last = (self.count.value - self.seen.value).astype(jnp.float32)
    return next_bias(self.bias.value, last, rate=self.rate)

  def record(self, count: Float[Array, " experts"]) -> None:
    """Adds the tokens of a training step, if the collection is mutable."""
    module = self.module
    if module.is_mutable_collection(COLLECTION) and (
      not module.is_initializing()
    ):
      before = self.count.value
      self.bias.value = self.value()
      self.seen.value = before
      self.count.value = before + count.astype(jnp.uint32)


@dataclasses.dataclass(frozen=True)
class FixedBias:
  """A bias of the selection that training keeps, as of a published model.

  It is the parameter `selection_bias` [E] of the router, has no gradient and no
  weight decay, and starts at 0.
  """

  def read(self, module: nn.Module, num_experts: int) -> "BoundFixedBias":
    """Creates the parameter of a layer in a compact method."""
    init = logical.partitioned(
      nn.initializers.zeros, (None,), regularized=False
    )
    value = module.param("selection_bias", init, (num_experts,), jnp.float32)
    return BoundFixedBias(value)


@dataclasses.dataclass(frozen=True)
class BoundFixedBias:
  """The parameter of `FixedBias` in a layer."""

  parameter: jax.Array

  def value(self) -> Float[Array, " experts"]:
    """Returns the bias, without a gradient."""
    return jax.lax.stop_gradient(self.parameter)

  def record(self, count: Float[Array, " experts"]) -> None:
    """Does nothing, as no step changes the bias."""
    del count

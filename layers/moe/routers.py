"""Routers that choose the best experts of each token.

  logits  = x @ kernel + bias                       (float32)
  scores  = softmax(logits), or sigmoid(logits)
  choices = the k largest scores; of equal ones the first

Gradients flow through the scores and their normalization, not through the
choice. `pax_routers` has those in which tokens compete.
"""

from collections.abc import Callable
import dataclasses
from typing import ClassVar, Final

from flax import linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from paxon.layers import activations, initializers, precision
from paxon.layers.moe import balance as balance_lib
from paxon.layers.moe import routing as routing_lib
from paxon.sharding import axes, checks, logical

# The random stream of jitter and of sampled choices.
STREAM: Final = "routing"

_default_init = initializers.lecun(in_axes=(0,), out_axes=(1,))


class Logits(nn.Module):
  """The logits of a router, in at least float32.

  Attributes:
    use_bias: Whether there is a bias.
    cap: Soft-caps the logits to `(-cap, cap)`; `None` does not.
    jitter: In training, tokens are multiplied by uniform noise from `1 -
      jitter` to `1 + jitter`.
    kernel_init: Initializer of the kernel [D,E].
    bias_init: Initializer of the bias.
  """

  use_bias: bool = False
  cap: float | None = None
  jitter: float = 0.0
  kernel_init: nn.initializers.Initializer = _default_init
  bias_init: nn.initializers.Initializer = nn.initializers.zeros

  def __post_init__(self) -> None:
    super().__post_init__()
    checks.check_positive(self, "cap")
    checks.check_interval(self, "[0, 1)", "jitter")

  @nn.compact
  def __call__(
    self,
    x: Float[Array, "batch length embed"],
    *,
    num_experts: int,
    deterministic: bool = True,
  ) -> Float[Array, "batch length experts"]:
    """Returns the logits of tokens."""
    x = precision.widen(x)
    if self.jitter and not deterministic:
      key = self.make_rng(STREAM)
      low, high = 1 - self.jitter, 1 + self.jitter
      x *= jax.random.uniform(key, x.shape, x.dtype, low, high)
    # Small, and read by all devices: only the width is split.
    kernel = self.param(
      "kernel",
      logical.partitioned(self.kernel_init, (axes.EMBED, None)),
      (x.shape[-1], num_experts),
      jnp.float32,
    )
    # A router in bfloat16, which is the default of matmuls on TPUs, would
    # choose other experts for some percent of tokens.
    logits = jnp.einsum(
      "BTD,DE->BTE",
      x,
      kernel.astype(x.dtype),
      precision=jax.lax.Precision.HIGHEST,
    )
    if self.use_bias:
      init = logical.partitioned(self.bias_init, (None,))
      bias = self.param("bias", init, (num_experts,), jnp.float32)
      logits += bias.astype(x.dtype)[None, None, :]
    return (
      logits if self.cap is None else activations.soft_cap(logits, self.cap)
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertGroups:
  """Limits the choices of a token to experts of a few groups.

  Groups are consecutive experts of equal number. The score of a group is the
  sum of its best experts' scores.

  Attributes:
    num_groups: Number of groups.
    num_chosen: Groups that a token may choose from.
    num_summed: Experts in the score of a group: 1 in DeepSeek-V2, 2 in V3.
  """

  num_groups: int
  num_chosen: int
  num_summed: int = 2

  def __post_init__(self) -> None:
    checks.check_size(self, "num_groups", "num_chosen", "num_summed")
    if self.num_chosen > self.num_groups:
      raise ValueError(
        f"ExpertGroups.num_chosen ({self.num_chosen}) must not be above"
        f" num_groups ({self.num_groups})."
      )

  def limit(self, scores: jax.Array, k: int) -> jax.Array:
    """Returns scores [...,E] with -inf outside of the chosen groups."""
    experts = scores.shape[-1]
    size = experts // self.num_groups
    if experts % self.num_groups or size < self.num_summed:
      raise ValueError(
        f"ExpertGroups.num_groups ({self.num_groups}) must divide the"
        f" {experts} experts into groups of at least num_summed"
        f" ({self.num_summed})."
      )
    if size * self.num_chosen < k:
      raise ValueError(
        f"ExpertGroups lets a token choose from {size * self.num_chosen}"
        f" experts, fewer than its {k} choices."
      )
    grouped = scores.reshape(*scores.shape[:-1], self.num_groups, size)
    best, _ = jax.lax.top_k(grouped, self.num_summed)
    _, chosen = jax.lax.top_k(jnp.sum(best, -1), self.num_chosen)
    is_chosen = jnp.any(
      jax.nn.one_hot(chosen, self.num_groups, dtype=jnp.bool_), axis=-2
    )
    low = jnp.asarray(-jnp.inf, scores.dtype)
    return jnp.where(is_chosen[..., None], grouped, low).reshape(scores.shape)


class Router(nn.Module):
  """Base of routers: `(x, mask, segment_ids) -> Routing`."""

  random_streams: ClassVar[tuple[str, ...]] = (STREAM,)

  def __call__(
    self,
    x: Float[Array, "batch length embed"],
    mask: Bool[Array, "batch length"],
    segment_ids: Int[Array, "batch length"] | None = None,
    *,
    num_experts: int,
    deterministic: bool = True,
  ) -> routing_lib.Routing:
    """Returns the experts of each token.

    Args:
      x: Tokens.
      mask: Tokens that are not padding.
      segment_ids: Segments; `None` is one document.
      num_experts: Number of experts.
      deterministic: Disables jitter and sampling.
    """
    raise NotImplementedError


class TopK(Router):
  """Each token chooses the experts with the highest scores.

  Attributes:
    k: Number of choices.
    score: Scores of logits [...,E]: `jax.nn.softmax`, or `jax.nn.sigmoid`.
    normalize: Whether the weights of a token are divided by their sum, which is
      the softmax over the chosen logits. One choice would have the constant
      weight 1, without a gradient.
    epsilon: Added to the sum.
    scale: Factor of the weights.
    groups: Limits the choices; `None` does not.
    bias: Balances the choices without a loss; `None` does not.
    logits: Submodule of the logits.
  """

  k: int
  score: Callable[[jax.Array], jax.Array] = jax.nn.softmax
  normalize: bool = True
  epsilon: float = 0.0
  scale: float = 1.0
  groups: ExpertGroups | None = None
  bias: balance_lib.SelectionBias | balance_lib.FixedBias | None = None
  logits: nn.Module = Logits()

  def __post_init__(self) -> None:
    super().__post_init__()
    checks.check_size(self, "k")
    checks.check_non_negative(self, "epsilon")
    checks.check_positive(self, "scale")

  @nn.compact
  def __call__(
    self,
    x: Float[Array, "batch length embed"],
    mask: Bool[Array, "batch length"],
    segment_ids: Int[Array, "batch length"] | None = None,
    *,
    num_experts: int,
    deterministic: bool = True,
  ) -> routing_lib.Routing:
    """Returns the experts of each token; see `Router`."""
    del segment_ids
    if self.k > num_experts:
      raise ValueError(
        f"TopK.k ({self.k}) must not be above num_experts ({num_experts})."
      )
    logits = self.logits(
      x, num_experts=num_experts, deterministic=deterministic
    )
    scores = self.score(logits)
    bias = None
    selected_by = jax.lax.stop_gradient(scores)
    if self.bias is not None:
      bias = self.bias.read(self, num_experts)
      selected_by += bias.value().astype(scores.dtype)[None, None, :]

    def choose(scores: jax.Array) -> jax.Array:
      if self.groups is not None:
        scores = self.groups.limit(scores, self.k)
      return jax.lax.top_k(scores, self.k)[1]

    ids = choose_locally(choose, selected_by)
    weights = jnp.take_along_axis(scores, ids, axis=-1)
    if self.normalize:
      weights /= jnp.sum(weights, -1, keepdims=True) + self.epsilon
    if self.scale != 1.0:
      weights *= self.scale
    result = make_routing(ids, weights, scores, logits, mask)
    if bias is not None:
      bias.record(result.counts())
    return result


def choose_locally(
  choose: Callable[[jax.Array], jax.Array], scores: jax.Array
) -> jax.Array:
  """Returns `choose(scores)`, [B,T,E] to [B,T,k], on the tokens of each device.

  The compiler does not partition `top_k`: it would gather the scores of all
  tokens on all devices.
  """
  spec = logical.partition_spec(scores.shape, (axes.BATCH, axes.LENGTH, None))
  if spec is None:
    return choose(scores)
  mapped = jax.shard_map(
    choose, in_specs=(spec,), out_specs=spec, check_vma=False
  )
  return mapped(scores)


def make_routing(
  ids: jax.Array,
  weights: jax.Array,
  scores: jax.Array,
  logits: jax.Array,
  mask: jax.Array,
) -> routing_lib.Routing:
  """Returns a `Routing` in which padding has no experts."""
  kept = mask[..., None]
  return routing_lib.Routing(
    ids=jnp.where(kept, ids, scores.shape[-1]).astype(jnp.int32),
    weights=jnp.where(kept, weights, jnp.zeros((), weights.dtype)),
    scores=scores,
    logits=logits,
    mask=mask,
  )

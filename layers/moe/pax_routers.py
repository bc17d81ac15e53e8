"""Routers of Pax and GShard, and routers in which experts choose tokens.

  TopTwo        GShard's top-2, with a sampled or random second expert
  ExpertChoice  each expert chooses its C best tokens of a group
  DenseTopTwo   all experts with at least the second largest score
  BySentence    decides once for all tokens of a segment

`ExpertChoice` and `BySentence` are not causal: what a token gets depends on
later ones, so a language model trained with them cannot decode.

Letters: B batch, T length, E experts, G groups of S tokens, C capacity.
"""

import enum

from flax import linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from paxon.layers import precision
from paxon.layers.moe import dispatch, routers
from paxon.layers.moe import routing as routing_lib
from paxon.sharding import checks

# Pax's, added to the sum of two weights.
_EPSILON = 1e-9

_ONE_GROUP = routing_lib.TokenGroups()


class SecondExpert(enum.Enum):
  """The second choice of a token."""

  # The second largest score.
  ALL = "all"
  # By a sample of the other experts, with their probabilities.
  SAMPLING = "sampling"
  # The second largest score, with a probability proportional to its weight.
  RANDOM = "random"


class TopTwo(routers.Router):
  """The two experts with the highest probability.

  Lepikhin et al. 2020, https://arxiv.org/abs/2006.16668, algorithm 1. Weights
  are divided by their sum (plus 1e-9) before a capacity drops any. If all other
  probabilities underflow, the second choice is expert 0 with the weight 0,
  which takes a slot, as in Pax.

  Attributes:
    second: Second choice in training; evaluation uses `ALL`.
    threshold: `RANDOM` keeps a second choice with the weight w with probability
      `w / threshold`. GShard's is 0.5; Pax's layer always has 0, which keeps
      all.
    logits: Submodule of the logits.
  """

  second: SecondExpert = SecondExpert.ALL
  threshold: float = 0.5
  logits: nn.Module = routers.Logits()

  def __post_init__(self) -> None:
    super().__post_init__()
    checks.check_non_negative(self, "threshold")

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
    if num_experts < 2:
      raise ValueError(
        f"TopTwo needs at least 2 experts, got num_experts {num_experts}."
      )
    logits = self.logits(
      x, num_experts=num_experts, deterministic=deterministic
    )
    scores = jax.nn.softmax(logits)
    first = jnp.argmax(scores, axis=-1)
    is_first = jax.nn.one_hot(first, num_experts, dtype=scores.dtype)
    others = scores * (1 - is_first)
    second = jnp.argmax(others, axis=-1)
    if self.second is SecondExpert.SAMPLING and not deterministic:
      low = jnp.asarray(-0.7 * jnp.finfo(logits.dtype).max, logits.dtype)
      noise = jax.random.gumbel(
        self.make_rng(routers.STREAM), logits.shape, logits.dtype
      )
      second = jnp.argmax(jnp.where(is_first > 0, low, logits) + noise, axis=-1)
    is_second = jax.nn.one_hot(second, num_experts, dtype=scores.dtype)
    weights = jnp.stack(
      [jnp.sum(scores * is_first, -1), jnp.sum(others * is_second, -1)], -1
    )
    weights /= jnp.sum(weights, -1, keepdims=True) + _EPSILON
    if self.second is SecondExpert.RANDOM and not deterministic:
      drawn = jax.random.uniform(
        self.make_rng(routers.STREAM), second.shape, weights.dtype
      )
      share = weights[..., 1] / max(self.threshold, _EPSILON)
      second = jnp.where(drawn < share, second, num_experts)
      weights = weights.at[..., 1].mul((drawn < share).astype(weights.dtype))
    ids = jnp.stack([first, second], -1)
    return routers.make_routing(ids, weights, scores, logits, mask)


class ExpertChoice(routers.Router):
  """Each expert chooses the C tokens of a group with the highest probability.

  Zhou et al. 2022, https://arxiv.org/abs/2202.09368. The weights are the
  probabilities, not normalized; a token may have no expert, or all. Of equal
  tokens the later one is chosen, as in Pax.

  A token has E choices, the largest weight first and then none for experts that
  did not choose it, so any dispatch with enough room applies;
  `Capacity` needs the same capacity and groups.

  Attributes:
    factor: Mean number of experts of a token.
    minimum: Smallest capacity, as in `dispatch.Capacity`.
    groups: Groups of tokens.
    floor_first: The capacity is `int(S // E * factor)`, and padding competes,
      as in the first version of Pax; otherwise the rule of `Capacity`.
    logits: Submodule of the logits.
  """

  factor: float
  minimum: int = 1
  groups: routing_lib.TokenGroups = _ONE_GROUP
  floor_first: bool = False
  logits: nn.Module = routers.Logits()

  def __post_init__(self) -> None:
    super().__post_init__()
    checks.check_positive(self, "factor")
    checks.check_size(self, "minimum")

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
    logits = self.logits(
      x, num_experts=num_experts, deterministic=deterministic
    )
    scores = jax.nn.softmax(logits)
    competing = scores
    if not self.floor_first:
      competing *= mask[..., None].astype(scores.dtype)
    grouped = jax.lax.stop_gradient(self.groups.split(competing))
    S = grouped.shape[1]
    size = self._capacity(S, num_experts)
    # The last of equal tokens: `top_k` would choose the first.
    _, chosen = jax.lax.top_k(jnp.swapaxes(grouped, 1, 2)[..., ::-1], size)
    is_chosen = jnp.any(
      jax.nn.one_hot(S - 1 - chosen, S, dtype=jnp.bool_), axis=2
    )
    is_chosen = jnp.swapaxes(is_chosen, 1, 2).reshape(scores.shape)
    weights = jnp.where(is_chosen, scores, 0)
    ids, weights = _sort_by_weight(is_chosen, weights)
    # Padding that the first version of Pax chooses has no output.
    return routers.make_routing(ids, weights, scores, logits, mask)

  def _capacity(self, size: int, num_experts: int) -> int:
    if self.floor_first:
      capacity = int(size // num_experts * self.factor)
    else:
      capacity = dispatch.capacity(
        size, num_experts, factor=self.factor, minimum=self.minimum
      )
    if not 0 < capacity <= size:
      raise ValueError(
        f"ExpertChoice.factor ({self.factor}) gives each of {num_experts}"
        f" experts a capacity of {capacity} of the {size} tokens of a group; it"
        " must be from 1 to all."
      )
    return capacity


def _sort_by_weight(
  is_chosen: jax.Array, weights: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Returns ids and weights [B,T,E] with the largest weight first.

  Of equal weights the first expert precedes. Experts that are not chosen are
  last.
  """
  num_experts = weights.shape[-1]
  key = jnp.where(is_chosen, -jax.lax.stop_gradient(weights), jnp.inf)
  order = jnp.argsort(key, axis=-1, stable=True)
  ids = jnp.where(
    jnp.take_along_axis(is_chosen, order, axis=-1), order, num_experts
  )
  return ids, jnp.take_along_axis(weights, order, axis=-1)


class DenseTopTwo(routers.Router):
  """All experts whose probability is at least the second largest value.

  If two experts tie for the first place, a token has three. The weights are
  divided by their sum (plus 1e-12), as in Pax.

  Attributes:
    logits: Submodule of the logits.
  """

  logits: nn.Module = routers.Logits()

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
    logits = self.logits(
      x, num_experts=num_experts, deterministic=deterministic
    )
    scores = jax.nn.softmax(logits)
    fixed = jax.lax.stop_gradient(scores)
    highest = jnp.max(fixed, -1, keepdims=True)
    below = jnp.where(fixed < highest, fixed, 0)
    is_chosen = fixed >= jnp.max(below, -1, keepdims=True)
    weights = jnp.where(is_chosen, scores, 0)
    weights /= jnp.sum(weights, -1, keepdims=True) + 1e-12
    ids, weights = _sort_by_weight(is_chosen, weights)
    return routers.make_routing(ids, weights, scores, logits, mask)


class BySentence(routers.Router):
  """Routes all tokens of a segment by the mean of their inputs.

  Attributes:
    router: Router of the means, in which each token counts with its segment.
  """

  router: nn.Module

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
    if segment_ids is None:
      segment_ids = mask.astype(jnp.int32)
    same = segment_ids[:, :, None] == segment_ids[:, None, :]
    # The mean of long segments needs float32, as the logits do.
    x = precision.widen(x)
    same = (same & mask[:, None, :] & mask[:, :, None]).astype(x.dtype)
    total = jnp.einsum(
      "BTS,BSD->BTD", same, x, precision=jax.lax.Precision.HIGHEST
    )
    count = jnp.maximum(jnp.sum(same, -1, keepdims=True), 1)
    return self.router(
      total / count,
      mask,
      segment_ids,
      num_experts=num_experts,
      deterministic=deterministic,
    )

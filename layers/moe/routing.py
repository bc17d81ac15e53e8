"""The decision of a router: experts and weights of each token.

Letters: B batch, T length, k choices of a token, E experts, G groups of S
tokens.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from paxon.sharding import checks


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Routing:
  """Experts and weights of each token.

  Attributes:
    ids: The experts of each token in the order of its choices [B,T,k];
      `num_experts` for none. No choices of a token are equal, except to none.
    weights: Factor of the output of each expert [B,T,k], in at least float32.
    scores: Scores of all experts [B,T,E], with gradient, such as probabilities.
    logits: Input of the scores [B,T,E].
    mask: Tokens that are not padding [B,T].
  """

  ids: Int[Array, "batch length choices"]
  weights: Float[Array, "batch length choices"]
  scores: Float[Array, "batch length experts"]
  logits: Float[Array, "batch length experts"]
  mask: Bool[Array, "batch length"]

  @property
  def num_experts(self) -> int:
    """The number of experts, E."""
    return self.scores.shape[-1]

  def counts(self) -> Float[Array, " experts"]:
    """Returns the number of tokens of each expert, before any capacity."""
    return jnp.sum(one_hot(self.ids, self.num_experts), axis=(0, 1, 2))


def one_hot(
  ids: Int[Array, "*shape"], num_experts: int
) -> Float[Array, "*shape experts"]:
  """Returns ones at the experts, zeros for none, in float32."""
  return jax.nn.one_hot(ids, num_experts, dtype=jnp.float32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenGroups:
  """Groups of consecutive tokens with a capacity, or a loss, of their own.

  Tokens of a batch are counted sequence by sequence, so with the default, one
  group, the result of a token depends on all sequences.

  Attributes:
    num_groups: Number of groups G, which divides the number of tokens.
    min_size: Groups are at least this large: if T tokens give less, there are
      `ceil(T / min_size)` groups. `None` does not change `num_groups`.
  """

  num_groups: int = 1
  min_size: int | None = None

  def __post_init__(self) -> None:
    checks.check_size(self, "num_groups", "min_size")

  def count(self, num_tokens: int) -> int:
    """Returns the number of groups of a batch.

    Raises:
      ValueError: It does not divide the tokens.
    """
    groups = self.num_groups
    if self.min_size is not None and num_tokens / groups < self.min_size:
      groups = -(-num_tokens // self.min_size)
    if num_tokens % groups:
      raise ValueError(
        f"TokenGroups cuts {num_tokens} tokens into {groups} groups, which must"
        " be of equal size; change num_groups, min_size or the batch."
      )
    return groups

  def split(self, x: Array) -> Array:
    """Returns [B,T,...] as [G,S,...]."""
    tokens = x.shape[0] * x.shape[1]
    groups = self.count(tokens)
    return x.reshape(groups, tokens // groups, *x.shape[2:])

"""Multi-token prediction: modules that predict tokens after the next one.

DeepSeek-V3 (DeepSeek-AI 2024, https://arxiv.org/abs/2412.19437, section 2.2).
Module k of D reads the states of the one before it, and the token k places
ahead:

  x_k = stack_k(project([norm(embed(token[t + k])); norm(x_{k-1}[t])]))
  loss += weight / D * cross_entropy(head(norm(x_k)), target[t + k])

The embedding and the head are those of the model, and `x_0` is the input of its
head. Positions whose token `t + k` belongs to another document, or is padding,
predict nothing. The modules are computed in training only.

Letters: B batch, T length, D embed.
"""

from collections.abc import Callable, Sequence
import dataclasses
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from paxon.layers import linear, token_context
from paxon.layers.losses import softmax_loss
from paxon.layers.models import language_model
from paxon.sharding import axes, checks

# `(ids, context) -> x`, [B,T] to [B,T,D].
Embed = Callable[[jax.Array, token_context.TokenContext], jax.Array]
# `(x, targets, weights) -> losses`.
TokenLoss = Callable[
  [jax.Array, jax.Array, jax.Array], softmax_loss.SoftmaxLossOutput
]


class PredictionModule(nn.Module):
  """Predicts the token one place after those of the module before it.

  Attributes:
    hidden_norm: Normalizes the states of the module before.
    embedding_norm: Normalizes the embedded tokens.
    projection: Maps [B,T,2D], embedded tokens first, to [B,T,D].
    stack: Called like that of `DecoderLm`, usually of one layer.
    final_norm: Normalizes the input of the head.
  """

  hidden_norm: nn.Module
  embedding_norm: nn.Module
  projection: nn.Module
  stack: nn.Module
  final_norm: nn.Module

  def __call__(
    self,
    x: Float[Array, "batch length embed"],
    embedded: Float[Array, "batch length embed"],
    context: token_context.TokenContext,
  ) -> tuple[
    Float[Array, "batch length embed"], Float[Array, "batch length embed"]
  ]:
    """Returns the states for the next module, and the input of the head."""
    parts: Any = (self.embedding_norm(embedded), self.hidden_norm(x))
    x = self.projection(jnp.concatenate(parts, axis=-1)).astype(x.dtype)
    x = self.stack(x, context)
    return x, self.final_norm(x)


class MultiTokenPrediction(nn.Module):
  """Further predictions of a `DecoderLm`, and their loss.

  Attributes:
    depths: One module for each further token.
    weight: Factor of the mean of their losses; DeepSeek-V3 had 0.3, and 0.1 in
      the last third of training.
  """

  depths: Sequence[PredictionModule]
  weight: float = 0.3

  def __post_init__(self) -> None:
    self.depths = tuple(self.depths)
    super().__post_init__()
    if not self.depths:
      raise ValueError("MultiTokenPrediction.depths must not be empty.")
    checks.check_non_negative(self, "weight")

  def __call__(
    self,
    x: Float[Array, "batch length embed"],
    inputs: Int[Array, "batch length"],
    context: token_context.TokenContext,
    *,
    embed: Embed,
  ) -> list[tuple[jax.Array, jax.Array]]:
    """Returns the input of the head [B,T,D] and valid positions of each module.

    Args:
      x: Input of the head of the model.
      inputs: Token ids.
      context: Positions and segments of the tokens.
      embed: Embeds tokens at their positions.
    """
    positions, segment_ids = context.positions, context.segment_ids
    assert positions is not None
    assert segment_ids is not None
    found = []
    for k, module in enumerate(self.depths, 1):
      same = (segment_ids != 0) & (_ahead(segment_ids, k) == segment_ids)
      ahead = dataclasses.replace(context, positions=_ahead(positions, k))
      embedded = embed(_ahead(inputs, k), ahead)
      # The others are the last of their document, so none of it attends to
      # them; as padding, they reach no expert.
      documents = jnp.where(same, segment_ids, 0)
      x, output = module(
        x, embedded, dataclasses.replace(context, segment_ids=documents)
      )
      found.append((output, same))
    return found

  def loss(
    self,
    x: Float[Array, "batch length embed"],
    batch: language_model.Batch,
    *,
    embed: Embed,
    token_loss: TokenLoss,
    deterministic: bool = False,
  ) -> tuple[jax.Array, dict[str, language_model.Weighted]]:
    """Returns the weighted sum of the losses, and metrics.

    The sum is over tokens, to be divided by the weight of the loss of the
    model, as in the report. Metrics `multi_token_log_pplx_<k>` are pairs of a
    sum and a weight, of each module.

    Raises:
      ValueError: The batch has a prefix with attention in both directions.
    """
    if "prefix" in batch:
      raise ValueError(
        "MultiTokenPrediction does not support a prefix: its tokens would"
        " attend to those that they predict."
      )
    context = token_context.TokenContext.from_batch(
      batch, deterministic=deterministic
    )
    outputs = self(x, batch["inputs"], context, embed=embed)
    weights = language_model.token_weights(batch)
    total, metrics = jnp.zeros((), jnp.float32), {}
    for k, (output, same) in enumerate(outputs, 1):
      own = jnp.where(same, _ahead(weights, k), 0)
      result = token_loss(output, _ahead(batch["targets"], k), own)
      total += self.weight / len(self.depths) * result.loss
      nll = jnp.sum(result.token_nll * own.astype(result.token_nll.dtype))
      metrics[f"multi_token_log_pplx_{k}"] = nll, jnp.sum(own)
    return total, metrics


def compose(
  make: Callable[..., Any],
  *,
  embed_dim: int,
  norm: Callable[[], Any],
  stack: Callable[[], Any],
  num_depths: int = 1,
  **fields: Any,
) -> Any:
  """Returns a `MultiTokenPrediction` built by `make(cls, **fields)`.

  `norm` and `stack` return a new one in each call, because modules must not be
  shared.
  """
  depths = [
    make(
      PredictionModule,
      hidden_norm=norm(),
      embedding_norm=norm(),
      projection=make(
        linear.Linear,
        output_dim=embed_dim,
        use_bias=False,
        kernel_axes=(axes.EMBED, None),
      ),
      stack=stack(),
      final_norm=norm(),
    )
    for _ in range(num_depths)
  ]
  return make(MultiTokenPrediction, depths=depths, **fields)


def _ahead(x: jax.Array, places: int) -> jax.Array:
  """Returns the value so many places later of [B,T]; zero after the last."""
  return jnp.pad(x[:, places:], ((0, 0), (0, min(places, x.shape[1]))))

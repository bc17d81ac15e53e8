"""The loss of a softmax head that never holds all logits at once.

For each token, with the terms of `softmax_cross_entropy`,

  loss = (1 - a) * nll + a * uniform_nll + b * log_normalizer ** 2

- `a` is label smoothing with uniform mass over the whole vocabulary, the target
  included (Szegedy et al. 2015, https://arxiv.org/abs/1512.00567, section 7),
  or, with `smooth_others_only`, over the other V - 1 ids (Pax's full softmax),
  which is the same with a share of `a * V / (V - 1)`;
- `tempered` replaces the first two terms by the bi-tempered loss of the
  smoothed targets (`bi_tempered_loss`);
- `b` weighs the z-loss, which keeps log Z near zero (PaLM, Chowdhery et al.
  2022, https://arxiv.org/abs/2204.02311, section 5, with b = 1e-4).

The head runs on chunks of positions, [batch, chunk, vocab] logits at a time,
each device on its own shard of the batch and of the positions.
The gradient is computed in the same pass: the loss is a sum of token losses
with known weights, so the gradient of each chunk's logits is known as soon as
they are, and the backward pass only scales it. See docs/design/0008-loss.md.

Letters: B batch, T length, D embed, V vocab.
"""

from collections.abc import Callable, Mapping
import dataclasses
import functools
from typing import Any, NamedTuple, TypeAlias

import jax
from jax import custom_derivatives
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from paxon.layers import precision
from paxon.layers.losses import cross_entropy
from paxon.sharding import axes, checks, logical, shards
from paxon.sharding import variables as variables_lib

Variables: TypeAlias = Mapping[str, Any]
# `(variables, x [B,T,D]) -> logits [B,T,V]`, each position by itself.
LogitsFn: TypeAlias = Callable[[Variables, jax.Array], jax.Array]

_SUMMED = ("params", variables_lib.SHARED)


class _Tokens(NamedTuple):
  """Values of each token, [B,T]."""

  loss: jax.Array
  nll: jax.Array
  z_loss: jax.Array
  hits: jax.Array


class SoftmaxLossOutput(NamedTuple):
  """The loss of a batch and its terms.

  Attributes:
    loss: Weighted sum of the token losses; the one differentiable output.
    token_nll: Negative log likelihood of each target, in nats, without
      smoothing and z-loss.
    token_z_loss: Weight of the z-loss times the square of log Z.
    token_hits: Whether the target has the largest logit.
  """

  loss: Float[Array, ""]
  token_nll: Float[Array, "batch length"]
  token_z_loss: Float[Array, "batch length"]
  token_hits: Bool[Array, "batch length"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SoftmaxLoss:
  """Cross entropy with label smoothing and z-loss, chunk by chunk.

  Attributes:
    label_smoothing: Share of the uniform distribution in the target
      distribution, in `[0, 1)`.
    z_loss_weight: Factor of the squared log normalizer.
    chunk_length: Maximum number of positions of each sequence whose logits a
      device holds at a time; `None` takes all. A chunk should have some
      thousand tokens on each device, or adding up the gradient of the head
      takes longer than computing it.
    smooth_others_only: Whether the target is excluded from the mass that label
      smoothing spreads.
    tempered: Maps logits and target probabilities to losses, in the place of
      the cross entropy: `BiTemperedLoss(first=0.8, second=1.2)` of
      `bi_tempered_loss`, or another function without parameters or state.
      `None` is the cross entropy.
    smooth_in_evaluation: Whether the loss that evaluation reports is smoothed.
      The negative log likelihood never is.
  """

  label_smoothing: float = 0.0
  z_loss_weight: float = 0.0
  chunk_length: int | None = 512
  smooth_others_only: bool = False
  tempered: Callable[[jax.Array, jax.Array], jax.Array] | None = None
  smooth_in_evaluation: bool = True

  def __post_init__(self) -> None:
    checks.check_interval(self, "[0, 1)", "label_smoothing")
    checks.check_non_negative(self, "z_loss_weight")
    checks.check_size(self, "chunk_length")

  def __call__(
    self,
    logits_fn: LogitsFn,
    variables: Variables,
    x: Float[Array, "batch length embed"],
    *,
    targets: Int[Array, "batch length"],
    weights: Float[Array, "batch length"],
  ) -> SoftmaxLossOutput:
    """Returns the loss of the tokens that follow the states `x`.

    Args:
      logits_fn: The head; must not close over traced arrays.
      variables: Collections of the head. Gradients of chunks are added up, so
        only those of `params` are differentiable.
      x: Hidden states.
      targets: Ids; those outside of the vocabulary give NaN.
      weights: Weight of each token in the sum; zero for padding.
    """
    weights = weights.astype(precision.at_least_float32(weights.dtype))
    if variables_lib.GHOST in variables:
      return self._differentiable(logits_fn, variables, x, targets, weights)
    return _loss(self, logits_fn, variables, x, targets, weights)

  def to_evaluation(self) -> "SoftmaxLoss":
    """Returns the loss as evaluation computes it."""
    if self.smooth_in_evaluation:
      return self
    return dataclasses.replace(self, label_smoothing=0.0)

  def num_chunks(self, length: int) -> int:
    """Returns the number of chunks of sequences of this length."""
    return -(-length // (self.chunk_length or length))

  def _differentiable(
    self,
    logits_fn: LogitsFn,
    variables: Variables,
    x: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
  ) -> SoftmaxLossOutput:
    """Returns the loss of a head with ghost norms, from all logits at once.

    Gradients that are computed with the loss would be those of each example.
    """
    chunks = self.num_chunks(x.shape[1])
    (split,) = logical.num_shards((axes.LENGTH,))
    if chunks > 1 or split > 1:
      raise ValueError(
        f"The ghost norm of the head requires the logits of {x.shape[1]}"
        f" positions at once, got {chunks} chunks on {split} shards; set"
        " SoftmaxLoss.chunk_length=None and split no sequences, or clip with"
        " Clipping.PER_EXAMPLE."
      )
    total, tokens = self._chunk(logits_fn, variables, x, targets, weights)
    tokens = jax.lax.stop_gradient(tokens)
    return SoftmaxLossOutput(total, tokens.nll, tokens.z_loss, tokens.hits)

  def _chunk(
    self,
    logits_fn: LogitsFn,
    variables: Variables,
    x: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
  ) -> tuple[jax.Array, _Tokens]:
    """Returns the weighted sum, and the values of each token."""
    logits = logits_fn(variables, x)
    terms = cross_entropy.softmax_terms(logits, targets)
    loss, share = terms.nll, self.label_smoothing
    if self.smooth_others_only:
      share *= logits.shape[-1] / (logits.shape[-1] - 1)
    if share:
      loss = (1 - share) * terms.nll + share * terms.uniform_nll
    if self.tempered is not None:
      vocab = logits.shape[-1]
      sure = jax.nn.one_hot(targets, vocab, dtype=loss.dtype)
      smooth = (1 - share) * sure + share / vocab
      # Ids outside of the vocabulary are NaN here, too.
      invalid = jnp.isnan(terms.nll)
      loss = jnp.where(invalid, terms.nll, self.tempered(logits, smooth))
    z_loss = self.z_loss_weight * jnp.square(terms.log_normalizer)
    if self.z_loss_weight:
      loss += z_loss
    total = jnp.sum(loss * weights.astype(loss.dtype))
    return total, _Tokens(loss, terms.nll, z_loss, terms.hits)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _loss(
  loss: SoftmaxLoss,
  logits_fn: LogitsFn,
  variables: Variables,
  x: jax.Array,
  targets: jax.Array,
  weights: jax.Array,
) -> SoftmaxLossOutput:
  def one_chunk(carry: None, chunk: tuple[jax.Array, ...]) -> Any:
    return carry, loss._chunk(logits_fn, variables, *chunk)[1]

  _, tokens = _over_chunks(one_chunk, None, (x, targets, weights), loss)
  return _output(tokens, weights)


def _forward(
  loss: SoftmaxLoss,
  logits_fn: LogitsFn,
  variables: Variables,
  x: Any,
  targets: Any,
  weights: Any,
) -> tuple[SoftmaxLossOutput, tuple[Any, jax.Array, jax.Array]]:
  """The loss and, for a cotangent of one, its gradients."""
  arrays = x.value, targets.value, weights.value
  merge, params = _split_differentiated(variables)

  def one_chunk(
    total: list[jax.Array], chunk: tuple[jax.Array, ...]
  ) -> tuple[list[jax.Array], Any]:
    x, targets, weights = chunk

    def objective(params: list[jax.Array], x: jax.Array) -> Any:
      return loss._chunk(logits_fn, merge(params), x, targets, weights)

    value, gradient, tokens = jax.vjp(objective, params, x, has_aux=True)
    params_bar, x_bar = gradient(jnp.ones_like(value))
    total = [
      t + g.astype(t.dtype) for t, g in zip(total, params_bar, strict=True)
    ]
    return total, (x_bar, tokens)

  # At least float32, because there may be many chunks.
  zeros = [
    jnp.zeros(p.shape, precision.at_least_float32(p.dtype)) for p in params
  ]
  total, (x_bar, tokens) = _over_chunks(one_chunk, zeros, arrays, loss)
  total = [t.astype(p.dtype) for t, p in zip(total, params, strict=True)]
  residuals = merge(total, gradient=True), x_bar, tokens.loss
  return _output(tokens, weights.value), residuals


def _backward(
  loss: SoftmaxLoss,
  logits_fn: LogitsFn,
  residuals: tuple[Any, jax.Array, jax.Array],
  cotangents: SoftmaxLossOutput,
) -> tuple[Any, ...]:
  del loss, logits_fn
  for name, cotangent in zip(
    SoftmaxLossOutput._fields[1:], cotangents[1:], strict=True
  ):
    if not isinstance(cotangent, custom_derivatives.SymbolicZero):
      raise ValueError(
        f"SoftmaxLossOutput.{name} was differentiated; only `loss` has a "
        "gradient. Change the weights of the loss, or take the cross entropy "
        "of logits (layers.softmax_cross_entropy)."
      )
  factor = cotangents.loss
  if isinstance(factor, custom_derivatives.SymbolicZero):
    return None, None, None, None

  def scale(gradient: jax.Array) -> jax.Array:
    wide = precision.widen(gradient)
    return (wide * factor.astype(wide.dtype)).astype(gradient.dtype)

  variables_bar, x_bar, weights_bar = jax.tree.map(scale, residuals)
  return variables_bar, x_bar, None, weights_bar


_loss.defvjp(_forward, _backward, symbolic_zeros=True)


def _split_differentiated(
  variables: Any,
) -> tuple[Callable[..., Any], list[jax.Array]]:
  """Returns a function that merges values into the variables, and the values.

  `merge(values, gradient=False)` puts values with a gradient among those
  without one, or among `None` for a tree of gradients. `variables` is a tree of
  `CustomVJPPrimal`.
  """
  leaves, treedef = jax.tree.flatten_with_path(
    variables,
    is_leaf=lambda x: isinstance(x, custom_derivatives.CustomVJPPrimal),
  )
  for path, leaf in leaves:
    if leaf.perturbed and path[0].key not in _SUMMED:
      raise ValueError(
        f"The head's variable {jax.tree_util.keystr(path)} has a gradient, but "
        f"is in none of the collections {_SUMMED}: gradients of chunks of the "
        "loss cannot be added up."
      )

  def merge(values: list[jax.Array], *, gradient: bool = False) -> Any:
    given = iter(values)
    return treedef.unflatten(
      next(given) if p.perturbed else None if gradient else p.value
      for _, p in leaves
    )

  return merge, [leaf.value for _, leaf in leaves if leaf.perturbed]


def _output(tokens: _Tokens, weights: jax.Array) -> SoftmaxLossOutput:
  """Returns the sum over the whole batch, and the values of each token."""
  total = jnp.sum(tokens.loss * weights.astype(tokens.loss.dtype))
  return SoftmaxLossOutput(total, tokens.nll, tokens.z_loss, tokens.hits)


def _over_chunks(
  fn: Callable[..., Any], carry: Any, arrays: Any, loss: SoftmaxLoss
) -> tuple[Any, Any]:
  """Runs `fn`, `(carry, chunk) -> (carry, outputs)`, over chunks of positions.

  Sequences [B,T,...] that do not divide into chunks are padded with zeros,
  which have weight zero. Returns the sum over all chunks and devices, and the
  outputs joined to [B,T,...].
  """

  # Each device has separate sums until the end: reduced over devices in each
  # step, the head's gradient would be sent once per chunk.
  def run(arrays: Any) -> tuple[Any, Any]:
    length = jax.tree.leaves(arrays)[0].shape[1]
    chunks = loss.num_chunks(length)
    if chunks == 1:
      return fn(carry, arrays)
    parts = jax.tree.map(lambda x: _cut_chunks(x, chunks), arrays)
    total, outputs = jax.lax.scan(fn, carry, parts)
    return total, jax.tree.map(lambda x: _join_chunks(x, length), outputs)

  return shards.map_shards(run, arrays, axes=(axes.BATCH, axes.LENGTH))


def _cut_chunks(x: jax.Array, chunks: int) -> jax.Array:
  """Returns [chunks, B, T of a chunk, ...]."""
  widths = [(0, 0)] * x.ndim
  widths[1] = (0, -x.shape[1] % chunks)
  x = jnp.pad(x, widths)
  return jnp.moveaxis(x.reshape(x.shape[0], chunks, -1, *x.shape[2:]), 1, 0)


def _join_chunks(x: jax.Array, length: int) -> jax.Array:
  """Undoes `_cut_chunks`."""
  x = jnp.moveaxis(x, 0, 1)
  return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :length]

"""N-grammer: embeddings of pairs of neighboring tokens (Roy et al. 2022).

https://arxiv.org/abs/2207.06366. Each token has an id for each of N heads: its
token id, or that of a quantizer of its embedding. For head n (from 0), with V
unigram ids, K buckets and the n-th prime p above K:

  pair   = id + V * (id of the token before, 0 for the first of a document)
  bucket = ((n + 1) * pair + n + 1) mod p mod K
  output = [norm(x)[: H - E], norm(table[n, bucket])]        (concat)
           norm(x) + norm(table[n, bucket])                  (E = H)

Both norms are layer norms of the features of a head, with parameters of their
own for each. Decoding keeps the ids of the last token. `BregmanNgrammer` has
coefficients c of each head in the place of ids, and mixes the rows of a table
by how they agree with those of the token before, zero for the first:

  weight[v] = sum_{i,j} c[i] * correlation[i,j,v] * c_before[j]
  output    = as above, with sum_v weight[v] * table[n, v]

Letters: B batch, T length, N heads, H features of a head, E of an n-gram,
C components, V entries of a table.
"""

import dataclasses

from flax import linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from paxon.layers import precision, token_context
from paxon.layers.losses import auxiliary_loss
from paxon.layers.quantizers import bregman
from paxon.layers.recurrent import decoding_state
from paxon.sharding import axes, checks, logical

_IDS = "ids"
_COEFFICIENTS = "coefficients"
# Numbers below 2^32 are multiplied in parts of this many bits.
_PART = 10


class Ngrammer(nn.Module, auxiliary_loss.Source):
  """Adds embeddings of bigrams to embedded tokens.

  Attributes:
    num_heads: Heads, N; divides the features of a token.
    num_ids: Number of token ids; `None` with a quantizer.
    quantizer: A quantizer of embedded tokens with N groups, whose ids are used
      in the place of token ids (VQ n-grammer), such as
      `EmaVectorQuantizer(256, num_heads, beta=0.0, decay=0.999,
      normalize_input=False, normalize_codebook=False)`. Its loss is an
      auxiliary loss. `None` uses token ids.
    ngram_vocab_size: Buckets of a head, K.
    ngram_dim: Features of an n-gram, E.
    concat: Whether n-grams replace the last E features of a head; otherwise
      they are added to all.
    epsilon: Added to variances.
    table_init: Initializer of the tables [N,K,E].
    param_dtype: Dtype in which the parameters are stored.
  """

  num_heads: int
  num_ids: int | None = None
  quantizer: nn.Module | None = None
  ngram_vocab_size: int = 768 * 256
  ngram_dim: int = 8
  concat: bool = True
  epsilon: float = 1e-6
  table_init: nn.initializers.Initializer = nn.initializers.normal(1.0)
  param_dtype: DTypeLike = jnp.float32

  def __post_init__(self) -> None:
    super().__post_init__()
    checks.check_size(self, "num_heads", "num_ids", "ngram_dim")
    checks.check_positive(self, "epsilon")
    if (self.num_ids is None) == (self.quantizer is None):
      raise ValueError(
        "Ngrammer needs one of num_ids (pairs of token ids) and quantizer"
        f" (pairs of codes), got num_ids={self.num_ids} and"
        f" quantizer={self.quantizer}."
      )
    # Sums of two numbers below the primes must fit in 32 bits.
    if not 1 < self.ngram_vocab_size <= 2**20:
      raise ValueError(
        "Ngrammer.ngram_vocab_size must be between 2 and 2**20, got"
        f" {self.ngram_vocab_size}."
      )

  @nn.compact
  def __call__(
    self,
    ids: Int[Array, "batch length"] | None,
    x: Float[Array, "batch length embed"],
    context: token_context.TokenContext = token_context.ONE_DOCUMENT,
  ) -> Float[Array, "batch length embed"]:
    """Returns the tokens with n-grams, zero where they are padding.

    Args:
      ids: Token ids; `None` is possible with a quantizer.
      x: Embedded tokens; may be NaN where they are padding.
      context: Their segments; a prefix is ignored, because n-grams are of
        earlier tokens in any case.

    Raises:
      ValueError: Sizes do not fit.
    """
    _find_head_size(self, x.shape[-1])
    shape = decoding_state.Shape((self.num_heads,), jnp.int32, (None,))
    tokens, stored = decoding_state.begin(
      self, x, dataclasses.replace(context, prefix=None), {_IDS: shape}
    )
    x = jnp.where(tokens.is_real[..., None], x, jnp.zeros((), x.dtype))
    if self.quantizer is None:
      if ids is None:
        raise ValueError(
          "Ngrammer with num_ids needs token ids, which the context of"
          " attention lacks; set a quantizer there."
        )
      heads = jnp.broadcast_to(ids[..., None], (*ids.shape, self.num_heads))
      num_ids = self.num_ids
    else:
      found = self.quantizer(
        x, tokens.is_real, deterministic=context.deterministic
      )
      auxiliary_loss.add(self, "ngram_codes", found.loss)
      heads, num_ids = found.ids, self.quantizer.num_codes
      if heads.shape[-1] != self.num_heads:
        raise ValueError(
          f"Ngrammer.quantizer gives {heads.shape[-1]} ids of a token, but"
          f" num_heads is {self.num_heads}."
        )
    assert num_ids is not None
    heads = heads.astype(jnp.int32)
    before, last = _find_neighbors(
      heads, tokens, None if stored is None else stored[_IDS]
    )
    if stored is not None:
      decoding_state.store(self, tokens, {_IDS: last}, {_IDS: shape})
    buckets = find_buckets(
      heads, before, num_ids=num_ids, num_buckets=self.ngram_vocab_size
    )
    table = self.param(
      "table",
      logical.partitioned(self.table_init, (None, axes.VOCAB, None)),
      (self.num_heads, self.ngram_vocab_size, self.ngram_dim),
      self.param_dtype,
    )
    numbers = jnp.arange(self.num_heads, dtype=jnp.int32)[None, None]
    return _join(self, x, table[numbers, buckets], tokens)


class BregmanNgrammer(nn.Module):
  """Adds embeddings of pairs of coefficients of Bregman PCA.

  Attributes:
    num_heads: Heads, N; divides the features of a token.
    pca: Gives the coefficients of a head, such as `BregmanPca`; each head has a
      copy, `pca_0` and so on. No gradients flow into it.
    ngram_vocab_size: Entries of the table of a head, V. The memory is C * C * V
      for each head.
    ngram_dim: Features of an n-gram, E.
    concat: As in `Ngrammer`.
    epsilon: Added to variances.
    correlation_init: Initializer of the correlations [N,C,C,V].
    table_init: Initializer of the tables [N,V,E].
    param_dtype: Dtype in which the parameters are stored.
  """

  num_heads: int
  pca: bregman.BregmanPca
  ngram_vocab_size: int
  ngram_dim: int = 8
  concat: bool = True
  epsilon: float = 1e-6
  correlation_init: nn.initializers.Initializer = nn.initializers.normal(1.0)
  table_init: nn.initializers.Initializer = nn.initializers.normal(1.0)
  param_dtype: DTypeLike = jnp.float32

  def __post_init__(self) -> None:
    super().__post_init__()
    checks.check_size(self, "num_heads", "ngram_vocab_size", "ngram_dim")
    checks.check_positive(self, "epsilon")

  @nn.compact
  def __call__(
    self,
    ids: Int[Array, "batch length"] | None,
    x: Float[Array, "batch length embed"],
    context: token_context.TokenContext = token_context.ONE_DOCUMENT,
  ) -> Float[Array, "batch length embed"]:
    """Returns the tokens with n-grams, zero where they are padding.

    Args:
      ids: Not used.
      x: Embedded tokens; may be NaN where they are padding.
      context: As for `Ngrammer`. Training updates the components.

    Raises:
      ValueError: Sizes do not fit.
    """
    del ids
    size, count = _find_head_size(self, x.shape[-1]), self.pca.num_components
    dtype = precision.at_least_float32(x.dtype)
    shape = decoding_state.Shape((self.num_heads * count,), dtype, (None,))
    tokens, stored = decoding_state.begin(
      self, x, dataclasses.replace(context, prefix=None), {_COEFFICIENTS: shape}
    )
    x = jnp.where(tokens.is_real[..., None], x, jnp.zeros((), x.dtype))
    heads = x.astype(dtype).reshape(*x.shape[:-1], self.num_heads, size)
    coefficients = self._find_coefficients(
      heads, tokens.is_real, deterministic=context.deterministic
    )
    before, last = _find_neighbors(
      coefficients.reshape(*x.shape[:2], -1),
      tokens,
      None if stored is None else stored[_COEFFICIENTS],
    )
    if stored is not None:
      decoding_state.store(
        self, tokens, {_COEFFICIENTS: last}, {_COEFFICIENTS: shape}
      )
    correlation, table = (
      self.param(
        name,
        logical.partitioned(init, names),
        (self.num_heads, *sizes),
        self.param_dtype,
      ).astype(dtype)
      for name, init, names, sizes in (
        (
          "correlation",
          self.correlation_init,
          (None, None, None, axes.VOCAB),
          (count, count, self.ngram_vocab_size),
        ),
        (
          "table",
          self.table_init,
          (None, axes.VOCAB, None),
          (self.ngram_vocab_size, self.ngram_dim),
        ),
      )
    )
    pairs = (
      coefficients[..., None] * before.reshape(coefficients.shape)[..., None, :]
    )
    weights = jnp.einsum("BTNCD,NCDV->BTNV", pairs, correlation)
    ngrams = jnp.einsum("BTNV,NVE->BTNE", weights, table)
    return _join(self, x, ngrams, tokens)

  def _find_coefficients(
    self, heads: jax.Array, is_real: jax.Array, *, deterministic: bool
  ) -> jax.Array:
    """Returns the coefficients [B,T,N,C] of heads [B,T,N,H]."""
    found = [
      self.pca.clone(parent=self, name=f"pca_{n}")(
        heads[:, :, n], is_real, deterministic=deterministic
      )
      for n in range(self.num_heads)
    ]
    return jnp.stack(found, axis=2)


_Layer = Ngrammer | BregmanNgrammer


def _find_head_size(layer: _Layer, features: int) -> int:
  """Returns the features of a head."""
  name, size = type(layer).__name__, features // layer.num_heads
  if features % layer.num_heads:
    raise ValueError(
      f"{name}.num_heads ({layer.num_heads}) must divide the {features}"
      " features of a token."
    )
  width = layer.ngram_dim
  if width > size or (not layer.concat and width != size):
    least = "at most" if layer.concat else "without concat"
    raise ValueError(
      f"{name}.ngram_dim must be {least} the {size} features of a head, got"
      f" {width}."
    )
  return size


def _join(
  layer: _Layer, x: jax.Array, ngrams: jax.Array, tokens: decoding_state.Tokens
) -> jax.Array:
  """Returns the tokens [B,T,N*H] with n-grams [B,T,N,E]."""
  ngrams = _normalize(layer, "ngram_norm", ngrams)
  y = x.reshape(*x.shape[:-1], layer.num_heads, -1)
  y = _normalize(layer, "token_norm", y)
  if layer.concat:
    kept = y[..., : y.shape[-1] - layer.ngram_dim]
    y = jnp.concatenate([kept, ngrams.astype(kept.dtype)], axis=-1)
  else:
    y += ngrams.astype(y.dtype)
  y = y.reshape(x.shape).astype(x.dtype)
  return jnp.where(tokens.is_real[..., None], y, jnp.zeros((), y.dtype))


def _normalize(layer: _Layer, name: str, x: jax.Array) -> jax.Array:
  """Returns the layer norm of heads [B,T,N,features]."""
  shape = x.shape[2:]
  scale, bias = (
    layer.param(
      f"{name}_{kind}",
      logical.partitioned(init, (None, None), regularized=False),
      shape,
      layer.param_dtype,
    )
    for kind, init in (
      ("scale", nn.initializers.ones),
      ("bias", nn.initializers.zeros),
    )
  )
  x = precision.widen(x)
  x -= jnp.mean(x, axis=-1, keepdims=True)
  variance = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
  x *= jax.lax.rsqrt(variance + layer.epsilon)
  scale, bias = (v.astype(x.dtype)[None, None] for v in (scale, bias))
  return x * scale + bias


def find_buckets(
  ids: Int[Array, "batch length heads"],
  before: Int[Array, "batch length heads"],
  *,
  num_ids: int,
  num_buckets: int,
) -> Int[Array, "batch length heads"]:
  """Returns the buckets of pairs of ids, exactly, int32.

  Args:
    ids: Ids of tokens, each below `num_ids`.
    before: Ids of the tokens they are paired with.
    num_ids: Number of ids, V. Pairs may exceed 32 bits.
    num_buckets: Number of buckets, K.
  """
  found = []
  for n, prime in enumerate(find_primes(num_buckets, ids.shape[-1])):
    first, second = (x[..., n].astype(jnp.uint32) for x in (ids, before))
    pair = _times(second, num_ids % prime, prime) + first % jnp.uint32(prime)
    hashed = _times(pair % jnp.uint32(prime), n + 1, prime) + jnp.uint32(n + 1)
    found.append(hashed % jnp.uint32(prime) % jnp.uint32(num_buckets))
  return jnp.stack(found, axis=-1).astype(jnp.int32)


def find_primes(above: int, count: int) -> list[int]:
  """Returns the first primes larger than a number."""
  primes, candidate = [], above + 1
  while len(primes) < count:
    if all(candidate % d for d in range(2, int(candidate**0.5) + 1)):
      primes.append(candidate)
    candidate += 1
  return primes


def _times(x: jax.Array, factor: int, prime: int) -> jax.Array:
  """Returns x * factor mod prime of uint32 numbers; prime is below 2^21."""
  total = jnp.zeros_like(x)
  for shift in range(0, 32, _PART):
    part = (x >> shift) & jnp.uint32(2**_PART - 1)
    of_part = jnp.uint32((factor << shift) % prime)
    total = (total + part * of_part % jnp.uint32(prime)) % jnp.uint32(prime)
  return total


def _find_neighbors(
  ids: jax.Array, tokens: decoding_state.Tokens, stored: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
  """Returns ids [B,T,N] of the tokens before, and [B,N] of the last token.

  Coefficients [B,T,N*C] likewise.
  """
  batch, length, heads = ids.shape
  if stored is None:
    stored = jnp.zeros((batch, heads), ids.dtype)
  every = jnp.concatenate([stored[:, None], ids], axis=1)
  none = jnp.zeros((batch, 1), jnp.int32)
  runs = jnp.concatenate([none, tokens.runs], axis=1)
  number = jnp.arange(1, length + 1, dtype=jnp.int32)[None]
  latest = jax.lax.cummax(jnp.where(tokens.is_real, number, 0), axis=1)
  index = jnp.concatenate([none, latest[:, :-1]], axis=1)
  is_same = jnp.take_along_axis(runs, index, axis=1) == tokens.runs
  before = jnp.take_along_axis(every, index[..., None], axis=1)
  before = jnp.where(is_same[..., None], before, jnp.zeros((), ids.dtype))
  last = jnp.take_along_axis(every, latest[:, -1:, None], axis=1)[:, 0]
  return before, last

"""Vector quantization: the nearest entries of codebooks.

The D features are split into G groups, each with a codebook of K entries
(van den Oord et al. 2017, https://arxiv.org/abs/1711.00937):

  id[g]    = argmin_k |z[g] - codebook[g,k]|**2
  value[g] = codebook[g, id[g]]
  loss     = sum_g |sg(z[g]) - value[g]|**2 + beta * |z[g] - sg(value[g])|**2

with sg for no gradient. `EmaVectorQuantizer` moves the entries to the mean of
the vectors that chose them instead of the first term. `ResidualQuantizer`
quantizes what the quantizers before it have left. `RandomProjectionQuantizer`
has ids as targets only, of random features that are never trained (BEST-RQ).

Einsum letters: B batch, T length, G groups, D features of a group, K codes.
"""

from collections.abc import Sequence
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from paxon.layers.norms import batch_norm
from paxon.layers.quantizers import codes
from paxon.sharding import axes, checks, logical, variables

# Added to squared norms before a root.
_EPSILON = 1e-12


class _Quantizer(nn.Module):
  """Base of quantizers with codebooks, whose fields they share."""

  def __post_init__(self) -> None:
    super().__post_init__()
    checks.check_size(self, "num_codes", "num_groups")
    checks.check_non_negative(self, "beta")


class VectorQuantizer(_Quantizer):
  """Quantizes by codebooks that gradients train.

  Attributes:
    num_codes: Entries of each codebook.
    num_groups: Groups of features, each with its codebook.
    beta: Weight of the commitment to the chosen entries.
    normalize_input: Whether vectors are scaled to length one first.
    normalize_codebook: Whether entries are.
    codebook_init: Initializer of the codebooks [G,K,D].
    param_dtype: Dtype in which they are stored.
  """

  num_codes: int
  num_groups: int = 1
  beta: float = 0.25
  normalize_input: bool = True
  normalize_codebook: bool = True
  codebook_init: nn.initializers.Initializer = nn.initializers.normal(1.0)
  param_dtype: DTypeLike = jnp.float32

  @nn.compact
  def __call__(
    self,
    x: Float[Array, "batch length embed"],
    mask: Bool[Array, "batch length"] | None = None,
    *,
    deterministic: bool = True,
  ) -> codes.Codes:
    """Returns the codes of the vectors, also in training.

    Args:
      x: Vectors; may be NaN where they are masked.
      mask: True for real positions; `None` is all.
      deterministic: Ignored.

    Raises:
      ValueError: `num_groups` does not divide the features.
    """
    del deterministic
    z = _split(self, x, mask)
    book = self.param(
      "codebook",
      logical.partitioned(self.codebook_init, (None, None, axes.EMBED)),
      (self.num_groups, self.num_codes, z.shape[-1]),
      self.param_dtype,
    ).astype(z.dtype)
    if self.normalize_codebook:
      book = _normalize(book)
    ids, values = _nearest(z, book)
    losses = _squares(jax.lax.stop_gradient(z) - values)
    losses += self.beta * _squares(z - jax.lax.stop_gradient(values))
    return _join(z, values, ids, losses, mask)


class EmaVectorQuantizer(_Quantizer):
  """Quantizes by codebooks of moving averages (appendix A.1 of the paper).

  With n[k] vectors that chose an entry, and their sum s[k],

    count = decay * count + (1 - decay) * n
    total = decay * total + (1 - decay) * s
    entry = total / count', count' = (count + e) / (sum + K * e) * sum

  and `sum` that of all counts; e keeps entries that nothing chooses.

  Attributes:
    decay: Decay of the averages.
    epsilon: e.

  The other attributes are those of `VectorQuantizer`; entries are normalized
  where they are used.
  """

  num_codes: int
  num_groups: int = 1
  beta: float = 0.25
  normalize_input: bool = True
  normalize_codebook: bool = True
  decay: float = 0.99
  epsilon: float = 1e-5
  codebook_init: nn.initializers.Initializer = nn.initializers.normal(1.0)

  def __post_init__(self) -> None:
    super().__post_init__()
    checks.check_interval(self, "[0, 1]", "decay")
    checks.check_positive(self, "epsilon")

  @nn.compact
  def __call__(
    self,
    x: Float[Array, "batch length embed"],
    mask: Bool[Array, "batch length"] | None = None,
    *,
    deterministic: bool = True,
  ) -> codes.Codes:
    """Returns the codes of the vectors; see `VectorQuantizer`.

    Training (not `deterministic`) updates the averages of the entries after
    they were used, if their collection `batch_stats` is mutable.
    """
    z = _split(self, x, mask)
    shape = self.num_groups, self.num_codes
    total: Any = self.variable(
      batch_norm.COLLECTION,
      "total",
      variables.make_boxed_init(
        self.codebook_init,
        (None, None, axes.EMBED),
        shape=(*shape, z.shape[-1]),
        dtype=jnp.float32,
      ),
    )
    count: Any = self.variable(
      batch_norm.COLLECTION,
      "count",
      variables.make_boxed_init(
        nn.initializers.ones, (None, None), shape=shape, dtype=jnp.float32
      ),
    )
    whole = jnp.sum(count.value, axis=1, keepdims=True)
    smooth = (count.value + self.epsilon) * whole
    smooth /= whole + self.num_codes * self.epsilon
    book = (total.value / smooth[..., None]).astype(z.dtype)
    if self.normalize_codebook:
      book = _normalize(book)
    ids, values = _nearest(z, book)
    can_update = self.is_mutable_collection(batch_norm.COLLECTION)
    if can_update and not (deterministic or self.is_initializing()):
      chosen = jax.nn.one_hot(ids, self.num_codes, dtype=jnp.float32)
      if mask is not None:
        chosen = jnp.where(mask[..., None, None], chosen, 0)
      fixed = jax.lax.stop_gradient(z).astype(jnp.float32)
      sums = jnp.einsum("BTGK,BTGD->GKD", chosen, fixed)
      new, old = 1 - self.decay, self.decay
      count.value = old * count.value + new * jnp.sum(chosen, axis=(0, 1))
      total.value = old * total.value + new * sums
    losses = self.beta * _squares(z - jax.lax.stop_gradient(values))
    return _join(z, values, ids, losses, mask)


_NORMALIZING = (VectorQuantizer, EmaVectorQuantizer)


class ResidualQuantizer(nn.Module):
  """Quantizes what the quantizers before have left (Zeghidour et al. 2021).

  https://arxiv.org/abs/2107.03312. The value is the sum of all values, the
  loss that of all losses, and the ids are side by side.

  Attributes:
    quantizers: Called one after another; they must not normalize vectors.
  """

  quantizers: Sequence[nn.Module]

  def __post_init__(self) -> None:
    self.quantizers = tuple(self.quantizers)
    super().__post_init__()
    if not self.quantizers:
      raise ValueError("ResidualQuantizer.quantizers must not be empty.")
    for i, each in enumerate(self.quantizers):
      if isinstance(each, _NORMALIZING) and each.normalize_input:
        raise ValueError(
          f"ResidualQuantizer.quantizers[{i}].normalize_input is True, but the"
          " length of a residual is part of it; set it to False."
        )

  def __call__(
    self,
    x: Float[Array, "batch length embed"],
    mask: Bool[Array, "batch length"] | None = None,
    *,
    deterministic: bool = True,
  ) -> codes.Codes:
    """Returns the codes of the vectors; see `VectorQuantizer`."""
    rest = z = codes.clear(x, mask)
    found = []
    for quantizer in self.quantizers:
      code = quantizer(rest, mask, deterministic=deterministic)
      rest -= jax.lax.stop_gradient(code.values)
      found.append(code)
    values = sum((code.values for code in found), start=jnp.zeros_like(z))
    loss = sum((code.loss for code in found), start=jnp.zeros(()))
    ids = jnp.concatenate([code.ids for code in found], axis=-1)
    # Not the sum of their gradients, which would count the input repeatedly.
    values = codes.straight_through(z, jax.lax.stop_gradient(values))
    if mask is not None:
      values = jnp.where(mask[..., None], values, 0)
    return codes.Codes(values, ids, loss)


class RandomProjectionQuantizer(nn.Module):
  """Ids of random projections, as targets (Chiu et al. 2022, BEST-RQ).

  https://arxiv.org/abs/2202.01855. Projection and codebook are drawn once and
  get no gradients and no updates.

  Attributes:
    num_codes: Entries of each codebook.
    projection_dim: Features after the projection, of each group.
    num_groups: Number of projections and codebooks.
    normalize: Whether projections and entries are scaled to length one, as in
      the paper.
  """

  num_codes: int
  projection_dim: int = 16
  num_groups: int = 1
  normalize: bool = True

  def __post_init__(self) -> None:
    super().__post_init__()
    checks.check_size(self, "num_codes", "projection_dim", "num_groups")

  @nn.compact
  def __call__(
    self,
    x: Float[Array, "batch length embed"],
    mask: Bool[Array, "batch length"] | None = None,
    *,
    deterministic: bool = True,
  ) -> codes.Codes:
    """Returns ids; the values are the codes side by side, without gradients.

    Stack frames before (`stacked_frames`), so that an id is that of several.
    """
    del deterministic
    z = jax.lax.stop_gradient(codes.clear(x, mask))
    sizes = self.num_groups, self.projection_dim
    projection = self._make_fixed(
      "projection",
      nn.initializers.xavier_uniform(),
      (axes.EMBED, None),
      (z.shape[-1], sizes[0] * sizes[1]),
    )
    book = self._make_fixed(
      "codebook",
      nn.initializers.normal(1.0),
      (None, None, None),
      (self.num_groups, self.num_codes, self.projection_dim),
    )
    z = (z @ projection.astype(z.dtype)).reshape(*z.shape[:-1], *sizes)
    book = book.astype(z.dtype)
    if self.normalize:
      z, book = _normalize(z), _normalize(book)
    ids, values = _nearest(z, book)
    joined = _join(values, values, ids, jnp.zeros(z.shape[:2], z.dtype), mask)
    return jax.lax.stop_gradient(joined)

  def _make_fixed(
    self,
    name: str,
    init: nn.initializers.Initializer,
    names: tuple[str | None, ...],
    shape: tuple[int, ...],
  ) -> jax.Array:
    boxed = variables.make_boxed_init(
      init, names, shape=shape, dtype=jnp.float32
    )
    variable: Any = self.variable(batch_norm.COLLECTION, name, boxed)
    return variable.value


def _normalize(x: jax.Array) -> jax.Array:
  # XLA:CPU takes longer for arrays with axes of size one.
  y = x.reshape(*(n for n in x.shape[:-1] if n > 1), x.shape[-1])
  squares = jnp.sum(y * y, axis=-1, keepdims=True)
  return (y * jax.lax.rsqrt(squares + _EPSILON)).reshape(x.shape)


def _squares(x: jax.Array) -> jax.Array:
  """Returns the sum of squares of groups and features, [B,T]."""
  x = x.reshape(*x.shape[:2], -1)
  return jnp.sum(x * x, axis=-1)


def _nearest(z: jax.Array, book: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns ids [B,T,G] and entries [B,T,G,D] of codebooks [G,K,D]."""
  highest = jax.lax.Precision.HIGHEST
  # Half of |z - entry|**2 without |z|**2, which is the same for all entries.
  norms = 0.5 * jnp.sum(book * book, axis=-1)
  if len(book) == 1:
    # XLA:CPU computes a batch of one matmul, and its gathers, slower.
    flat = z.reshape(-1, z.shape[-1])
    scores = jnp.matmul(flat, book[0].T, precision=highest)
    ids = _find_least(norms - scores)
    return ids.reshape(z.shape[:3]), book[0][ids].reshape(z.shape)
  scores = jnp.einsum("BTGD,GKD->BTGK", z, book, precision=highest)
  ids = _find_least(norms[None, None] - scores)
  groups = jnp.arange(len(book), dtype=jnp.int32)[None, None]
  return ids, book[groups, ids]


def _find_least(x: jax.Array) -> jax.Array:
  return jnp.argmin(jax.lax.stop_gradient(x), axis=-1).astype(jnp.int32)


def _split(
  quantizer: VectorQuantizer | EmaVectorQuantizer,
  x: jax.Array,
  mask: jax.Array | None,
) -> jax.Array:
  """Returns the features by group [B,T,G,D], normalized if asked."""
  if x.shape[-1] % quantizer.num_groups:
    raise ValueError(
      f"{type(quantizer).__name__}.num_groups ({quantizer.num_groups}) must"
      f" divide the {x.shape[-1]} features."
    )
  x = codes.clear(x, mask)
  split = x.reshape(*x.shape[:-1], quantizer.num_groups, -1)
  return _normalize(split) if quantizer.normalize_input else split


def _join(
  z: jax.Array,
  values: jax.Array,
  ids: jax.Array,
  losses: jax.Array,
  mask: jax.Array | None,
) -> codes.Codes:
  """Returns codes of groups [B,T,G,D]."""
  flat = (*z.shape[:2], -1)
  return codes.finish(z.reshape(flat), values.reshape(flat), ids, losses, mask)

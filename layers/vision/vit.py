"""Vision transformers: patches, their positions, and the encoder.

Dosovitskiy et al. 2021, https://arxiv.org/abs/2010.11929:

  x = patches(image) @ kernel + bias + positions      [B, N, D]
  x = norm(stack([tokens_before, x, tokens_after]))

and the state of the first class token, or the mean of the tokens, goes to the
head. The blocks of the stack are those of language models, with a mask that is
not causal (`MaskRules(causal=False)`).
"""

from collections.abc import Callable

from flax import linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from paxon.layers import token_context
from paxon.layers.vision import pooling
from paxon.sharding import axes, checks, logical


def to_patches(
  images: Float[Array, "batch height width channels"], patch_size: int
) -> Float[Array, "batch patches values"]:
  """Returns square patches row by row, the values of each by (row, column, c).

  Raises:
    ValueError: The size of the images is not a multiple of `patch_size`.
  """
  batch, height, width, channels = images.shape
  if height % patch_size or width % patch_size:
    raise ValueError(
      f"The height and width of images ({height} x {width}) must be multiples"
      f" of patch_size ({patch_size})."
    )
  rows, columns = height // patch_size, width // patch_size
  split = images.reshape(batch, rows, patch_size, columns, patch_size, channels)
  return split.transpose(0, 1, 3, 2, 4, 5).reshape(batch, rows * columns, -1)


def to_images(
  patches: Float[Array, "batch patches values"],
  patch_size: int,
  *,
  height: int,
  width: int,
) -> Float[Array, "batch height width channels"]:
  """Returns the images of patches; the inverse of `to_patches`."""
  rows, columns = height // patch_size, width // patch_size
  split = patches.reshape(
    patches.shape[0], rows, columns, patch_size, patch_size, -1
  )
  joined = split.transpose(0, 1, 3, 2, 4, 5)
  return joined.reshape(patches.shape[0], height, width, -1)


class PatchPositions(nn.Module):
  """Learned positions of a grid of patches, interpolated to other grids.

  Attributes:
    height: Number of patches vertically, in training.
    width: Number of patches horizontally.
    tokens_before: Number of tokens before the patches that have positions, too;
      these are not interpolated.
    table_init: Initializer of the table [tokens_before + height * width, D].
    dtype: Dtype of the result. `None` takes that of the table.
    param_dtype: Dtype in which the table is stored.
  """

  height: int
  width: int
  tokens_before: int = 0
  table_init: nn.initializers.Initializer = nn.initializers.normal(0.02)
  dtype: DTypeLike | None = None
  param_dtype: DTypeLike = jnp.float32

  def __post_init__(self) -> None:
    super().__post_init__()
    checks.check_size(self, "height", "width")
    checks.check_non_negative(self, "tokens_before")

  @nn.compact
  def __call__(
    self, rows: int, columns: int, embed_dim: int
  ) -> Float[Array, "positions embed"]:
    """Returns positions: of the tokens before, then of each patch row by row.

    Another grid than the learned one is interpolated bilinearly; a smaller one
    with antialiasing (`jax.image.resize`), as in Praxis.
    """
    table = self.param(
      "table",
      logical.partitioned(self.table_init, (None, axes.EMBED)),
      (self.tokens_before + self.height * self.width, embed_dim),
      self.param_dtype,
    )
    if (rows, columns) != (self.height, self.width):
      before, grid = jnp.split(table, [self.tokens_before])
      grid = grid.reshape(self.height, self.width, embed_dim)
      grid = jax.image.resize(grid, (rows, columns, embed_dim), "bilinear")
      grid = grid.reshape(rows * columns, embed_dim)
      table = jax.lax.concatenate((before, grid), 0)
    return table if self.dtype is None else table.astype(self.dtype)


class VisionTransformer(nn.Module):
  """Encodes images, or sequences of patches, as [B,D] or [B,N,D].

  Attributes:
    patch_size: Height and width of a patch in pixels.
    projection: Maps the values of a patch to the embedding [B,N,D], such as
      `linear.Linear` with `kernel_axes=(None, "embed")`.
    positions: Positions of the patches, or of all tokens before and patches
      (`PatchPositions.tokens_before`); `None` adds none.
    stack: Blocks with attention that is not causal.
    final_norm: Norm of the tokens after the stack; `None` for none.
    pooling: Maps tokens [B,N,D] to [B,D], such as `pool_first`, `pool_mean`
      or `AttentionPooling`; `None` returns all tokens.
    output: Maps the pooled features [B,D], such as `linear.Linear` with `tanh`
      (Praxis's default); `None` is the identity.
    tokens_before: Number of learned tokens before the patches.
    tokens_after: Number of learned tokens after them, without positions.
    token_init: Initializer of these tokens.
    embedding_norm: Norm of the input of the stack, as in CLIP; `None` for none.
    dropout: Applied to the patches with their positions; `None` disables it.
    output_dropout: Applied to the result; `None` disables it.
  """

  patch_size: int
  projection: nn.Module
  positions: nn.Module | None
  stack: nn.Module
  final_norm: nn.Module | None
  pooling: Callable[[jax.Array], jax.Array] | None = None
  output: nn.Module | None = None
  tokens_before: int = 0
  tokens_after: int = 0
  token_init: nn.initializers.Initializer = nn.initializers.zeros
  embedding_norm: nn.Module | None = None
  dropout: nn.Module | None = None
  output_dropout: nn.Module | None = None
  param_dtype: DTypeLike = jnp.float32

  def __post_init__(self) -> None:
    super().__post_init__()
    checks.check_size(self, "patch_size")
    checks.check_non_negative(self, "tokens_before", "tokens_after")

  @nn.compact
  def __call__(
    self,
    images: Float[Array, "batch height width channels"],
    *,
    deterministic: bool = True,
  ) -> Float[Array, "batch *tokens embed"]:
    """Returns the encoded images.

    Raises:
      ValueError: The size of the images is not a multiple of `patch_size`, or
        there are positions of other tokens.
    """
    x = self.projection(to_patches(images, self.patch_size))
    before = None
    if self.positions is not None:
      rows, columns = (n // self.patch_size for n in images.shape[1:3])
      positions = self.positions(rows, columns, x.shape[-1]).astype(x.dtype)
      extra = len(positions) - rows * columns
      if extra not in (0, self.tokens_before):
        raise ValueError(
          "VisionTransformer.positions must be those of the patches, or also of"
          f" the tokens before them ({self.tokens_before}); there are {extra}"
          f" more than the {rows * columns} patches."
        )
      before, positions = jnp.split(positions[None], [extra], axis=1)
      x += positions
    if self.dropout is not None:
      x = self.dropout(x, deterministic=deterministic)
    x = self._with_tokens(x, before)
    if self.embedding_norm is not None:
      x = self.embedding_norm(x)
    x = logical.constrain(x, (axes.BATCH, axes.LENGTH, axes.ACTIVATION_EMBED))
    context = token_context.TokenContext(deterministic=deterministic)
    x = self.stack(x, context)
    if self.final_norm is not None:
      x = self.final_norm(x)
    if self.pooling is not None:
      x = self.pooling(x)
    if self.output is not None:
      x = self.output(x)
    if self.output_dropout is not None:
      x = self.output_dropout(x, deterministic=deterministic)
    return x

  def _with_tokens(self, x: jax.Array, before: jax.Array | None) -> jax.Array:
    """Returns patches between tokens; `before` are positions of the first."""
    parts = [x]
    for name, number in (
      ("tokens_before", self.tokens_before),
      ("tokens_after", self.tokens_after),
    ):
      if not number:
        continue
      tokens = self.param(
        f"learned_{name}",
        logical.partitioned(self.token_init, (None, axes.EMBED)),
        (number, x.shape[-1]),
        self.param_dtype,
      ).astype(x.dtype)[None]
      if name == "tokens_before" and before is not None and before.size:
        tokens += before
      tokens = jnp.broadcast_to(tokens, (x.shape[0], *tokens.shape[1:]))
      parts.insert(0 if name == "tokens_before" else len(parts), tokens)
    return jax.lax.concatenate(parts, 1)


class AttentionPooling(nn.Module):
  """A learned query that attends to all tokens, then a feed-forward layer.

    y = attention(query, x);  y + feed_forward(norm(y))

  Zhai et al. 2022, https://arxiv.org/abs/2106.04560, and SigLIP.

  Attributes:
    attention: Called with the query [B,1,D] and the tokens, such as
      `cross_attention.CrossAttention`.
    norm: Norm before the feed-forward layer; `None` for none.
    feed_forward: Maps [B,1,D] to [B,1,D]; `None` leaves it and the norm out.
    query_init: Initializer of the query [1,D].
  """

  attention: nn.Module
  norm: nn.Module | None = None
  feed_forward: nn.Module | None = None
  query_init: nn.initializers.Initializer = nn.initializers.normal(0.02)
  param_dtype: DTypeLike = jnp.float32

  @nn.compact
  def __call__(
    self, x: Float[Array, "batch tokens embed"]
  ) -> Float[Array, "batch embed"]:
    """Returns the pooled tokens."""
    query = self.param(
      "query",
      logical.partitioned(self.query_init, (None, axes.EMBED)),
      (1, x.shape[-1]),
      self.param_dtype,
    ).astype(x.dtype)
    query = jnp.broadcast_to(query[None], (len(x), *query.shape))
    y = self.attention(query, x)
    if self.feed_forward is not None:
      y += self.feed_forward(y if self.norm is None else self.norm(y))
    return y[:, 0]


def pool_first(
  x: Float[Array, "batch tokens embed"],
) -> Float[Array, "batch embed"]:
  """Returns the first token, which is a class token if there is one."""
  return x[:, 0]


def pool_mean(
  x: Float[Array, "batch tokens embed"],
) -> Float[Array, "batch embed"]:
  """Returns the mean of all tokens."""
  return pooling.pool_all(x, axes=(1,))


def pool_max(
  x: Float[Array, "batch tokens embed"],
) -> Float[Array, "batch embed"]:
  """Returns the maximum of all tokens."""
  return pooling.pool_all(x, axes=(1,), reduction=pooling.Reduction.MAX)

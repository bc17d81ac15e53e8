"""Token embedding: a table of one vector per id, also usable as a tied head.

The lookup is a function `(table [V,D], ids [...]) -> [...,D]` in a field, so it
can be replaced, for example to clip per-example gradients. Ids outside of the
table give NaN.

Einsum letters: B batch, T length, D embed, V vocab.
"""

from collections.abc import Callable
from typing import ClassVar

from flax import linen as nn
from flax.linen import dtypes
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from paxon.layers import precision
from paxon.quantization import matmuls
from paxon.sharding import axes, checks, logical

# Standard deviation embed_dim ** -0.5: vectors have length one, and tied logits
# of a normalized input have variance one.
_default_init = nn.initializers.variance_scaling(
  1.0, "fan_in", "normal", out_axis=0
)


# `(table [V,D], ids [...]) -> rows [...,D]`.
Lookup = Callable[[jax.Array, jax.Array], jax.Array]


def gather(
  table: Float[Array, "vocab embed"], ids: Int[Array, "*batch"]
) -> Float[Array, "*batch embed"]:
  """Returns the rows of `ids`; negative ids count from the end."""
  return jnp.take(table, ids, axis=0, mode="fill")


def one_hot(
  table: Float[Array, "vocab embed"], ids: Int[Array, "*batch"]
) -> Float[Array, "*batch embed"]:
  """Returns the rows of `ids` by a matmul with one-hot vectors.

  A table sharded over the vocabulary is not moved, and the gradient is a matmul
  instead of a scatter. Faster for small tables.
  """
  size = table.shape[0]
  ids = jnp.where(ids < 0, ids + size, ids)
  # Invalid ids have a one-hot vector of zeros; make their rows NaN instead.
  valid = (ids >= 0) & (ids < size)
  chosen = jax.nn.one_hot(ids, size, dtype=table.dtype)
  # Each sum has one term, so the result is exact if float32 is not rounded, as
  # accelerators do by default.
  is_wide = table.dtype.itemsize > 2
  precision = jax.lax.Precision.HIGHEST if is_wide else None
  rows = jnp.einsum("...V,VD->...D", chosen, table, precision=precision)
  return jnp.where(valid[..., None], rows, jnp.nan)


class Embedding(nn.Module):
  """Maps ids to vectors, and vectors back to logits.

  Attributes:
    vocab_size: Number of ids. An id outside of `[-vocab_size, vocab_size)`
      gives NaN, so that a wrong tokenizer does not go unnoticed.
    embed_dim: Width of a vector.
    input_scale: Factor on looked-up vectors, not on `attend`. Tied models often
      use `embed_dim ** 0.5`, so that entries have variance one.
    embedding_init: Initializer of the table; by default normal with standard
      deviation `embed_dim ** -0.5`.
    dtype: Dtype of the computation. `None` takes that of the table.
    param_dtype: Dtype in which the table is stored.
    einsum: The contraction of `attend`.
    use_bias: Whether `attend` adds a learned value to each logit.
    bias_init: Initializer of the bias.
    attend_scale: Factor on the input of `attend`; T5 and GShard use
      `embed_dim ** -0.5`.
    lookup: `gather` or `one_hot`.
  """

  vocab_size: int
  embed_dim: int
  input_scale: float = 1.0
  embedding_init: nn.initializers.Initializer = _default_init
  dtype: DTypeLike | None = None
  param_dtype: DTypeLike = jnp.float32
  einsum: Callable[..., jax.Array] = precision.wide_einsum
  use_bias: bool = False
  bias_init: nn.initializers.Initializer = nn.initializers.zeros
  attend_scale: float = 1.0
  lookup: Lookup = gather

  quantization_roles: ClassVar[tuple[str, ...]] = (
    matmuls.EMBEDDING,
    matmuls.HEAD,
  )

  def __post_init__(self) -> None:
    super().__post_init__()
    checks.check_size(self, "vocab_size", "embed_dim")

  def setup(self) -> None:
    """Makes the parameters, for both methods."""
    self.table = self.param(
      "table",
      logical.partitioned(
        self.embedding_init,
        (axes.VOCAB, axes.EMBED),
        read_dtype=self.dtype,
      ),
      (self.vocab_size, self.embed_dim),
      self.param_dtype,
    )
    if self.use_bias:
      init = logical.partitioned(self.bias_init, (axes.VOCAB,))
      self.bias = self.param("bias", init, (self.vocab_size,), self.param_dtype)

  def __call__(
    self, ids: Int[Array, "batch length"]
  ) -> Float[Array, "batch length embed"]:
    """Returns the vectors of `ids`."""
    (table,) = dtypes.promote_dtype(self.table, dtype=self.dtype)
    # Gathered over D, like any weight before its use: each device then looks up
    # its own ids. A table sharded over D would give an output that is sharded
    # unlike the batch, and XLA would replicate all of it to reshard.
    table = logical.constrain(table, (axes.VOCAB, axes.ACTIVATION_EMBED))
    x = logical.gather_lengths(self.lookup(table, ids)) * self.input_scale
    # Constrained so that the sharding of the table does not spread to the
    # residual stream.
    return logical.constrain(
      x, (axes.BATCH, axes.ACTIVATION_LENGTH, axes.ACTIVATION_EMBED)
    )

  def attend(
    self, x: Float[Array, "batch length embed"]
  ) -> Float[Array, "batch length vocab"]:
    """Returns logits, `x @ table.T`, in at least float32."""
    x, table = dtypes.promote_dtype(x, self.table, dtype=self.dtype)
    x = logical.gather_lengths(x)
    if self.attend_scale != 1:
      x *= self.attend_scale
    logits = matmuls.call(
      self.einsum,
      "attend",
      "BTD,VD->BTV",
      x,
      table,
      # float32 because the loss subtracts logits of similar size.
      preferred_element_type=precision.at_least_float32(x.dtype),
    )
    if self.use_bias:
      logits += self.bias.astype(logits.dtype)[None, None, :]
    # Constrained so that the largest tensor of the model is sharded over V.
    return logical.constrain(
      logits, (axes.BATCH, axes.LENGTH, axes.ACTIVATION_VOCAB)
    )

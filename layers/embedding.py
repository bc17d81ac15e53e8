"""Token embedding: a table of one row per id, also usable as output head.

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

from paxon.layers import lookup as lookup_lib
from paxon.layers import precision, wide_einsum
from paxon.quantization import products, roles
from paxon.sharding import axes, checks, logical

# Standard deviation embed_dim ** -0.5: rows have length one, and tied logits
# of a normalized input have variance one.
_default_init = nn.initializers.variance_scaling(
  1.0, "fan_in", "normal", out_axis=0
)


class Embedding(nn.Module):
  """Maps ids to vectors, and vectors back to logits.

  Attributes:
    vocab_size: Number of rows. An id outside of `[-vocab_size, vocab_size)`
      gives a row of NaN, so that a wrong tokenizer cannot pass unseen.
    embed_dim: Width of a row.
    input_scale: Factor on looked-up rows, not on `attend`. Tied models often
      use `embed_dim ** 0.5`, which makes the entries of size one.
    embedding_init: Initializer of the table; by default normal with standard
      deviation `embed_dim ** -0.5`.
    dtype: Dtype of the computation. `None` takes that of the table.
    param_dtype: Dtype in which the table is stored.
    einsum: The contraction of `attend`.
    use_bias: Whether `attend` adds a learned value to each logit.
    bias_init: Initializer of the bias.
    attend_scale: Factor on what `attend` is given, before the product. T5 and
      GShard shrink it by `embed_dim ** -0.5`.
    lookup: How rows are looked up (`layers.lookup`).
  """

  vocab_size: int
  embed_dim: int
  input_scale: float = 1.0
  embedding_init: nn.initializers.Initializer = _default_init
  dtype: DTypeLike | None = None
  param_dtype: DTypeLike = jnp.float32
  einsum: Callable[..., jax.Array] = wide_einsum.wide_einsum
  use_bias: bool = False
  bias_init: nn.initializers.Initializer = nn.initializers.zeros
  attend_scale: float = 1.0
  lookup: lookup_lib.Lookup = lookup_lib.gather

  quantization_roles: ClassVar[tuple[str, ...]] = (roles.EMBEDDING, roles.HEAD)

  def __post_init__(self) -> None:
    super().__post_init__()
    checks.check_size(self, "vocab_size", "embed_dim")

  def setup(self) -> None:
    """Makes the parameters, for both methods."""
    self.table = self.param(
      "table",
      logical.partitioned(self.embedding_init, (axes.VOCAB, axes.EMBED)),
      (self.vocab_size, self.embed_dim),
      self.param_dtype,
    )
    if self.use_bias:
      init = logical.partitioned(self.bias_init, (axes.VOCAB,))
      self.bias = self.param("bias", init, (self.vocab_size,), self.param_dtype)

  def __call__(
    self, ids: Int[Array, "batch length"]
  ) -> Float[Array, "batch length embed"]:
    """Returns the rows of `ids`."""
    (table,) = dtypes.promote_dtype(self.table, dtype=self.dtype)
    # Rows whole, as a weight is gathered before its use: each device then looks
    # up its own ids. Rows that stay split over D would give an output that is
    # split otherwise than the batch, and XLA would replicate all of it to get
    # from one to the other.
    table = logical.constrain(table, (axes.VOCAB, axes.ACTIVATION_EMBED))
    x = self.lookup(table, ids) * self.input_scale
    # Pinned so that a table split over V or D does not split the residual
    # stream the same way.
    return logical.constrain(
      x, (axes.BATCH, axes.LENGTH, axes.ACTIVATION_EMBED)
    )

  def attend(
    self, x: Float[Array, "batch length embed"]
  ) -> Float[Array, "batch length vocab"]:
    """Returns the products of `x` with every row, in at least float32."""
    x, table = dtypes.promote_dtype(x, self.table, dtype=self.dtype)
    if self.attend_scale != 1:
      x *= self.attend_scale
    logits = products.call(
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
    # Pinned so that the largest tensor of the model is split over V.
    return logical.constrain(
      logits, (axes.BATCH, axes.LENGTH, axes.ACTIVATION_VOCAB)
    )

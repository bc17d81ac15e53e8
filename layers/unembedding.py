"""Untied output head: `logits = x @ kernel + bias`.

A head that shares the input table is `Embedding.attend`.

Einsum letters: B batch, T length, D embed, V vocab.
"""

from collections.abc import Callable
from typing import ClassVar

from flax import linen as nn
from flax.linen import dtypes
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from paxon.layers import precision
from paxon.quantization import matmuls
from paxon.sharding import axes, checks, logical

_default_init = nn.initializers.variance_scaling(
  1.0, "fan_in", "truncated_normal"
)


class Unembedding(nn.Module):
  """A linear map from the residual stream to logits.

  Attributes:
    vocab_size: Number of logits.
    kernel_init: Initializer of the kernel [D, V].
    dtype: Dtype of the operands. `None` promotes input and kernel.
    param_dtype: Dtype in which the kernel is stored.
    einsum: The contraction.
    use_bias: Whether a learned value is added to each logit.
    bias_init: Initializer of the bias.
    input_scale: Factor on `x`, such as `embed_dim ** -0.5`.
  """

  vocab_size: int
  kernel_init: nn.initializers.Initializer = _default_init
  dtype: DTypeLike | None = None
  param_dtype: DTypeLike = jnp.float32
  einsum: Callable[..., jax.Array] = precision.wide_einsum
  use_bias: bool = False
  bias_init: nn.initializers.Initializer = nn.initializers.zeros
  input_scale: float = 1.0

  quantization_roles: ClassVar[tuple[str, ...]] = (matmuls.HEAD,)

  def __post_init__(self) -> None:
    super().__post_init__()
    checks.check_size(self, "vocab_size")

  @nn.compact
  def __call__(
    self, x: Float[Array, "batch length embed"]
  ) -> Float[Array, "batch length vocab"]:
    """Returns the logits of `x`, in at least float32."""
    kernel = self.param(
      "kernel",
      logical.partitioned(
        self.kernel_init, (axes.EMBED, axes.VOCAB), read_dtype=self.dtype
      ),
      (x.shape[-1], self.vocab_size),
      self.param_dtype,
    )
    bias = None
    if self.use_bias:
      init = logical.partitioned(self.bias_init, (axes.VOCAB,))
      bias = self.param("bias", init, (self.vocab_size,), self.param_dtype)
    x, kernel = dtypes.promote_dtype(x, kernel, dtype=self.dtype)
    x = logical.gather_lengths(x)
    if self.input_scale != 1:
      x *= self.input_scale
    logits = matmuls.call(
      self.einsum,
      "kernel",
      "BTD,DV->BTV",
      x,
      kernel,
      # float32 because the loss subtracts logits of similar size.
      preferred_element_type=precision.at_least_float32(x.dtype),
    )
    if bias is not None:
      logits += bias.astype(logits.dtype)[None, None, :]
    # Constrained so that the largest tensor of the model is sharded over V.
    return logical.constrain(
      logits, (axes.BATCH, axes.LENGTH, axes.ACTIVATION_VOCAB)
    )

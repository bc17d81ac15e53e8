"""One linear map from tokens to heads, with its parameters.

What attention layers use that make queries, keys and values from different
inputs; `projections` makes all three from one.

Einsum letters: B batch, T length, D embed, N heads, H head_dim.
"""

from flax import linen as nn
from flax.linen import dtypes
import jax

from paxon.layers.attention import projections
from paxon.quantization import products
from paxon.sharding import axes, logical


def to_heads(
  layer: projections.Layer,
  name: str,
  x: jax.Array,
  num_heads: int,
  head_dim: int,
  *,
  in_axis: str = axes.EMBED,
  heads_axis: str = axes.HEADS,
) -> jax.Array:
  """Returns heads [B,T,N,H], pinned so that tensor parallelism splits them.

  Args:
    layer: The layer, which gets the parameters `name` [D, N, H] and, if
      `layer.use_bias`, `<name>_bias` [N, H].
    name: Of the kernel.
    x: Tokens [B,T,D].
    num_heads: N.
    head_dim: H.
    in_axis: Logical axis of D.
    heads_axis: Logical axis of N: `heads` or `kv_heads`.
  """
  names = (in_axis, heads_axis, axes.HEAD_DIM)
  shape = (x.shape[-1], num_heads, head_dim)
  kernel = layer.param(
    name,
    logical.partitioned(layer.kernel_init, names),
    shape,
    layer.param_dtype,
  )
  bias = None
  if layer.use_bias:
    # Of rank two, but no matrix: weight decay is not for it.
    bias_init = logical.partitioned(
      nn.initializers.zeros, names[1:], regularized=False
    )
    bias = layer.param(f"{name}_bias", bias_init, shape[1:], layer.param_dtype)
  x, kernel, bias = dtypes.promote_dtype(x, kernel, bias, dtype=layer.dtype)
  out = products.call(layer.einsum, name, "BTD,DNH->BTNH", x, kernel)
  if bias is not None:
    out += bias[None, None]
  activation = {
    axes.HEADS: axes.ACTIVATION_HEADS,
    axes.KV_HEADS: axes.ACTIVATION_KV_HEADS,
  }[heads_axis]
  return logical.constrain(
    out, (axes.BATCH, axes.LENGTH, activation, axes.ACTIVATION_HEAD_DIM)
  )

"""How an attention layer makes queries, keys and values of its tokens.

Projections are a part of the layer: functions of what it is (`Layer`) and of
the tokens. `SeparateProjections` has a kernel for each of the three;
`CombinedProjections` has one, so that the tokens are read, and a kernel that is
split over devices is gathered, once instead of three times. Both start with
values of the same distribution.

Einsum letters: B batch, T length, D embed, N heads, K key/value heads,
H head_dim, C what is combined.
"""

from collections.abc import Callable, Sequence
import dataclasses

from flax import linen as nn
from flax.linen import dtypes
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from paxon.layers import remat
from paxon.quantization import products
from paxon.sharding import axes, logical

Initializer = nn.initializers.Initializer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layer:
  """What projections need to know of the layer that owns them.

  Attributes:
    num_heads: Number of query heads, N.
    num_kv_heads: Number of key/value heads, K; divides N.
    head_dim: Width of a head, H.
    use_bias: Whether a learned value is added to what a kernel gives.
    kernel_init: Initializer of a kernel [D, heads, H].
    dtype: Dtype of the computation; `None` promotes.
    param_dtype: Dtype in which parameters are stored.
    einsum: The contraction.
    param: `(name, initializer, shape, dtype)` makes a parameter of the layer.
  """

  num_heads: int
  num_kv_heads: int
  head_dim: int
  use_bias: bool
  kernel_init: Initializer
  dtype: DTypeLike | None
  param_dtype: DTypeLike
  einsum: Callable[..., jax.Array]
  param: Callable[..., jax.Array]


# `(layer, tokens [B,T,D]) -> (queries [B,T,N,H], keys [B,T,K,H], values)`.
Projections = Callable[
  [Layer, jax.Array], tuple[jax.Array, jax.Array, jax.Array]
]


@dataclasses.dataclass(frozen=True)
class SeparateProjections:
  """Kernels `query` [D, N, H], `key` and `value` [D, K, H].

  Attributes:
    query_init: Initializer of the kernel of queries; `None` is that of all.
  """

  query_init: Initializer | None = None

  def __call__(
    self, layer: Layer, x: jax.Array
  ) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns queries, keys and values."""
    D, H = x.shape[-1], layer.head_dim
    parts = {
      "query": (layer.num_heads, axes.HEADS),
      "key": (layer.num_kv_heads, axes.KV_HEADS),
      "value": (layer.num_kv_heads, axes.KV_HEADS),
    }
    kernels, biases = [], []
    for name, (heads, axis) in parts.items():
      kernel_axes = (axes.EMBED, axis, axes.HEAD_DIM)
      init = layer.kernel_init
      if name == "query":
        init = self.query_init or init
      kernels.append(_kernel(layer, name, init, (D, heads, H), kernel_axes))
      biases.append(_bias(layer, name, (heads, H), kernel_axes[1:]))
    x, *params = dtypes.promote_dtype(x, *kernels, *biases, dtype=layer.dtype)
    query, key, value = (
      _with_bias(
        products.call(layer.einsum, name, "BTD,DNH->BTNH", x, kernel), bias
      )
      for name, kernel, bias in zip(parts, params[:3], params[3:], strict=True)
    )
    return _pinned(query, key, value)


@dataclasses.dataclass(frozen=True)
class CombinedProjections:
  """One kernel `qkv`, and one product.

  It is [D, 3, N, H] where there are as many key/value heads as query heads.
  Else it is [D, K, N / K + 2, H]: each key/value head, after the queries that
  use it. The dimension along which the result is taken apart is never split,
  so tensor parallelism splits heads and moves nothing.

  Attributes:
    query_init: Initializer of the part of queries, [D, N, H]; `None` is that of
      all.
  """

  query_init: Initializer | None = None

  def __call__(
    self, layer: Layer, x: jax.Array
  ) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns queries, keys and values."""
    N, K, H = layer.num_heads, layer.num_kv_heads, layer.head_dim
    if N == K:
      shape, names, at = (3, N, H), (None, axes.HEADS, axes.HEAD_DIM), 2
      equation, sizes = "BTD,DCNH->BTCNH", (1, 1, 1)
    else:
      shape, names, at = (K, N // K + 2, H), (axes.KV_HEADS, None), 3
      names = (*names, axes.HEAD_DIM)
      equation, sizes = "BTD,DKCH->BTKCH", (N // K, 1, 1)
    init = _CombinedInit(
      layer.kernel_init, N, K, self.query_init or layer.kernel_init
    )
    kernel_shape, kernel_axes = (x.shape[-1], *shape), (axes.EMBED, *names)
    kernel = _kernel(layer, "qkv", init, kernel_shape, kernel_axes)
    bias = _bias(layer, "qkv", shape, names)
    x, kernel, bias = dtypes.promote_dtype(x, kernel, bias, dtype=layer.dtype)
    combined = products.call(layer.einsum, "qkv", equation, x, kernel)
    combined = _with_bias(combined, bias)
    # Taken apart by `split`, whose derivative is one concatenation.
    query, key, value = jax.lax.split(combined, sizes, axis=at)
    return _pinned(
      query.reshape(*x.shape[:2], N, H),
      key.reshape(*x.shape[:2], K, H),
      value.reshape(*x.shape[:2], K, H),
    )


@dataclasses.dataclass(frozen=True)
class _CombinedInit:
  """Makes each part of a combined kernel as if it stood alone.

  A class, because equal initializers must compare equal.
  """

  init: Initializer
  num_heads: int
  num_kv_heads: int
  query_init: Initializer

  def __call__(
    self, key: jax.Array, shape: Sequence[int], dtype: DTypeLike = jnp.float32
  ) -> jax.Array:
    N, K, (D, H) = self.num_heads, self.num_kv_heads, (shape[0], shape[-1])
    keys = jax.random.split(key, 3)
    inits = (self.query_init, self.init, self.init)
    query, key, value = (
      init(k, (D, heads, H), dtype)
      for init, k, heads in zip(inits, keys, (N, K, K), strict=True)
    )
    if N == K:
      return jnp.stack([query, key, value], axis=1)
    grouped = query.reshape(D, K, N // K, H)
    parts = (grouped, key[:, :, None], value[:, :, None])
    return jnp.concatenate(parts, axis=2)


def output(
  layer: Layer,
  context: jax.Array,
  embed_dim: int,
  *,
  kernel_init: Initializer,
  use_bias: bool,
) -> jax.Array:
  """Returns tokens [B,T,D] of what heads gathered.

  Args:
    layer: The layer, which gets the parameters `out` [N, H, D] and, if asked
      for, `out_bias` [D].
    context: What each head gathered, [B,T,N,H].
    embed_dim: D.
    kernel_init: Initializer of `out`.
    use_bias: Whether there is a bias.
  """
  shape = (*context.shape[2:], embed_dim)
  kernel_axes = (axes.HEADS, axes.HEAD_DIM, axes.EMBED)
  kernel = _kernel(layer, "out", kernel_init, shape, kernel_axes)
  bias = None
  if use_bias:
    bias_init = logical.partitioned(nn.initializers.zeros, (axes.EMBED,))
    bias = layer.param("out_bias", bias_init, (embed_dim,), layer.param_dtype)
  context, kernel, bias = dtypes.promote_dtype(
    context, kernel, bias, dtype=layer.dtype
  )
  x = products.call(layer.einsum, "out", "BTNH,NHD->BTD", context, kernel)
  x = _with_bias(x, bias)
  return remat.tag(x, remat.ATTENTION_OUTPUT)


def _kernel(
  layer: Layer,
  name: str,
  init: Initializer,
  shape: tuple[int, ...],
  names: tuple[str | None, ...],
) -> jax.Array:
  init = logical.partitioned(init, names)
  return layer.param(name, init, shape, layer.param_dtype)


def _bias(
  layer: Layer,
  name: str,
  shape: tuple[int, ...],
  names: tuple[str | None, ...],
) -> jax.Array | None:
  if not layer.use_bias:
    return None
  # Of rank two or more, but no matrix: weight decay is not for it.
  init = logical.partitioned(nn.initializers.zeros, names, regularized=False)
  return layer.param(f"{name}_bias", init, shape, layer.param_dtype)


def _with_bias(x: jax.Array, bias: jax.Array | None) -> jax.Array:
  return x if bias is None else x + bias[None, None]


def _pinned(
  query: jax.Array, key: jax.Array, value: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Pins all three, so that tensor parallelism splits heads.

  A sequence that is split over devices stays split through the projections.
  """
  pin = logical.constrain
  names = (axes.BATCH, axes.LENGTH), (axes.ACTIVATION_HEAD_DIM,)
  heads = (*names[0], axes.ACTIVATION_HEADS, *names[1])
  kv_heads = (*names[0], axes.ACTIVATION_KV_HEADS, *names[1])
  return pin(query, heads), pin(key, kv_heads), pin(value, kv_heads)


def to_heads(
  layer: Layer,
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


def gshard_query(
  key: jax.Array, shape: Sequence[int], dtype: DTypeLike = jnp.float32
) -> jax.Array:
  """Returns the kernel [D, N, H] of queries."""
  embed_dim, _, head_dim = shape
  return _normal(key, shape, dtype, embed_dim * head_dim)


def gshard_key_value(
  key: jax.Array, shape: Sequence[int], dtype: DTypeLike = jnp.float32
) -> jax.Array:
  """Returns the kernel [D, K, H] of keys or of values."""
  embed_dim, _, _ = shape
  return _normal(key, shape, dtype, embed_dim)


def gshard_output(
  key: jax.Array, shape: Sequence[int], dtype: DTypeLike = jnp.float32
) -> jax.Array:
  """Returns the kernel [N, H, D] of the gshard_output."""
  num_heads, head_dim, _ = shape
  return _normal(key, shape, dtype, num_heads * head_dim)


def _normal(
  key: jax.Array, shape: Sequence[int], dtype: DTypeLike, terms: int
) -> jax.Array:
  return jax.random.normal(key, tuple(shape), dtype) * terms**-0.5

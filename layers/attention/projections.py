"""Projections of attention: queries, keys, values, and the output.

`SeparateProjections` has one kernel each for queries, keys and values;
`GatedProjections` also has gates that multiply the weighted values.
`CombinedProjections` has one for all three, so that the tokens are read, and a
kernel that is split over devices is gathered, once instead of three times. Both
start with the same distribution. Projections create the parameters in the
attention layer that calls them.

GShard's initializers are Gaussians by the true fan-in; queries have the scale
of logits in their initializer (Lepikhin et al. 2020,
https://arxiv.org/abs/2006.16668):

  GroupedQueryAttention(
    ...,
    projections=SeparateProjections(
      query_init=gshard_query,
      kernel_init=gshard_key_value,
      output_init=gshard_output,
    ),
    logits=Logits(scale=1.0),
  )

Einsum letters: B batch, T length, D embed, N heads, K key/value heads,
H head_dim, C index in a combined kernel.
"""

from collections.abc import Callable, Sequence
import dataclasses
from typing import Any, Protocol, runtime_checkable

from flax import linen as nn
from flax.linen import dtypes
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from paxon.layers import remat
from paxon.layers.cpu import forms
from paxon.sharding import axes, logical

Initializer = nn.initializers.Initializer

# Both scale by the true number of summed terms: D into heads, N * H out.
_kernel_init = nn.initializers.variance_scaling(
  1.0, "fan_in", "truncated_normal", in_axis=0, out_axis=(1, 2)
)
_output_init = nn.initializers.variance_scaling(
  1.0, "fan_in", "truncated_normal", in_axis=(0, 1), out_axis=2
)

_ACTIVATION_AXES = {
  axes.HEADS: axes.ACTIVATION_HEADS,
  axes.KV_HEADS: axes.ACTIVATION_KV_HEADS,
}


@runtime_checkable
class Layer(Protocol):
  """The fields of an attention layer that projections use."""

  num_heads: int
  head_dim: int
  dtype: DTypeLike | None
  param_dtype: DTypeLike
  einsum: Callable[..., jax.Array]

  @property
  def num_kv_heads(self) -> int:
    """Number of key/value heads; divides `num_heads`."""
    ...

  def param(self, name: str, init_fn: Any, *args: Any) -> Any:
    """Creates a parameter, as `nn.Module.param`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Projections:
  """Initializers, biases and the output; subclasses make the heads.

  Attributes:
    kernel_init: Initializer of the kernels of queries, keys and values.
    query_init: Initializer of the kernel of queries; `None` is `kernel_init`.
    output_init: Initializer of the kernel of the output.
    use_bias: Whether queries, keys, values and the output have a bias.
    output_bias: Whether the output has a bias; `None` is `use_bias`.
  """

  kernel_init: Initializer = _kernel_init
  query_init: Initializer | None = None
  output_init: Initializer = _output_init
  use_bias: bool = False
  output_bias: bool | None = None

  def __call__(
    self, layer: Layer, x: jax.Array
  ) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns queries [B,T,N,H], keys and values [B,T,K,H] of tokens [B,T,D].

    The calling layer, bound, gets the parameters.
    """
    raise NotImplementedError

  def find_gate(self, layer: Layer, x: jax.Array) -> jax.Array | None:
    """Returns factors [B,T,N,H] of the weighted values, or None."""
    del layer, x
    return None

  def output(
    self, layer: Layer, context: jax.Array, embed_dim: int
  ) -> jax.Array:
    """Returns tokens [B,T,D] from the weighted values of heads [B,T,N,H].

    The layer gets the parameters `out` [N,H,D] and, with a bias, `out_bias`.
    """
    shape = (*context.shape[2:], embed_dim)
    names = (axes.HEADS, axes.HEAD_DIM, axes.EMBED)
    kernel = _make_kernel(layer, "out", self.output_init, shape, names)
    bias = None
    has_bias = self.use_bias if self.output_bias is None else self.output_bias
    if has_bias:
      bias_init = logical.partitioned(
        nn.initializers.zeros, (axes.EMBED,), read_dtype=layer.dtype
      )
      bias = layer.param("out_bias", bias_init, (embed_dim,), layer.param_dtype)
    context, kernel, bias = dtypes.promote_dtype(
      context, kernel, bias, dtype=layer.dtype
    )
    x = forms.multiply_tokens(
      layer.einsum, "out", "BTNH,NHD->BTD", context, kernel
    )
    return remat.tag(_add_bias(x, bias), remat.ATTENTION_OUTPUT)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SeparateProjections(Projections):
  """Kernels `query` [D,N,H], `key` and `value` [D,K,H]."""

  def __call__(
    self, layer: Layer, x: jax.Array
  ) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns queries, keys and values."""
    heads_axes = {
      "query": axes.HEADS,
      "key": axes.KV_HEADS,
      "value": axes.KV_HEADS,
    }
    kernels, biases = [], []
    for name, heads_axis in heads_axes.items():
      kernel, bias = self._make_parameters(
        layer, name, x.shape[-1], layer.head_dim, heads_axis
      )
      kernels.append(kernel)
      biases.append(bias)
    # Promoted once, so the three gradients are added before one cast.
    x, *params = dtypes.promote_dtype(x, *kernels, *biases, dtype=layer.dtype)
    query, key, value = (
      _contract(layer, name, x, kernel, bias, heads_axis)
      for (name, heads_axis), kernel, bias in zip(
        heads_axes.items(), params[:3], params[3:], strict=True
      )
    )
    return query, key, value

  def project(
    self,
    layer: Layer,
    name: str,
    x: jax.Array,
    *,
    head_dim: int | None = None,
    heads_axis: str = axes.HEADS,
  ) -> jax.Array:
    """Returns one linear map of tokens [B,T,D] to heads, [B,T,N,H].

    The layer gets the parameters `name` [D,N,H] and, with biases, `<name>_bias`
    [N,H]. `heads_axis` is the logical axis of N, and `head_dim` is H, by
    default that of the layer.
    """
    kernel, bias = self._make_parameters(
      layer, name, x.shape[-1], head_dim or layer.head_dim, heads_axis
    )
    x, kernel, bias = dtypes.promote_dtype(x, kernel, bias, dtype=layer.dtype)
    return _contract(layer, name, x, kernel, bias, heads_axis)

  def _make_parameters(
    self,
    layer: Layer,
    name: str,
    embed_dim: int,
    head_dim: int,
    heads_axis: str,
  ) -> tuple[jax.Array, jax.Array | None]:
    """Returns a kernel [D,N,H] and its bias [N,H], or None without biases."""
    is_query = heads_axis == axes.HEADS
    num_heads = layer.num_heads if is_query else layer.num_kv_heads
    shape = (embed_dim, num_heads, head_dim)
    names = (axes.EMBED, heads_axis, axes.HEAD_DIM)
    init = self.kernel_init
    if name == "query":
      init = self.query_init or init
    kernel = _make_kernel(layer, name, init, shape, names)
    bias = None
    if self._has_bias(name):
      bias = _make_bias(layer, name, shape[1:], names[1:])
    return kernel, bias

  def _has_bias(self, name: str) -> bool:
    del name
    return self.use_bias


@dataclasses.dataclass(frozen=True, kw_only=True)
class UnbiasedKeys(SeparateProjections):
  """`SeparateProjections` with biases, but none of keys, as in Whisper.

  A bias of keys adds the same number to all logits of a query, which the
  softmax removes.
  """

  use_bias: bool = True

  def _has_bias(self, name: str) -> bool:
    return self.use_bias and name != "key"


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatedProjections(SeparateProjections):
  """Separate projections, and gates of the weighted values, as in Qwen3-Next.

  Qiu et al. 2025, https://arxiv.org/abs/2505.06708. There is a kernel `gate`
  [D,N,H] and, with biases, `gate_bias`.

  Attributes:
    activation: Maps the gates to factors.
  """

  activation: Callable[[jax.Array], jax.Array] = jax.nn.sigmoid

  def find_gate(self, layer: Layer, x: jax.Array) -> jax.Array:
    """Returns factors [B,T,N,H] of the weighted values."""
    return self.activation(self.project(layer, "gate", x))


@dataclasses.dataclass(frozen=True, kw_only=True)
class CombinedProjections(Projections):
  """One kernel `qkv`, and one matmul.

  Its shape is [D, 3, N, H] if there are as many key/value heads as query heads,
  else [D, K, N / K + 2, H]: each key/value head, after the queries that use it.
  The dimension along which the result is split is never sharded, so tensor
  parallelism splits heads and moves nothing.
  """

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
      self.kernel_init, N, K, self.query_init or self.kernel_init
    )
    kernel_shape, kernel_axes = (x.shape[-1], *shape), (axes.EMBED, *names)
    kernel = _make_kernel(layer, "qkv", init, kernel_shape, kernel_axes)
    bias = None
    if self.use_bias:
      bias = _make_bias(layer, "qkv", shape, names)
    x, kernel, bias = dtypes.promote_dtype(x, kernel, bias, dtype=layer.dtype)
    combined = forms.multiply_tokens(layer.einsum, "qkv", equation, x, kernel)
    # `split`, because its derivative is one concatenation.
    query, key, value = jax.lax.split(_add_bias(combined, bias), sizes, axis=at)
    return (
      _constrain_heads(query.reshape(*x.shape[:2], N, H), axes.HEADS),
      _constrain_heads(key.reshape(*x.shape[:2], K, H), axes.KV_HEADS),
      _constrain_heads(value.reshape(*x.shape[:2], K, H), axes.KV_HEADS),
    )


def check_separate(layer: Layer, projections: Projections) -> None:
  """Raises ValueError unless projections are separate and without gates."""
  is_gated = isinstance(projections, GatedProjections)
  if is_gated or not isinstance(projections, SeparateProjections):
    raise ValueError(
      f"{type(layer).__name__}.projections must be SeparateProjections, got"
      f" {type(projections).__name__}."
    )


def gshard_query(
  key: jax.Array, shape: Sequence[int], dtype: DTypeLike = jnp.float32
) -> jax.Array:
  """GShard initializer of the query kernel [D,N,H]: `(D H) ** -0.5`."""
  embed_dim, _, head_dim = shape
  return _draw_normal(key, shape, dtype, embed_dim * head_dim)


def gshard_key_value(
  key: jax.Array, shape: Sequence[int], dtype: DTypeLike = jnp.float32
) -> jax.Array:
  """GShard initializer of a key or value kernel [D,K,H]: `D ** -0.5`."""
  embed_dim, _, _ = shape
  return _draw_normal(key, shape, dtype, embed_dim)


def gshard_output(
  key: jax.Array, shape: Sequence[int], dtype: DTypeLike = jnp.float32
) -> jax.Array:
  """GShard initializer of the output kernel [N,H,D]: `(N H) ** -0.5`."""
  num_heads, head_dim, _ = shape
  return _draw_normal(key, shape, dtype, num_heads * head_dim)


@dataclasses.dataclass(frozen=True)
class _CombinedInit:
  """Initializes queries, keys and values as if their kernels were separate.

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


def _make_kernel(
  layer: Layer,
  name: str,
  init: Initializer,
  shape: tuple[int, ...],
  names: tuple[str | None, ...],
) -> jax.Array:
  init = logical.partitioned(init, names, read_dtype=layer.dtype)
  return layer.param(name, init, shape, layer.param_dtype)


def _make_bias(
  layer: Layer,
  name: str,
  shape: tuple[int, ...],
  names: tuple[str | None, ...],
) -> jax.Array:
  # Of rank two or more, but not subject to weight decay.
  init = logical.partitioned(
    nn.initializers.zeros, names, regularized=False, read_dtype=layer.dtype
  )
  return layer.param(f"{name}_bias", init, shape, layer.param_dtype)


def _contract(
  layer: Layer,
  name: str,
  x: jax.Array,
  kernel: jax.Array,
  bias: jax.Array | None,
  heads_axis: str,
) -> jax.Array:
  heads = forms.multiply_tokens(layer.einsum, name, "BTD,DNH->BTNH", x, kernel)
  return _constrain_heads(_add_bias(heads, bias), heads_axis)


def _add_bias(x: jax.Array, bias: jax.Array | None) -> jax.Array:
  return x if bias is None else x + bias[None, None]


def _constrain_heads(x: jax.Array, heads_axis: str) -> jax.Array:
  """Constrains heads, so that tensor parallelism splits them."""
  heads = _ACTIVATION_AXES[heads_axis]
  return logical.constrain(
    x, (axes.BATCH, axes.LENGTH, heads, axes.ACTIVATION_HEAD_DIM)
  )


def _draw_normal(
  key: jax.Array, shape: Sequence[int], dtype: DTypeLike, terms: int
) -> jax.Array:
  return jax.random.normal(key, tuple(shape), dtype) * terms**-0.5

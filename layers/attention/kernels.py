"""Attention kernels with one signature; settings and sinks of the logits.

  out[t, n] = sum_s softmax_s(query[t, n] . key[s, k] / sqrt(H)) value[s, k]

over the keys `s` that are visible to `t`, with `k = n // (N / K)`: each group
of N / K neighbouring query heads shares a key/value head. The output of a query
without visible keys (padding) is zero, in every kernel. Attention sinks [N] add
a term `exp(sinks[n])` to the denominator of the softmax (the "zero sink" of
Xiao et al. 2023, https://arxiv.org/abs/2309.17453).

Einsum letters: B batch, T queries, S keys, N heads, K key/value heads,
G groups (N / K), H head_dim.
"""

from collections.abc import Callable, Mapping
import dataclasses
import functools
import math
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

from flax import linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from paxon.layers import precision
from paxon.layers.attention import kernel_support
from paxon.layers.attention import mask as attention_mask
from paxon.quantization import matmuls
from paxon.sharding import axes, checks, logical, target

# `(query, key, value, mask, *, logit_cap=None, bias=None, scale=None,
# sinks=None) -> [B,T,N,H]`. Layers pass only the keywords that are set. A
# kernel whose `takes_bias_function` is true gets a `BiasFunction` as `bias`.
Kernel = Callable[..., jax.Array]
# Keys and values [B',S',K,H], of which B / B' adjacent sequences share each.
Parts = tuple[tuple[jax.Array, jax.Array], ...]
# `(query [B,T,N,H], q_positions [B,T], kv_positions [B,S]) -> [B,N,T,S]`.
BiasFunction = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


@kernel_support.declare(kernel_support.PLAIN)
def plain(
  query: Float[Array, "batch length heads head_dim"],
  key: Float[Array, "batch kv_length kv_heads head_dim"],
  value: Float[Array, "batch kv_length kv_heads value_dim"],
  mask: attention_mask.AttentionMask,
  *,
  logit_cap: float | None = None,
  bias: Float[Array, "batch heads length kv_length"] | None = None,
  scale: float | None = None,
  sinks: Float[Array, " heads"] | None = None,
  einsum: matmuls.Einsum | None = None,
) -> Float[Array, "batch length heads value_dim"]:
  """Attention by two contractions; logits and softmax in float32.

  Args:
    query: Queries.
    key: Keys.
    value: Values; they may have another width.
    mask: The mask.
    logit_cap: Soft-caps the scaled logits to `(-logit_cap, logit_cap)`.
    bias: Added to the scaled logits, before the soft cap.
    scale: Factor of the dot products; `None` is `H ** -0.5`.
    sinks: Logits of attention sinks, neither scaled nor capped.
    einsum: Computes the matmuls `logits` and `context`; `None` is
      `wide_einsum` for logits and `jnp.einsum` for values.

  Returns:
    The weighted values.

  Raises:
    ValueError: Shapes do not fit, or heads do not divide into groups.
  """
  check_shapes(
    "kernels.plain", query, key, value, mask.q_positions, mask.kv_positions
  )
  B, T, N, H = query.shape
  K = key.shape[2]
  # No axis of one where there are no groups: XLA would copy logits.
  heads, sizes = ("KG", (K, N // K)) if N > K else ("K", (K,))
  logits = matmuls.call(
    einsum or precision.wide_einsum,
    "logits",
    f"BT{heads}H,BSKH->B{heads}TS",
    query.reshape(B, T, *sizes, H),
    key,
    # float32 because the softmax takes differences of logits.
    preferred_element_type=precision.at_least_float32(query.dtype),
  )
  logits *= H**-0.5 if scale is None else scale
  if bias is not None:
    logits += bias.reshape(logits.shape).astype(logits.dtype)
  if logit_cap is not None:
    logits = logit_cap * jnp.tanh(logits / logit_cap)
  visible = mask.to_array()
  # Finite, because a row of -inf would make its softmax NaN.
  lowest = float(jnp.finfo(jnp.float32).min)
  unmasked = visible[:, :, None] if N > K else visible
  logits = jnp.where(unmasked, logits, lowest)
  weights = jax.nn.softmax(logits, axis=-1)
  if sinks is not None:
    weights *= _share_of_keys(logits, sinks)
  out = matmuls.call(
    einsum or jnp.einsum,
    "context",
    f"B{heads}TS,BSKH->BT{heads}H",
    weights.astype(query.dtype),
    value,
  )
  out = out.reshape(B, T, N, value.shape[-1]).astype(query.dtype)
  return _zero_unless(mask.sees_any(visible), out)


@kernel_support.declare(kernel_support.AUTO)
def auto(
  query: Float[Array, "batch length heads head_dim"],
  key: Float[Array, "batch kv_length kv_heads head_dim"],
  value: Float[Array, "batch kv_length kv_heads value_dim"],
  mask: attention_mask.AttentionMask,
  *,
  logit_cap: float | None = None,
  bias: Float[Array, "batch heads length kv_length"] | None = None,
  scale: float | None = None,
  sinks: Float[Array, " heads"] | None = None,
) -> Float[Array, "batch length heads value_dim"]:
  """`plain`; on CPUs in one of the faster forms of `layers/cpu`.

  GPUs and TPUs run `plain` itself: cuDNN's and splash kernels are chosen by the
  layer's field. One CPU device uses `one_pass` from 64 tokens and
  `causal_blocks` from 512 tokens, where they support the call.

  On CPUs, keys and values may have a wider dtype than queries
  (`kv_cache.KeyValues`); the result is the same.
  """
  more = {"logit_cap": logit_cap, "bias": bias, "scale": scale, "sinks": sinks}
  if not target.is_cpu():
    return plain(query, key, value, mask, **more)
  # Loaded where they are used: most programs are not for CPUs.
  from paxon.layers.cpu import causal_blocks, one_pass

  check_shapes(
    "kernels.auto", query, key, value, mask.q_positions, mask.kv_positions
  )
  T = query.shape[1]
  if T >= one_pass.MIN_LENGTH:
    # A step reads them as they are: the cast would take longer than attention.
    key, value = (_cast_down(x, query.dtype) for x in (key, value))
  request = kernel_support.from_call(
    query, key, value, mask, logit_cap=logit_cap, bias=bias, sinks=sinks
  )

  def prefers(support: kernel_support.Support, min_length: int) -> bool:
    is_faster = target.is_one_cpu() and min_length <= T
    return is_faster and not any(support.problems(request))

  if prefers(kernel_support.CAUSAL_BLOCKS, causal_blocks.MIN_LENGTH):
    tokens = causal_blocks.Tokens(
      mask.q_positions,
      mask.kv_positions,
      mask.q_segment_ids,
      mask.kv_segment_ids,
    )

    def rules(**tokens: jax.Array) -> jax.Array:
      return attention_mask.AttentionMask(**tokens, rules=mask.rules).to_array()

    return causal_blocks.attend(
      rules, query, key, value, tokens, logit_cap=logit_cap, scale=scale
    )
  if prefers(kernel_support.ONE_PASS, one_pass.MIN_LENGTH):
    visible = mask.to_array()
    out = one_pass.attend(query, key, value, visible, scale=scale)
    return _zero_unless(mask.sees_any(visible), out)
  einsum = functools.partial(one_pass.einsum, dtype=query.dtype)
  return plain(query, key, value, mask, einsum=einsum, **more)


def call(
  kernel: Kernel,
  query: jax.Array,
  key: jax.Array,
  value: jax.Array,
  mask: attention_mask.AttentionMask,
  *,
  parts: Parts = (),
  **more: Any,
) -> jax.Array:
  """Returns the result of a kernel for keys and values of a cache.

  They may have a wider dtype than queries; most kernels get them cast. `plain`
  and `auto` read those of `parts`, where they are stored once for several
  sequences; other kernels read `key` and `value`.
  """
  if parts and kernel in (plain, auto):
    einsum = functools.partial(_join, parts=parts, dtype=query.dtype)
    return plain(query, key, value, mask, einsum=einsum, **more)
  support = kernel_support.find_support(kernel)
  if support is None or not support.wide_keys:
    key, value = (_cast_down(x, query.dtype) for x in (key, value))
  return kernel(query, key, value, mask, **more)


def _join(
  equation: str,
  lhs: jax.Array,
  rhs: jax.Array,
  *,
  parts: Parts,
  dtype: DTypeLike,
  preferred_element_type: DTypeLike | None = None,
) -> jax.Array:
  """Returns a matmul of `plain` with the keys or values of parts.

  Sequences that share a part are one more dimension of queries, so the part is
  not copied. Nothing reads `rhs`, the copy, so XLA does not compute it.

  Args:
    equation: Equation of the logits or of the context.
    lhs: Queries, or weights of the slots of all parts.
    rhs: Not used.
    parts: See `Parts`.
    dtype: Dtype of queries.
    preferred_element_type: Dtype of logits.
  """
  del rhs
  operands, result = equation.split("->")
  is_logits = "S" in result
  begin, found = 0, []
  for key, value in parts:
    x, y = lhs, key
    if not is_logits:
      x, y = lhs[..., begin : begin + value.shape[1]], value
      begin += value.shape[1]
    x = x.reshape(y.shape[0], -1, *x.shape[1:])
    product = _multiply(f"BR{operands[1:]}->BR{result[1:]}", x, y, dtype)
    found.append(product.reshape(-1, *product.shape[2:]))
  if is_logits:
    joined = jnp.concatenate(found, axis=-1)
    return joined.astype(preferred_element_type or joined.dtype)
  return functools.reduce(jnp.add, found)


def _multiply(
  equation: str, lhs: jax.Array, rhs: jax.Array, dtype: DTypeLike
) -> jax.Array:
  """Returns a matmul with keys or values, in at least float32."""
  wide = precision.at_least_float32(dtype)
  if not target.is_cpu():
    lhs = lhs.astype(dtype)
    return precision.wide_einsum(
      equation, lhs, _cast_down(rhs, lhs.dtype), preferred_element_type=wide
    )
  from paxon.layers.cpu import one_pass

  return one_pass.einsum(
    equation, lhs, rhs, dtype=dtype, preferred_element_type=wide
  )


def _cast_down(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
  """Returns `x` in `dtype` if its own is wider."""
  return x.astype(dtype) if x.dtype.itemsize > dtype.itemsize else x


def check_shapes(
  name: str,
  query: jax.Array,
  key: jax.Array,
  value: jax.Array,
  q_positions: jax.Array,
  kv_positions: jax.Array,
) -> None:
  """Raises ValueError unless the arrays of a kernel fit each other.

  Queries [B,T,N,H] at positions [B,T], keys [B,S,K,H] at [B,S], with K dividing
  N, and values [B,S,K,H'].
  """
  fits = (
    query.ndim == key.ndim == value.ndim == 4
    and query.shape[0] == key.shape[0]
    and query.shape[3] == key.shape[3]
    and key.shape[:3] == value.shape[:3]
  )
  if not fits:
    raise ValueError(
      f"{name} needs queries [B,T,N,H], keys [B,S,K,H] and values [B,S,K,H'], "
      f"got {query.shape}, {key.shape} and {value.shape}."
    )
  for words, array, positions in (
    ("queries", query, q_positions),
    ("keys", key, kv_positions),
  ):
    if positions.shape != array.shape[:2]:
      raise ValueError(
        f"{name} needs a mask of {array.shape[:2]} {words}, got one of "
        f"{positions.shape}."
      )
  kernel_support.check_groups(query, key)


def _fused_support(settings: Mapping[str, Any]) -> kernel_support.Support:
  is_cudnn = settings.get("implementation") == "cudnn"
  return kernel_support.FUSED_BY_CUDNN if is_cudnn else kernel_support.FUSED


@kernel_support.declare(_fused_support)
def fused(
  query: Float[Array, "batch length heads head_dim"],
  key: Float[Array, "batch kv_length kv_heads head_dim"],
  value: Float[Array, "batch kv_length kv_heads head_dim"],
  mask: attention_mask.AttentionMask,
  *,
  logit_cap: float | None = None,
  bias: Float[Array, "batch heads length kv_length"] | None = None,
  scale: float | None = None,
  sinks: Float[Array, " heads"] | None = None,
  implementation: Literal["xla", "cudnn"] | None = None,
) -> Float[Array, "batch length heads head_dim"]:
  """Attention by `jax.nn.dot_product_attention`, called like `plain`.

  Its softmax is in float32, also for float64 inputs. Soft caps and sinks are
  not supported. `implementation` is passed on to JAX: "cudnn" asks for the
  fused kernel of NVIDIA GPUs (bfloat16 or float16 only), None leaves it to JAX.

  Raises:
    ValueError: The heads do not divide into groups, or a cap or sinks are
      given.
  """
  kernel_support.check_call(
    _fused_support({"implementation": implementation}),
    query,
    key,
    value,
    mask,
    logit_cap=logit_cap,
    bias=bias,
    sinks=sinks,
  )
  visible = mask.to_array()
  # JAX's own code mixes bfloat16 with float32, an error under strict promotion.
  with jax.numpy_dtype_promotion("standard"):
    out = jax.nn.dot_product_attention(
      query,
      key,
      value,
      bias,
      mask=visible,
      scale=scale,
      implementation=implementation,
    )
  return _zero_unless(mask.sees_any(visible), out)


def _zero_unless(
  sees_any: Bool[Array, "batch length"],
  out: Float[Array, "batch length heads value_dim"],
) -> jax.Array:
  """Returns `out` with zeros for queries without visible keys.

  Their softmax is an average of all values. Zeroing the output and not the
  weights saves passes over the largest tensor of attention, [B,N,T,S].
  """
  return jnp.where(sees_any[:, :, None, None], out, jnp.zeros((), out.dtype))


def _share_of_keys(
  logits: Float[Array, "batch *heads length kv_length"],
  sinks: Float[Array, " all_heads"],
) -> jax.Array:
  """Returns the share of the keys in a softmax with sinks, [B,...,T,1].

  `e ** l / (e ** l + e ** sink)` for `e ** l`, the sum over keys.
  """
  total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
  sinks = sinks.reshape(1, *logits.shape[1:-2], 1, 1).astype(total.dtype)
  return jax.nn.sigmoid(total - sinks)


class PlainKernel(nn.Module):
  """`plain` with a replaceable contraction, which may be a submodule.

  Attributes:
    einsum: Computes the matmuls `logits`, of queries and keys, and `context`,
      of weights and values; replaced by quantization.
  """

  einsum: matmuls.Einsum

  support: ClassVar[kernel_support.Support] = kernel_support.PLAIN

  def __call__(
    self,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: attention_mask.AttentionMask,
    **more: Any,
  ) -> jax.Array:
    """Returns the result of `plain`."""
    return plain(query, key, value, mask, einsum=self.einsum, **more)


@runtime_checkable
class TakesBiasFunction(Protocol):
  """A kernel whose `bias` may be a function of positions."""

  takes_bias_function: bool


class Logits(nn.Module):
  """Settings and submodules of the attention logits of a layer.

    logits = cap(scale * query . key + bias)

  The submodules belong to the layer, whose parameters are `query_scale/...`,
  `position_bias/...` and so on; the layer calls `bind_fields` first.

  Attributes:
    cap: Soft-caps the logits to `(-cap, cap)`; `None` does not.
    scale: Factor of the dot products; `None` is `head_dim ** -0.5`.
    query_scale: Maps queries [B,T,N,H] to the same shape after rotary
      positions, such as `head_norm.PerDimScale`.
    position_bias: `(positions of queries [B,T], of keys [B,S], number of heads)
      -> [B,N,T,S]`, added to the logits.
    relative_position: `(queries, scale) -> (queries, function of them and of
      positions that returns a bias)` (`position_bias.TransformerXlPosition`).
    sinks: `(number of heads) -> [N]`, logits of attention sinks (`sinks`).
  """

  cap: float | None = None
  scale: float | None = None
  query_scale: nn.Module | None = None
  position_bias: nn.Module | None = None
  relative_position: nn.Module | None = None
  sinks: nn.Module | None = None

  def __post_init__(self) -> None:
    super().__post_init__()
    checks.check_positive(self, "cap", "scale")

  @property
  def has_bias(self) -> bool:
    """Whether anything is added to the logits."""
    return self.position_bias is not None or self.relative_position is not None

  @nn.nowrap
  def prepare(self, query: jax.Array) -> tuple[jax.Array, BiasFunction | None]:
    """Returns the queries for the kernel, and the bias of the logits.

    The given queries [B,T,N,H] are normalized and rotated.
    """
    num_heads = query.shape[2]
    if self.query_scale is not None:
      query = self.query_scale(query)
    relative = None
    if self.relative_position is not None:
      scale = self.scale or query.shape[-1] ** -0.5
      query, relative = self.relative_position(query, scale)

    def bias(
      query: jax.Array, q_positions: jax.Array, kv_positions: jax.Array
    ) -> jax.Array:
      total = None
      if relative is not None:
        total = relative(query, q_positions, kv_positions)
      if self.position_bias is not None:
        fixed = self.position_bias(q_positions, kv_positions, num_heads)
        total = fixed if total is None else total + fixed.astype(total.dtype)
      assert total is not None
      return total

    return query, bias if self.has_bias else None

  @nn.nowrap
  def keywords(
    self,
    kernel: Kernel,
    query: jax.Array,
    mask: attention_mask.AttentionMask,
    bias: BiasFunction | None = None,
  ) -> dict[str, Any]:
    """Returns the keywords for a kernel, only those that are set.

    `query` and `bias` are those that `prepare` returned.
    """
    keywords: dict[str, Any] = {}
    if self.cap is not None:
      keywords["logit_cap"] = self.cap
    if self.scale is not None:
      keywords["scale"] = self.scale
    if self.sinks is not None:
      keywords["sinks"] = self.sinks(query.shape[2])
    if bias is not None:
      keywords["bias"] = bias
      if not (
        isinstance(kernel, TakesBiasFunction) and kernel.takes_bias_function
      ):
        keywords["bias"] = bias(query, mask.q_positions, mask.kv_positions)
    return keywords


def bind_fields(part: nn.Module, layer: nn.Module) -> Any:
  """Returns a copy of `part` whose submodules are children of `layer`.

  They have the names of their fields, so that the names of parameters do not
  depend on how a layer groups its submodules. To be called in a compact method;
  `part` must have no variables.
  """
  bound: dict[str, Any] = {}
  for field in dataclasses.fields(part):
    value = getattr(part, field.name)
    if isinstance(value, nn.Module) and field.name != "parent":
      bound[field.name] = value.clone(parent=layer, name=field.name)
  return part.clone(parent=None, name=None, **bound)


class LearnedSinks(nn.Module):
  """A learned logit per head, as in gpt-oss.

  OpenAI 2025, https://arxiv.org/abs/2508.10925.

  Attributes:
    sinks_init: Initializer of the logits [N].
    param_dtype: Dtype in which they are stored.
  """

  sinks_init: nn.initializers.Initializer = nn.initializers.zeros
  param_dtype: DTypeLike = jnp.float32

  @nn.compact
  def __call__(self, num_heads: int) -> Float[Array, " heads"]:
    """Returns the logit of each head."""
    init = logical.partitioned(self.sinks_init, (axes.HEADS,))
    return self.param("sinks", init, (num_heads,), self.param_dtype)


class ConstantSinks(nn.Module):
  """The same logit for all heads, nothing to learn.

  With 0 the denominator is one more than the sum: "softmax plus one". Pax calls
  it `attention_extra_logit`.

  Attributes:
    logit: The logit; far below the logits of keys it has no effect.
  """

  logit: float = 0.0

  def __post_init__(self) -> None:
    super().__post_init__()
    if not math.isfinite(self.logit):
      raise ValueError(
        f"ConstantSinks.logit must be finite, got {self.logit}; for no sinks "
        "leave Logits.sinks None."
      )

  def __call__(self, num_heads: int) -> Float[Array, " heads"]:
    """Returns the logit of each head, in float32."""
    return jnp.full((num_heads,), self.logit, jnp.float32)

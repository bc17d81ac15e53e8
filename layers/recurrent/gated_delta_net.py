"""Gated delta net: a recurrence that replaces what it has stored for a key.

  state[t] = exp(log_decay[t]) * state[t - 1] (I - rate[t] key[t] key[t]^T)
             + rate[t] value[t] key[t]^T
  y[t] = state[t] query[t]

Yang et al. 2024, https://arxiv.org/abs/2412.06464; keys and queries of length
one, and a norm with a gate after the recurrence, as in Qwen3-Next. In a chunk
the sum over earlier tokens is a triangular system, and the rest are matmuls.

Letters: B batch, T length, D embed, N heads, H key_dim, P value_dim, C chunks,
Q and K tokens of a chunk, W width of the convolution. There may be fewer heads
of keys and queries; adjacent heads of values share one then.
"""

from collections.abc import Callable, Mapping
import dataclasses
import functools
from typing import Any, ClassVar

from flax import linen as nn
from flax.linen import dtypes
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from paxon.layers import initializers, precision, token_context
from paxon.layers.cpu import forms
from paxon.layers.recurrent import (
  decoding_state,
  gated_norm,
  mamba2,
  short_convolution,
)
from paxon.quantization import matmuls
from paxon.sharding import axes, checks, logical

_STATE = "state"
_CONVOLVED = ("query", "key", "value")


def scan(
  value: Float[Array, "batch length heads value_dim"],
  log_decay: Float[Array, "batch length heads"],
  rate: Float[Array, "batch length heads"],
  key: Float[Array, "batch length heads key_dim"],
  query: Float[Array, "batch length heads key_dim"],
  runs: Int[Array, "batch length"],
  state: Float[Array, "batch heads value_dim key_dim"] | None = None,
  *,
  chunk_length: int,
) -> tuple[
  Float[Array, "batch length heads value_dim"],
  Float[Array, "batch heads value_dim key_dim"],
]:
  """Returns the outputs, and the state after the last token.

  All is computed in at least float32.

  Args:
    value: Values.
    log_decay: At most 0; zero for padding.
    rate: From 0 to 1; zero for padding.
    key: Keys, of length at most one.
    query: Queries.
    runs: Number of resets so far; see `state_space.scan`.
    state: State before the first token, which run 0 continues; `None` is zeros.
    chunk_length: Tokens of a chunk, which any number gives the same result up
      to rounding.
  """
  batch, length, heads, value_dim = value.shape
  wide = precision.at_least_float32(value.dtype)
  size = min(chunk_length, length)
  if state is None:
    state = jnp.zeros((batch, heads, value_dim, key.shape[-1]), wide)
  causal = jnp.tril(jnp.ones((size, size), bool))
  identity = jnp.eye(size, dtype=wide)

  def advance(
    carry: tuple[jax.Array, jax.Array], chunk: tuple[jax.Array, ...]
  ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
    state, before = carry
    value, log_decay, rate, key, query, runs = chunk
    decay, from_state = _find_decays(log_decay, runs, before, causal)
    past = jnp.einsum("BQNH,BNPH->BQNP", key, state) * from_state[..., None]
    wanted = (value - past) * rate[..., None]
    added = _find_additions(wanted, rate, key, decay, identity)
    scores = jnp.einsum("BQNH,BKNH->BNQK", query, key) * decay
    y = jnp.einsum("BNQK,BNKP->BQNP", scores, added)
    y += jnp.einsum("BQNH,BNPH->BQNP", query, state) * from_state[..., None]
    # The last row of the decays is that to the end of the chunk.
    left = decay[:, :, -1]
    kept = from_state[:, -1][..., None, None]
    state = state * kept + jnp.einsum("BNK,BNKP,BKNH->BNPH", left, added, key)
    return (state, runs[:, -1]), y

  arrays = (x.astype(wide) for x in (value, log_decay, rate, key, query))
  to_chunks = functools.partial(_to_chunks, size=size)
  chunks = (*map(to_chunks, arrays), to_chunks(runs, mode="edge"))
  first = jnp.zeros((batch,), runs.dtype)
  (state, _), y = jax.lax.scan(advance, (state.astype(wide), first), chunks)
  y = jnp.moveaxis(y, 0, 1).reshape(batch, -1, heads, value_dim)
  return y[:, :length], state


def _to_chunks(x: jax.Array, *, size: int, mode: str = "constant") -> jax.Array:
  """Returns [C,B,Q,...] of [B,T,...], padded at the end."""
  batch, length = x.shape[:2]
  after = -length % size
  pads = [(0, 0), (0, after), *[(0, 0)] * (x.ndim - 2)]
  x = jnp.pad(x, pads, mode=mode)
  x = x.reshape(batch, -1, size, *x.shape[2:])
  return jnp.moveaxis(x, 1, 0)


def _find_decays(
  log_decay: jax.Array, runs: jax.Array, before: jax.Array, causal: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Returns the decays between tokens of a chunk and from the state before it.

  They are zero across resets and to earlier tokens.

  Args:
    log_decay: Logarithms of the decays at tokens, [B,Q,N].
    runs: Number of resets so far, [B,Q].
    before: Number of resets before the chunk, [B].
    causal: Mask of a chunk, bool [Q,K].

  Returns:
    The decays [B,N,Q,K] and [B,Q,N].
  """
  total = jnp.cumsum(log_decay, axis=1)
  by_head = jnp.moveaxis(total, 1, 2)
  sees = (runs[:, :, None] == runs[:, None]) & causal[None]
  gap = by_head[..., None] - by_head[..., None, :]
  decay = jnp.exp(jnp.where(sees[:, None], gap, -jnp.inf))
  is_first = (runs == before[:, None])[..., None]
  return decay, jnp.where(is_first, jnp.exp(total), 0)


def _find_additions(
  wanted: jax.Array,
  rate: jax.Array,
  key: jax.Array,
  decay: jax.Array,
  identity: jax.Array,
) -> jax.Array:
  """Returns the values that the tokens of a chunk add to the state.

  Each addition depends on the additions of earlier tokens, which is a
  triangular system of equations.

  Args:
    wanted: Additions as if there were none of earlier tokens, [B,Q,N,P].
    rate: Rates [B,Q,N].
    key: Keys [B,Q,N,H].
    decay: Decays between the tokens, [B,N,Q,K].
    identity: Identity matrix [Q,Q].

  Returns:
    The additions, [B,N,Q,P].
  """
  overlap = jnp.einsum("BQNH,BKNH->BNQK", key, key) * decay
  overlap *= jnp.moveaxis(rate, 1, 2)[..., None]
  system = jnp.tril(overlap, -1) + identity[None, None]
  return jax.lax.linalg.triangular_solve(
    system,
    jnp.moveaxis(wanted, 1, 2),
    left_side=True,
    lower=True,
    unit_diagonal=True,
  )


class GatedDeltaNet(nn.Module):
  """Mixes the tokens of a sequence by the delta rule; called like attention.

  Attributes:
    num_heads: Number of heads, N.
    key_dim: Width of keys and queries, H.
    value_dim: Width of values, P.
    num_key_heads: Heads of keys and queries; divides `num_heads`. `None` is
      `num_heads`.
    conv_width: Width of the short convolutions, W.
    chunk_length: Tokens of a chunk of the recurrence; changes speed only.
    activation: Applied to the results of the convolutions.
    norm: Norm of the output, called with heads and gate [B,T,N,P].
    rate_init: Initializer of `log_rate`, as of Mamba-2.
    step_init: Initializer of `step_offset`, as of Mamba-2.
    dtype: Dtype of the projections. `None` promotes inputs and kernels.
    param_dtype: Dtype in which the parameters are stored.
    einsum: The contraction of the projections.
  """

  num_heads: int
  key_dim: int
  value_dim: int
  num_key_heads: int | None = None
  conv_width: int = 4
  chunk_length: int = 64
  activation: Callable[[jax.Array], jax.Array] = nn.silu
  # A factory, because a default object would be shared by two layers.
  norm: nn.Module = dataclasses.field(
    default_factory=functools.partial(
      gated_norm.GatedRmsNorm,
      num_groups=None,
      gate_first=False,
      share_scale=True,
      parent=None,
    )
  )
  rate_init: nn.initializers.Initializer = mamba2.LogUniform()
  step_init: nn.initializers.Initializer = mamba2.StepOffset()
  dtype: DTypeLike | None = None
  param_dtype: DTypeLike = jnp.float32
  einsum: Callable[..., jax.Array] = jnp.einsum

  quantization_roles: ClassVar[tuple[str, ...]] = (
    matmuls.ATTENTION_PROJECTIONS,
  )

  def __post_init__(self) -> None:
    super().__post_init__()
    sizes = ("num_heads", "key_dim", "value_dim", "conv_width", "chunk_length")
    checks.check_size(self, *sizes, "num_key_heads")
    if self.num_key_heads is not None:
      checks.check_multiple(self, "num_heads", "num_key_heads")

  @nn.compact
  def __call__(
    self,
    x: Float[Array, "batch length embed"],
    context: token_context.TokenContext = token_context.ONE_DOCUMENT,
  ) -> Float[Array, "batch length embed"]:
    """Returns the mixed tokens; called like `mamba2.Mamba2`.

    Raises:
      TypeError: Segments are not integers.
      ValueError: Shapes do not fit, or there is a prefix.
    """
    dtype = dtypes.canonicalize_dtype(x, dtype=self.dtype)
    if self.dtype is None:
      dtype = jnp.promote_types(dtype, self.param_dtype)
    wide = precision.at_least_float32(dtype)
    shapes = self._stored_shapes(dtype, wide)
    tokens, stored = decoding_state.begin(self, x, context, shapes)
    is_real = tokens.is_real[..., None]
    # Not multiplied: padding may be NaN.
    x = jnp.where(is_real, x, jnp.zeros((), x.dtype))
    mixed, after = self._convolve(x, tokens, stored)
    log_decay, rate = self._find_decay(x, wide)
    zero = jnp.zeros((), wide)
    key, query = (
      # Adjacent heads of values share those of keys and queries.
      jnp.repeat(
        _normalize(mixed[name].astype(wide)),
        self.num_heads // mixed[name].shape[2],
        axis=2,
      )
      for name in ("key", "query")
    )
    y, after[_STATE] = scan(
      mixed["value"].astype(wide),
      jnp.where(is_real, log_decay, zero),
      jnp.where(is_real, rate, zero),
      key,
      query * self.key_dim**-0.5,
      tokens.runs,
      None if stored is None else stored[_STATE],
      chunk_length=self.chunk_length,
    )
    if stored is not None:
      decoding_state.store(self, tokens, after, shapes)
    y = jnp.where(is_real[..., None], y, zero)
    y = self.norm(y, self._project("gate", x, self._heads("gate")))
    return self._project_out(y.astype(dtype), x.shape[-1])

  def _stored_shapes(
    self, dtype: DTypeLike, wide: DTypeLike
  ) -> dict[str, decoding_state.Shape]:
    """Returns the arrays that decoding stores, by name."""
    shapes = {
      _window(name): decoding_state.Shape(
        (self.conv_width - 1, *self._heads(name)),
        dtype,
        (None, self._heads_axis(name), axes.HEAD_DIM),
      )
      for name in _CONVOLVED
    }
    shapes[_STATE] = decoding_state.Shape(
      (self.num_heads, self.value_dim, self.key_dim),
      wide,
      (axes.HEADS, axes.HEAD_DIM, None),
    )
    return shapes

  def _convolve(
    self,
    x: jax.Array,
    tokens: decoding_state.Tokens,
    stored: Mapping[str, jax.Array] | None,
  ) -> tuple[dict[str, jax.Array], dict[str, Any]]:
    """Returns the convolved projections, and the windows after the tokens.

    The windows are None if `stored` is.
    """
    mixed, after = {}, {}
    for name in _CONVOLVED:
      window = _window(name)
      mixed[name], after[window] = short_convolution.ShortConvolution(
        self.conv_width,
        (self._heads_axis(name), axes.HEAD_DIM),
        use_bias=False,
        activation=self.activation,
        dtype=self.dtype,
        param_dtype=self.param_dtype,
        name=f"{name}_conv",
      )(
        self._project(name, x, self._heads(name)),
        tokens,
        None if stored is None else stored[window],
      )
    return mixed, after

  def _find_decay(
    self, x: jax.Array, wide: DTypeLike
  ) -> tuple[jax.Array, jax.Array]:
    """Returns the logarithms of decays, and the rates, [B,T,N]."""
    shape, names = (self.num_heads,), (axes.HEADS,)
    log_rate = self._param("log_rate", self.rate_init, shape, names)
    offset = self._param("step_offset", self.step_init, shape, names)
    step = self._project("step", x, shape).astype(wide)
    step = jax.nn.softplus(step + offset.astype(wide)[None, None])
    rate = jax.nn.sigmoid(self._project("rate", x, shape).astype(wide))
    return -jnp.exp(log_rate.astype(wide))[None, None] * step, rate

  def _heads(self, name: str) -> tuple[int, int]:
    """Returns the number of heads of a projection, and their width."""
    if name in ("key", "query"):
      return self.num_key_heads or self.num_heads, self.key_dim
    return self.num_heads, self.value_dim

  def _heads_axis(self, name: str) -> str:
    """Returns the logical axis of the heads of a projection."""
    is_shared = self._heads(name)[0] != self.num_heads
    return axes.KV_HEADS if is_shared else axes.HEADS

  def _project(
    self, name: str, x: jax.Array, heads: tuple[int, ...]
  ) -> jax.Array:
    """Returns a projection [B,T,*heads] of tokens."""
    shape = (x.shape[-1], *heads)
    init = initializers.lecun(
      in_axes=(0,), out_axes=tuple(range(1, len(shape)))
    )
    heads_axis = self._heads_axis(name)
    names = (axes.EMBED, heads_axis, axes.HEAD_DIM)[: len(shape)]
    kernel = self._param(name, init, shape, names, self.dtype)
    x, kernel = dtypes.promote_dtype(x, kernel, dtype=self.dtype)
    letters = "NP"[: len(shape) - 1]
    y = forms.multiply_tokens(
      self.einsum, name, f"BTD,D{letters}->BT{letters}", x, kernel
    )
    activation = axes.ACTIVATION_HEADS
    if heads_axis == axes.KV_HEADS:
      activation = axes.ACTIVATION_KV_HEADS
    outputs = (axes.BATCH, axes.LENGTH, activation, axes.ACTIVATION_HEAD_DIM)
    return logical.constrain(y, outputs[: y.ndim])

  def _project_out(self, y: jax.Array, embed_dim: int) -> jax.Array:
    """Returns the output [B,T,D] of heads [B,T,N,P]."""
    out = self._param(
      "out",
      initializers.lecun(in_axes=(0, 1), out_axes=(2,)),
      (self.num_heads, self.value_dim, embed_dim),
      (axes.HEADS, axes.HEAD_DIM, axes.EMBED),
      self.dtype,
    )
    y, out = dtypes.promote_dtype(y, out, dtype=self.dtype)
    return forms.multiply_tokens(self.einsum, "out", "BTNP,NPD->BTD", y, out)

  def _param(
    self,
    name: str,
    init: nn.initializers.Initializer,
    shape: tuple[int, ...],
    names: tuple[str | None, ...],
    read_dtype: DTypeLike | None = None,
  ) -> jax.Array:
    init = logical.partitioned(init, names, read_dtype=read_dtype)
    return self.param(name, init, shape, self.param_dtype)


def _window(name: str) -> str:
  """Returns the name of the stored window of a convolution."""
  return f"{name}_window"


def _normalize(x: jax.Array) -> jax.Array:
  """Returns vectors of length one."""
  return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)

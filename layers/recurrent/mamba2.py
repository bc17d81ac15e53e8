"""Mamba-2: a selective state-space layer (SSD).

  z, x, B, C, dt = projections of the tokens
  x, B, C = silu(short convolution of each)
  dt = softplus(dt + dt_bias)                               for each head
  h = exp(dt A) h + dt B x,  A = -exp(A_log)
  y = C h + D x
  output = out(norm(y * silu(z)))

Time and memory are linear in the length of the sequence, and decoding keeps a
state of fixed size. Dao and Gu 2024, https://arxiv.org/abs/2405.21060, section
7. Parameters are named for attention's terms: z is `gate`, x `value`, B `key`,
C `query`, dt `step`, dt_bias `step_offset`, A_log `log_rate` and D `skip`. The
projections are separate kernels, so that each can be split over heads.

Letters: B batch, T length, D embed, N heads, P head_dim, G groups, S state_dim,
W width of the convolution.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
import math
from typing import ClassVar

from flax import linen as nn
from flax.linen import dtypes
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from paxon.layers import initializers, precision, remat, token_context
from paxon.layers.cpu import forms
from paxon.layers.recurrent import (
  decoding_state,
  gated_norm,
  short_convolution,
  state_space,
)
from paxon.quantization import matmuls
from paxon.sharding import axes, checks, logical

_STATE = "state"
_CONVOLVED = ("value", "key", "query")


@dataclasses.dataclass(frozen=True)
class LogUniform:
  """Initializer of A_log (`log_rate`): the logarithm of uniform values.

  Attributes:
    low: Least rate.
    high: Largest rate.
  """

  low: float = 1.0
  high: float = 16.0

  def __call__(
    self, key: jax.Array, shape: Sequence[int], dtype: DTypeLike
  ) -> jax.Array:
    """Returns the values."""
    rate = jax.random.uniform(
      key, tuple(shape), jnp.float32, self.low, self.high
    )
    return jnp.log(rate).astype(dtype)


@dataclasses.dataclass(frozen=True)
class StepOffset:
  """Initializer of dt_bias (`step_offset`): dt is uniform in its logarithm.

  Attributes:
    low: Least step.
    high: Largest step.
    floor: Steps are at least this.
  """

  low: float = 1e-3
  high: float = 0.1
  floor: float = 1e-4

  def __call__(
    self, key: jax.Array, shape: Sequence[int], dtype: DTypeLike
  ) -> jax.Array:
    """Returns the values, which softplus maps to the steps."""
    low, high = math.log(self.low), math.log(self.high)
    log_step = jax.random.uniform(key, tuple(shape), jnp.float32, low, high)
    step = jnp.maximum(jnp.exp(log_step), self.floor)
    return (step + jnp.log(-jnp.expm1(-step))).astype(dtype)


class Mamba2(nn.Module):
  """Mixes the tokens of a sequence by a recurrence; called like attention.

  Attributes:
    num_heads: Number of heads, N. The paper has `num_heads * head_dim` twice
      the width of a token.
    head_dim: Width of a head, P.
    state_dim: Width of keys and queries, S: a head has a state [P,S].
    num_groups: Keys and queries of a token, G; divides `num_heads`.
    conv_width: Width of the short convolutions, W.
    chunk_length: Tokens of a chunk of the recurrence; changes speed only.
    activation: Applied to the results of the convolutions.
    norm: Norm of the output, called with heads and gate [B,T,N,P].
    step_limits: Steps are clipped to this interval.
    use_bias: Whether the projections have biases.
    use_conv_bias: Whether the convolutions have biases.
    kernel_init: Initializer of the projections; `None` scales by the fan-in.
    rate_init: Initializer of `log_rate`.
    step_init: Initializer of `step_offset`.
    dtype: Dtype of the computation. `None` promotes inputs and kernels.
    param_dtype: Dtype in which the parameters are stored.
    einsum: The contraction of the projections.
  """

  num_heads: int
  head_dim: int
  state_dim: int
  num_groups: int = 1
  conv_width: int = 4
  chunk_length: int = 128
  activation: Callable[[jax.Array], jax.Array] = nn.silu
  # A factory, because a default object would be shared by two layers.
  norm: nn.Module = dataclasses.field(
    default_factory=functools.partial(gated_norm.GatedRmsNorm, parent=None)
  )
  step_limits: tuple[float, float] = (0.0, math.inf)
  use_bias: bool = False
  use_conv_bias: bool = True
  kernel_init: nn.initializers.Initializer | None = None
  rate_init: nn.initializers.Initializer = LogUniform()
  step_init: nn.initializers.Initializer = StepOffset()
  dtype: DTypeLike | None = None
  param_dtype: DTypeLike = jnp.float32
  einsum: Callable[..., jax.Array] = jnp.einsum

  quantization_roles: ClassVar[tuple[str, ...]] = (
    matmuls.ATTENTION_PROJECTIONS,
  )

  def __post_init__(self) -> None:
    self.step_limits = tuple(self.step_limits)
    super().__post_init__()
    sizes = ("num_heads", "head_dim", "state_dim", "num_groups")
    checks.check_size(self, *sizes, "conv_width", "chunk_length")
    checks.check_multiple(self, "num_heads", "num_groups")
    low, high = self.step_limits
    if not 0 <= low < high:
      raise ValueError(
        "Mamba2.step_limits must be (low, high) with 0 <= low < high, got"
        f" {self.step_limits}."
      )

  @nn.compact
  def __call__(
    self,
    x: Float[Array, "batch length embed"],
    context: token_context.TokenContext = token_context.ONE_DOCUMENT,
  ) -> Float[Array, "batch length embed"]:
    """Returns the mixed tokens; the output of padding is zero without biases.

    Args:
      x: The tokens.
      context: Their segments; positions are not used, and there must be no
        prefix.

    Raises:
      TypeError: Segments are not integers.
      ValueError: Shapes do not fit, or there is a prefix.
    """
    heads = (self.num_heads, self.head_dim)
    groups = (self.num_groups, self.state_dim)
    dtype = dtypes.canonicalize_dtype(x, dtype=self.dtype)
    if self.dtype is None:
      dtype = jnp.promote_types(dtype, self.param_dtype)
    shapes = self._state_shapes(dtype)
    tokens, stored = decoding_state.begin(self, x, context, shapes)
    if not tokens.is_plain:
      # Not multiplied: padding may be NaN.
      x = jnp.where(tokens.is_real[..., None], x, jnp.zeros((), x.dtype))
    gate = self._project("gate", x, heads)
    step = self._project("step", x, (self.num_heads,))
    mixed, windows = {}, {}
    for name in _CONVOLVED:
      shape = heads if name == "value" else groups
      projected = self._project(name, x, shape)
      window = f"{name}_window"
      mixed[name], windows[window] = short_convolution.ShortConvolution(
        self.conv_width,
        self._head_axes(name),
        use_bias=self.use_conv_bias,
        activation=self.activation,
        dtype=self.dtype,
        param_dtype=self.param_dtype,
        name=f"{name}_conv",
      )(projected, tokens, None if stored is None else stored[window])
    y, state = self._recur(step, tokens, stored, **mixed)
    if stored is not None:
      decoding_state.store(self, tokens, {**windows, _STATE: state}, shapes)
    y = self.norm(y, gate).astype(dtype)
    y = remat.tag(y, remat.ATTENTION_CONTEXT)
    return self._output(y, x.shape[-1])

  def _recur(
    self,
    step: jax.Array,
    tokens: decoding_state.Tokens,
    stored: dict[str, jax.Array] | None,
    *,
    value: jax.Array,
    key: jax.Array,
    query: jax.Array,
  ) -> tuple[jax.Array, jax.Array]:
    """Returns the outputs [B,T,N,P] with the skip, and the state after them."""
    vector = functools.partial(self._param, shape=(self.num_heads,))
    offset = vector("step_offset", self.step_init, names=(axes.HEADS,))
    log_rate = vector("log_rate", self.rate_init, names=(axes.HEADS,))
    skip = vector("skip", nn.initializers.ones, names=(axes.HEADS,))
    wide = precision.at_least_float32(step.dtype)
    offset, log_rate, skip = (x.astype(wide) for x in (offset, log_rate, skip))
    step = jax.nn.softplus(step.astype(wide) + offset[None, None])
    if self.step_limits != (0.0, math.inf):
      step = jnp.clip(step, *self.step_limits)
    if not tokens.is_plain:
      step = jnp.where(tokens.is_real[..., None], step, jnp.zeros((), wide))
    y, state = state_space.scan(
      (value.astype(wide) * step[..., None]).astype(value.dtype),
      -jnp.exp(log_rate)[None, None] * step,
      key,
      query,
      None if tokens.is_plain else tokens.runs,
      None if stored is None else stored[_STATE],
      chunk_length=self.chunk_length,
    )
    y += value.astype(wide) * skip[None, None, :, None]
    if tokens.is_plain:
      return y, state
    # The convolution has a bias.
    is_real = tokens.is_real[..., None, None]
    return jnp.where(is_real, y, jnp.zeros((), wide)), state

  def _state_shapes(self, dtype: DTypeLike) -> dict[str, decoding_state.Shape]:
    """Returns the arrays of the decoding state."""
    before = self.conv_width - 1
    shapes = {
      _STATE: decoding_state.Shape(
        (self.num_heads, self.head_dim, self.state_dim),
        precision.at_least_float32(dtype),
        (*self._head_axes("value"), None),
      )
    }
    for name in _CONVOLVED:
      width = (self.num_heads, self.head_dim)
      if name != "value":
        width = (self.num_groups, self.state_dim)
      shapes[f"{name}_window"] = decoding_state.Shape(
        (before, *width), dtype, (None, *self._head_axes(name))
      )
    return shapes

  def _head_axes(self, name: str) -> tuple[str | None, ...]:
    """Returns the logical axes of the heads of a projection."""
    if name == "step":
      return (axes.HEADS,)
    if name in ("gate", "value"):
      return axes.HEADS, axes.HEAD_DIM
    # A single group is replicated.
    return (axes.KV_HEADS if self.num_groups > 1 else None), axes.HEAD_DIM

  def _project(
    self, name: str, x: jax.Array, shape: tuple[int, ...]
  ) -> jax.Array:
    """Returns a projection [B,T,*shape] of tokens."""
    names = self._head_axes(name)
    init = self.kernel_init or initializers.lecun(
      in_axes=(0,), out_axes=tuple(range(1, len(shape) + 1))
    )
    dtype = self.dtype
    kernel = self._param(
      name, init, (x.shape[-1], *shape), (axes.EMBED, *names), dtype
    )
    bias = None
    if self.use_bias:
      zeros = nn.initializers.zeros
      bias = self._param(f"{name}_bias", zeros, shape, names, dtype)
    x, kernel, bias = dtypes.promote_dtype(x, kernel, bias, dtype=dtype)
    letters = "NP"[: len(shape)]
    y = forms.multiply_tokens(
      self.einsum, name, f"BTD,D{letters}->BT{letters}", x, kernel
    )
    if bias is not None:
      y += bias[None, None]
    if len(shape) == 1:
      return logical.constrain(
        y, (axes.BATCH, axes.LENGTH, axes.ACTIVATION_HEADS)
      )
    heads = axes.ACTIVATION_HEADS
    if names[0] != axes.HEADS:
      heads = axes.ACTIVATION_KV_HEADS
    return logical.constrain(
      y, (axes.BATCH, axes.LENGTH, heads, axes.ACTIVATION_HEAD_DIM)
    )

  def _output(self, y: jax.Array, embed_dim: int) -> jax.Array:
    """Returns tokens [B,T,D] of heads [B,T,N,P]."""
    names = (axes.HEADS, axes.HEAD_DIM, axes.EMBED)
    init = self.kernel_init or initializers.lecun(in_axes=(0, 1), out_axes=(2,))
    dtype = self.dtype
    kernel = self._param("out", init, (*y.shape[2:], embed_dim), names, dtype)
    bias = None
    if self.use_bias:
      bias = self._param(
        "out_bias", nn.initializers.zeros, (embed_dim,), (axes.EMBED,), dtype
      )
    y, kernel, bias = dtypes.promote_dtype(y, kernel, bias, dtype=dtype)
    x = forms.multiply_tokens(self.einsum, "out", "BTNP,NPD->BTD", y, kernel)
    x = x if bias is None else x + bias[None, None]
    return remat.tag(x, remat.ATTENTION_OUTPUT)

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

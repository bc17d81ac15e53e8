"""Long short-term memory (LSTM) and gated recurrent units (GRU).

An LSTM has a cell c and an output h; with gates i, f, o and the update u, each
an affine function of the token and the previous h,

  c = sigmoid(f) c + sigmoid(i) tanh(u)
  h = sigmoid(o) tanh(c)

Variants: layer norm of each gate (Ba et al. 2016,
https://arxiv.org/abs/1607.06450), `1 - sigmoid(f)` as the input gate (CIFG,
Greff et al. 2015, https://arxiv.org/abs/1503.04069) and a projection of h (Sak
et al. 2014, https://arxiv.org/abs/1402.1128). A GRU (Cho et al. 2014,
https://arxiv.org/abs/1406.1078, as in PyTorch) has one state:

  u = tanh(W x + b + sigmoid(r) (U h + d))
  h = sigmoid(z) h + (1 - sigmoid(z)) u

The gates of all tokens are projected at once; a loop over tokens does the rest.
Layers are called like attention (`decoding_state`).

Zoneout (Krueger et al. 2016, https://arxiv.org/abs/1606.01305) keeps each entry
of the state with a probability p in training; otherwise the state is the
expected one, `p * old + (1 - p) * new`.

Letters: B batch, T length, D embed, G gates, F hidden_dim, O output.
"""

from collections.abc import Callable
import dataclasses
from typing import Any

from flax import linen as nn
from flax.linen import dtypes
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from paxon.layers import initializers, precision, token_context
from paxon.layers.cpu import forms
from paxon.layers.recurrent import decoding_state
from paxon.sharding import axes, checks, logical

# The state by name, [B,F] or [B,O], and the gates of a token, [B,G,F].
State = dict[str, jax.Array]
Step = Callable[[State, jax.Array], State]

_HIDDEN = "hidden"
_STREAM = "dropout"
_default_init = initializers.lecun(in_axes=(0,), out_axes=(1, 2))


class _Recurrence(nn.Module):
  """The loop over tokens; subclasses define a step."""

  def __post_init__(self) -> None:
    super().__post_init__()
    checks.check_size(self, "hidden_dim")
    checks.check_interval(self, "[0, 1)", "zoneout")

  @nn.compact
  def __call__(
    self,
    x: Float[Array, "batch length embed"],
    context: token_context.TokenContext = token_context.ONE_DOCUMENT,
  ) -> Float[Array, "batch length output"]:
    """Returns the output of each token, zero for padding.

    Args:
      x: The tokens.
      context: Their segments, each of which begins with a state of zeros;
        positions are not used, and there must be no prefix. Training draws the
        entries that zoneout keeps.

    Raises:
      TypeError: Segments are not integers.
      ValueError: Shapes do not fit, or there is a prefix.
    """
    layer: Any = self
    dtype = dtypes.canonicalize_dtype(x, dtype=layer.dtype)
    if layer.dtype is None:
      dtype = jnp.promote_types(dtype, layer.param_dtype)
    wide = precision.at_least_float32(dtype)
    shapes = {
      name: decoding_state.Shape((size,), wide, (axes.MLP,))
      for name, size in self.state_sizes().items()
    }
    tokens, stored = decoding_state.begin(self, x, context, shapes)
    state = stored
    if state is None:
      state = {
        n: jnp.zeros((len(x), *s.sizes), wide) for n, s in shapes.items()
      }
    is_plain = tokens.is_plain
    if not is_plain:
      # Not multiplied: padding may be NaN.
      x = jnp.where(tokens.is_real[..., None], x, jnp.zeros((), x.dtype))
    gates, step = self.make_step(x, dtype)
    shares = self._draw_shares(x.shape[:2], shapes, context.deterministic)

    def advance(
      carry: tuple[State, jax.Array], token: tuple[Any, ...]
    ) -> tuple[tuple[State, jax.Array], jax.Array]:
      (state, before), (gates, is_real, run, shares) = carry, token
      begin = state
      if not is_plain:
        is_reset = (run != before)[:, None]
        begin = {n: jnp.where(is_reset, 0, x) for n, x in state.items()}
      after = step(begin, gates)
      for n, old in shares.items():
        after[n] = old * begin[n] + (1 - old) * after[n]
      if is_plain:
        return (after, run), after[_HIDDEN]
      is_kept = is_real[:, None]
      state = {n: jnp.where(is_kept, after[n], x) for n, x in state.items()}
      return (state, run), jnp.where(is_kept, state[_HIDDEN], 0)

    by_time = (
      jnp.swapaxes(each, 0, 1) for each in (gates, tokens.is_real, tokens.runs)
    )
    first = jnp.zeros((len(x),), jnp.int32)
    inputs = (*by_time, shares)
    (state, _), y = jax.lax.scan(advance, (state, first), inputs)
    if stored is not None:
      decoding_state.store(self, tokens, state, shapes)
    y = jnp.swapaxes(y, 0, 1).astype(dtype)
    return logical.constrain(y, (axes.BATCH, axes.LENGTH, axes.ACTIVATION_MLP))

  def _draw_shares(
    self,
    shape: tuple[int, ...],
    shapes: dict[str, decoding_state.Shape],
    deterministic: bool,
  ) -> State:
    """Returns the share of the old state in the new one, [T,B,F] by name."""
    layer: Any = self
    if not layer.zoneout:
      return {}
    sizes = {n: (*shape[::-1], *s.sizes) for n, s in shapes.items()}
    if deterministic:
      return {
        n: jnp.full(size, layer.zoneout, shapes[n].dtype)
        for n, size in sizes.items()
      }
    keys = jax.random.split(self.make_rng(_STREAM), len(sizes))
    return {
      n: jax.random.bernoulli(key, layer.zoneout, size).astype(shapes[n].dtype)
      for key, (n, size) in zip(keys, sizes.items(), strict=True)
    }

  @nn.nowrap
  def state_sizes(self) -> dict[str, int]:
    """Returns the width of each array of the state."""
    layer: Any = self
    return {_HIDDEN: layer.hidden_dim}

  @nn.nowrap
  def make_step(self, x: jax.Array, dtype: DTypeLike) -> tuple[jax.Array, Step]:
    """Returns the gates [B,T,G,F] of tokens, and a step of the recurrence."""
    raise NotImplementedError

  def _project(
    self, x: jax.Array, num_gates: int, dtype: DTypeLike, *, use_bias: bool
  ) -> jax.Array:
    """Returns the gates [B,T,G,F] of tokens, in at least float32."""
    layer: Any = self
    shape = (x.shape[-1], num_gates, layer.hidden_dim)
    kernel = self._param("input", layer.kernel_init, shape, axes.EMBED, dtype)
    gates = _multiply("BTD,DGF->BTGF", x.astype(dtype), kernel.astype(dtype))
    if not use_bias:
      return gates
    bias = self._param("bias", nn.initializers.zeros, shape[1:])
    return gates + bias.astype(gates.dtype)[None, None]

  def _recurrent(
    self, size: int, num_gates: int, dtype: DTypeLike
  ) -> Callable[[jax.Array], jax.Array]:
    """Returns the linear map of the output [B,O] to gates [B,G,F]."""
    layer: Any = self
    shape = (size, num_gates, layer.hidden_dim)
    kernel = self._param(
      "recurrent", layer.kernel_init, shape, axes.EMBED, dtype
    )
    kernel = kernel.astype(dtype)

    return lambda hidden: _multiply("BO,OGF->BGF", hidden.astype(dtype), kernel)

  def _param(
    self,
    name: str,
    init: nn.initializers.Initializer,
    shape: tuple[int, ...],
    first: str | None = None,
    read_dtype: DTypeLike | None = None,
  ) -> jax.Array:
    """Creates a parameter whose last axis is `mlp`."""
    layer: Any = self
    names = (first, *(None,) * (len(shape) - 2), axes.MLP)[-len(shape) :]
    init = logical.partitioned(init, names, read_dtype=read_dtype)
    return self.param(name, init, shape, layer.param_dtype)


class Lstm(_Recurrence):
  """An LSTM; gates are the update, input, forget and output, in this order.

  Attributes:
    hidden_dim: Width of the cell, F.
    output_dim: Width of the output, O, by a projection; `None` has none.
    couple_gates: Whether the input gate is one minus the forget gate (CIFG),
      which has no parameters of its own.
    norm_epsilon: Epsilon of a layer norm of each gate, 1e-8 in Praxis; `None`
      has no norm.
    cell_cap: Clips the cell to `[-cell_cap, cell_cap]`, 10 in Praxis; `None`
      does not.
    forget_bias: Added to the forget gate.
    activation: Applied to the cell before the output gate; `None` is the
      identity.
    zoneout: Probability that an entry of the state is kept.
    kernel_init: Initializer of kernels.
    dtype: Dtype of the matmuls. `None` promotes inputs and kernels.
    param_dtype: Dtype in which the parameters are stored.
  """

  hidden_dim: int
  output_dim: int | None = None
  couple_gates: bool = False
  norm_epsilon: float | None = None
  cell_cap: float | None = None
  forget_bias: float = 0.0
  activation: Callable[[jax.Array], jax.Array] | None = nn.tanh
  zoneout: float = 0.0
  kernel_init: nn.initializers.Initializer = _default_init
  dtype: DTypeLike | None = None
  param_dtype: DTypeLike = jnp.float32

  def __post_init__(self) -> None:
    super().__post_init__()
    checks.check_size(self, "output_dim")
    checks.check_positive(self, "cell_cap", "norm_epsilon")

  @nn.nowrap
  def state_sizes(self) -> dict[str, int]:
    """Returns the width of each array of the state."""
    output = self.output_dim or self.hidden_dim
    return {_HIDDEN: output, "cell": self.hidden_dim}

  @nn.nowrap
  def make_step(self, x: jax.Array, dtype: DTypeLike) -> tuple[jax.Array, Step]:
    """Returns the gates [B,T,G,F] of tokens, and a step of the recurrence."""
    num_gates = 3 if self.couple_gates else 4
    epsilon = self.norm_epsilon
    gates = self._project(x, num_gates, dtype, use_bias=epsilon is None)
    recurrent = self._recurrent(self.state_sizes()[_HIDDEN], num_gates, dtype)
    scale = bias = out = None
    if epsilon is not None:
      shape = (num_gates, self.hidden_dim)
      scale = self._param("scale", nn.initializers.ones, shape)
      bias = self._param("bias", nn.initializers.zeros, shape)
      scale, bias = (each.astype(gates.dtype) for each in (scale, bias))
    if self.output_dim is not None:
      init = logical.partitioned(
        initializers.lecun(in_axes=(0,), out_axes=(1,)),
        (axes.EMBED, axes.MLP),
        read_dtype=dtype,
      )
      shape = (self.hidden_dim, self.output_dim)
      out = self.param("out", init, shape, self.param_dtype).astype(dtype)

    def step(state: State, gates: jax.Array) -> State:
      gates += recurrent(state[_HIDDEN])
      if epsilon is not None and scale is not None and bias is not None:
        gates -= jnp.mean(gates, axis=-1, keepdims=True)
        variance = jnp.mean(gates * gates, axis=-1, keepdims=True)
        gates = gates * jax.lax.rsqrt(variance + epsilon) * scale[None]
        gates += bias[None]
      forget = jax.nn.sigmoid(gates[:, -2] + self.forget_bias)
      admit = 1 - forget if self.couple_gates else jax.nn.sigmoid(gates[:, 1])
      cell = forget * state["cell"] + admit * jnp.tanh(gates[:, 0])
      if self.cell_cap is not None:
        cell = jnp.clip(cell, -self.cell_cap, self.cell_cap)
      shown = cell if self.activation is None else self.activation(cell)
      hidden = jax.nn.sigmoid(gates[:, -1]) * shown
      if out is not None:
        hidden = jnp.einsum(
          "BF,FO->BO",
          hidden.astype(dtype),
          out,
          preferred_element_type=cell.dtype,
        )
      return {_HIDDEN: hidden, "cell": cell}

    return gates, step


class Gru(_Recurrence):
  """A GRU; gates are the reset, the mix and the update, in this order.

  Attributes:
    hidden_dim: Width of the state and of the output, F.
    zoneout: Probability that an entry of the state is kept.
    kernel_init: Initializer of kernels.
    dtype: Dtype of the matmuls. `None` promotes inputs and kernels.
    param_dtype: Dtype in which the parameters are stored.
  """

  hidden_dim: int
  zoneout: float = 0.0
  kernel_init: nn.initializers.Initializer = _default_init
  dtype: DTypeLike | None = None
  param_dtype: DTypeLike = jnp.float32

  @nn.nowrap
  def make_step(self, x: jax.Array, dtype: DTypeLike) -> tuple[jax.Array, Step]:
    """Returns the gates [B,T,G,F] of tokens, and a step of the recurrence."""
    gates = self._project(x, 3, dtype, use_bias=True)
    recurrent = self._recurrent(self.hidden_dim, 3, dtype)
    zeros = nn.initializers.zeros
    update = self._param("update_bias", zeros, (self.hidden_dim,))
    update = update.astype(gates.dtype)[None]

    def step(state: State, gates: jax.Array) -> State:
      hidden = state[_HIDDEN]
      past = recurrent(hidden)
      reset, mix = (jax.nn.sigmoid(gates[:, i] + past[:, i]) for i in range(2))
      new = jnp.tanh(gates[:, 2] + reset * (past[:, 2] + update))
      return {_HIDDEN: mix * hidden + (1 - mix) * new}

    return gates, step


class Bidirectional(nn.Module):
  """Two layers, one of which reads each document from its end.

  Attributes:
    forward: Called like attention.
    backward: The same for reversed tokens.
  """

  forward: nn.Module
  backward: nn.Module

  def __call__(
    self,
    x: Float[Array, "batch length embed"],
    context: token_context.TokenContext = token_context.ONE_DOCUMENT,
  ) -> Float[Array, "batch length output"]:
    """Returns the outputs of both layers, side by side.

    Raises:
      ValueError: A decoding state is asked for, or there is a prefix; see
        `_Recurrence`.
    """
    if context.cache_length is not None:
      raise ValueError(
        "Bidirectional cannot decode, because it reads later tokens; leave out"
        " cache_length."
      )
    ids = context.segment_ids
    reverse = dataclasses.replace(
      context, positions=None, segment_ids=None if ids is None else ids[:, ::-1]
    )
    y = self.forward(x, context)
    back = self.backward(x[:, ::-1], reverse)[:, ::-1]
    return jnp.concatenate([y, back], axis=-1)


def _multiply(equation: str, x: jax.Array, kernel: jax.Array) -> jax.Array:
  """Returns the matmul, in at least float32."""
  wide = precision.at_least_float32(x.dtype)
  if wide != x.dtype:
    return jnp.einsum(equation, x, kernel, preferred_element_type=wide)
  return forms.multiply_tokens(jnp.einsum, "gates", equation, x, kernel)

"""Diagonal state spaces (S4D), and the gated state-space layer.

Each feature d of a token has a state h of N complex numbers:

  h[t] = exp(step a) h[t-1] + (exp(step a) - 1) / a * x[t]
  y[t] = real(sum_n c[n] h[t,n]) + skip x[t]

the zero-order hold of h' = a h + x (Gu et al. 2022,
https://arxiv.org/abs/2206.11893). The rates a are the same for all features at
first, and begin as a diagonal that stands for a HiPPO matrix:

  evenly_spaced  -1/2 + i pi (N - 1) (n / N - 1/2): Praxis's default
  linear         -1/2 + i pi n: S4D-Lin
  inverse        -1/2 + i N / pi (N / (2 n + 1) - 1): S4D-Inv
  legendre       eigenvalues of the normal part of HiPPO-LegS
  laguerre       those of HiPPO-LagT; frequencies times N, as in Praxis

`GatedStateSpace` has such a layer between projections (Mehta et al. 2022,
https://arxiv.org/abs/2206.13947):

  output = out(context(state space of gelu(inner(x))) * gelu(gate(x)))

Letters: B batch, T length, D features, N states.
"""

from collections.abc import Callable, Sequence
from typing import ClassVar

from flax import linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float
import numpy as np

from paxon.layers import contracts, linear, precision, token_context
from paxon.layers.recurrent import decoding_state
from paxon.quantization import matmuls
from paxon.sharding import axes, checks, logical

_STATE = "state"
_NORMAL = nn.initializers.normal(0.5**0.5)


def evenly_spaced(num: int) -> np.ndarray:
  """Returns N rates, complex128, with evenly spaced frequencies around 0."""
  return -0.5 + 1j * np.pi * (num - 1) * (np.arange(num) / num - 0.5)


def linear_rates(num: int) -> np.ndarray:
  """Returns the N rates of S4D-Lin, complex128."""
  return -0.5 + 1j * np.pi * np.arange(num)


def inverse(num: int) -> np.ndarray:
  """Returns the N rates of S4D-Inv, complex128."""
  n = np.arange(num)
  return -0.5 + 1j * num / np.pi * (num / (2 * n + 1) - 1)


def legendre(num: int) -> np.ndarray:
  """Returns the eigenvalues of the normal part of HiPPO-LegS, complex128.

  The HiPPO matrix is that of the paper's equation 6; with half the outer
  product of its input vector added it is -1/2 on the diagonal and otherwise
  skew-symmetric, so its eigenvalues are -1/2 plus imaginary numbers.
  """
  root = np.sqrt(2 * np.arange(num) + 1)
  lower = np.tril(np.outer(root, root), -1)
  return _normal(lower, root)


def laguerre(num: int) -> np.ndarray:
  """Returns HiPPO-LagT's values, frequencies times N, complex128."""
  rates = _normal(np.tril(np.ones((num, num)), -1), np.ones(num))
  return rates.real + 1j * rates.imag * num


def _normal(lower: np.ndarray, vector: np.ndarray) -> np.ndarray:
  """Returns eigenvalues of -lower + outer(vector) / 2 off the diagonal."""
  skew = np.outer(vector, vector) / 2 - lower
  np.fill_diagonal(skew, 0)
  return -0.5 + 1j * np.linalg.eigvalsh(-1j * skew)


class DiagonalStateSpace(nn.Module):
  """A state space for each feature; called like attention.

  Attributes:
    state_dim: States of a feature, N.
    rates: `(N) -> rates`, complex [N] with negative real parts.
    step: Step of the discretization.
    train_rates: Whether rates and steps are trained; Praxis does not. Then each
      feature has rates and a step, and a real part stays negative.
    chunk_length: Tokens of a chunk of the recurrence; changes speed and memory
      only.
    param_dtype: Dtype in which the parameters are stored.
  """

  state_dim: int = 64
  rates: Callable[[int], np.ndarray] = evenly_spaced
  step: float = 0.01
  train_rates: bool = False
  chunk_length: int = 32
  param_dtype: DTypeLike = jnp.float32

  def __post_init__(self) -> None:
    super().__post_init__()
    checks.check_size(self, "state_dim", "chunk_length")
    checks.check_positive(self, "step")

  @nn.compact
  def __call__(
    self,
    x: Float[Array, "batch length embed"],
    context: token_context.TokenContext = token_context.ONE_DOCUMENT,
  ) -> Float[Array, "batch length embed"]:
    """Returns the outputs of all features, zero where tokens are padding.

    Args:
      x: The tokens.
      context: Their segments; positions are not used, and there must be no
        prefix.

    Raises:
      TypeError: Segments are not integers.
      ValueError: Shapes do not fit, or there is a prefix.
    """
    wide = precision.at_least_float32(x.dtype)
    dim = x.shape[-1]
    # Two real arrays: caches are not complex.
    shape = decoding_state.Shape(
      (dim, self.state_dim, 2), wide, (axes.EMBED, None, None)
    )
    tokens, stored = decoding_state.begin(self, x, context, {_STATE: shape})
    # Not multiplied: padding may be NaN.
    x = jnp.where(tokens.is_real[..., None], x, jnp.zeros((), x.dtype))
    rates, step = self._rates(dim, wide)
    decay = jnp.exp(rates * step[:, None].astype(rates.dtype))
    one = jnp.ones((), decay.dtype)
    read = self._param("read_real", dim), self._param("read_imaginary", dim)
    read = jax.lax.complex(*(part.astype(wide) for part in read))
    skip = self.param(
      "skip",
      logical.partitioned(nn.initializers.ones, (axes.EMBED,)),
      (dim,),
      self.param_dtype,
    ).astype(wide)
    state = None
    if stored is not None:
      state = jax.lax.complex(stored[_STATE][..., 0], stored[_STATE][..., 1])
    y, state = _scan(
      x.astype(wide),
      decay,
      (decay - one) / rates * read,
      tokens,
      state,
      chunk_length=self.chunk_length,
    )
    if stored is not None:
      parts = jnp.stack([state.real, state.imag], axis=-1)
      decoding_state.store(self, tokens, {_STATE: parts}, {_STATE: shape})
    y += x.astype(wide) * skip[None, None]
    return y.astype(x.dtype)

  def _rates(self, dim: int, dtype: DTypeLike) -> tuple[jax.Array, jax.Array]:
    """Returns rates [D,N] or [1,N], and steps [D] or [1]."""
    found = np.asarray(self.rates(self.state_dim), np.complex128)
    if found.shape != (self.state_dim,) or np.any(found.real >= 0):
      raise ValueError(
        f"DiagonalStateSpace.rates must return {self.state_dim} numbers with"
        f" negative real parts, got {found}."
      )
    if not self.train_rates:
      parts = (jnp.asarray(x[None], dtype) for x in (found.real, found.imag))
      return jax.lax.complex(*parts), jnp.full((1,), self.step, dtype)
    real = self._param("log_rate", dim, _constant(np.log(-found.real)))
    imaginary = self._param("frequency", dim, _constant(found.imag))
    step = self.param(
      "log_step",
      logical.partitioned(
        nn.initializers.constant(np.log(self.step)), (axes.EMBED,)
      ),
      (dim,),
      self.param_dtype,
    )
    real, imaginary, step = (x.astype(dtype) for x in (real, imaginary, step))
    return jax.lax.complex(-jnp.exp(real), imaginary), jnp.exp(step)

  def _param(
    self,
    name: str,
    dim: int,
    init: nn.initializers.Initializer = _NORMAL,
  ) -> jax.Array:
    return self.param(
      name,
      logical.partitioned(init, (axes.EMBED, None), regularized=False),
      (dim, self.state_dim),
      self.param_dtype,
    )


def _constant(values: np.ndarray) -> nn.initializers.Initializer:
  """Returns an initializer of these values in each feature."""

  def init(key: jax.Array, shape: Sequence[int], dtype: DTypeLike) -> jax.Array:
    del key
    return jnp.broadcast_to(jnp.asarray(values, dtype), tuple(shape))

  return init


def _scan(
  x: jax.Array,
  decay: jax.Array,
  read: jax.Array,
  tokens: decoding_state.Tokens,
  state: jax.Array | None,
  *,
  chunk_length: int,
) -> tuple[jax.Array, jax.Array]:
  """Returns real(sum_n read h) [B,T,D] and the last h [B,D,N].

  Args:
    x: Input to all states of a feature, [B,T,D], zero for padding.
    decay: Complex, [D,N] or [1,N].
    read: Complex, [D,N] or [1,N].
    tokens: Padding and runs of `x`.
    state: h before the tokens; `None` is zeros.
    chunk_length: Tokens whose states are in memory at once.
  """
  batch, length, dim = x.shape
  if state is None:
    state = jnp.zeros((batch, dim, decay.shape[-1]), decay.dtype)
  before = jnp.concatenate(
    [jnp.zeros((batch, 1), jnp.int32), tokens.runs[:, :-1]], axis=1
  )
  size = min(chunk_length, length)

  def cut_chunks(x: jax.Array) -> jax.Array:
    # Filled up with padding, which changes no state.
    rest = [(0, 0), (0, -length % size)] + [(0, 0)] * (x.ndim - 2)
    x = jnp.pad(x, rest).reshape(batch, -1, size, *x.shape[2:])
    return jnp.swapaxes(x, 0, 1)

  def combine(
    first: tuple[jax.Array, jax.Array], second: tuple[jax.Array, jax.Array]
  ) -> tuple[jax.Array, jax.Array]:
    return first[0] * second[0], second[0] * first[1] + second[1]

  def run_chunk(
    state: jax.Array, chunk: tuple[jax.Array, jax.Array, jax.Array]
  ) -> tuple[jax.Array, jax.Array]:
    x, is_first, is_real = chunk
    one, zero = jnp.ones((), decay.dtype), jnp.zeros((), decay.dtype)
    factors = jnp.where(is_real[..., None, None], decay[None, None], one)
    factors = jnp.where(is_first[..., None, None], zero, factors)
    added = x.astype(decay.dtype)[..., None]
    added = jnp.broadcast_to(added, (*x.shape, decay.shape[-1]))
    factors, states = jax.lax.associative_scan(
      combine, (factors, added), axis=1
    )
    states += factors * state[:, None]
    y = jnp.sum(states * read[None, None], axis=-1).real
    return states[:, -1], y

  # Backward, the states of a chunk are computed again.
  state, y = jax.lax.scan(
    jax.checkpoint(run_chunk),
    state,
    (
      cut_chunks(x),
      cut_chunks(tokens.runs != before),
      cut_chunks(tokens.is_real),
    ),
  )
  y = jnp.swapaxes(y, 0, 1).reshape(batch, -1, dim)[:, :length]
  return jnp.where(tokens.is_real[..., None], y, jnp.zeros((), y.dtype)), state


class GatedStateSpace(nn.Module):
  """A state space between projections, with a gate; called like attention.

  Attributes:
    inner_dim: Features of the state space.
    gate_dim: Features of the gate.
    mixer: The layer that mixes tokens, such as `DiagonalStateSpace`.
    activation: Applied to the projections `inner` and `gate`.
    use_bias: Whether the projections have biases.
    dtype: Dtype of the computation. `None` promotes inputs and kernels.
    param_dtype: Dtype in which the parameters are stored.
    einsum: The contraction of the projections.
  """

  inner_dim: int
  gate_dim: int
  mixer: contracts.TokenMixer
  activation: Callable[[jax.Array], jax.Array] = nn.gelu
  use_bias: bool = False
  dtype: DTypeLike | None = None
  param_dtype: DTypeLike = jnp.float32
  einsum: Callable[..., jax.Array] = jnp.einsum

  quantization_roles: ClassVar[tuple[str, ...]] = (
    matmuls.ATTENTION_PROJECTIONS,
  )

  def __post_init__(self) -> None:
    super().__post_init__()
    checks.check_size(self, "inner_dim", "gate_dim")

  @nn.compact
  def __call__(
    self,
    x: Float[Array, "batch length embed"],
    context: token_context.TokenContext = token_context.ONE_DOCUMENT,
  ) -> Float[Array, "batch length embed"]:
    """Returns the mixed tokens; the arguments are those of the mixer.

    The output of padding is zero without biases.
    """
    if context.segment_ids is not None:
      # Not multiplied: padding may be NaN.
      is_real = (context.segment_ids != 0)[..., None]
      x = jnp.where(is_real, x, jnp.zeros((), x.dtype))
    inner = self.activation(self._project("inner", x, self.inner_dim))
    gate = self.activation(self._project("gate", x, self.gate_dim))
    mixed = self.mixer(inner, context)
    mixed = self._project("context", mixed, self.gate_dim)
    names = (axes.MLP, axes.EMBED)
    return self._project("out", mixed * gate, x.shape[-1], names)

  @nn.nowrap
  def _project(
    self,
    name: str,
    x: jax.Array,
    output_dim: int,
    names: tuple[str, str] = (axes.EMBED, axes.MLP),
  ) -> jax.Array:
    return linear.Linear(
      output_dim,
      use_bias=self.use_bias,
      kernel_axes=names,
      dtype=self.dtype,
      param_dtype=self.param_dtype,
      einsum=matmuls.name_einsum(self.einsum, name),
      name=name,
    )(x)

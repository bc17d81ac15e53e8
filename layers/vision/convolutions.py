"""Convolutions over one, two or three axes, with norm and activation.

  y[b, t, f] = bias[f] + sum_{i, d} kernel[i, d, f] * x[b, t*s + i*r - p, d]

with stride s, dilation r and `p` positions of padding before the first; the
same for each further axis. `Conv` sums over the channels of a group, and
`DepthwiseConv` convolves each channel separately. `WeightNorm` and
`SpectralNorm` reparameterize a kernel, `ConvNormAct` adds a norm and an
activation.

With a mask, padding at the end of the first axis (time) counts as zeros, which
is what lies beyond the end of a shorter sequence, and stays zero.
"""

from collections.abc import Callable, Iterable, Sequence
import enum
from typing import Any, Protocol, runtime_checkable

from flax import linen as nn
from flax.linen import dtypes
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from paxon.layers import precision
from paxon.layers.norms import batch_norm
from paxon.sharding import axes, checks, logical, variables

_default_init = nn.initializers.variance_scaling(
  1.0, "fan_in", "truncated_normal"
)
# Added to squared norms, as in Praxis.
_EPSILON = 1e-12
# Names of the axes of input, kernel and output, by rank.
_SPATIAL = "THW"


class Padding(enum.Enum):
  """The zeros around each axis, for a kernel that spans `n` positions."""

  # The output has ceil(size / stride) positions, and the zeros that this needs
  # are split evenly, the odd one at the end: as in XLA and TensorFlow.
  SAME = "same"
  # The same number of positions, with (n - 1) // 2 zeros before the first and
  # n // 2 after the last, whatever the stride: Praxis's default, and PyTorch's
  # `padding=n // 2` for odd kernels.
  CENTERED = "centered"
  # `CENTERED`, but all n - 1 zeros of the first axis are before it, so no
  # output depends on later input.
  CAUSAL = "causal"
  # None.
  VALID = "valid"


class WeightNorm(nn.Module):
  """Gives the kernel of each output channel the norm `1 + scale`.

  Salimans and Kingma 2016, https://arxiv.org/abs/1602.07868. The scale begins
  at zero.
  """

  param_dtype: DTypeLike = jnp.float32

  @nn.compact
  def __call__(
    self, kernel: Float[Array, "*in out"], *, deterministic: bool = True
  ) -> Float[Array, "*in out"]:
    """Returns the normalized kernel; the last axis is the output."""
    del deterministic
    scale = self.param(
      "scale",
      logical.partitioned(nn.initializers.zeros, (axes.MLP,)),
      (kernel.shape[-1],),
      self.param_dtype,
    )
    kernel = _l2_normalize(kernel, range(kernel.ndim - 1))
    return kernel * (1 + scale).reshape((1,) * (kernel.ndim - 1) + (-1,))


class SpectralNorm(nn.Module):
  """Divides the kernel by its largest singular value, as a matrix [D, F].

  Miyato et al. 2018, https://arxiv.org/abs/1802.05957. The value is estimated
  by power iteration, whose vector is kept between steps of training.

  Attributes:
    num_iterations: Iterations in each call.
  """

  num_iterations: int = 1

  def __post_init__(self) -> None:
    super().__post_init__()
    checks.check_size(self, "num_iterations")

  @nn.compact
  def __call__(
    self, kernel: Float[Array, "*in out"], *, deterministic: bool = True
  ) -> Float[Array, "*in out"]:
    """Returns the normalized kernel; training updates the vector."""
    matrix = precision.widen(kernel.reshape(-1, kernel.shape[-1]))
    vector: Any = self.variable(
      batch_norm.COLLECTION,
      "vector",
      variables.make_boxed_init(
        nn.initializers.normal(1.0),
        (axes.MLP,),
        shape=matrix.shape[1:],
        dtype=jnp.float32,
      ),
    )
    right = vector.value.astype(matrix.dtype)
    fixed = jax.lax.stop_gradient(matrix)
    left = fixed[:, 0]
    for _ in range(self.num_iterations):
      left = _l2_normalize(fixed @ right, (0,))
      right = _l2_normalize(left @ fixed, (0,))
    can_update = self.is_mutable_collection(batch_norm.COLLECTION)
    if can_update and not (deterministic or self.is_initializing()):
      vector.value = right.astype(jnp.float32)
    return (kernel / (left @ matrix @ right)).astype(kernel.dtype)


@runtime_checkable
class _Fields(Protocol):
  """A bound convolution."""

  kernel_size: Sequence[int]
  strides: int | Sequence[int]
  dilations: int | Sequence[int]
  padding: Padding
  use_bias: bool
  weight_norm: nn.Module | None
  kernel_axes: tuple[str | None, str | None]
  output_axes: tuple[str | None, ...] | None
  kernel_init: nn.initializers.Initializer
  bias_init: nn.initializers.Initializer
  dtype: DTypeLike | None
  param_dtype: DTypeLike

  def param(self, name: str, init_fn: Any, *args: Any) -> Any:
    """Creates or reads a parameter, like `nn.Module.param`."""

  def output_mask(self, mask: jax.Array) -> jax.Array:
    """Returns the mask of the output."""
    ...


class _Convolution(nn.Module):
  """Base of `Conv` and `DepthwiseConv`, with the fields that they share."""

  @nn.nowrap
  def output_mask(
    self: "_Fields", mask: Bool[Array, "batch time"]
  ) -> Bool[Array, "batch out"]:
    """Returns the mask of the output: True for outputs of real positions.

    With `VALID` these are windows with at least one; otherwise the windows
    whose position is real.
    """
    span = _span(self)[0]
    stride = _expand(self.strides, self.kernel_size)[0]
    if self.padding is not Padding.VALID:
      return mask[:, ::stride]
    return jax.lax.reduce_window(
      mask, False, jax.lax.bitwise_or, (1, span), (1, stride), "VALID"
    )

  def _convolve(
    self: "_Fields",
    x: jax.Array,
    mask: jax.Array | None,
    *,
    output_dim: int,
    groups: int,
    deterministic: bool,
  ) -> jax.Array:
    rank = len(self.kernel_size)
    _check_input(self, x.shape, groups)
    if mask is not None:
      x = _mask_time(x, mask)
    kernel = self.param(
      "kernel",
      logical.partitioned(
        self.kernel_init,
        (*(None,) * rank, *self.kernel_axes),
        read_dtype=self.dtype if self.weight_norm is None else None,
      ),
      (*self.kernel_size, x.shape[-1] // groups, output_dim),
      self.param_dtype,
    )
    bias = None
    if self.use_bias:
      init = logical.partitioned(
        self.bias_init, self.kernel_axes[1:], read_dtype=self.dtype
      )
      bias = self.param("bias", init, (output_dim,), self.param_dtype)
    if self.weight_norm is not None:
      kernel = self.weight_norm(kernel, deterministic=deterministic)
    x, kernel, bias = dtypes.promote_dtype(x, kernel, bias, dtype=self.dtype)
    if rank == 1 and groups == x.shape[-1] == output_dim:
      y = _convolve_channels(self, x, kernel)
    else:
      spatial = _SPATIAL[:rank]
      y = jax.lax.conv_general_dilated(
        x,
        kernel,
        window_strides=_expand(self.strides, self.kernel_size),
        padding=_zeros_around(self),
        rhs_dilation=_expand(self.dilations, self.kernel_size),
        dimension_numbers=(f"N{spatial}C", f"{spatial}IO", f"N{spatial}C"),
        feature_group_count=groups,
      )
    if bias is not None:
      y += bias.reshape((1,) * (y.ndim - 1) + (-1,))
    if mask is not None:
      y = _mask_time(y, self.output_mask(mask))
    if self.output_axes is not None:
      y = logical.constrain(y, self.output_axes)
    return y


class Conv(_Convolution):
  """A convolution over as many axes as `kernel_size` has entries.

  Attributes:
    output_dim: Channels of the output.
    kernel_size: Size of the kernel for each axis, time first; 1 to 3 axes.
    strides: Stride for each axis, or for all.
    dilations: Distance of the entries of the kernel, for each axis or for all.
    padding: The zeros around the input.
    groups: Groups of channels that are convolved separately.
    use_bias: Whether there is a bias.
    weight_norm: Maps the kernel to the one that is used, such as `WeightNorm`.
    kernel_axes: Logical axes of the kernel's channels, input and output.
    output_axes: Logical axes of the result; `None` leaves its sharding to the
      compiler.
    kernel_init: Initializer of the kernel [*kernel_size, D / groups, F].
    bias_init: Initializer of the bias.
    dtype: Dtype of the computation. `None` promotes input and parameters.
    param_dtype: Dtype in which the parameters are stored.
  """

  output_dim: int
  kernel_size: Sequence[int]
  strides: int | Sequence[int] = 1
  dilations: int | Sequence[int] = 1
  padding: Padding = Padding.SAME
  groups: int = 1
  use_bias: bool = True
  weight_norm: nn.Module | None = None
  kernel_axes: tuple[str | None, str | None] = (axes.EMBED, axes.MLP)
  output_axes: tuple[str | None, ...] | None = None
  kernel_init: nn.initializers.Initializer = _default_init
  bias_init: nn.initializers.Initializer = nn.initializers.zeros
  dtype: DTypeLike | None = None
  param_dtype: DTypeLike = jnp.float32

  def __post_init__(self) -> None:
    _make_hashable(self)
    super().__post_init__()
    checks.check_size(self, "output_dim", "groups")
    checks.check_multiple(self, "output_dim", "groups")
    _check(self)

  @nn.compact
  def __call__(
    self,
    x: Float[Array, "batch *space channels"],
    mask: Bool[Array, "batch time"] | None = None,
    *,
    deterministic: bool = True,
  ) -> Float[Array, "batch *out output"]:
    """Returns the convolution.

    Args:
      x: Input, channels last.
      mask: True for real positions of the first axis; see `output_mask`.
      deterministic: Passed to `weight_norm`.

    Raises:
      ValueError: The rank of `x` does not match `kernel_size`, or `groups` does
        not divide its channels.
    """
    return self._convolve(
      x,
      mask,
      output_dim=self.output_dim,
      groups=self.groups,
      deterministic=deterministic,
    )


class DepthwiseConv(_Convolution):
  """A convolution of each channel.

  Attributes:
    multiplier: Outputs of each channel, side by side.
    kernel_init: Initializer of the kernel [*kernel_size, 1, D * multiplier].

  The other attributes are those of `Conv`.
  """

  kernel_size: Sequence[int]
  multiplier: int = 1
  strides: int | Sequence[int] = 1
  dilations: int | Sequence[int] = 1
  padding: Padding = Padding.SAME
  use_bias: bool = True
  weight_norm: nn.Module | None = None
  kernel_axes: tuple[str | None, str | None] = (None, axes.EMBED)
  output_axes: tuple[str | None, ...] | None = None
  kernel_init: nn.initializers.Initializer = _default_init
  bias_init: nn.initializers.Initializer = nn.initializers.zeros
  dtype: DTypeLike | None = None
  param_dtype: DTypeLike = jnp.float32

  def __post_init__(self) -> None:
    _make_hashable(self)
    super().__post_init__()
    checks.check_size(self, "multiplier")
    _check(self)

  @nn.compact
  def __call__(
    self,
    x: Float[Array, "batch *space channels"],
    mask: Bool[Array, "batch time"] | None = None,
    *,
    deterministic: bool = True,
  ) -> Float[Array, "batch *out output"]:
    """Returns the convolution; see `Conv`."""
    return self._convolve(
      x,
      mask,
      output_dim=x.shape[-1] * self.multiplier,
      groups=x.shape[-1],
      deterministic=deterministic,
    )


class ConvNormAct(nn.Module):
  """A convolution, a norm and an activation.

  Attributes:
    conv: The convolution.
    norm: Called with the mask of the output and, if it is a `BatchNorm`, with
      `deterministic`; `None` disables it.
    activation: Applied to the result; `None` is the identity.
  """

  conv: Conv | DepthwiseConv
  norm: nn.Module | None = None
  activation: Callable[[jax.Array], jax.Array] | None = nn.relu

  def __call__(
    self,
    x: Float[Array, "batch *space channels"],
    mask: Bool[Array, "batch time"] | None = None,
    *,
    deterministic: bool = True,
  ) -> Float[Array, "batch *out output"]:
    """Returns the output, zero where `conv.output_mask(mask)` is False."""
    y = self.conv(x, mask, deterministic=deterministic)
    kept = None
    if mask is not None:
      kept = self.conv.output_mask(mask)
      kept = kept.reshape(*kept.shape, *(1,) * (y.ndim - 3))
      kept = jnp.broadcast_to(kept, y.shape[:-1])
    if self.norm is not None:
      y = apply_norm(self.norm, y, kept, deterministic)
    if self.activation is not None:
      y = self.activation(y)
    return y if kept is None else jnp.where(kept[..., None], y, 0)


def apply_norm(
  norm: nn.Module,
  x: jax.Array,
  mask: jax.Array | None,
  deterministic: bool,
) -> jax.Array:
  """Returns the normalized `x`, of batch norm or a norm of each position."""
  if isinstance(norm, batch_norm.BatchNorm):
    return norm(x, mask, deterministic=deterministic)
  return norm(x)


def _mask_time(x: jax.Array, mask: jax.Array) -> jax.Array:
  """Returns `x` [B,T,...], zero where `mask` [B,T] is False."""
  # Not multiplied: padding may be NaN.
  return jnp.where(mask.reshape(*mask.shape, *(1,) * (x.ndim - 2)), x, 0)


def _l2_normalize(x: jax.Array, over: Iterable[int]) -> jax.Array:
  squares = jnp.sum(x * x, axis=tuple(over), keepdims=True)
  return x * jax.lax.rsqrt(squares + _EPSILON)


def _expand(
  value: int | Sequence[int], kernel_size: Sequence[int]
) -> tuple[int, ...]:
  return (value,) * len(kernel_size) if isinstance(value, int) else tuple(value)


def _span(fields: _Fields) -> list[int]:
  """Returns the number of positions from the kernel's first to its last."""
  dilations = _expand(fields.dilations, fields.kernel_size)
  return [
    r * (k - 1) + 1 for k, r in zip(fields.kernel_size, dilations, strict=True)
  ]


def _zeros_around(fields: _Fields) -> str | list[tuple[int, int]]:
  if fields.padding in (Padding.SAME, Padding.VALID):
    return fields.padding.name
  around = [((n - 1) // 2, n // 2) for n in _span(fields)]
  if fields.padding is Padding.CAUSAL:
    around[0] = (sum(around[0]), 0)
  return around


def _convolve_channels(
  fields: _Fields, x: jax.Array, kernel: jax.Array
) -> jax.Array:
  """Returns the convolution of each channel over time, as a sum of shifts.

  XLA compiles it to one pass over the input. Its convolutions of groups are
  slower by an order of magnitude on a CPU, forward and backward.
  """
  (size,) = fields.kernel_size
  (stride,) = _expand(fields.strides, fields.kernel_size)
  (dilation,) = _expand(fields.dilations, fields.kernel_size)
  span, padding = dilation * (size - 1) + 1, _zeros_around(fields)
  if isinstance(padding, str):
    padding = jax.lax.padtype_to_pads(x.shape[1:2], (span,), (stride,), padding)
  x = jnp.pad(x, ((0, 0), tuple(padding[0]), (0, 0)))
  count = (x.shape[1] - span) // stride + 1
  total = jnp.zeros((x.shape[0], max(count, 0), x.shape[2]), x.dtype)
  for i in range(size):
    end = i * dilation + (count - 1) * stride + 1
    total += x[:, i * dilation : end : stride] * kernel[i][None]
  return total


def _make_hashable(fields: _Fields) -> None:
  names = ("kernel_size", "strides", "dilations")
  for name, value in checks.get_values(fields, *names):
    if not isinstance(value, int):
      setattr(fields, name, tuple(value))


def _check_input(fields: _Fields, shape: tuple[int, ...], groups: int) -> None:
  """Raises if an input does not fit the kernel."""
  owner, rank = type(fields).__name__, len(fields.kernel_size)
  if len(shape) != rank + 2:
    raise ValueError(
      f"{owner}.kernel_size {tuple(fields.kernel_size)} needs an input of rank"
      f" {rank + 2}, batch, {rank} axes and channels; got the shape {shape}."
    )
  if shape[-1] % groups:
    raise ValueError(
      f"{owner}.groups ({groups}) must divide the input's {shape[-1]} channels."
    )


def _check(fields: _Fields) -> None:
  owner, rank = type(fields).__name__, len(fields.kernel_size)
  if not 1 <= rank <= len(_SPATIAL):
    raise ValueError(
      f"{owner}.kernel_size must have 1 to {len(_SPATIAL)} entries, got"
      f" {tuple(fields.kernel_size)}."
    )
  names = ("kernel_size", "strides", "dilations")
  for name, given in checks.get_values(fields, *names):
    value = _expand(given, fields.kernel_size)
    if len(value) != rank or min(value) <= 0:
      raise ValueError(
        f"{owner}.{name} must have {rank} positive entries, like kernel_size,"
        f" got {value}."
      )
  if not isinstance(fields.padding, Padding):
    raise ValueError(
      f"{owner}.padding must be a Padding, got {fields.padding!r}."
    )

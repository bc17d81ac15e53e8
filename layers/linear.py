"""Linear layers: of the last axis, and by an einsum equation.

  Linear:  activation(x @ kernel + bias)
  Einsum:  einsum(equation, x, kernel) + bias

Multilayer perceptrons are
`nn.Sequential([Linear(128, activation=nn.relu), ..., Linear(10)])`.

Einsum letters: D input, F output.
"""

from collections.abc import Callable, Mapping
from typing import ClassVar

from flax import linen as nn
from flax.linen import dtypes
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from paxon.layers import initializers, remat
from paxon.layers.cpu import forms
from paxon.quantization import matmuls
from paxon.sharding import axes, checks, logical

_default_init = nn.initializers.variance_scaling(
  1.0, "fan_in", "truncated_normal"
)


class Linear(nn.Module):
  """A linear map of the last axis.

  Attributes:
    output_dim: Width of the result.
    use_bias: Whether there is a bias.
    activation: Applied to the result; `None` is the identity.
    kernel_axes: Logical axes of the kernel [D, F].
    output_axes: Logical axes of the result; `None` leaves its sharding to the
      compiler.
    remat_name: Name of the result for `remat` policies.
    kernel_init: Initializer of the kernel.
    bias_init: Initializer of the bias.
    dtype: Dtype of the computation. `None` promotes input and parameters.
    param_dtype: Dtype in which the parameters are stored.
    einsum: The matmul; replaced by quantization.
  """

  output_dim: int
  use_bias: bool = True
  activation: Callable[[jax.Array], jax.Array] | None = None
  kernel_axes: tuple[str | None, str | None] = (axes.EMBED, axes.MLP)
  output_axes: tuple[str | None, ...] | None = None
  remat_name: str | None = None
  kernel_init: nn.initializers.Initializer = _default_init
  bias_init: nn.initializers.Initializer = nn.initializers.zeros
  dtype: DTypeLike | None = None
  param_dtype: DTypeLike = jnp.float32
  einsum: Callable[..., jax.Array] = jnp.einsum

  quantization_roles: ClassVar[tuple[str, ...]] = (matmuls.LINEAR,)

  def __post_init__(self) -> None:
    super().__post_init__()
    checks.check_size(self, "output_dim")

  @nn.compact
  def __call__(
    self, x: Float[Array, "*batch embed"]
  ) -> Float[Array, "*batch output"]:
    """Returns the transformed `x`; every vector is independent."""
    kernel = self.param(
      "kernel",
      logical.partitioned(
        self.kernel_init, self.kernel_axes, read_dtype=self.dtype
      ),
      (x.shape[-1], self.output_dim),
      self.param_dtype,
    )
    bias = None
    if self.use_bias:
      init = logical.partitioned(
        self.bias_init, self.kernel_axes[1:], read_dtype=self.dtype
      )
      bias = self.param("bias", init, (self.output_dim,), self.param_dtype)
    x, kernel, bias = dtypes.promote_dtype(x, kernel, bias, dtype=self.dtype)
    y = forms.multiply_tokens(self.einsum, "kernel", "...D,DF->...F", x, kernel)
    if bias is not None:
      y += bias.reshape((1,) * (y.ndim - 1) + (-1,))
    if self.activation is not None:
      y = self.activation(y)
    if self.output_axes is not None:
      y = logical.constrain(y, self.output_axes)
    return y if self.remat_name is None else remat.tag(y, self.remat_name)


class Einsum(nn.Module):
  """An einsum of the input with a kernel.

  `Einsum("BTD,DNH->BTNH", {"N": 4, "H": 8}, ("embed", "heads", "head_dim"))`
  projects to heads; `"BTED,EDF->BTEF"` has a kernel for each expert.

  Attributes:
    equation: `input,kernel->output`, one letter per axis.
    sizes: Sizes of the letters that only the kernel has.
    kernel_axes: Logical axes of the kernel.
    use_bias: Whether there is a bias, with the axes that kernel and output
      share.
    output_axes: Logical axes of the result; `None` leaves its sharding to the
      compiler.
    kernel_init: Initializer of the kernel; `None` is `initializers.lecun` with
      the fan-in of the equation.

  The other attributes are those of `Linear`.
  """

  equation: str
  sizes: Mapping[str, int]
  kernel_axes: tuple[str | None, ...]
  use_bias: bool = False
  output_axes: tuple[str | None, ...] | None = None
  kernel_init: nn.initializers.Initializer | None = None
  bias_init: nn.initializers.Initializer = nn.initializers.zeros
  dtype: DTypeLike | None = None
  param_dtype: DTypeLike = jnp.float32
  einsum: Callable[..., jax.Array] = jnp.einsum

  quantization_roles: ClassVar[tuple[str, ...]] = (matmuls.LINEAR,)

  def __post_init__(self) -> None:
    super().__post_init__()
    letters, _, output = self.equation.partition("->")
    terms = (*letters.split(","), output)
    if len(terms) != 3 or not all(
      term.isalpha() and len(set(term)) == len(term) for term in terms
    ):
      raise ValueError(
        "Einsum.equation must be 'input,kernel->output' with one letter per "
        f"axis, each once in a term, got {self.equation!r}."
      )
    new = set(terms[1]) - set(terms[0])
    if new != set(self.sizes):
      raise ValueError(
        "Einsum.sizes must have the letters that only the kernel of "
        f"{self.equation!r} has, {sorted(new)}, got {sorted(self.sizes)}."
      )
    for letter, size in self.sizes.items():
      if size <= 0:
        raise ValueError(
          f"Einsum.sizes[{letter!r}] must be positive, got {size}."
        )

  @nn.compact
  def __call__(self, x: Float[Array, "*shape"]) -> Float[Array, "*output"]:
    """Returns the contraction.

    Raises:
      ValueError: The rank of `x` does not match the equation.
    """
    letters, _, output = self.equation.partition("->")
    input_letters, kernel_letters = letters.split(",")
    if x.ndim != len(input_letters):
      raise ValueError(
        f"Einsum.equation {self.equation!r} needs an input of rank "
        f"{len(input_letters)}, got the shape {x.shape}."
      )
    sizes = dict(zip(input_letters, x.shape, strict=True)) | dict(self.sizes)
    axis_of = dict(zip(kernel_letters, self.kernel_axes, strict=True))
    init = self.kernel_init or _default_einsum_init(
      input_letters, kernel_letters, output
    )
    kernel = self._param("kernel", init, kernel_letters, sizes, axis_of)
    kept = "".join(letter for letter in output if letter in kernel_letters)
    bias = None
    if self.use_bias:
      bias = self._param("bias", self.bias_init, kept, sizes, axis_of)
    x, kernel, bias = dtypes.promote_dtype(x, kernel, bias, dtype=self.dtype)
    y = matmuls.call(self.einsum, "kernel", self.equation, x, kernel)
    if bias is not None:
      y += bias.reshape([sizes[c] if c in kept else 1 for c in output])
    if self.output_axes is None:
      return y
    return logical.constrain(y, self.output_axes)

  def _param(
    self,
    name: str,
    init: nn.initializers.Initializer,
    letters: str,
    sizes: Mapping[str, int],
    axis_of: Mapping[str, str | None],
  ) -> jax.Array:
    names = [axis_of[c] for c in letters]
    boxed = logical.partitioned(init, names, read_dtype=self.dtype)
    shape = tuple(sizes[c] for c in letters)
    return self.param(name, boxed, shape, self.param_dtype)


def _default_einsum_init(
  input_letters: str, kernel: str, output: str
) -> initializers.FanScaled:
  """Returns an initializer whose fan-in are the axes missing in the output."""
  summed = tuple(i for i, c in enumerate(kernel) if c not in output)
  added = tuple(i for i, c in enumerate(kernel) if c not in input_letters)
  return initializers.lecun(in_axes=summed, out_axes=added)

"""Low-rank adapters of matmuls: LoRA, rsLoRA and DoRA.

  LoRA     x W + s (x A) B              s = alpha / rank
  rsLoRA   the same                     s = alpha / sqrt(rank)
  DoRA     (x W + s (x A) B) m / |W + s A B|

LoRA: https://arxiv.org/abs/2106.09685, rsLoRA:
https://arxiv.org/abs/2312.03732, DoRA: https://arxiv.org/abs/2402.09353.

A is random and B zero, so training starts at the outputs of the base model.
`|.|` is the norm of the inputs of each output and has no gradient. m is stored
as the difference to |W|, initially zero, so that it does not depend on the
imported weights; W must be frozen.

`LoraEinsum(lora)` replaces `jnp.einsum` in the field `einsum` of a layer. If
the right operand of a matmul is the layer's parameter of the same name, the
matmul has the variables

  params/<path of the layer>/einsum/<matmul>/lora_a            [..., inputs, R]
  params/<path of the layer>/einsum/<matmul>/lora_b            [..., R, outputs]
  params/<path of the layer>/einsum/<matmul>/lora_magnitude    [..., outputs]

where `...` are the axes of a kernel for each expert. Other matmuls have no
adapter.
"""

from collections.abc import Callable, Sequence
import dataclasses
import enum
import math
from typing import Final

from flax import linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from paxon.quantization import equations, matmuls, stored_kernels
from paxon.quantization import rules as rules_lib
from paxon.sharding import checks, logical

A: Final = "lora_a"
B: Final = "lora_b"
MAGNITUDE: Final = "lora_magnitude"
# Matches the logical names of the variables of adapters.
PATTERN: Final = ".*/lora_(a|b|magnitude)"
_PARAMS = "params"


class Kind(enum.Enum):
  """The form of an adapter."""

  LORA = "lora"
  RSLORA = "rslora"
  DORA = "dora"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lora:
  """An adapter of a matmul.

  Attributes:
    rank: Rank R of the change of the kernel.
    alpha: Numerator of the factor of the change; `None` is `rank`.
    kind: LoRA, rsLoRA or DoRA.
    param_dtype: Dtype in which the adapter is stored.
  """

  rank: int
  alpha: float | None = None
  kind: Kind = Kind.LORA
  param_dtype: DTypeLike = jnp.float32

  def __post_init__(self) -> None:
    checks.check_positive(self, "rank", "alpha")

  @property
  def scale(self) -> float:
    """The factor s of A B."""
    alpha = self.rank if self.alpha is None else self.alpha
    if self.kind is Kind.RSLORA:
      return alpha / math.sqrt(self.rank)
    return alpha / self.rank


@dataclasses.dataclass(frozen=True)
class LoraRule:
  """The adapter of some layers; the first rule that matches applies.

  Attributes:
    target: A role or a path with `*`, or a tuple of them, as in `rules.Rule`.
    lora: The adapter; `None` exempts the layers from later rules.
    matmuls: Names of the matmuls that have an adapter, such as `query` and
      `value`; `None` is all of a layer.
  """

  target: str | tuple[str, ...]
  lora: Lora | None
  matmuls: tuple[str, ...] | None = None

  def __post_init__(self) -> None:
    rules_lib.Rule(self.target, None)
    if self.matmuls is not None and not self.matmuls:
      raise ValueError("LoraRule.matmuls must name a matmul, or be None.")

  def matches(self, path: str, its_roles: Sequence[str]) -> bool:
    """Returns whether the rule applies to a layer."""
    return rules_lib.Rule(self.target, None).matches(path, its_roles)


@dataclasses.dataclass(frozen=True)
class _UniformInit:
  """Values of U(-1, 1) / sqrt(inputs), as those of PEFT.

  Attributes:
    num_inputs: Size of the contracted dimensions.
  """

  num_inputs: int

  def __call__(
    self, key: jax.Array, shape: tuple[int, ...], dtype: DTypeLike
  ) -> jax.Array:
    """Returns the values."""
    bound = 1 / math.sqrt(self.num_inputs)
    values = jax.random.uniform(key, shape, jnp.float32, -bound, bound)
    return values.astype(dtype)


class LoraEinsum(matmuls.Adapter):
  """Adds low-rank adapters to the matmuls of a layer.

  Attributes:
    lora: The adapter of each matmul.
    matmuls: Names of the matmuls with an adapter; `None` is all.
    storage: Format in which all kernels of the layer are stored; `None` keeps
      them as parameters.
  """

  lora: Lora
  matmuls: tuple[str, ...] | None = None
  storage: stored_kernels.Storage | None = None

  @property
  def replaces_matmul(self) -> bool:
    """Whether the matmul itself is another one, of a stored kernel."""
    return self.storage is not None

  def make_matmul(self, name: str) -> Callable[..., jax.Array]:
    """Returns the adapted matmul of this name."""
    if self.storage is None:
      return super().make_matmul(name)
    has_adapter = self.matmuls is None or name in self.matmuls
    lora = self.lora if has_adapter else None
    return _StoredMatmul(lora, self.storage, name=name)

  @nn.compact
  def adapt(
    self,
    equation: str,
    lhs: jax.Array,
    rhs: jax.Array,
    out: jax.Array,
    *,
    matmul: str,
  ) -> jax.Array:
    """Returns the output of a matmul with its adapter.

    Args:
      equation: Equation of the matmul.
      lhs: Activations.
      rhs: The kernel.
      out: Output without an adapter.
      matmul: Name of the matmul.
    """
    if self.matmuls is not None and matmul not in self.matmuls:
      return out
    return _Matmul(self.lora, name=matmul)(equation, lhs, rhs, out)


class _Matmul(nn.Module):
  """The adapter of one matmul."""

  lora: Lora | None

  @nn.compact
  def __call__(
    self, equation: str, lhs: jax.Array, rhs: jax.Array, out: jax.Array
  ) -> jax.Array:
    return self.adapt(equation, lhs, rhs, out)

  def adapt(
    self, equation: str, lhs: jax.Array, rhs: jax.Array, out: jax.Array
  ) -> jax.Array:
    """Returns `out` with the adapter; `rhs` is read for DoRA only."""
    if self.lora is None:
      return out
    if self.is_initializing():
      names = matmuls.parameter_axes(self, rhs.shape)
      if names is None:
        return out
    elif not self.has_variable(_PARAMS, A):
      return out
    else:
      names = (None,) * rhs.ndim
    parsed = equations.parse(equation, lhs.ndim, rhs.ndim)
    batch, inner, outer = split_letters(parsed)
    if parsed.rhs != batch + inner + outer:
      raise ValueError(
        f"LoRA of the matmul {'/'.join(self.path)} requires a kernel with its"
        f" inputs before its outputs, got the equation {equation!r}."
      )
    rank = next(c for c in "rRqQzZ" if c not in parsed.text)
    sizes = dict(zip(parsed.rhs, rhs.shape, strict=True))
    sizes[rank] = self.lora.rank
    axes = dict(zip(parsed.rhs, names, strict=True)) | {rank: None}
    num_inputs = math.prod(sizes[c] for c in inner)

    def make(
      name: str,
      init: nn.initializers.Initializer,
      letters: str,
      regularized: bool = True,
    ) -> jax.Array:
      assert self.lora is not None
      return self.param(
        name,
        logical.partitioned(
          init, [axes[c] for c in letters], regularized=regularized
        ),
        tuple(sizes[c] for c in letters),
        self.lora.param_dtype,
      )

    zeros = nn.initializers.zeros
    a = make(A, _UniformInit(num_inputs), batch + inner + rank)
    b = make(B, zeros, batch + rank + outer)
    scale = self.lora.scale
    down = "".join(c for c in parsed.lhs if c not in inner) + rank
    low = jnp.einsum(
      f"{parsed.lhs},{batch}{inner}{rank}->{down}", lhs, a.astype(lhs.dtype)
    )
    high = jnp.einsum(
      f"{down},{batch}{rank}{outer}->{parsed.out}", low, b.astype(lhs.dtype)
    )
    if self.lora.kind is not Kind.DORA:
      return out + (scale * high).astype(out.dtype)
    delta = make(MAGNITUDE, zeros, batch + outer, regularized=False)
    factor = dora_factor(
      jax.lax.stop_gradient(rhs), *(a, b, delta), scale=scale
    )
    factor = equations.like_output(factor, batch + outer, parsed.out)
    wide, high = out.astype(jnp.float32), high.astype(jnp.float32)
    change = (factor - 1) * wide + factor * (scale * high)
    return out + change.astype(out.dtype)


class _StoredMatmul(_Matmul):
  """One matmul with a stored kernel, and its adapter if it has one."""

  storage: stored_kernels.Storage

  @nn.compact
  def __call__(
    self,
    equation: str,
    lhs: jax.Array,
    rhs: jax.Array,
    preferred_element_type: DTypeLike | None,
  ) -> jax.Array:
    parsed = equations.parse(equation, lhs.ndim, rhs.ndim)
    names = None
    if self.is_initializing():
      names = matmuls.parameter_axes(self, rhs.shape)
    fields = stored_kernels.find_fields(
      self, self.storage, parsed, rhs, names=names
    )
    if fields is None:
      return jnp.einsum(
        equation, lhs, rhs, preferred_element_type=preferred_element_type
      )
    out = stored_kernels.multiply(
      parsed,
      lhs,
      fields,
      storage=self.storage,
      shape=rhs.shape,
      preferred_element_type=preferred_element_type,
    )
    if self.lora is not None and self.lora.kind is Kind.DORA:
      rhs = stored_kernels.dequantize(
        fields,
        self.storage,
        shape=rhs.shape,
        inputs=parsed.contracted_axes(parsed.rhs),
      )
    return self.adapt(equation, lhs, rhs, out)


def split_letters(equation: equations.Equation) -> tuple[str, str, str]:
  """Returns the batch, input and output letters of the right operand."""
  rhs, lhs, out = equation.rhs, equation.lhs, equation.out
  return (
    "".join(c for c in rhs if c in lhs and c in out),
    "".join(c for c in rhs if c not in out),
    "".join(c for c in rhs if c not in lhs),
  )


def kernel_change(
  a: jax.Array, b: jax.Array, *, kernel_shape: tuple[int, ...], scale: float
) -> jax.Array:
  """Returns s A B in the shape of the kernel, float32.

  Args:
    a: [*batch, *inputs, R].
    b: [*batch, R, *outputs].
    kernel_shape: [*batch, *inputs, *outputs]; `batch` includes layers of a
      stack.
    scale: The factor s.
  """
  num_batch = count_batch_axes(a, b, kernel_shape)
  rank, batch = a.shape[-1], kernel_shape[:num_batch]
  left = a.astype(jnp.float32).reshape(*batch, -1, rank)
  right = b.astype(jnp.float32).reshape(*batch, rank, -1)
  return (scale * (left @ right)).reshape(kernel_shape)


def count_batch_axes(
  a: jax.Array, b: jax.Array, kernel_shape: tuple[int, ...]
) -> int:
  """Returns the number of axes of layers and experts of an adapter."""
  return a.ndim + b.ndim - len(kernel_shape) - 2


def dora_factor(
  kernel: jax.Array,
  a: jax.Array,
  b: jax.Array,
  magnitude: jax.Array,
  *,
  scale: float,
) -> jax.Array:
  """Returns m / |W + s A B| [*batch, *outputs], float32.

  Its gradient is that of m alone.

  Args:
    kernel: W, [*batch, *inputs, *outputs].
    a: [*batch, *inputs, R].
    b: [*batch, R, *outputs].
    magnitude: m - |W|, [*batch, *outputs].
    scale: The factor s.
  """
  start = count_batch_axes(a, b, kernel.shape)
  axes = tuple(range(start, a.ndim - 1))
  wide = kernel.astype(jnp.float32)
  change = kernel_change(a, b, kernel_shape=kernel.shape, scale=scale)

  def norm(x: jax.Array) -> jax.Array:
    return jnp.sqrt(jnp.sum(jnp.square(x), axis=axes))

  # As a difference, so that the factor is exactly 1 without a change.
  before = norm(wide)
  after = jax.lax.stop_gradient(norm(wide + change))
  return 1 + ((before - after) + magnitude.astype(jnp.float32)) / after


def merge(
  kernel: jax.Array,
  a: jax.Array,
  b: jax.Array,
  magnitude: jax.Array | None = None,
  *,
  lora: Lora,
) -> jax.Array:
  """Returns the kernel with the adapter, in the dtype of the kernel.

  Shapes are those of `dora_factor`, possibly with leading axes of stacks.
  """
  change = kernel_change(a, b, kernel_shape=kernel.shape, scale=lora.scale)
  merged = kernel.astype(jnp.float32) + change
  if magnitude is not None:
    factor = dora_factor(kernel, a, b, magnitude, scale=lora.scale)
    axes = range(count_batch_axes(a, b, kernel.shape), a.ndim - 1)
    merged = merged * jnp.expand_dims(factor, tuple(axes))
  return merged.astype(kernel.dtype)

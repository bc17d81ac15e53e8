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
adapter. Layers that multiply a kernel by other code get its adapter from
`LoraEinsum.make_grouped`, or the kernel with its change from
`LoraEinsum.find_kernel`.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import enum
import math
import re
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
# The field `matmuls` of the einsum hides the module.
_GroupedKernel = matmuls.GroupedKernel


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
    lora: The adapter of each matmul; `None` for none, if kernels are stored.
    matmuls: Names of the matmuls with an adapter; `None` is all.
    storage: Format in which all kernels of the layer are stored; `None` keeps
      them as parameters.
  """

  lora: Lora | None
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
    return _StoredMatmul(self._find_lora(name), self.storage, name=name)

  def _find_lora(self, name: str) -> Lora | None:
    """Returns the adapter of the matmul of this name."""
    if self.matmuls is not None and name not in self.matmuls:
      return None
    return self.lora

  @nn.compact
  def make_grouped(
    self, equation: str, kernel: jax.Array, *, matmul: str
  ) -> _GroupedKernel:
    """Returns a kernel for each expert [E, inputs, outputs] and its adapter.

    Args:
      equation: Equation of the matmul, without an ellipsis.
      kernel: The parameter, read unless it is stored.
      matmul: Name of the matmul and of its parameter.
    """
    made = self._make_module(matmul)
    return made.make_grouped(_parse(equation, kernel), kernel)

  @nn.compact
  def find_kernel(
    self, equation: str, kernel: jax.Array, *, matmul: str
  ) -> jax.Array:
    """Returns the kernel with its change, for layers with another matmul of it.

    The arguments are those of `make_grouped`.
    """
    made = self._make_module(matmul)
    return made.find_kernel(_parse(equation, kernel), kernel)

  def _make_module(self, name: str) -> "_Matmul":
    lora = self._find_lora(name)
    if self.storage is None:
      return _Matmul(lora, name=name)
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
    return _Matmul(self._find_lora(matmul), name=matmul)(
      equation, lhs, rhs, out
    )


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
    parsed = equations.parse(equation, lhs.ndim, rhs.ndim)
    found = self._find_variables(parsed, rhs)
    if found is None:
      return out
    assert self.lora is not None
    a, b, delta = found
    batch, inner, outer = split_letters(parsed)
    rank = _rank_letter(parsed)
    scale = self.lora.scale
    down = "".join(c for c in parsed.lhs if c not in inner) + rank
    low = jnp.einsum(
      f"{parsed.lhs},{batch}{inner}{rank}->{down}", lhs, a.astype(lhs.dtype)
    )
    high = jnp.einsum(
      f"{down},{batch}{rank}{outer}->{parsed.out}", low, b.astype(lhs.dtype)
    )
    if delta is None:
      return out + (scale * high).astype(out.dtype)
    factor = dora_factor(rhs, a, b, delta, scale=scale)
    factor = equations.like_output(factor, batch + outer, parsed.out)
    # In float32, then rounded once.
    wide = out.astype(jnp.float32)
    change = scale * high.astype(jnp.float32)
    return ((wide + change) * factor).astype(out.dtype)

  @nn.nowrap
  def _find_variables(
    self, equation: equations.Equation, rhs: jax.Array
  ) -> tuple[jax.Array, jax.Array, jax.Array | None] | None:
    """Returns A, B and the magnitudes of DoRA; None without an adapter."""
    if self.lora is None:
      return None
    if self.is_initializing():
      names = matmuls.parameter_axes(self, rhs.shape)
      if names is None:
        return None
    elif not self.has_variable(_PARAMS, A):
      return None
    else:
      names = (None,) * rhs.ndim
    batch, inner, outer = split_letters(equation)
    if equation.rhs != batch + inner + outer:
      raise ValueError(
        f"LoRA of the matmul {'/'.join(self.path)} requires a kernel with its"
        f" inputs before its outputs, got the equation {equation.text!r}."
      )
    rank = _rank_letter(equation)
    sizes = dict(zip(equation.rhs, rhs.shape, strict=True))
    sizes[rank] = self.lora.rank
    axes = dict(zip(equation.rhs, names, strict=True)) | {rank: None}
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
    if self.lora.kind is not Kind.DORA:
      return a, b, None
    return a, b, make(MAGNITUDE, zeros, batch + outer, regularized=False)

  @nn.compact
  def make_grouped(
    self, equation: equations.Equation, rhs: jax.Array
  ) -> _GroupedKernel:
    """Returns the kernel and its adapter; see `LoraEinsum.make_grouped`."""
    stored = self._find_stored(equation, rhs)
    kernel = rhs if stored is None else stored
    found = self._find_variables(equation, rhs)
    if found is None:
      return _GroupedKernel(kernel=kernel)
    assert self.lora is not None
    a, b, delta = found
    scale, factor = self.lora.scale, None
    if delta is not None:
      wide = rhs if stored is None else stored.dequantize()
      factor = dora_factor(wide, a, b, delta, scale=scale)[:, None]
    return _GroupedKernel(kernel=kernel, a=a, b=scale * b, factor=factor)

  @nn.compact
  def find_kernel(
    self, equation: equations.Equation, rhs: jax.Array
  ) -> jax.Array:
    """Returns the kernel with its change; see `LoraEinsum.find_kernel`."""
    stored = self._find_stored(equation, rhs)
    kernel = rhs if stored is None else stored.dequantize(rhs.dtype)
    found = self._find_variables(equation, rhs)
    if found is None:
      return kernel
    assert self.lora is not None
    return merge(kernel, *found, lora=self.lora)

  @nn.nowrap
  def _find_stored(
    self, equation: equations.Equation, rhs: jax.Array
  ) -> stored_kernels.StoredKernel | None:
    """Returns the stored kernel; None if it is a parameter."""
    del equation, rhs
    return None


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
    stored = self._find_stored(parsed, rhs)
    if stored is None:
      return jnp.einsum(
        equation, lhs, rhs, preferred_element_type=preferred_element_type
      )
    out = stored_kernels.multiply(
      parsed, lhs, stored, preferred_element_type=preferred_element_type
    )
    if self.lora is not None and self.lora.kind is Kind.DORA:
      rhs = stored.dequantize()
    return self.adapt(equation, lhs, rhs, out)

  @nn.nowrap
  def _find_stored(
    self, equation: equations.Equation, rhs: jax.Array
  ) -> stored_kernels.StoredKernel | None:
    """Returns the stored kernel; None if it is a parameter."""
    names = None
    if self.is_initializing():
      names = matmuls.parameter_axes(self, rhs.shape)
    return stored_kernels.find_stored(
      self, self.storage, equation, rhs, names=names
    )


def _parse(equation: str, kernel: jax.Array) -> equations.Equation:
  """Returns a parsed equation without an ellipsis."""
  tokens = equation.partition(",")[0]
  return equations.parse(equation, len(tokens), kernel.ndim)


def _rank_letter(equation: equations.Equation) -> str:
  """Returns a letter that an equation does not have."""
  return next(c for c in "rRqQzZ" if c not in equation.text)


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


def find_kernel_name(variable: str) -> str:
  """Returns the name of the kernel that an adapter's variable changes."""
  layer, matmul, _ = variable.rsplit("/", 2)
  return f"{layer.removesuffix('/einsum')}/{matmul}"


def name_variable(kernel: str, variable: str) -> str:
  """Returns the name of an adapter's variable, such as `A`, of a kernel."""
  layer, _, matmul = kernel.rpartition("/")
  return f"{layer}/einsum/{matmul}/{variable}"


def merge_variables(
  values: Mapping[str, jax.Array], lora: Lora
) -> dict[str, jax.Array]:
  """Returns variables by logical name with the adapters merged."""
  merged = {
    name: value
    for name, value in values.items()
    if not re.fullmatch(PATTERN, name)
  }
  for name in values:
    if not name.endswith(f"/{A}"):
      continue
    kernel = find_kernel_name(name)
    merged[kernel] = merge(
      values[kernel],
      values[name],
      values[name_variable(kernel, B)],
      values.get(name_variable(kernel, MAGNITUDE)),
      lora=lora,
    )
  return merged


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

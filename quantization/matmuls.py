"""Named, replaceable matrix multiplications of layers, and their roles.

A layer's field `einsum` holds a function like `jnp.einsum`, or a provider
(`quantization.einsum.QuantizedEinsum`), which keeps variables, such as scales,
for each matmul. Layers therefore name their matmuls:

```python
gate = matmuls.call(self.einsum, "gate", "BTD,DF->BTF", x, kernel)
```

A plain function is called without the name.

Quantization rules select layers by role. A layer declares the roles of its
matmuls in a class attribute:

```python
class MyFeedForward(nn.Module):
  einsum: Callable[..., jax.Array] = jnp.einsum

  quantization_roles: ClassVar[tuple[str, ...]] = (matmuls.FEED_FORWARD,)
```
"""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any, ClassVar, Final, Protocol, runtime_checkable

from flax import linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from paxon.sharding import variables

Einsum = Callable[..., jax.Array]

# Queries, keys and values of tokens, and the output projection.
ATTENTION_PROJECTIONS: Final = "attention_projections"
# Logits of queries and keys, and sums of values.
ATTENTION_MATMULS: Final = "attention_matmuls"
FEED_FORWARD: Final = "feed_forward"
# Feed-forward layers of a mixture of experts.
EXPERTS: Final = "experts"
# The embedding table used as a head.
EMBEDDING: Final = "embedding"
# Logits, by a table or by a separate kernel.
HEAD: Final = "head"
# `Linear` and `Einsum`, without a specific role; rules select them by path.
LINEAR: Final = "linear"

ROLES: Final = (
  ATTENTION_PROJECTIONS,
  ATTENTION_MATMULS,
  FEED_FORWARD,
  EXPERTS,
  EMBEDDING,
  HEAD,
  LINEAR,
)

# Attribute of layers.
_ROLES = "quantization_roles"


@runtime_checkable
class TakesMatmulName(Protocol):
  """An einsum that may take the keyword `matmul`, a name."""

  takes_matmul_name: bool


@runtime_checkable
class FindsKernel(Protocol):
  """An einsum that stores kernels elsewhere, or changes them."""

  def find_kernel(
    self, equation: str, kernel: jax.Array, /, *, matmul: str
  ) -> jax.Array:
    """Returns the kernel that a matmul multiplies by."""
    ...


def is_provider(einsum: Einsum) -> bool:
  """Returns whether an einsum takes the name of the matmul."""
  return isinstance(einsum, TakesMatmulName) and einsum.takes_matmul_name


def call(
  einsum: Einsum,
  name: str,
  equation: str,
  lhs: jax.Array,
  rhs: jax.Array,
  **more: Any,
) -> jax.Array:
  """Returns a matmul of a layer; `name` is unique in it, as of the kernel."""
  if is_provider(einsum):
    more["matmul"] = name
  return einsum(equation, lhs, rhs, **more)


def name_einsum(einsum: Einsum, name: str) -> Einsum:
  """Returns the einsum for a submodule with one matmul, such as a `Linear`."""
  if not is_provider(einsum):
    return einsum
  return functools.partial(einsum, matmul=name)


def find_kernel(
  einsum: Einsum, name: str, equation: str, kernel: jax.Array
) -> jax.Array:
  """Returns the kernel that a matmul of a layer multiplies by.

  For layers that multiply the kernel in other equations, too: a provider may
  store it elsewhere, or change it.

  Args:
    einsum: Einsum of the layer.
    name: Name of the matmul and of its parameter.
    equation: Equation of the matmul, without an ellipsis.
    kernel: The parameter.
  """
  if not isinstance(einsum, FindsKernel):
    return kernel
  return einsum.find_kernel(equation, kernel, matmul=name)


def get_roles(layer: object) -> tuple[str, ...]:
  """Returns the roles of a layer or of its class; none if it declares none."""
  return tuple(getattr(layer, _ROLES, ()))


def parameter_axes(
  matmul: nn.Module, shape: tuple[int, ...]
) -> tuple[str | None, ...] | None:
  """Returns the logical axes of the parameter that a matmul multiplies.

  Args:
    matmul: The module of a matmul, which a provider in a layer made.
    shape: Shape of the right operand.

  Returns:
    The axes of the layer's parameter of the matmul's name, all `None` except
    during initialization; `None` without such a parameter of this shape.
  """
  # By scopes: inside lifted transforms a module has no parent.
  provider = matmul.scope.parent if matmul.scope is not None else None
  layer = provider.parent if provider is not None else None
  if layer is None or matmul.name is None:
    return None
  parameter = layer.get_variable("params", matmul.name)
  names = getattr(parameter, "names", (None,) * len(shape))
  if getattr(variables.unbox(parameter), "shape", None) != shape:
    return None
  return tuple(names)


@runtime_checkable
class Stored(Protocol):
  """A kernel that is stored in another format."""

  @property
  def shape(self) -> tuple[int, ...]:
    """Shape of the kernel."""
    ...

  def dequantize(self, dtype: DTypeLike = ...) -> jax.Array:
    """Returns the values of the kernel."""
    ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupedKernel:
  """Kernels of experts for grouped matmuls, and what a provider adds.

  `y = (x W_e + (x A_e) B_e) factor_e` for the tokens x of expert e.

  Attributes:
    kernel: W [E, inputs, outputs], or how it is stored.
    a: A [E, inputs, R]; `None` without a low-rank adapter.
    b: B [E, R, outputs].
    factor: A factor of each output [E, 1, outputs], float32; `None` is 1.
    recipe: The `recipe.Recipe` of training; `None` does not quantize.
    key: Random key of its rounding.
  """

  kernel: jax.Array | Stored
  a: jax.Array | None = None
  b: jax.Array | None = None
  factor: jax.Array | None = None
  recipe: Any = None
  key: jax.Array | None = None


class Provider(nn.Module):
  """Base of einsums that take the name of the matmul."""

  takes_matmul_name: ClassVar[bool] = True

  @nn.compact
  def __call__(
    self,
    equation: str,
    lhs: jax.Array,
    rhs: jax.Array,
    *,
    matmul: str,
    preferred_element_type: DTypeLike | None = None,
  ) -> jax.Array:
    """Returns the matmul of two operands.

    Args:
      equation: Equation of `jnp.einsum`.
      lhs: Activations.
      rhs: The kernel or other activations.
      matmul: Name of the matmul, unique in the layer. If `rhs` is a parameter,
        its name.
      preferred_element_type: Dtype of the result; `None` is that of `lhs`.
    """
    return self.make_matmul(matmul)(equation, lhs, rhs, preferred_element_type)

  def make_matmul(self, name: str) -> Einsum:
    """Returns `(equation, lhs, rhs, preferred_element_type) -> out`."""
    raise NotImplementedError


class Adapter(Provider):
  """Base of providers that change the output of a plain matmul."""

  @property
  def replaces_matmul(self) -> bool:
    """Whether the matmul itself is another one, too."""
    return False

  def make_matmul(self, name: str) -> Einsum:
    """Returns the adapted matmul of this name."""

    def multiply(
      equation: str, lhs: jax.Array, rhs: jax.Array, dtype: DTypeLike | None
    ) -> jax.Array:
      out = jnp.einsum(equation, lhs, rhs, preferred_element_type=dtype)
      return self.adapt(equation, lhs, rhs, out, matmul=name)

    return multiply

  def adapt(
    self,
    equation: str,
    lhs: jax.Array,
    rhs: jax.Array,
    out: jax.Array,
    *,
    matmul: str,
  ) -> jax.Array:
    """Returns the adapted output of a matmul."""
    raise NotImplementedError

"""Experts: feed-forward layers whose kernels are stacked.

  gated: down_e(activation(gate_e(x)) * up_e(x))
  plain: down_e(activation(up_e(x)))

with optional biases. A dispatch calls them with tokens sorted by expert, or
with C tokens of each expert. The weight of a token multiplies its hidden
activation, so that its gradient needs no second copy of the output.

Letters: E experts, D embed, F mlp, R tokens with their choices, C capacity.
"""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any, ClassVar

from flax import linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from paxon.layers import initializers, precision, remat
from paxon.layers.moe import grouped_matmul, quantized_grouped_matmul
from paxon.quantization import matmuls
from paxon.quantization import recipe as recipe_lib
from paxon.sharding import axes, checks, logical

# `(name, x, kernel) -> y`, a matmul of tokens with their experts' kernels.
_Multiply = Callable[[str, jax.Array, jax.Array], jax.Array]
_KERNELS = ("gate", "up", "down")

IN_AXES = (axes.EXPERTS, axes.EMBED, axes.MLP)
OUT_AXES = (axes.EXPERTS, axes.MLP, axes.EMBED)
# Logical axes of each parameter.
AXES = {
  "gate": IN_AXES,
  "up": IN_AXES,
  "down": OUT_AXES,
  "gate_bias": (axes.EXPERTS, axes.MLP),
  "up_bias": (axes.EXPERTS, axes.MLP),
  "down_bias": (axes.EXPERTS, axes.EMBED),
  # Scales of kernels that are stored in low precision, and of DoRA.
  "gate_scale": (axes.EXPERTS, None, axes.MLP),
  "up_scale": (axes.EXPERTS, None, axes.MLP),
  "down_scale": (axes.EXPERTS, None, axes.EMBED),
  # Factors of low-rank adapters.
  "gate_a": (axes.EXPERTS, axes.EMBED, None),
  "gate_b": (axes.EXPERTS, None, axes.MLP),
  "up_a": (axes.EXPERTS, axes.EMBED, None),
  "up_b": (axes.EXPERTS, None, axes.MLP),
  "down_a": (axes.EXPERTS, axes.MLP, None),
  "down_b": (axes.EXPERTS, None, axes.EMBED),
  # Keys of stochastic rounding.
  "gate_key": (None,),
  "up_key": (None,),
  "down_key": (None,),
}
_EQUATIONS = {
  "gate": "ECD,EDF->ECF",
  "up": "ECD,EDF->ECF",
  "down": "ECF,EFD->ECD",
}

_default_init = initializers.lecun(in_axes=(1,), out_axes=(2,))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Stacks:
  """Kernels and biases of experts, and their function.

  Attributes:
    parameters: `gate`, `up` [E,D,F], `down` [E,F,D], and biases [E,F] and
      [E,D], those that exist. `get_stored` adds scales [E,1,F] and [E,1,D] of
      outputs, and A [E,D,R], [E,F,R] and B [E,R,F], [E,R,D] of adapters.
    hidden: `(gate or None, up) -> hidden`.
    einsum: The matmul of `apply_batched`.
    recipe: How grouped matmuls are quantized in training; `None` does not.
  """

  # Transformations also make trees of other leaves.
  parameters: dict[str, Any]
  hidden: Callable[[Any, jax.Array], jax.Array] = dataclasses.field(
    metadata={"static": True}
  )
  einsum: matmuls.Einsum = dataclasses.field(
    default=jnp.einsum, metadata={"static": True}
  )
  recipe: recipe_lib.Recipe | None = dataclasses.field(
    default=None, metadata={"static": True}
  )

  @property
  def num_experts(self) -> int:
    """Number of experts of these parameters."""
    return self.parameters["up"].shape[0]

  def get_stored(self) -> "Stacks":
    """Returns experts with stored weights and adapters, for `apply_grouped`.

    Kernels that are stored with one scale for each expert and output stay in
    their low precision, others are a `matmuls.Stored`. Activations keep their
    dtype.

    Raises:
      ValueError: The einsum changes matmuls in another way.
    """
    if not matmuls.is_provider(self.einsum):
      return self
    einsum: Any = self.einsum
    if not hasattr(einsum, "make_grouped"):
      raise ValueError(
        f"{type(einsum).__name__} of experts needs a dispatch by capacity"
        " (layers.moe.dispatch.Capacity): it does not change grouped matmuls."
      )
    made, recipe = dict(self.parameters), self.recipe
    for name, equation in _EQUATIONS.items():
      if name not in made:
        continue
      found = einsum.make_grouped(equation, made[name], matmul=name)
      made[name] = found.kernel
      recipe = found.recipe or recipe
      parts = {
        "a": found.a,
        "b": found.b,
        "scale": found.factor,
        "key": None if found.key is None else jax.random.key_data(found.key),
      }
      made |= {f"{name}_{k}": v for k, v in parts.items() if v is not None}
    return dataclasses.replace(
      self, parameters=made, einsum=jnp.einsum, recipe=recipe
    )

  def dequantize(self, dtype: DTypeLike) -> "Stacks":
    """Returns the experts with arrays in place of a `matmuls.Stored`."""
    made = {
      name: value.dequantize(dtype) if hasattr(value, "dequantize") else value
      for name, value in self.parameters.items()
    }
    return dataclasses.replace(self, parameters=made)

  def apply_grouped(
    self,
    x: Float[Array, "tokens embed"],
    weights: Float[Array, " tokens"],
    sizes: Int[Array, " experts"],
    kernel: grouped_matmul.Kernel,
  ) -> Float[Array, "tokens embed"]:
    """Returns the weighted outputs of tokens sorted by expert.

    The first `sizes[0]` tokens belong to expert 0; those after the last expert
    are padding and give zeros.
    """
    ids = None
    if any(name.endswith(("_bias", "_scale")) for name in self.parameters):
      ends = jnp.cumsum(sizes)
      tokens = jnp.arange(x.shape[0], dtype=sizes.dtype)
      ids = jnp.searchsorted(ends, tokens, side="right")

    product = functools.partial(_multiply_grouped, sizes=sizes, kernel=kernel)

    def multiply(name: str, tokens: jax.Array, w: Any) -> jax.Array:
      if self.recipe is None:
        y = product(tokens, w)
      else:
        key = self.parameters.get(f"{name}_key")
        y = quantized_grouped_matmul.grouped_matmul_by(
          self.recipe,
          tokens,
          w.astype(tokens.dtype),
          sizes,
          kernel=kernel,
          key=None if key is None else jax.random.wrap_key_data(key),
        )
      if f"{name}_a" in self.parameters:
        low = product(tokens, self.parameters[f"{name}_a"])
        y += product(low, self.parameters[f"{name}_b"])
      scale = self.parameters.get(f"{name}_scale")
      if scale is None:
        return y
      assert ids is not None
      factor = scale[:, 0].at[ids].get(mode="fill", fill_value=0)
      return (y.astype(factor.dtype) * factor).astype(y.dtype)

    def bias(name: str) -> jax.Array | None:
      value = self.parameters.get(f"{name}_bias")
      if value is None or ids is None:
        return None
      return value.at[ids].get(mode="fill", fill_value=0)

    return self._apply(x, weights[:, None], multiply, bias)

  def apply_batched(
    self,
    x: Float[Array, "experts capacity embed"],
    weights: Float[Array, "experts capacity"],
  ) -> Float[Array, "experts capacity embed"]:
    """Returns the weighted outputs of C tokens of each expert."""

    def multiply(name: str, tokens: jax.Array, w: jax.Array) -> jax.Array:
      return matmuls.call(self.einsum, name, _EQUATIONS[name], tokens, w)

    def bias(name: str) -> jax.Array | None:
      value = self.parameters.get(f"{name}_bias")
      return None if value is None else value[:, None, :]

    return self._apply(x, weights[..., None], multiply, bias)

  def _apply(
    self,
    x: jax.Array,
    weights: jax.Array,
    multiply: _Multiply,
    bias: Callable[[str], jax.Array | None],
  ) -> jax.Array:
    def project(name: str) -> jax.Array | None:
      if name not in self.parameters:
        return None
      y = multiply(name, x, self.parameters[name])
      added = bias(name)
      return y if added is None else y + added

    up = project("up")
    assert up is not None
    hidden = self.hidden(project("gate"), up)
    hidden = remat.tag(hidden, remat.FEED_FORWARD_HIDDEN)
    wide = precision.at_least_float32(hidden.dtype)
    scaled = (hidden.astype(wide) * weights.astype(wide)).astype(hidden.dtype)
    y = multiply("down", scaled, self.parameters["down"])
    added = bias("down")
    if added is not None:
      y += (added.astype(wide) * weights.astype(wide)).astype(y.dtype)
    return y


def _multiply_grouped(
  tokens: jax.Array, w: Any, *, sizes: jax.Array, kernel: grouped_matmul.Kernel
) -> jax.Array:
  """Returns a grouped matmul with an array or a `matmuls.Stored`."""

  def compute(tokens: jax.Array, w: Any) -> jax.Array:
    if isinstance(w, jax.Array):
      w = w.astype(tokens.dtype)
    else:
      w = w.dequantize(tokens.dtype)
    return grouped_matmul.grouped_matmul(tokens, w, sizes, kernel=kernel)

  if isinstance(w, jax.Array):
    return compute(tokens, w)
  # Dequantized again in the backward pass.
  return jax.checkpoint(compute)(tokens, w)


class _Experts(nn.Module):
  """Parameters of both kinds of experts."""

  quantization_roles: ClassVar[tuple[str, ...]] = (matmuls.EXPERTS,)

  def __post_init__(self) -> None:
    super().__post_init__()
    checks.check_size(self, "mlp_dim")

  @nn.nowrap
  def _stacks(
    self,
    names: tuple[str, ...],
    hidden: Callable[[Any, jax.Array], jax.Array],
    num_experts: int,
    x: jax.Array,
  ) -> Stacks:
    layer: Any = self
    sizes = {axes.EXPERTS: num_experts, axes.EMBED: x.shape[-1]}
    sizes[axes.MLP] = layer.mlp_dim
    dtype = layer.dtype or x.dtype
    made = {}
    for name in names:
      for label in (name, f"{name}_bias") if layer.use_bias else (name,):
        init = layer.kernel_init if label == name else layer.bias_init
        value = self.param(
          label,
          logical.partitioned(
            init,
            AXES[label],
            regularized=label in _KERNELS,
            read_dtype=dtype,
          ),
          tuple(sizes[axis] for axis in AXES[label] if axis),
          layer.param_dtype,
        )
        made[label] = value.astype(dtype)
    return Stacks(parameters=made, hidden=hidden, einsum=layer.einsum)


class GatedExperts(_Experts):
  """Gated feed-forward layers, such as SwiGLU.

  Attributes:
    mlp_dim: Width of the hidden activation of an expert.
    activation: Applied to the gate branch only.
    combine: `(gate, up) -> hidden`, instead of `activation(gate) * up`, such as
      `ClampedSwiglu`.
    use_bias: Whether all matmuls have a bias.
    kernel_init: Initializer of the kernels [E,D,F] and [E,F,D]; one with fans
      needs `in_axes=(1,), out_axes=(2,)`.
    bias_init: Initializer of the biases.
    dtype: Dtype of the computation; `None` is that of the tokens.
    param_dtype: Dtype in which the parameters are stored.
    einsum: The matmul of a dispatch by capacity, replaced by quantization; a
      dropless dispatch reads the weights that it stores, and its adapters.
  """

  mlp_dim: int
  activation: Callable[[jax.Array], jax.Array] = nn.silu
  combine: Callable[[Any, jax.Array], jax.Array] | None = None
  use_bias: bool = False
  kernel_init: nn.initializers.Initializer = _default_init
  bias_init: nn.initializers.Initializer = nn.initializers.zeros
  dtype: DTypeLike | None = None
  param_dtype: DTypeLike = jnp.float32
  einsum: Callable[..., jax.Array] = jnp.einsum

  @nn.compact
  def __call__(self, x: jax.Array, *, num_experts: int) -> Stacks:
    """Returns the experts for tokens [...,D], whose dtype and width count."""
    combine = self.combine or GatedActivation(self.activation)
    return self._stacks(("gate", "up", "down"), combine, num_experts, x)


class PlainExperts(_Experts):
  """Feed-forward layers without a gate.

  Attributes:
    activation: Applied to the hidden activation.

  The other attributes are those of `GatedExperts`.
  """

  mlp_dim: int
  activation: Callable[[jax.Array], jax.Array] = nn.relu
  use_bias: bool = True
  kernel_init: nn.initializers.Initializer = _default_init
  bias_init: nn.initializers.Initializer = nn.initializers.zeros
  dtype: DTypeLike | None = None
  param_dtype: DTypeLike = jnp.float32
  einsum: Callable[..., jax.Array] = jnp.einsum

  @nn.compact
  def __call__(self, x: jax.Array, *, num_experts: int) -> Stacks:
    """Returns the experts for tokens [...,D], whose dtype and width count."""
    hidden = PlainActivation(self.activation)
    return self._stacks(("up", "down"), hidden, num_experts, x)


@dataclasses.dataclass(frozen=True)
class GatedActivation:
  """`activation(gate) * up`."""

  activation: Callable[[jax.Array], jax.Array]

  def __call__(self, gate: Any, up: jax.Array) -> jax.Array:
    """Returns the hidden activation."""
    return self.activation(gate) * up


@dataclasses.dataclass(frozen=True)
class PlainActivation:
  """`activation(up)`."""

  activation: Callable[[jax.Array], jax.Array]

  def __call__(self, gate: Any, up: jax.Array) -> jax.Array:
    """Returns the hidden activation."""
    del gate
    return self.activation(up)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClampedSwiglu:
  """Swish of a clamped gate times a clamped, shifted branch, as in gpt-oss.

  `(clip(up, -limit, limit) + 1) * g * sigmoid(alpha * g)` with
  `g = min(gate, limit)`.

  Attributes:
    limit: Largest magnitude.
    alpha: Slope of the sigmoid.
  """

  limit: float = 7.0
  alpha: float = 1.702

  def __call__(self, gate: Any, up: jax.Array) -> jax.Array:
    """Returns the hidden activation."""
    gate = jnp.minimum(gate, self.limit)
    up = jnp.clip(up, -self.limit, self.limit)
    return (up + 1) * gate * jax.nn.sigmoid(self.alpha * gate)

"""Quantized einsum as a linen module, for layers.

`QuantizedEinsum(recipe)` replaces `jnp.einsum` in the field `einsum` of a
layer. It is a linen module because delayed scaling has state, stored at
`fp8/<path of the layer>/einsum/<matmul>/...`. A learner overwrites this
collection with its gradient and combines it over microbatches by maximum;
stacks stack it like parameters. Gradients of two uses would be added, so a
matmul with state may be computed only once per pass; a second call raises.

A matmul without state in an immutable collection uses current scaling:
decoding with other matmuls than training (latent attention), or weights of an
unquantized run.

Stochastic rounding uses the random stream `rounding`. Without this stream, as
in evaluation and decoding, forward matmuls round to nearest.
"""

import dataclasses
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from paxon.quantization import (
  equations,
  learned_range,
  matmuls,
  quantized_array,
  quantized_einsum,
)
from paxon.quantization import monitor as monitor_lib
from paxon.quantization import recipe as recipe_lib
from paxon.sharding import variables

COLLECTION = "fp8"
ROUNDING = "rounding"


class QuantizedEinsum(matmuls.Provider):
  """Computes the matmuls of a layer in low precision.

  Attributes:
    recipe: How operands and gradients are quantized.
    monitor: Whether training reports the fractions of saturated and flushed
      values as summaries (`quantization.monitor`). Costs a pass over each
      operand and a variable per matmul.
  """

  recipe: recipe_lib.Recipe
  monitor: bool = False

  @property
  def random_streams(self) -> tuple[str, ...]:
    """The random streams that training requires."""
    return (ROUNDING,) if is_stochastic(self.recipe) else ()

  def make_matmul(self, name: str) -> nn.Module:
    """Returns the matmul of this name."""
    return _Matmul(self.recipe, self.monitor, name=name)

  @nn.compact
  def make_grouped(
    self, equation: str, kernel: jax.Array, *, matmul: str
  ) -> matmuls.GroupedKernel:
    """Returns kernels of experts, and how other code quantizes their matmul.

    Kernels that are quantized alone are rounded here. A recipe with blocks of
    activations does not change grouped matmuls.

    Args:
      equation: Equation of `jnp.einsum`, without an ellipsis.
      kernel: Kernels [E, inputs, outputs].
      matmul: Name of the matmul and of its parameter.
    """
    made = _Matmul(self.recipe, self.monitor, name=matmul)
    return made.make_grouped(equation, kernel)


class _Matmul(nn.Module):
  """One matmul of a layer."""

  recipe: recipe_lib.Recipe
  monitor: bool

  @nn.compact
  def __call__(
    self,
    equation: str,
    lhs: jax.Array,
    rhs: jax.Array,
    preferred_element_type: DTypeLike | None,
  ) -> jax.Array:
    key = None
    if is_stochastic(self.recipe) and self.has_rng(ROUNDING):
      key = self.make_rng(ROUNDING)
    recipe, rhs = self._round_in_learned_range(equation, lhs, rhs)
    state = self._histories()
    out = quantized_einsum.quantized_einsum(
      equation,
      lhs,
      rhs,
      recipe=recipe,
      state=state,
      key=key,
      preferred_element_type=preferred_element_type,
    )
    if not self.monitor:
      return out
    common = {"recipe": recipe, "state": state}
    monitor_lib.sow_operands(self, equation, lhs, rhs, **common)
    record = None
    if recipe.gradient is not None:
      record = self._make_variable(monitor_lib.RECORD, monitor_lib.RECORD_SHAPE)
    if record is None:
      return out
    ranks = lhs.ndim, rhs.ndim
    return monitor_lib.record_gradient(
      self, equation, out, record, ranks=ranks, **common
    )

  @nn.compact
  def make_grouped(
    self, equation: str, rhs: jax.Array
  ) -> matmuls.GroupedKernel:
    """Returns kernels of experts; see `QuantizedEinsum.make_grouped`."""
    recipe = self.recipe
    if not is_grouped(recipe):
      return matmuls.GroupedKernel(kernel=rhs)
    if recipe.lhs is None and recipe.gradient is None:
      lhs = jax.ShapeDtypeStruct((1,) * rhs.ndim, rhs.dtype)
      if recipe.learned_range:
        rhs = self._round_in_learned_range(equation, lhs, rhs)[1]
      elif recipe.rhs is not None:
        parsed = equations.parse(equation, lhs.ndim, rhs.ndim)
        rounded = quantized_array.quantize(
          rhs, recipe.rhs, contracted=parsed.contracted_axes(parsed.rhs)
        ).dequantize(rhs.dtype)
        # The gradient is that of the rounded kernel.
        rhs = rhs + jax.lax.stop_gradient(rounded - rhs)
      return matmuls.GroupedKernel(kernel=rhs)
    key = None
    if is_stochastic(recipe) and self.has_rng(ROUNDING):
      key = self.make_rng(ROUNDING)
    return matmuls.GroupedKernel(kernel=rhs, recipe=recipe, key=key)

  def _round_in_learned_range(
    self, equation: str, lhs: jax.Array | jax.ShapeDtypeStruct, rhs: jax.Array
  ) -> tuple[recipe_lib.Recipe, jax.Array]:
    """Returns a right operand that is rounded already, and the other recipes.

    Both are unchanged if no range is learned.
    """
    recipe = self.recipe
    if not recipe.learned_range or recipe.rhs is None:
      return recipe, rhs
    names = matmuls.parameter_axes(self, rhs.shape)
    if names is None:
      return recipe, rhs
    parsed = equations.parse(equation, lhs.ndim, rhs.ndim)
    ranges = learned_range.find(
      self,
      rhs,
      recipe.rhs,
      contracted=parsed.contracted_axes(parsed.rhs),
      names=names,
    )
    rounded = learned_range.quantize(rhs, ranges, recipe.rhs)
    rest = dataclasses.replace(
      recipe, rhs=None, backward_rhs=None, learned_range=False
    )
    return rest, rounded

  def _histories(self) -> dict[str, jax.Array] | None:
    """Returns the histories of delayed scaling; None without state."""
    state = {}
    for name, value in (
      quantized_einsum.initial_state(self.recipe) or {}
    ).items():
      history = self._make_variable(name, value.shape)
      if history is None:
        return None
      state[name] = history
    return state or None

  def _make_variable(
    self, name: str, shape: tuple[int, ...]
  ) -> jax.Array | None:
    """Returns a variable, initially zero; None if it cannot be created."""
    is_there = self.has_variable(COLLECTION, name)
    if is_there and self.is_initializing():
      raise ValueError(
        f"The matmul {'/'.join(self.path)} is computed twice in one pass, but "
        f"has state ({name}) for one; use another layer, name the matmuls "
        "differently, or use a recipe with current scales and no monitor."
      )
    if not is_there and not self.is_mutable_collection(COLLECTION):
      return None
    # Linen unboxes the value, which its types do not show.
    made: Any = self.variable(
      COLLECTION,
      name,
      variables.make_boxed_init(
        nn.initializers.zeros,
        (None,) * len(shape),
        shape=shape,
        dtype=jnp.float32,
        update=variables.UpdateRule.OVERWRITE_WITH_GRADIENT,
        combine=variables.CombineRule.MAX,
      ),
    )
    return made.value


def is_grouped(recipe: recipe_lib.Recipe) -> bool:
  """Returns whether grouped matmuls are quantized by a recipe.

  Blocks of activations or gradients have no scale for each row or expert.
  """
  if recipe.lhs is None and recipe.gradient is None:
    return True
  operands = (
    recipe.lhs,
    recipe.rhs,
    recipe.gradient,
    recipe.backward_lhs,
    recipe.backward_rhs,
  )
  return not recipe.learned_range and all(
    each is None or each.granularity is not recipe_lib.Granularity.BLOCK
    for each in operands
  )


def is_stochastic(recipe: recipe_lib.Recipe) -> bool:
  """Returns whether any operand of the recipe is rounded stochastically."""
  operands = (
    recipe.lhs,
    recipe.rhs,
    recipe.gradient,
    recipe.backward_lhs,
    recipe.backward_rhs,
  )
  random = recipe_lib.Rounding.STOCHASTIC
  return any(o is not None and o.rounding is random for o in operands)

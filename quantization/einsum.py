"""Quantized einsum as a linen module, for layers.

`QuantizedEinsum(recipe)` goes into a layer's field `einsum` in place of
`jnp.einsum`. It is a linen module, because delayed scaling has a state: what a
product needs lies at `fp8/<path of the layer>/einsum/<product>/...`, in a
collection of its own that a learner overwrites with its gradient, and combines
over microbatches by maximum. A stack stacks it like parameters. The next state
is a gradient, and gradients of two uses are added up; so a product that has a
state is computed once in a pass, and a layer that is called twice is refused.

Where variables may not change and there are none for a product (decoding by
other products than training has, as latent attention does; weights of a run
that was not quantized), delayed scales are current ones.

Random rounding draws from the stream `rounding`; without that stream, which is
in evaluation and decoding, forward products round to the nearest value.
"""

import dataclasses
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from paxon.quantization import monitor as monitor_lib
from paxon.quantization import products, quantized_einsum
from paxon.quantization import recipe as recipe_lib
from paxon.sharding import variables

COLLECTION = "fp8"
ROUNDING = "rounding"


class QuantizedEinsum(products.Provider):
  """Computes the products of a layer in few bits.

  Attributes:
    recipe: How operands and gradients are quantized.
    monitor: Whether training tells the shares of values that saturate, and that
      become zero, as summaries (`quantization.monitor`). It costs a pass over
      each operand, and a variable for each product.
  """

  recipe: recipe_lib.Recipe
  monitor: bool = False

  @property
  def random_streams(self) -> tuple[str, ...]:
    """The random streams that training needs for it."""
    return (ROUNDING,) if is_stochastic(self.recipe) else ()

  def part(self, product: str) -> nn.Module:
    """Returns the product of this name."""
    return _Product(self.recipe, self.monitor, name=product)


class _Product(nn.Module):
  """One product of a layer."""

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
    state = self._histories()
    out = quantized_einsum.quantized_einsum(
      equation,
      lhs,
      rhs,
      recipe=self.recipe,
      state=state,
      key=key,
      preferred_element_type=preferred_element_type,
    )
    if not self.monitor:
      return out
    common = {"recipe": self.recipe, "state": state}
    monitor_lib.tell_operands(self, equation, lhs, rhs, **common)
    record = None
    if self.recipe.gradient is not None:
      record = self._made(monitor_lib.RECORD, monitor_lib.RECORD_SHAPE)
    if record is None:
      return out
    ranks = lhs.ndim, rhs.ndim
    return monitor_lib.watched(
      self, equation, out, record, ranks=ranks, **common
    )

  def _histories(self) -> dict[str, jax.Array] | None:
    """Returns the histories of delayed scaling; None if there are none."""
    state = {}
    for name, value in (
      quantized_einsum.initial_state(self.recipe) or {}
    ).items():
      history = self._made(name, value.shape)
      if history is None:
        return None
      state[name] = history
    return state or None

  def _made(self, name: str, shape: tuple[int, ...]) -> jax.Array | None:
    """Returns a variable, zeros at first; None where there is none."""
    is_there = self.has_variable(COLLECTION, name)
    if is_there and self.is_initializing():
      raise ValueError(
        f"The matmul {'/'.join(self.path)} is computed twice in one pass, but "
        f"has state ({name}) for one; use another layer, name the matmuls "
        "differently, or use a recipe with current scales and no monitor."
      )
    if not is_there and not self.is_mutable_collection(COLLECTION):
      return None
    # Linen takes the box off, which its types do not say.
    made: Any = self.variable(
      COLLECTION,
      name,
      variables.boxed(
        nn.initializers.zeros,
        (None,) * len(shape),
        shape=shape,
        dtype=jnp.float32,
        update=variables.UpdateRule.OVERWRITE_WITH_GRADIENT,
        combine=variables.CombineRule.MAX,
      ),
    )
    return made.value


def is_stochastic(recipe: recipe_lib.Recipe) -> bool:
  """Whether an operand of one of the three products is rounded at random."""
  operands = (
    getattr(recipe, field.name) for field in dataclasses.fields(recipe)
  )
  random = recipe_lib.Rounding.STOCHASTIC
  return any(
    isinstance(o, recipe_lib.TensorRecipe) and o.rounding is random
    for o in operands
  )

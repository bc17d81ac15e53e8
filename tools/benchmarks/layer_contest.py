"""One of our layers beside a hand-written one, forward and backward."""

from collections.abc import Callable
import dataclasses
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np

Params = Any
# `(parameters, floats..., integers...) -> [B,T,D]`.
Layer = Callable[..., jax.Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contest:
  """Two layers that compute the same from the same parameters.

  Attributes:
    module: Ours.
    baseline: Called with what is below `params` of ours, and the same arrays.
    floats: What is differentiated besides the parameters, tokens first.
    integers: The other arrays.
    call: How ours is called; by default with all arrays by position.
  """

  module: nn.Module
  baseline: Layer
  floats: tuple[jax.Array, ...]
  integers: tuple[jax.Array, ...]
  call: Callable[..., Any] | None = None

  def parameters(self) -> Params:
    """Returns random values of our parameters, none of them special.

    Initial values would hide a scale that is not applied.
    """
    rng = np.random.default_rng(0)
    arrays = (*self.floats, *self.integers)
    shapes = nn.unbox(
      jax.eval_shape(self._initialized, jax.random.key(0), *arrays)
    )

    def draw(x: jax.ShapeDtypeStruct) -> jax.Array:
      values = rng.standard_normal(x.shape)
      size = x.size / max(x.shape)
      values = values * size**-0.5 if x.ndim > 1 else 1 + 0.3 * values
      return jnp.asarray(values, x.dtype)

    return jax.tree.map(draw, shapes["params"])

  def ours(self, params: Params, *arrays: jax.Array) -> jax.Array:
    """Returns what our layer makes of the arrays."""
    call: Any = self.call or type(self.module).__call__
    out: Any = self.module.apply({"params": params}, *arrays, method=call)
    return out

  def compiled(self, layer: Layer, **options: Any) -> jax.stages.Compiled:
    """Returns the forward and backward pass of one of the two layers.

    It maps parameters and the float arrays to the output and the gradients of
    both, given ones as the gradient of the output.

    Args:
      layer: `ours` or `baseline`.
      **options: Of the compiler.
    """

    def step(params: Params, floats: Any, integers: Any) -> Any:
      out, pull = jax.vjp(lambda p, f: layer(p, *f, *integers), params, floats)
      return out, pull(jnp.ones_like(out))

    shapes = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), self.arguments()
    )
    return jax.jit(step).lower(*shapes).compile(compiler_options=options)

  def arguments(self) -> tuple[Params, Any, Any]:
    """Returns what both compiled passes are called with."""
    return self.parameters(), self.floats, self.integers

  def _initialized(self, key: jax.Array, *arrays: jax.Array) -> Any:
    call: Any = self.call or type(self.module).__call__
    return self.module.init(key, *arrays, method=call)

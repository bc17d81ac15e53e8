"""Shared helpers of layer tests: values, axes, matmul dtypes, gradients."""

from collections.abc import Callable, Mapping
import functools
import math
from typing import Any, NamedTuple

from flax import linen as nn
import jax
import numpy as np

from paxon.layers import token_context
from paxon.sharding import initialization, variables


class _The:
  """A module as a key: itself, and not what is equal to it.

  Equal models differ where one of them has a part in two places.
  """

  def __init__(self, module: nn.Module):
    self.module = module

  def __hash__(self) -> int:
    return id(self.module)

  def __eq__(self, other: object) -> bool:
    return isinstance(other, _The) and other.module is self.module


def specs(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
  """Returns the tree of specs of `module` called with these arguments.

  A module is traced once for all arguments of the same shapes.

  Args:
    module: Not bound.
    *args: Arrays, or trees of them.
    **kwargs: Constants.
  """
  leaves, treedef = jax.tree.flatten(args)
  shapes = tuple(map(jax.typeof, leaves))
  given = _The(module), treedef, shapes, tuple(kwargs.items())
  if not _are_hashable(kwargs):
    return _traced_specs(*given)
  tree = _known_specs(*given)
  # A caller may change its dictionaries.
  return jax.tree.map(lambda spec: spec, tree)


def _traced_specs(the: _The, treedef: Any, shapes: Any, constants: Any) -> Any:
  def init(*leaves):
    args = jax.tree.unflatten(treedef, leaves)
    return the.module.init(jax.random.key(0), *args, **dict(constants))

  return variables.get_specs(jax.eval_shape(init, *shapes))


_known_specs = functools.lru_cache(maxsize=64)(_traced_specs)


def _are_hashable(constants: Mapping[str, Any]) -> bool:
  try:
    hash(tuple(constants.values()))
  except TypeError:
    return False
  return True


def axes(module: nn.Module, *args: Any, **kwargs: Any) -> dict[str, Any]:
  """Returns the logical axes of each variable by its name."""
  tree = specs(module, *args, **kwargs)
  return {spec.name: spec.axes for spec in jax.tree.leaves(tree)}


def initial_values(
  module: nn.Module, *args: Any, seed: int = 0, **kwargs: Any
) -> Any:
  """Returns first values as training computes them."""
  tree = specs(module, *args, **kwargs)
  return jax.jit(lambda: initialization.initial_values(tree, seed))()


def random_values(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
  """Returns values drawn by numpy, none of them special (as scales of one).

  Matrices keep the size of what they multiply; they are not the module's own
  initial values, and cost no compilation.
  """
  rng = np.random.default_rng(7)

  def draw(spec: variables.VariableSpec) -> jax.Array:
    shape, values = spec.layer_shape, rng.standard_normal(spec.shape)
    if len(shape) < 2:
      values = 1 + 0.3 * values
    else:
      values *= (math.prod(shape) / max(shape)) ** -0.5
    return array(values, spec.dtype)

  return jax.tree.map(draw, specs(module, *args, **kwargs))


def apply(module: nn.Module, values: Any, *args: Any, **static: Any) -> Any:
  """Returns `module.apply(values, *args, **static)`, compiled as a whole.

  A module is compiled once for all arguments of the same shapes.

  Args:
    module: Not bound.
    values: Its variables.
    *args: Arrays, or trees of them.
    **static: Constants.
  """
  # As a key of the cache, a list is the tuple of what is in it.
  known = {k: tuple(v) if isinstance(v, list) else v for k, v in static.items()}
  if not _are_hashable(known):
    return _jit(_The(module), tuple(static.items()))(values, *args)
  return _known_jitted(_The(module), tuple(known.items()))(values, *args)


def _jit(the: _The, constants: Any) -> Callable[..., Any]:
  return jax.jit(lambda v, *a: the.module.apply(v, *a, **dict(constants)))


# Programs take memory, and one is used again soon or never.
_known_jitted = functools.lru_cache(maxsize=16)(_jit)


def array(values: Any, dtype: Any = np.float32) -> jax.Array:
  """Returns `numpy.asarray(values)` on the device.

  `jnp.asarray` compiles a program for each shape.
  """
  return jax.device_put(np.asarray(values, dtype))


def place(tree: Any, shardings: Any) -> Any:
  """Returns a tree of arrays, laid out.

  By way of the host: what lies on one device is split by programs, one for
  each shape.
  """
  return jax.device_put(jax.device_get(tree), shardings)


def normal(*shape: int, seed: int = 1, dtype: Any = np.float32) -> jax.Array:
  """Returns random normal numbers."""
  return array(np.random.default_rng(seed).standard_normal(shape), dtype)


def make_positions(batch: int, length: int) -> jax.Array:
  """Returns positions 0, 1, ... int32 [batch, length]."""
  row = np.arange(length, dtype=np.int32)
  return array(np.tile(row, (batch, 1)), np.int32)


def ones(batch: int, length: int) -> jax.Array:
  """Returns segment ids of one document per sequence, int32 [batch, length]."""
  return array(np.ones((batch, length)), np.int32)


class Dot(NamedTuple):
  """The dtypes of one product."""

  operands: tuple[Any, ...]
  result: Any


def dots(closed: Any) -> list[Dot]:
  """Returns the matmuls of a jaxpr and of its inner jaxprs."""
  found, waiting = [], [closed.jaxpr]
  while waiting:
    for eqn in waiting.pop().eqns:
      if eqn.primitive.name == "dot_general":
        types = tuple(v.aval.dtype for v in eqn.invars)
        found.append(Dot(types, eqn.outvars[0].aval.dtype))
      for value in jax.tree.leaves(list(eqn.params.values())):
        # A closed jaxpr holds a jaxpr.
        inner = getattr(value, "jaxpr", value)
        if hasattr(inner, "eqns"):
          waiting.append(inner)
  return found


def assert_gradients_match(
  fn: Callable[[Any], jax.Array],
  at: Any,
  *,
  rtol: float = 1e-6,
  has_rule: bool = False,
) -> None:
  """Compares the gradient of `fn` with finite differences, in float64.

  Each leaf of `at` is moved along one random unit vector by itself.

  Args:
    fn: Maps a tree of float arrays to a scalar.
    at: Where to differentiate.
    rtol: Relative tolerance of each directional derivative.
    has_rule: Whether something in `fn` has a rule of its own for gradients
      (`custom_vjp`), whose values are not computed as those of `fn` alone. So
      `fn` is compiled alone, too.
  """
  with jax.enable_x64(True):
    # Of numpy, so that nothing but `fn` is compiled.
    at = jax.tree.map(lambda x: np.asarray(x, np.float64), at)
    leaves, treedef = jax.tree.flatten(at)
    # One program gives both, unless that hides the other way to the value.
    both = jax.jit(jax.value_and_grad(fn))
    compiled = jax.jit(fn) if has_rule else lambda at: both(at)[0]
    gradients = jax.tree.leaves(both(at)[1])
    rng = np.random.default_rng(0)
    step = 1e-5
    for i, (leaf, gradient) in enumerate(zip(leaves, gradients, strict=True)):
      direction = rng.standard_normal(leaf.shape)
      direction /= np.linalg.norm(direction)
      moved = [
        float(compiled(treedef.unflatten([*leaves[:i], x, *leaves[i + 1 :]])))
        for x in (leaf + step * direction, leaf - step * direction)
      ]
      numeric = (moved[0] - moved[1]) / (2 * step)
      analytic = float(np.sum(np.asarray(gradient) * direction))
      assert gradient.dtype == np.float64
      assert analytic != 0.0, f"leaf {i} has no influence"
      np.testing.assert_allclose(
        analytic, numeric, rtol=rtol, atol=1e-9, err_msg=f"leaf {i}"
      )


def in_context(
  x: Any, *arrays: Any, **given: Any
) -> tuple[Any, token_context.TokenContext]:
  """Returns the arguments of a layer: tokens and their context.

  `arrays` and `given` are those of `TokenContext`.
  """
  on_device = (
    array(each, each.dtype) if isinstance(each, np.ndarray) else each
    for each in arrays
  )
  return x, token_context.TokenContext(*on_device, **given)

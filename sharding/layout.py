"""Layouts: a mesh and a rule set, and compilation of functions under them.

Rules are entered inside the traced function, and each layout makes a new
function, because linen's rules are not part of jit's cache key: a step traced
under one rule set would otherwise be reused silently under another.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
import math
from typing import Any

from flax import linen as nn
import jax

from paxon.sharding import axes as axis_names
from paxon.sharding import host_memory, suggestions, variables
from paxon.sharding import rules as sharding_rules


@dataclasses.dataclass(frozen=True)
class Layout:
  """The placement of arrays on devices.

  Attributes:
    mesh: Devices, see `mesh.make_mesh`.
    rules: Mesh axes of each logical axis.
  """

  mesh: jax.sharding.Mesh
  rules: sharding_rules.Rules = sharding_rules.DEFAULT_RULES

  def sharding(self, axes: Sequence[str | None]) -> jax.sharding.NamedSharding:
    """Returns the sharding of an array with these logical axes."""
    spec = sharding_rules.to_partition_spec(axes, rules=self.rules)
    return jax.sharding.NamedSharding(self.mesh, spec)

  @property
  def replicated(self) -> jax.sharding.NamedSharding:
    """The sharding of an array that is replicated on every device."""
    return self.sharding(())

  def batch_sharding(self, ndim: int) -> jax.sharding.NamedSharding:
    """Returns the sharding of a batch array [batch, length, ...]."""
    names = (axis_names.BATCH, axis_names.LENGTH)[:ndim]
    return self.sharding(names + (None,) * (ndim - len(names)))

  def shards(self, axis: str) -> int:
    """Returns the number of shards along a logical axis."""
    (entry,) = self.sharding((axis,)).spec
    names = sharding_rules.as_tuple(entry)
    return math.prod(self.mesh.shape[name] for name in names)

  def shardings(self, specs: Any) -> Any:
    """Returns the sharding of each `VariableSpec` in a pytree.

    Raises:
      ValueError: Dimensions are not multiples of their shards; the message
        lists the first such variables, axes and sizes.
    """
    leaves = jax.tree.leaves(specs)
    problems = [p for spec in leaves for p in self._indivisible(spec)]
    if problems:
      # Optimizer moments repeat the problems of their parameters.
      raise ValueError(suggestions.limit(problems))
    return jax.tree.map(self._place, specs)

  def jit(self, fn: Callable[..., Any], **options: Any) -> "LaidOut":
    """Returns `jax.jit(fn, **options)` for this layout."""
    return LaidOut(self, fn, options)

  def lower(self, traced: jax.stages.Traced) -> jax.stages.Lowered:
    """Lowers a function of this layout that `LaidOut.trace` traced."""
    with jax.set_mesh(self.mesh):
      return traced.lower()

  def _place(self, spec: variables.VariableSpec) -> jax.sharding.NamedSharding:
    found = self.sharding(spec.axes)
    return host_memory.place(found) if spec.on_host else found

  def _indivisible(self, spec: variables.VariableSpec) -> list[str]:
    entries = self.sharding(spec.axes).spec
    problems = []
    for axis, size, entry in zip(spec.axes, spec.shape, entries, strict=True):
      names = sharding_rules.as_tuple(entry)
      parts = math.prod(self.mesh.shape[name] for name in names)
      if size % parts:
        over = ", ".join(f"{n}={self.mesh.shape[n]}" for n in names)
        problems.append(
          f"{spec.name}: axis '{axis}' of size {size} does not divide by "
          f"{over}; change the size or the mesh"
        )
    return problems


class LaidOut:
  """A jitted function that runs under its layout."""

  def __init__(
    self, layout: Layout, fn: Callable[..., Any], options: dict[str, Any]
  ) -> None:
    @functools.wraps(fn)
    def trace(*args: Any, **kwargs: Any) -> Any:
      with nn.logical_axis_rules(layout.rules):
        return fn(*args, **kwargs)

    self._layout = layout
    self._jitted = jax.jit(trace, **options)

  def __call__(self, *args: Any, **kwargs: Any) -> Any:
    """Runs the function; the first call compiles it."""
    with jax.set_mesh(self._layout.mesh):
      return self._jitted(*args, **kwargs)

  def trace(self, *args: Any, **kwargs: Any) -> jax.stages.Traced:
    """Traces the function, for `Layout.lower`."""
    with jax.set_mesh(self._layout.mesh):
      return self._jitted.trace(*args, **kwargs)

  def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
    """Traces and lowers the function; `.compile()` needs no mesh context."""
    with jax.set_mesh(self._layout.mesh):
      return self._jitted.lower(*args, **kwargs)

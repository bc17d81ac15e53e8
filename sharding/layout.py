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
    partitioner: Chooses the mesh axes of variables and their optimizer state,
      instead of the rules.
  """

  mesh: jax.sharding.Mesh
  rules: sharding_rules.Rules = sharding_rules.DEFAULT_RULES
  # Not hashed, because it may be an object with settings.
  partitioner: variables.Partitioner | None = dataclasses.field(
    default=None, hash=False
  )

  def sharding(self, axes: Sequence[str | None]) -> jax.sharding.NamedSharding:
    """Returns the sharding of an array with these logical axes."""
    spec = sharding_rules.to_partition_spec(axes, rules=self.rules)
    return jax.sharding.NamedSharding(self.mesh, spec)

  def stored_sharding(
    self, shape: Sequence[int], axes: Sequence[str | None]
  ) -> jax.sharding.NamedSharding:
    """Returns the sharding of a variable between programs."""
    spec = sharding_rules.fit_stored(
      shape, axes, rules=self.rules, mesh=self.mesh.shape
    )
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
      ValueError: Layers, stages or experts are not multiples of their shards,
        or a result of the partitioner is not valid; the message lists the first
        such variables, axes and sizes.
    """
    leaves = jax.tree.leaves(specs)
    problems = [p for spec in leaves for p in self._indivisible(spec)]
    if problems:
      # Optimizer moments repeat the problems of their parameters.
      raise ValueError(suggestions.limit(problems))
    return jax.tree.map(self.place, specs)

  def jit(self, fn: Callable[..., Any], **options: Any) -> "LaidOut":
    """Returns `jax.jit(fn, **options)` for this layout."""
    return LaidOut(self, fn, options)

  def lower(self, traced: jax.stages.Traced) -> jax.stages.Lowered:
    """Lowers a function of this layout that `LaidOut.trace` traced."""
    with jax.set_mesh(self.mesh):
      return traced.lower()

  def place(self, spec: variables.VariableSpec) -> jax.sharding.NamedSharding:
    """Returns the sharding of a variable."""
    chosen = self._choose(spec)
    found = self.stored_sharding(spec.shape, spec.axes)
    if chosen is not None:
      entries = jax.sharding.PartitionSpec(*chosen)
      found = jax.sharding.NamedSharding(self.mesh, entries)
    return host_memory.place(found) if spec.on_host else found

  def _choose(
    self, spec: variables.VariableSpec
  ) -> Sequence[str | tuple[str, ...] | None] | None:
    if self.partitioner is None:
      return None
    return self.partitioner(spec, dict(self.mesh.shape))

  def _indivisible(self, spec: variables.VariableSpec) -> list[str]:
    chosen = self._choose(spec)
    if chosen is None:
      entries = sharding_rules.fit_computed(
        spec.shape, spec.axes, rules=self.rules, mesh=self.mesh.shape
      )
    elif problem := self._find_problem(spec, chosen):
      return [problem]
    else:
      entries = chosen
    problems = []
    for axis, size, entry in zip(spec.axes, spec.shape, entries, strict=True):
      names = sharding_rules.as_tuple(entry)
      parts = math.prod(self.mesh.shape[name] for name in names)
      is_padded = (
        chosen is None
        and sharding_rules.find_padding(axis, size, parts) is not None
      )
      if size % parts and not is_padded:
        over = ", ".join(f"{n}={self.mesh.shape[n]}" for n in names)
        problems.append(
          f"{spec.name}: axis '{axis}' of size {size} does not divide by "
          f"{over}; change the size or the mesh"
        )
    return problems

  def _find_problem(
    self, spec: variables.VariableSpec, entries: Any
  ) -> str | None:
    """Returns an error of a result of the partitioner, or None."""
    where = f"{spec.name}: partitioner"
    is_sequence = isinstance(entries, (tuple, list, jax.sharding.PartitionSpec))
    if not is_sequence or len(entries) != len(spec.shape):
      return (
        f"{where} must return one entry for each dimension of the shape"
        f" {spec.shape}, or None, got {entries!r}"
      )
    names = [n for entry in entries for n in sharding_rules.as_tuple(entry)]
    for name in names:
      if name not in self.mesh.shape:
        known = ", ".join(self.mesh.shape)
        return f"{where} must return mesh axes ({known}), got {name!r}"
      if names.count(name) > 1:
        return f"{where} must return a mesh axis once, got {name!r} twice"
    return None


class LaidOut:
  """A jitted function that runs under its layout."""

  def __init__(
    self, layout: Layout, fn: Callable[..., Any], options: dict[str, Any]
  ) -> None:
    @functools.wraps(fn)
    def trace(*args: Any, **kwargs: Any) -> Any:
      with (
        nn.logical_axis_rules(layout.rules),
        variables.use_partitioner(layout.partitioner),
      ):
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

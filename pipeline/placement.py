"""Where the arrays of a pipeline lie: their first axis over the mesh's stages.

Inside of a stage the rules of the layout hold without the mesh axis of stages,
since each stage computes on its own devices only.
"""

from collections.abc import Iterator, Sequence
import contextlib
import math
from typing import Any

from flax import linen as nn
import jax

from paxon.sharding import axes
from paxon.sharding import rules as rules_lib

_ANY = jax.sharding.PartitionSpec.UNCONSTRAINED


def stage_axis() -> str | None:
  """Returns the mesh axis of stages; None outside of a layout."""
  active = tuple(nn.get_logical_axis_rules())
  if not active:
    return None
  (entry,) = rules_lib.to_partition_spec((axes.STAGES,), rules=active)
  if isinstance(entry, tuple):
    raise ValueError(
      f"The rule of {axes.STAGES!r} must name one mesh axis, got {entry}."
    )
  return entry


def check_mesh(num_stages: int) -> None:
  """Raises ValueError unless the mesh has a place for each stage.

  One device may do the work of all: the order of things is the same there.
  """
  axis, sizes = stage_axis(), jax.sharding.get_abstract_mesh().shape
  if not nn.get_logical_axis_rules() or all(n == 1 for n in sizes.values()):
    return
  if axis is None:
    raise ValueError(
      f"PipelinedStack.num_stages ({num_stages}) needs a rule of the logical"
      f" axis {axes.STAGES!r}; map it to the mesh axis {axes.STAGE!r}."
    )
  # A mesh of the user's own need not have all axes.
  if sizes.get(axis, 1) != num_stages:
    given = ",".join(f"{name}={n}" for name, n in sizes.items() if n > 1)
    raise ValueError(
      f"PipelinedStack.num_stages ({num_stages}) needs a mesh whose axis"
      f" {axis!r} has that size, got the mesh '{given}'; write"
      f" {axis}={num_stages} into it."
    )


@contextlib.contextmanager
def inside_a_stage() -> Iterator[None]:
  """The active rules without the mesh axis of stages, but for stages."""
  active, axis = nn.get_logical_axis_rules(), stage_axis()
  if axis is None:
    yield
    return
  with nn.logical_axis_rules(_without(active, axis)):
    yield


@contextlib.contextmanager
def with_whole_tables() -> Iterator[None]:
  """The active rules, by which nothing splits a vocabulary."""
  active = nn.get_logical_axis_rules()
  if not active:
    yield
    return
  kept = tuple(
    (name, None if name == axes.VOCAB else entry) for name, entry in active
  )
  with nn.logical_axis_rules(kept):
    yield


def whole(x: jax.Array) -> jax.Array:
  """Returns an array that no mesh axis splits; as it is outside of a layout."""
  if not nn.get_logical_axis_rules():
    return x
  return jax.lax.with_sharding_constraint(x, jax.sharding.PartitionSpec())


def staged(tree: Any) -> Any:
  """Returns arrays [P,...], each stage's part on its devices."""
  return _constrained(tree, (axes.STAGES,))


def staged_rows(tree: Any, *, between: int = 0) -> Any:
  """Returns arrays [P,...,rows,...] placed by stage and by batch.

  Args:
    tree: Of arrays.
    between: Number of axes between those two, which stay whole.
  """
  return _constrained(tree, (axes.STAGES, *(None,) * between, axes.BATCH))


def batch(tree: Any) -> Any:
  """Returns arrays [batch,...] placed as outside of the pipeline."""
  active = tuple(nn.get_logical_axis_rules())
  if not active:
    return tree
  (entry,) = rules_lib.to_partition_spec((axes.BATCH,), rules=active)

  shards = _shards(entry)

  def constrain(x: jax.Array) -> jax.Array:
    # Prompts may be fewer than devices.
    if x.shape[0] % shards:
      return x
    spec = jax.sharding.PartitionSpec(entry, *(_ANY,) * (x.ndim - 1))
    return jax.lax.with_sharding_constraint(x, spec)

  return jax.tree.map(constrain, tree)


def row_shards() -> int:
  """Returns into how many parts the mesh splits the rows of a microbatch."""
  with inside_a_stage():
    active = tuple(nn.get_logical_axis_rules())
    if not active:
      return 1
    (entry,) = rules_lib.to_partition_spec((axes.BATCH,), rules=active)
  return _shards(entry)


def _constrained(tree: Any, names: Sequence[str | None]) -> Any:
  axis = stage_axis()
  if axis is None:
    return tree
  active = _without(nn.get_logical_axis_rules(), axis)

  def constrain(x: jax.Array) -> jax.Array:
    # A dimension of size one stays whole, as in `logical.constrain`.
    sizes = x.shape[: len(names)]
    kept = [n if s > 1 else None for n, s in zip(names, sizes, strict=True)]
    entries = rules_lib.to_partition_spec(kept, rules=active)
    rest = (_ANY,) * (x.ndim - len(kept))
    spec = jax.sharding.PartitionSpec(*entries, *rest)
    return jax.lax.with_sharding_constraint(x, spec)

  return jax.tree.map(constrain, tree)


def _shards(entry: rules_lib.MeshAxes) -> int:
  sizes = jax.sharding.get_abstract_mesh().shape
  return math.prod(sizes[name] for name in rules_lib.as_tuple(entry))


def _without(rules: Any, axis: str) -> rules_lib.Rules:
  """Returns rules in which nothing but stages is split over `axis`."""

  def kept(name: str, entry: rules_lib.MeshAxes) -> rules_lib.MeshAxes:
    if name == axes.STAGES:
      return entry
    names = tuple(n for n in rules_lib.as_tuple(entry) if n != axis)
    return names or None

  return tuple((name, kept(name, entry)) for name, entry in rules)

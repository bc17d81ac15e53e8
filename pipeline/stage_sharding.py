"""Sharding of a pipeline: rules for its variables, constraints on its arrays.

A stack stores its layers in their order, [layers,...]. If each stage has one
run of consecutive layers, all of equal length, that axis is sharded over the
stages and nothing moves before a step. With circular repeats, or unequal runs,
no sharding of that axis fits; then the width of weights (`embed`) is also
sharded over the stages, and each step moves the weights to their stage and the
gradients back, once each, by all-to-all.

While streaming, batches are sharded over the stages outside of the pipeline, so
that embedding and head are computed once and not by each stage.

Inside a stage the rules of the layout hold without the mesh axis of stages,
since each stage computes on its own devices only.
"""

from collections.abc import Iterator, Sequence
import contextlib
from typing import Any

from flax import linen as nn
import jax

from paxon.sharding import axes, logical
from paxon.sharding import rules as rules_lib

_ANY = jax.sharding.PartitionSpec.UNCONSTRAINED


def with_stages(
  rules: rules_lib.Rules,
  *,
  num_stages: int,
  num_groups: int,
  circular_repeats: int = 1,
  streaming: bool = False,
) -> rules_lib.Rules:
  """Returns rules that also shard a model over stages.

  Args:
    rules: Rules for the other mesh axes.
    num_stages: As of the `PipelinedStack`.
    num_groups: Its layers by the length of its pattern, rounded down.
    circular_repeats: As of the `PipelinedStack`.
    streaming: As of the `PipelinedStack`.

  Raises:
    ValueError: `num_stages` is not positive.
  """
  if num_stages <= 0:
    raise ValueError(f"num_stages must be positive, got {num_stages}.")
  entries = dict(rules)
  changes: dict[str, rules_lib.MeshAxes] = {axes.STAGES: axes.STAGE}
  if circular_repeats == 1 and num_groups % num_stages == 0:
    changes[axes.LAYERS] = axes.STAGE
  else:
    width = rules_lib.as_tuple(entries.get(axes.EMBED))
    changes[axes.EMBED] = (*width, axes.STAGE)
  if streaming:
    batch = rules_lib.as_tuple(entries.get(axes.BATCH))
    changes[axes.BATCH] = (axes.STAGE, *batch)
  return rules_lib.replace(rules, changes)


def find_stage_axis() -> str | None:
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
  """Raises ValueError unless the mesh has that many stages, or one device."""
  axis, sizes = find_stage_axis(), jax.sharding.get_abstract_mesh().shape
  if not nn.get_logical_axis_rules() or all(n == 1 for n in sizes.values()):
    return
  if axis is None:
    raise ValueError(
      f"PipelinedStack.num_stages ({num_stages}) needs a rule of the logical"
      f" axis {axes.STAGES!r}; map it to the mesh axis {axes.STAGE!r}."
    )
  # A custom mesh need not have all axes.
  if sizes.get(axis, 1) != num_stages:
    given = ",".join(f"{name}={n}" for name, n in sizes.items() if n > 1)
    raise ValueError(
      f"PipelinedStack.num_stages ({num_stages}) needs a mesh with"
      f" {axis}={num_stages}, got the mesh '{given}'."
    )


@contextlib.contextmanager
def inside_stage() -> Iterator[None]:
  """Activates the rules that hold inside a stage."""
  active, axis = nn.get_logical_axis_rules(), find_stage_axis()
  if axis is None:
    yield
    return
  with nn.logical_axis_rules(_without(active, axis)):
    yield


@contextlib.contextmanager
def with_replicated_vocab() -> Iterator[None]:
  """Activates rules that do not shard the vocabulary."""
  active = nn.get_logical_axis_rules()
  if not active:
    yield
    return
  kept = tuple(
    (name, None if name == axes.VOCAB else entry) for name, entry in active
  )
  with nn.logical_axis_rules(kept):
    yield


def replicate(x: jax.Array) -> jax.Array:
  """Returns an array that no mesh axis shards; unchanged without a layout."""
  if not nn.get_logical_axis_rules():
    return x
  return jax.lax.with_sharding_constraint(x, jax.sharding.PartitionSpec())


def shard(tree: Any) -> Any:
  """Shards arrays [P,...] over the stages."""
  return _constrain(tree, (axes.STAGES,))


def shard_microbatch(tree: Any, *, between: int = 0) -> Any:
  """Shards arrays [P,...,size,...] over the stages and as a batch.

  Args:
    tree: Arrays.
    between: Number of axes between those two, which are not sharded.
  """
  return _constrain(tree, (axes.STAGES, *(None,) * between, axes.BATCH))


def shard_batch(tree: Any) -> Any:
  """Shards arrays [batch,...] as outside of the pipeline."""
  active = tuple(nn.get_logical_axis_rules())
  if not active:
    return tree
  (entry,) = rules_lib.to_partition_spec((axes.BATCH,), rules=active)
  shards = logical.count_shards(entry)

  def constrain(x: jax.Array) -> jax.Array:
    # Prompts may be fewer than devices.
    if x.shape[0] % shards:
      return x
    spec = jax.sharding.PartitionSpec(entry, *(_ANY,) * (x.ndim - 1))
    return jax.lax.with_sharding_constraint(x, spec)

  return jax.tree.map(constrain, tree)


def count_microbatch_shards() -> int:
  """Returns over how many shards the mesh splits a microbatch."""
  with inside_stage():
    return logical.num_shards((axes.BATCH,))[0]


def _constrain(tree: Any, names: Sequence[str | None]) -> Any:
  axis = find_stage_axis()
  if axis is None:
    return tree
  active = _without(nn.get_logical_axis_rules(), axis)

  def constrain(x: jax.Array) -> jax.Array:
    # A dimension of size one is not sharded, as in `logical.constrain`.
    sizes = x.shape[: len(names)]
    kept = [n if s > 1 else None for n, s in zip(names, sizes, strict=True)]
    entries = rules_lib.to_partition_spec(kept, rules=active)
    rest = (_ANY,) * (x.ndim - len(kept))
    spec = jax.sharding.PartitionSpec(*entries, *rest)
    return jax.lax.with_sharding_constraint(x, spec)

  return jax.tree.map(constrain, tree)


def _without(rules: Any, axis: str) -> rules_lib.Rules:
  """Returns rules in which only stages are sharded over `axis`."""

  def keep_others(name: str, entry: rules_lib.MeshAxes) -> rules_lib.MeshAxes:
    if name == axes.STAGES:
      return entry
    names = tuple(n for n in rules_lib.as_tuple(entry) if n != axis)
    return names or None

  return tuple((name, keep_others(name, entry)) for name, entry in rules)

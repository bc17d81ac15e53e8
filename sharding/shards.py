"""Functions of activations that are applied to each shard separately.

A sum over a sharded axis is reduced over devices where it is computed; in a
loop, in every iteration. A function that is mapped over shards computes one
local sum per shard, and the sums are reduced once at the end.
"""

from collections.abc import Callable, Sequence
import itertools
import math
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from paxon.sharding import axes as axis_names
from paxon.sharding import rules

Arrays = Any


def map_shards(
  fn: Callable[[Arrays], tuple[Any, Any]],
  arrays: Arrays,
  *,
  axes: Sequence[str],
) -> tuple[Any, Any]:
  """Returns `fn(arrays)`, computed on all shards in parallel.

  Inside `fn`, arrays are shards, and sharding constraints omit the mesh axes
  that split `axes`.

  Args:
    fn: Maps arrays to (sums, outputs). Sums have any shape and are added over
      shards; outputs have the leading axes `axes`.
    arrays: Activations with the leading axes `axes`.
    axes: Logical axes, split by the active rules. Outside a layout there is one
      shard.

  Raises:
    ValueError: A dimension is not a multiple of its shards.
  """
  active = tuple(nn.get_logical_axis_rules())
  if not active:
    return fn(arrays)
  # A dimension of size one is not split, as in `logical.constrain`.
  shape = jax.tree.leaves(arrays)[0].shape
  names = [a if n > 1 else None for a, n in zip(axes, shape, strict=False)]
  entries = rules.to_partition_spec(names, rules=active)
  mesh_axes = [rules.as_tuple(e) for e in entries]
  sizes = jax.sharding.get_abstract_mesh().shape
  counts = [math.prod(sizes[name] for name in names) for names in mesh_axes]
  if math.prod(counts) == 1:
    return fn(arrays)
  every = tuple(itertools.chain(*mesh_axes))

  def map_one(arrays: Arrays) -> tuple[Any, Any]:
    with nn.logical_axis_rules(_without(every, active)):
      return fn(arrays)

  for names in reversed(mesh_axes):
    map_one = jax.vmap(map_one, spmd_axis_name=names or None)

  def place(x: jax.Array) -> jax.Array:
    rest = [PartitionSpec.UNCONSTRAINED] * (x.ndim - len(counts))
    spec = PartitionSpec(*(names or None for names in mesh_axes), *rest)
    return jax.lax.with_sharding_constraint(x, spec)

  parts = jax.tree.map(lambda x: place(_split(x, axes, counts)), arrays)
  sums, outputs = map_one(parts)
  rank = len(counts)

  def add(x: jax.Array) -> jax.Array:
    # One axis for all shards, for a single reduction over all devices.
    x = place(x).reshape(-1, *x.shape[rank:])
    rest = [PartitionSpec.UNCONSTRAINED] * (x.ndim - 1)
    spec = PartitionSpec(every, *rest)
    return jnp.sum(jax.lax.with_sharding_constraint(x, spec), axis=0)

  return (
    jax.tree.map(add, sums),
    jax.tree.map(lambda x: _join(place(x), rank), outputs),
  )


def map_examples(
  fn: Callable[..., Any], *, in_axes: int | Sequence[Any] | None = 0
) -> Callable[..., Any]:
  """Returns `jax.vmap(fn, in_axes)` over an axis that is split like a batch.

  Inside `fn`, sharding constraints omit the mesh axes that split `axes.BATCH`.
  """
  active = tuple(nn.get_logical_axis_rules())
  if not active:
    return jax.vmap(fn, in_axes=in_axes)
  (entry,) = rules.to_partition_spec((axis_names.BATCH,), rules=active)
  taken = rules.as_tuple(entry)

  def map_one(*args: Any) -> Any:
    with nn.logical_axis_rules(_without(taken, active)):
      return fn(*args)

  return jax.vmap(map_one, in_axes=in_axes, spmd_axis_name=taken or None)


def _without(taken: tuple[str, ...], active: rules.Rules) -> rules.Rules:
  """Returns the rules without the mesh axes `taken`."""

  def keep_others(entry: rules.MeshAxes) -> rules.MeshAxes:
    names = rules.as_tuple(entry)
    return tuple(name for name in names if name not in taken) or None

  return tuple((logical, keep_others(entry)) for logical, entry in active)


def _split(x: jax.Array, axes: Sequence[str], counts: list[int]) -> jax.Array:
  """Returns shape [shards per axis ..., shard size per axis ..., ...]."""
  shape: list[int] = []
  for axis, count, size in zip(axes, counts, x.shape, strict=False):
    if size % count:
      raise ValueError(
        f"The axis '{axis}' of an activation of shape {x.shape} does not "
        f"divide by its {count} shards."
      )
    shape += [count, size // count]
  x = x.reshape(*shape, *x.shape[len(counts) :])
  return jnp.moveaxis(x, range(0, len(shape), 2), range(len(counts)))


def _join(x: jax.Array, rank: int) -> jax.Array:
  """Undoes `_split`."""
  x = jnp.moveaxis(x, range(rank), range(0, 2 * rank, 2))
  sizes = [x.shape[i] * x.shape[i + 1] for i in range(0, 2 * rank, 2)]
  return x.reshape(*sizes, *x.shape[2 * rank :])

"""Calls of opaque attention kernels on each device's sequences and heads.

A kernel that the compiler cannot partition (cuDNN's, Pallas's) would be called
with whole arrays, gathered on every device. Attention of different sequences
and heads is independent, so each device calls it with its own shard.
"""

from collections.abc import Callable
import math
from typing import Final

import jax
import jax.numpy as jnp

from paxon.layers.attention import mask as attention_mask
from paxon.sharding import axes, logical, rules

HEADS: Final = (
  axes.BATCH,
  axes.LENGTH,
  axes.ACTIVATION_HEADS,
  axes.ACTIVATION_HEAD_DIM,
)
KV_HEADS: Final = (
  axes.BATCH,
  axes.LENGTH,
  axes.ACTIVATION_KV_HEADS,
  axes.ACTIVATION_HEAD_DIM,
)

# `(query, key, value, mask, sinks) -> out`, all of one device.
Attend = Callable[..., jax.Array]


def call(
  attend: Attend,
  query: jax.Array,
  key: jax.Array,
  value: jax.Array,
  mask: attention_mask.AttentionMask,
  sinks: jax.Array | None = None,
  *,
  name: str,
) -> jax.Array:
  """Calls `attend` for the sequences and heads of each device.

  Queries are [B,T,N,H], keys and values [B,S,K,H], sinks [N]; `attend` gets
  whole sequences.

  Raises:
    ValueError: The mesh splits sequences, or separates heads of queries from
      their keys.
  """
  num_heads = query.shape[2]
  query, key, value, sinks = fill_devices(query, key, value, sinks)
  heads, kv_heads = splits(query, key, name=name)
  if heads is None or kv_heads is None:
    return attend(query, key, value, mask, sinks)
  if heads[1] or kv_heads[1]:
    raise ValueError(
      f"{name} attention needs whole sequences on each device, but the mesh"
      f" splits '{axes.LENGTH}' over {words(heads[1] or kv_heads[1])}; use"
      " layers.attention.ring.Ring."
    )
  rows = jax.P(heads[0])
  mapped = jax.shard_map(
    attend,
    in_specs=(heads, kv_heads, kv_heads, rows, jax.P(heads[2])),
    out_specs=heads,
    # A Pallas call does not say over which axes its outputs vary.
    check_vma=False,
  )
  return mapped(query, key, value, mask, sinks)[:, :, :num_heads]


def fill_devices(
  query: jax.Array,
  key: jax.Array,
  value: jax.Array,
  sinks: jax.Array | None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
  """Returns the arguments of `call` with a number of heads that divides.

  Key/value heads are repeated if the queries of a head can be divided between
  devices; otherwise zeros are added after the last heads.
  """
  num_heads, num_kv = query.shape[2], key.shape[2]
  shards, kv_shards = (
    logical.num_shards((axis,))[0]
    for axis in (axes.ACTIVATION_HEADS, axes.ACTIVATION_KV_HEADS)
  )
  groups = num_heads // num_kv
  if num_kv == 1:
    extra_kv, extra = 0, -num_heads % shards
  else:
    extra_kv = -num_kv % kv_shards
    extra = extra_kv * groups
  if not extra:
    return query, key, value, sinks
  copies = kv_shards // math.gcd(num_kv, kv_shards)
  if extra_kv and groups % copies == 0:
    key, value = (jnp.repeat(x, copies, axis=2) for x in (key, value))
    return query, key, value, sinks
  if sinks is not None:
    sinks = jnp.pad(sinks, (0, extra))
  query, key, value = (
    jnp.pad(x, ((0, 0), (0, 0), (0, count), (0, 0)))
    for x, count in ((query, extra), (key, extra_kv), (value, extra_kv))
  )
  return query, key, value, sinks


def splits(
  query: jax.Array, key: jax.Array, *, name: str
) -> tuple[jax.sharding.PartitionSpec | None, ...]:
  """Returns how the active rules split queries and keys, or None twice.

  Raises:
    ValueError: Query heads and their keys are on different devices.
  """
  heads = logical.find_splits(query.shape, HEADS)
  kv_heads = logical.find_splits(key.shape, KV_HEADS)
  if heads is None or kv_heads is None:
    return None, None
  if heads[2] != kv_heads[2] and key.shape[2] > 1:
    raise ValueError(
      f"{name} attention needs query and key/value heads on the same"
      f" devices, but the mesh splits them over {words(heads[2])} and over"
      f" {words(kv_heads[2])}."
    )
  return heads, kv_heads


def words(entry: str | tuple[str, ...] | None) -> str:
  """Returns an entry of a partition spec, for a message."""
  return ", ".join(rules.as_tuple(entry) or ("nothing",))

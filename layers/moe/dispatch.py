"""Dispatch: how tokens reach their experts and come back.

A dispatch is `(x [G,S,D], ids [G,S,k], weights [G,S,k], stacks) -> [G,S,D]`, a
pure function of its arrays:

  y[t] = sum_j weights[t, j] * expert_{ids[t, j]}(x[t])

  Dropless      sorts tokens by expert; a grouped matmul multiplies the tokens
                of each expert, however many
  Capacity      each expert takes C tokens of each group; others are dropped
  OneHotEinsum  the same by GShard's einsums, for comparison, and where the
                compiler must derive the all-to-alls of a sharded batch

Sums over the choices of a token are in float32.

Letters: G groups, S tokens of a group, k choices, E experts, C capacity,
D embed, R choices (T * k), T tokens (G * S).
"""

import dataclasses
import math
from typing import Any, Final, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from paxon.layers import precision
from paxon.layers.moe import (
  expert_parallel,
  grouped_matmul,
  grouped_rows,
  platform_kernels,
)
from paxon.layers.moe import experts as experts_lib
from paxon.layers.moe import routing as routing_lib
from paxon.sharding import axes, checks, logical, rules

_BY_PLATFORM: Final = platform_kernels.ByPlatform()
_ONE_GROUP: Final = routing_lib.TokenGroups()


@runtime_checkable
class Dispatch(Protocol):
  """A dispatch; hashable."""

  def __call__(
    self,
    x: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    stacks: experts_lib.Stacks,
  ) -> jax.Array:
    """Returns the weighted sums of the experts' outputs."""
    ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dropless:
  """Every token reaches all of its experts.

  Attributes:
    kernel: The grouped matmul.
    bound: Under expert parallelism, the number of choices that a device can
      send to another by all-to-all, divided by the mean; a step with more
      gathers all tokens. `None` always gathers, which moves fewer bytes for
      `k` of about the number of devices or more (`expert_parallel`).
  """

  kernel: grouped_matmul.Kernel = _BY_PLATFORM
  bound: float | None = None

  def __post_init__(self) -> None:
    checks.check_positive(self, "bound")

  def __call__(
    self,
    x: Float[Array, "groups tokens embed"],
    ids: Int[Array, "groups tokens choices"],
    weights: Float[Array, "groups tokens choices"],
    stacks: experts_lib.Stacks,
  ) -> Float[Array, "groups tokens embed"]:
    """Returns the weighted sums of the experts' outputs."""
    stacks = stacks.get_stored()
    plan = expert_parallel.make_plan(x, stacks)
    if plan is not None:
      # Formats of blocks have no axes to split.
      stacks = stacks.dequantize(x.dtype)
      return expert_parallel.run(
        plan, x, ids, weights, stacks, kernel=self.kernel, bound=self.bound
      )
    k = ids.shape[-1]
    y = grouped_rows.dropless(
      x.reshape(-1, x.shape[-1]),
      ids.reshape(-1, k),
      weights.reshape(-1, k),
      stacks,
      kernel=self.kernel,
    )
    return y.astype(x.dtype).reshape(x.shape)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Capacity:
  """Each expert takes at most C tokens of each group.

  All first choices precede the second ones, and earlier tokens later ones, as
  in GShard and Pax. A token that does not fit loses that choice: the weights of
  its others do not change.

  The rule of C is Pax's: with `factor`, it is `int(S * factor / E)`, rounded up
  to a multiple of four, but at least `minimum`. So `factor` contains the number
  of choices: 2.0 is the mean load of two.

  Attributes:
    factor: Factor of the capacity; 0 uses `minimum`.
    minimum: Smallest capacity, not rounded.
    groups: Groups of tokens.
  """

  factor: float = 0.0
  minimum: int = 1
  groups: routing_lib.TokenGroups = _ONE_GROUP

  def __post_init__(self) -> None:
    checks.check_non_negative(self, "factor")
    checks.check_size(self, "minimum")
    if not self.factor and self.minimum == 1:
      raise ValueError(
        f"{type(self).__name__} needs a factor above 0 or a minimum above 1;"
        " with neither, each expert would take one token of a group."
      )

  def __call__(
    self,
    x: Float[Array, "batch length embed"],
    ids: Int[Array, "batch length choices"],
    weights: Float[Array, "batch length choices"],
    stacks: experts_lib.Stacks,
  ) -> Float[Array, "batch length embed"]:
    """Returns the weighted sums of the experts' outputs."""
    parts = map(self.groups.split, (x, ids, weights))
    y = self._dispatch_by_group(*parts, stacks=stacks)
    return y.astype(x.dtype).reshape(x.shape)

  def count_dropped(
    self, ids: Int[Array, "batch length choices"], num_experts: int
  ) -> Float[Array, ""]:
    """Returns the share of choices that exceed the capacity."""
    ids = self.groups.split(ids)
    asked = ids < num_experts
    kept = assign_slots(ids, num_experts)[1] < capacity(
      ids.shape[1], num_experts, factor=self.factor, minimum=self.minimum
    )
    lost = jnp.sum((asked & ~kept).astype(jnp.float32))
    return lost / jnp.maximum(jnp.sum(asked.astype(jnp.float32)), 1)

  def _dispatch_by_group(
    self,
    x: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    *,
    stacks: experts_lib.Stacks,
  ) -> jax.Array:
    """Gathers the tokens of each slot, and the slot of each choice."""
    G, S, _ = x.shape
    E = stacks.num_experts
    C = capacity(S, E, factor=self.factor, minimum=self.minimum)
    kept, slots = _slots(ids, weights, num_experts=E, capacity=C)
    # The choice of each slot; the last entry collects dropped ones.
    place = jnp.where(kept, ids * C + slots, E * C)
    choices = jnp.broadcast_to(
      jnp.arange(ids[0].size, dtype=jnp.int32), (G, ids[0].size)
    )
    table = jnp.full((G, E * C + 1), ids[0].size, jnp.int32)
    rows = jnp.arange(G)[:, None]
    table = table.at[rows, place.reshape(G, -1)].set(choices)[:, :-1]
    tokens = jnp.minimum(table // ids.shape[-1], S)
    picked = jax.vmap(lambda v, at: v.at[at].get(mode="fill", fill_value=0))
    sent = picked(x, tokens)
    own = picked(weights.reshape(G, -1), table)
    out = stacks.apply_batched(
      _group_by_expert(sent, E), _group_by_expert(own, E)
    )
    out = jnp.moveaxis(out.reshape(E, G, C, -1), 0, 1).reshape(G, E * C, -1)
    back = picked(precision.widen(out), place.reshape(G, -1))
    return jnp.sum(back.reshape(G, S, ids.shape[-1], -1), axis=2)


def _group_by_expert(x: jax.Array, num_experts: int) -> jax.Array:
  """Returns slots [G,E*C,...] as [E,G*C,...]."""
  groups, slots, *rest = x.shape
  x = x.reshape(groups, num_experts, slots // num_experts, *rest)
  return jnp.moveaxis(x, 1, 0).reshape(num_experts, -1, *rest)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OneHotEinsum(Capacity):
  """`Capacity` by einsums with one-hot arrays [G,S,E,C].

  Its matmuls cost `4 * T * E * C * D` more. A compiler can partition them: for
  a batch and experts sharded over one mesh axis it makes two all-to-alls.
  """

  def _dispatch_by_group(
    self,
    x: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    *,
    stacks: experts_lib.Stacks,
  ) -> jax.Array:
    G, S, _ = x.shape
    E = stacks.num_experts
    C = capacity(S, E, factor=self.factor, minimum=self.minimum)
    kept, slots = _slots(ids, weights, num_experts=E, capacity=C)
    combine = jnp.zeros((G, S, E, C), weights.dtype)
    for j in range(ids.shape[-1]):
      choice = jnp.where(kept[..., j], weights[..., j], 0)
      at = jax.nn.one_hot(ids[..., j], E, dtype=weights.dtype)[..., None]
      slot = jax.nn.one_hot(slots[..., j], C, dtype=weights.dtype)
      combine += choice[..., None, None] * at * slot[..., None, :]
    sent = jnp.einsum("GSEC,GSD->EGCD", (combine != 0).astype(x.dtype), x)
    sent = _split_experts(_split_groups(sent))
    y = stacks.apply_batched(
      sent.reshape(E, G * C, -1), jnp.ones((E, G * C), weights.dtype)
    )
    y = precision.widen(y).reshape(E, G, C, -1)
    y = _split_groups(_split_experts(y))
    return jnp.einsum("GSEC,EGCD->GSD", combine.astype(y.dtype), y)


def _split_groups(x: jax.Array) -> jax.Array:
  """Returns slots [E,G,C,D], split by group alone, like tokens."""
  if not _are_split(x):
    return x
  spec = logical.partition_spec(x.shape, (None, axes.BATCH, None, None))
  return jax.lax.with_sharding_constraint(x, spec)


def _split_experts(x: jax.Array) -> jax.Array:
  """Returns slots [E,G,C,D], split by expert, and by group over the other axes.

  Between this and `_split_groups` a compiler makes an all-to-all. Left alone,
  it may split groups over all axes of the batch: then it gathers the weights of
  all experts and reduces their gradients.
  """
  if not _are_split(x):
    return x
  experts = logical.find_splits(x.shape[:1], (axes.ACTIVATION_EXPERTS,))
  groups = logical.find_splits(x.shape[1:2], (axes.BATCH,))
  assert experts is not None
  assert groups is not None
  used = rules.as_tuple(experts[0])
  rest = tuple(a for a in rules.as_tuple(groups[0]) if a not in used)
  spec = jax.P(experts[0], rest or None, None, None)
  return jax.lax.with_sharding_constraint(x, spec)


def _are_split(x: jax.Array) -> bool:
  """Whether mesh axes split the experts of slots [E,G,C,D], and its groups."""
  sizes = zip(x.shape, (axes.ACTIVATION_EXPERTS, axes.BATCH), strict=False)
  shards = [(n, logical.num_shards((name,))[0]) for n, name in sizes]
  return all(n % parts == 0 and parts > 1 for n, parts in shards)


def capacity(
  group_size: int, num_experts: int, *, factor: float, minimum: int
) -> int:
  """Returns the tokens that an expert takes of a group; see `Capacity`."""
  size = int(group_size * factor / num_experts) if factor else 0
  if minimum >= size:
    return minimum
  return 4 * math.ceil(size / 4)


def assign_slots(
  ids: Int[Array, "groups tokens choices"], num_experts: int
) -> tuple[Bool[Array, "groups tokens choices"], Any]:
  """Returns which choices are experts, and their slots, from 0 in each expert.

  All first choices precede the second ones, and earlier tokens later ones.
  """
  G, S, k = ids.shape
  # Choice-major, [G,k*S].
  flat = jnp.swapaxes(ids, 1, 2).reshape(G, k * S).astype(jnp.int32)
  index = jnp.broadcast_to(jnp.arange(k * S, dtype=jnp.int32), flat.shape)
  keys, order = jax.lax.sort((flat, index), num_keys=1)
  starts = jax.vmap(lambda row: jnp.searchsorted(row, row))(keys)
  _, slots = jax.lax.sort(
    (order, index - starts.astype(jnp.int32)), dimension=1, num_keys=1
  )
  slots = jnp.swapaxes(slots.reshape(G, k, S), 1, 2)
  return ids < num_experts, slots


def _slots(
  ids: jax.Array, weights: jax.Array, *, num_experts: int, capacity: int
) -> tuple[jax.Array, jax.Array]:
  """Returns which choices are dispatched, and their slots.

  A choice whose weight is zero keeps its slot empty, as in Pax.
  """
  exists, slots = assign_slots(ids, num_experts)
  return exists & (slots < capacity) & (weights != 0), slots

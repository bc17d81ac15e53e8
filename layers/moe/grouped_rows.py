"""Tokens sorted by expert, and the dropless sum over their experts.

Letters: T tokens, k choices, E experts, R choices of all tokens, sorted by
expert, D embed.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from paxon.layers import precision
from paxon.layers.moe import experts as experts_lib
from paxon.layers.moe import grouped_matmul


def dropless(
  x: Float[Array, "tokens embed"],
  ids: Int[Array, "tokens choices"],
  weights: Float[Array, "tokens choices"],
  stacks: experts_lib.Stacks,
  *,
  kernel: grouped_matmul.Kernel,
  max_rows: int | None = None,
) -> Float[Array, "tokens embed"]:
  """Returns the sums over the given experts, in at least float32.

  Args:
    x: Tokens.
    ids: Experts of each token; ids from `stacks.num_experts` on are skipped.
    weights: Factors of the experts' outputs.
    stacks: Experts.
    kernel: The grouped matmul.
    max_rows: A bound of the number of ids that are not skipped, which saves
      memory; `None` is all.
  """
  tokens, k = ids.shape
  num_experts = stacks.num_experts
  rows = min(max_rows or tokens * k, tokens * k)
  order, slots, sizes = sort_by_expert(ids, num_experts, rows=rows)
  sorted_x = gather_rows(x, order, slots)
  used = jnp.arange(rows) < jnp.sum(sizes)
  row_weights = jnp.where(used, weights.reshape(-1)[order], 0)
  y = stacks.apply_grouped(sorted_x, row_weights, sizes, kernel)
  return sum_rows(y, order, slots)


def sort_by_expert(
  ids: Int[Array, "tokens choices"], num_experts: int, *, rows: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Returns the order of choices by expert, its inverse and the group sizes.

  The sort is stable: tokens of an expert stay in order.

  Returns:
    The choice `t * k + j` at each index [R]; the index of each choice [T,k],
    which is R for choices without one; the number of choices per expert [E].
  """
  flat = jnp.minimum(ids.reshape(-1), num_experts).astype(jnp.int32)
  index = jnp.arange(flat.size, dtype=jnp.int32)
  # Not argsort, whose result in shard_map is typed as equal on all devices.
  keys, order = jax.lax.sort((flat, index), num_keys=1)
  _, slots = jax.lax.sort((order, index), num_keys=1)
  bounds = jnp.searchsorted(keys, jnp.arange(num_experts + 1, dtype=jnp.int32))
  sizes = jnp.diff(bounds).astype(jnp.int32)
  kept = (flat < num_experts) & (slots < rows)
  slots = jnp.where(kept, slots, rows)
  return order[:rows], slots.reshape(ids.shape), sizes


@jax.custom_vjp
def gather_rows(x: jax.Array, order: jax.Array, slots: jax.Array) -> jax.Array:
  """Returns the token of each choice in `order`, [R,D]; zero for none."""
  return x.at[order // slots.shape[1]].get(mode="fill", fill_value=0)


@jax.custom_vjp
def sum_rows(y: jax.Array, order: jax.Array, slots: jax.Array) -> jax.Array:
  """Returns the sum of the choices of each token [T,D], in float32."""
  del order
  picked = y.at[slots].get(mode="fill", fill_value=0)
  return jnp.sum(precision.widen(picked), axis=1)


# Each is the transpose of the other, by gathers: scatters with duplicates are
# slow, and on GPUs not deterministic. Rows without a choice get gradients that
# nothing reads.
gather_rows.defvjp(
  lambda x, order, slots: (gather_rows(x, order, slots), (order, slots)),
  lambda saved, g: (sum_rows(g, *saved).astype(g.dtype), None, None),
)
sum_rows.defvjp(
  lambda y, order, slots: (
    sum_rows(y, order, slots),
    (jnp.zeros((), y.dtype), order, slots),
  ),
  lambda saved, g: (
    gather_rows(g.astype(saved[0].dtype), *saved[1:]),
    None,
    None,
  ),
)

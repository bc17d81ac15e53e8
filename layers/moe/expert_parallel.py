"""Expert parallelism of the dropless dispatch, by explicit collectives.

Tokens are split over the mesh axes of the batch, experts over those of
`experts`, usually one of the former. Each device multiplies the tokens of its
own experts, wherever these are:

  gather    all-gathers tokens, ids and weights over the expert axes, adds the
            outputs of its own experts, and reduce-scatters the sums
  exchange  sends each choice to the device of its expert, and the output back,
            by two all-to-alls with room for `bound` times the mean; if any
            device has more for another, all repeat this for the others

Repeated exchanges save only their inputs for the backward pass. So a step needs
the memory of one exchange, whatever the routing.

Both are exact for every routing. No weights of experts move over the expert
axes. Over the axes of `embed` (FSDP) each device gathers the weights of its
experts, again in the backward pass; over those of `mlp` (tensor) it adds
partial sums of tokens.

Tokens that the mesh does not split over the expert axes (a decoding step of few
sequences) are on all devices, and the outputs are summed.
"""

from collections.abc import Callable, Mapping
import dataclasses
import functools
import math
from typing import Any, Final

import jax
from jax import ad_checkpoint
import jax.numpy as jnp

from paxon.layers import precision
from paxon.layers.moe import experts as experts_lib
from paxon.layers.moe import grouped_matmul, grouped_rows
from paxon.sharding import axes, logical, rules

# Every expert multiplies whole tokens.
_TOKENS: Final = (axes.BATCH, axes.LENGTH, None)
_GATHERED: Final = "gathered_experts"
# The scope of what moves tokens to experts, which plans expect.
SCOPE: Final = "expert_parallel"
# The scope of the branch that plans assume.
USUAL: Final = "usual_branch"

Names = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class _Plan:
  """Mesh axes of larger size than one.

  Attributes:
    tokens: Partition of tokens [B,T,D].
    parameters: Partition of each parameter.
    experts: Axes of the experts.
    mlp: Axes of the hidden activation.
  """

  tokens: jax.sharding.PartitionSpec
  parameters: Mapping[str, jax.sharding.PartitionSpec]
  experts: Names
  mlp: Names

  @property
  def gathered(self) -> Names:
    """Axes of the experts that split tokens."""
    used = {name for entry in self.tokens for name in rules.as_tuple(entry)}
    return tuple(name for name in self.experts if name in used)


def make_plan(x: jax.Array, stacks: experts_lib.Stacks) -> _Plan | None:
  """Returns the partition under the active rules; None on one device.

  Raises:
    ValueError: A dimension is not a multiple of its shards.
  """
  tokens = logical.find_splits(x.shape, _TOKENS)
  if tokens is None:
    return None
  parameters = {}
  for name, value in stacks.parameters.items():
    names = experts_lib.AXES[name]
    spec = logical.find_splits(value.shape, names)
    assert spec is not None
    parameters[name] = spec
  up = parameters["up"]
  plan = _Plan(tokens, parameters, rules.as_tuple(up[0]), rules.as_tuple(up[2]))
  specs = (tokens, *parameters.values())
  return plan if any(entry for spec in specs for entry in spec) else None


def run(
  plan: _Plan,
  x: jax.Array,
  ids: jax.Array,
  weights: jax.Array,
  stacks: experts_lib.Stacks,
  *,
  kernel: grouped_matmul.Kernel,
  bound: float | None,
) -> jax.Array:
  """Returns the weighted sums of the experts' outputs, like tokens [B,T,D]."""
  by_token = jax.P(*plan.tokens[:2])

  def body(
    x: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    parameters: dict[str, jax.Array],
  ) -> jax.Array:
    here = dataclasses.replace(
      stacks, parameters=_prepare(parameters, plan=plan)
    )
    D, k = x.shape[-1], ids.shape[-1]
    with jax.named_scope(SCOPE):
      y = _run_on_device(
        x.reshape(-1, D),
        ids.reshape(-1, k),
        weights.reshape(-1, k),
        here,
        plan=plan,
        kernel=kernel,
        bound=bound,
      )
    return y.astype(x.dtype).reshape(x.shape)

  mapped = jax.shard_map(
    # Gathered weights are not kept for the backward pass.
    jax.checkpoint(
      body,
      policy=jax.checkpoint_policies.save_anything_except_these_names(
        _GATHERED
      ),
    ),
    in_specs=(plan.tokens, by_token, by_token, dict(plan.parameters)),
    out_specs=plan.tokens,
    # A Pallas call does not say over which axes its outputs vary.
    check_vma=False,
  )
  return mapped(x, ids, weights, stacks.parameters)


def _prepare(
  parameters: Mapping[str, jax.Array], *, plan: _Plan
) -> dict[str, jax.Array]:
  """Returns the parameters of the device's experts, whole in `embed`."""
  result = {}
  for name, value in parameters.items():
    for axis, entry in enumerate(plan.parameters[name]):
      if entry and experts_lib.AXES[name][axis] == axes.EMBED:
        value = jax.lax.all_gather(
          value, rules.as_tuple(entry), axis=axis, tiled=True
        )
        value = ad_checkpoint.checkpoint_name(value, _GATHERED)
    if name == "down_bias" and plan.mlp:
      # Added once, not by each shard of the sum.
      is_first = jax.lax.axis_index(plan.mlp) == 0
      value = jnp.where(is_first, value, jnp.zeros((), value.dtype))
    result[name] = value
  return result


def _run_on_device(
  x: jax.Array,
  ids: jax.Array,
  weights: jax.Array,
  stacks: experts_lib.Stacks,
  *,
  plan: _Plan,
  kernel: grouped_matmul.Kernel,
  bound: float | None,
) -> jax.Array:
  """Returns the sums of the device's tokens [T,D]."""
  sum_rows = functools.partial(
    grouped_rows.dropless, stacks=stacks, kernel=kernel
  )
  common: dict[str, Any] = {
    "sum_rows": sum_rows,
    "experts": stacks.num_experts,
    "plan": plan,
  }
  if bound is None or plan.gathered != plan.experts or not plan.experts:
    return _gather(x, ids, weights, **common)
  devices = logical.count_shards(plan.experts)
  room = math.ceil(bound * ids.size / devices)
  worst = x.shape[0] * min(ids.shape[1], stacks.num_experts)
  if room >= worst:
    return _exchange(x, ids, weights, room=worst, **common)
  device = _find_device(ids, stacks.num_experts, devices)
  counts = jnp.sum(jax.nn.one_hot(device, devices, dtype=jnp.int32), (0, 1))
  # Equal on all devices, which must take the same branch: each branch has
  # collectives.
  used = tuple(name for entry in plan.tokens for name in rules.as_tuple(entry))
  rounds = -(-jax.lax.pmax(jnp.max(counts), used) // room)

  def exchange(*operands: jax.Array) -> jax.Array:
    with jax.named_scope(USUAL):
      return _exchange(*operands, room=room, **common)

  def repeat(x: jax.Array, ids: jax.Array, weights: jax.Array) -> jax.Array:
    floating, others = {}, {}
    for name, value in stacks.parameters.items():
      is_floating = jnp.issubdtype(value.dtype, jnp.floating)
      (floating if is_floating else others)[name] = value

    def exchange_round(i: jax.Array, fixed: Any, values: Any) -> jax.Array:
      (ids, others), (x, weights, floating) = fixed, values
      here = dataclasses.replace(stacks, parameters=floating | others)
      given = common | {"sum_rows": functools.partial(sum_rows, stacks=here)}
      return _exchange(x, ids, weights, room=room, first=i * room, **given)

    return _add_rounds(
      exchange_round, rounds, (ids, others), (x, weights, floating)
    )

  return jax.lax.cond(rounds <= 1, exchange, repeat, x, ids, weights)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _add_rounds(
  run: Callable[..., jax.Array], rounds: jax.Array, fixed: Any, values: Any
) -> jax.Array:
  """Returns the sum of `run(i, fixed, values)` for each round i.

  The backward pass computes each round again, so nothing but the arguments is
  saved: a conditional would allocate the values that either branch saves.

  Args:
    run: One round; returns an array in the shape of `values[0]`.
    rounds: Their number.
    fixed: Arrays without a gradient.
    values: Arrays with one.
  """
  return jax.lax.fori_loop(
    0,
    rounds,
    lambda i, y: y + run(i, fixed, values),
    _zeros_like(values[0]),
  )


def _transpose_rounds(
  run: Callable[..., jax.Array], saved: Any, gradient: jax.Array
) -> tuple[None, None, Any]:
  rounds, fixed, values = saved

  def add(i: jax.Array, total: Any) -> Any:
    _, transpose = jax.vjp(lambda values: run(i, fixed, values), values)
    return jax.tree.map(jnp.add, total, *transpose(gradient))

  total = jax.lax.fori_loop(0, rounds, add, jax.tree.map(_zeros_like, values))
  return None, None, jax.tree.map(lambda t, v: t.astype(v.dtype), total, values)


_add_rounds.defvjp(
  lambda run, *arguments: (_add_rounds(run, *arguments), arguments),
  _transpose_rounds,
)


def _zeros_like(value: jax.Array) -> jax.Array:
  """Returns zeros of this shape, in at least float32."""
  return jnp.zeros(value.shape, precision.at_least_float32(value.dtype))


def _gather(
  x: jax.Array,
  ids: jax.Array,
  weights: jax.Array,
  *,
  sum_rows: Callable[..., jax.Array],
  experts: int,
  plan: _Plan,
) -> jax.Array:
  """Adds the device's experts for all tokens of the expert axes."""
  over, k = plan.gathered, ids.shape[1]
  if over:
    x, ids, weights = (
      jax.lax.all_gather(v, over, axis=0, tiled=True) for v in (x, ids, weights)
    )
  if plan.experts:
    own = ids - jax.lax.axis_index(plan.experts).astype(ids.dtype) * experts
    # A choice of weight zero may repeat another choice, and adds nothing.
    is_here = (own >= 0) & (own < experts) & (weights != 0)
    ids = jnp.where(is_here, own, experts)
  # So no token has more choices here than there are experts.
  most = min(k, experts)
  with grouped_matmul.expected_rows(
    k, of=most * logical.count_shards(plan.experts)
  ):
    y = sum_rows(x, ids, weights, max_rows=x.shape[0] * most)
  if over:
    y = jax.lax.psum_scatter(y, over, scatter_dimension=0, tiled=True)
  rest = tuple(name for name in plan.experts if name not in over) + plan.mlp
  return jax.lax.psum(y, rest) if rest else y


def _exchange(
  x: jax.Array,
  ids: jax.Array,
  weights: jax.Array,
  *,
  sum_rows: Callable[..., jax.Array],
  experts: int,
  plan: _Plan,
  room: int,
  first: jax.Array | int = 0,
) -> jax.Array:
  """Sends each choice to its expert's device, in one of `room` slots.

  Choices before `first` of a device's choices for another, and those that
  exceed the room after it, are left out.
  """
  devices = logical.count_shards(plan.experts)
  device = _find_device(ids, experts, devices)
  order, slots, sizes = grouped_rows.sort_by_expert(
    device, devices, rows=ids.size
  )
  starts = jnp.cumsum(sizes) - sizes
  # The sorted choice in each slot [devices * room].
  inside = jnp.arange(room, dtype=jnp.int32)[None, :]
  inside += first
  table = starts[:, None] + inside
  table = jnp.where(inside < sizes[:, None], table, ids.size).reshape(-1)
  choice = order.at[table].get(mode="fill", fill_value=ids.size)
  # The slot of each choice [T,k].
  owner = jnp.minimum(device, devices - 1)
  slot = slots - starts[owner] - first
  is_sent = (device < devices) & (slot >= 0) & (slot < room)
  place = jnp.where(is_sent, owner * room + slot, devices * room)
  sent = (
    grouped_rows.gather_rows(x, choice, place),
    (ids % experts).reshape(-1).at[choice].get(mode="fill", fill_value=experts),
    weights.reshape(-1).at[choice].get(mode="fill", fill_value=0),
  )
  move = functools.partial(
    jax.lax.all_to_all,
    axis_name=plan.experts,
    split_axis=0,
    concat_axis=0,
    tiled=True,
  )
  used = ids.size
  x, ids, weights = map(move, sent)
  with grouped_matmul.expected_rows(used, of=ids.size):
    y = sum_rows(x, ids[:, None], weights[:, None])
  if plan.mlp:
    y = jax.lax.psum(y, plan.mlp)
  return grouped_rows.sum_rows(move(y.astype(x.dtype)), choice, place)


def _find_device(ids: jax.Array, experts: int, devices: int) -> jax.Array:
  """Returns the device of each choice; `devices` for none."""
  return jnp.minimum(ids // experts, devices).astype(jnp.int32)

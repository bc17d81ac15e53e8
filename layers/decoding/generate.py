"""Generation: reads prompts at once, then one id per row and step.

  logits, cache = prefill(prompts)
  id[0] = sampler(logits at the end of each prompt, fold_in(key, 0))
  for i = 1, 2, ... until max_new_tokens, or until all rows have ended:
    logits, cache = decode_step(cache, id[i - 1])
    id[i] = sampler(logits, fold_in(key, i))

The function is traceable: compile it with everything but the arrays closed
over. It knows no model; `model_steps` makes the two steps from one.

Letters: B batch, P prompt length, V vocab.
"""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Key

from paxon.layers.decoding import samplers

# (ids, positions, segment_ids, each [B,P], *, cache_length: int)
#   -> (logits [B,P,V], a cache with that many slots)
Prefill = Callable[..., tuple[jax.Array, Any]]

# (cache, ids, positions, segment_ids, each [B,1]) -> (logits [B,1,V], cache)
DecodeStep = Callable[
  [Any, jax.Array, jax.Array, jax.Array], tuple[jax.Array, Any]
]


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=("ids", "lengths"),
  meta_fields=(),
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class Generation:
  """What was generated, without the prompts.

  Attributes:
    ids: int32 [B, max_new_tokens]; 0 after the end of a row.
    lengths: int32 [B]; number of generated ids, an `end_id` included.
  """

  ids: jax.Array
  lengths: jax.Array


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=("step", "cache", "last", "done", "result"),
  meta_fields=(),
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class _State:
  """Carried by the loop; `last` [B] and `done` [B] are of the last step."""

  step: jax.Array
  cache: Any
  last: jax.Array
  done: jax.Array
  result: Generation


def generate(
  prefill: Prefill,
  decode_step: DecodeStep,
  prompts: Int[Array, "batch prompt_length"],
  prompt_lengths: Int[Array, " rows"],
  *,
  sampler: samplers.Sampler,
  key: Key[Array, ""],
  max_new_tokens: int,
  end_id: int | None = None,
) -> Generation:
  """Continues each prompt; a row does not depend on its neighbours' lengths.

  Args:
    prefill: Reads the prompts and makes the cache.
    decode_step: Appends one id per row to the cache.
    prompts: Ids, padded on the right with anything.
    prompt_lengths: Number of ids of each prompt, from 1 to P (`prompts`
      module checks that on the host).
    sampler: Chooses ids from logits.
    key: Random key; step `i` uses `fold_in(key, i)`.
    max_new_tokens: Number of ids to generate at most.
    end_id: A row ends after this id; `None` never ends one early.

  Returns:
    The generated ids.

  Raises:
    ValueError: `max_new_tokens` is not positive, or the shapes disagree.
  """
  _check(prompts, prompt_lengths, max_new_tokens)
  batch, width = prompts.shape
  lengths = prompt_lengths.astype(jnp.int32)
  positions = jax.lax.broadcasted_iota(jnp.int32, prompts.shape, 1)
  inside = positions < lengths[:, None]
  # The last generated id is never read, so it needs no slot.
  slots = width + max_new_tokens - 1
  logits, cache = prefill(
    jnp.where(inside, prompts.astype(jnp.int32), 0),
    positions,
    inside.astype(jnp.int32),
    cache_length=slots,
  )
  at_end = jnp.take_along_axis(logits, (lengths - 1)[:, None, None], axis=1)

  def chosen(logits: jax.Array, state: _State) -> _State:
    ids = sampler(logits, jax.random.fold_in(key, state.step))
    return _appended(state, ids, end_id)

  def body(state: _State) -> _State:
    # The first generated id stands right after the prompt.
    position = lengths + state.step - 1
    logits, cache = decode_step(
      state.cache,
      state.last[:, None],
      position[:, None],
      jnp.ones((batch, 1), jnp.int32),
    )
    return chosen(logits[:, 0], dataclasses.replace(state, cache=cache))

  def is_running(state: _State) -> jax.Array:
    return (state.step < max_new_tokens) & ~jnp.all(state.done)

  empty = Generation(
    ids=jnp.zeros((batch, max_new_tokens), jnp.int32),
    lengths=jnp.zeros((batch,), jnp.int32),
  )
  state = _State(
    step=jnp.int32(0),
    cache=cache,
    last=jnp.zeros((batch,), jnp.int32),
    done=jnp.zeros((batch,), bool),
    result=empty,
  )
  state = chosen(at_end[:, 0], state)
  return jax.lax.while_loop(is_running, body, state).result


def _appended(state: _State, ids: jax.Array, end_id: int | None) -> _State:
  """Adds one id to each row that has not ended."""
  ids = jnp.where(state.done, 0, ids)
  result = Generation(
    ids=jax.lax.dynamic_update_slice_in_dim(
      state.result.ids, ids[:, None], state.step, axis=1
    ),
    lengths=state.result.lengths + (~state.done).astype(jnp.int32),
  )
  done = state.done
  if end_id is not None:
    done = done | (ids == end_id)
  return dataclasses.replace(
    state, step=state.step + 1, last=ids, done=done, result=result
  )


def _check(
  prompts: jax.Array, prompt_lengths: jax.Array, max_new_tokens: int
) -> None:
  if max_new_tokens <= 0:
    raise ValueError(f"max_new_tokens must be positive, got {max_new_tokens}.")
  if prompts.shape[1] == 0:
    raise ValueError(
      f"prompts of shape {prompts.shape} are empty; begin them with at least "
      "one id, such as the begin-of-document id."
    )
  if prompt_lengths.shape != prompts.shape[:1]:
    raise ValueError(
      f"prompt_lengths of shape {prompt_lengths.shape} must have one entry "
      f"for each of the {prompts.shape[0]} prompts."
    )

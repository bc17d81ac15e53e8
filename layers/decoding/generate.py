"""Autoregressive generation: prefill of prompts, then one token per step.

  logits, cache = prefill(prompts)
  id[0] = sampler(logits at the end of each prompt, fold_in(key, 0))
  for i = 1, 2, ... until max_new_tokens, or until all sequences have ended:
    logits, cache = decode_step(cache, id[i - 1])
    id[i] = sampler(logits, fold_in(key, i))

The function is traceable: jit it with everything but the arrays closed over.
`model_steps` makes the two steps from a model.

Letters: B batch, P prompt length, V vocab, R sequences (B times num_samples).
"""

from collections.abc import Callable, Collection
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Key

from paxon.layers.decoding import cache_rows, samplers

# (ids, positions, segment_ids, each [B,P], *, cache_length: int, at: int [B])
#   -> (logits [B,1,V] of the token with index `at` of each sequence,
#       a cache with that many slots)
Prefill = Callable[..., tuple[jax.Array, Any]]

# (cache, ids, positions, segment_ids, each [B,1]) -> (logits [B,1,V], cache)
DecodeStep = Callable[
  [Any, jax.Array, jax.Array, jax.Array], tuple[jax.Array, Any]
]

# (cache, count) -> the cache with `count` adjacent copies of each sequence.
Repeat = Callable[[Any, int], Any]


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=("ids", "lengths", "log_probs"),
  meta_fields=(),
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class Generation:
  """Generated tokens, without the prompts.

  Attributes:
    ids: int32 [R, max_new_tokens]; 0 after the end of a sequence. Samples of a
      prompt are adjacent.
    lengths: int32 [R]; number of generated ids, including an `end_id`.
    log_probs: float32 [R, max_new_tokens]; log probability of each id under the
      model, independent of the sampler; 0 after the end of a sequence.
  """

  ids: jax.Array
  lengths: jax.Array
  log_probs: jax.Array


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=("step", "cache", "last", "done", "result"),
  meta_fields=(),
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class _State:
  """Loop state; `last` [R] and `done` [R] are those of the last step."""

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
  end_id: int | Collection[int] | None = None,
  num_samples: int = 1,
  repeat: Repeat = cache_rows.repeat,
) -> Generation:
  """Generates a continuation of each prompt, independent of other prompts.

  Args:
    prefill: Reads the prompts and creates the cache.
    decode_step: Appends one id to each sequence.
    prompts: Ids, padded on the right with anything.
    prompt_lengths: Number of ids of each prompt, from 1 to P.
    sampler: Samples ids from logits.
    key: Random key; step `i` uses `fold_in(key, i)`.
    max_new_tokens: Maximum number of generated ids.
    end_id: Id, or ids, that end a sequence; `None` never ends one early.
    num_samples: Number of continuations of each prompt, which share its
      prefill.
    repeat: Repeats the sequences of a cache.

  Returns:
    The generated tokens.

  Raises:
    ValueError: A number is not positive, `end_id` is empty, or the shapes do
      not match.
  """
  _check(prompts, prompt_lengths, max_new_tokens, num_samples)
  end_ids = _end_ids(end_id)
  rows, width = prompts.shape[0] * num_samples, prompts.shape[1]
  lengths = prompt_lengths.astype(jnp.int32)
  positions = jax.lax.broadcasted_iota(jnp.int32, prompts.shape, 1)
  inside = positions < lengths[:, None]
  # The last generated id is not read, so it needs no slot.
  slots = width + max_new_tokens - 1
  at_end, cache = prefill(
    jnp.where(inside, prompts.astype(jnp.int32), 0),
    positions,
    inside.astype(jnp.int32),
    cache_length=slots,
    # Only the logits of the last token are needed.
    at=lengths - 1,
  )
  if num_samples > 1:
    cache = repeat(cache, num_samples)
    at_end, lengths = (
      jnp.repeat(x, num_samples, axis=0) for x in (at_end, lengths)
    )

  def sample(logits: jax.Array, state: _State) -> _State:
    ids = sampler(logits, jax.random.fold_in(key, state.step))
    return _append(state, ids, _log_probs(logits, ids), end_ids)

  def body(state: _State) -> _State:
    # The first generated id directly follows the prompt.
    position = lengths + state.step - 1
    logits, cache = decode_step(
      state.cache,
      state.last[:, None],
      position[:, None],
      jnp.ones((rows, 1), jnp.int32),
    )
    return sample(logits[:, 0], dataclasses.replace(state, cache=cache))

  def is_running(state: _State) -> jax.Array:
    return (state.step < max_new_tokens) & ~jnp.all(state.done)

  empty = Generation(
    ids=jnp.zeros((rows, max_new_tokens), jnp.int32),
    lengths=jnp.zeros((rows,), jnp.int32),
    log_probs=jnp.zeros((rows, max_new_tokens), jnp.float32),
  )
  state = _State(
    step=jnp.int32(0),
    cache=cache,
    last=jnp.zeros((rows,), jnp.int32),
    done=jnp.zeros((rows,), bool),
    result=empty,
  )
  state = sample(at_end[:, 0], state)
  return jax.lax.while_loop(is_running, body, state).result


def _append(
  state: _State,
  ids: jax.Array,
  log_probs: jax.Array,
  end_ids: tuple[int, ...],
) -> _State:
  """Appends one id to each sequence that has not ended."""
  ids = jnp.where(state.done, 0, ids)
  log_probs = jnp.where(state.done, 0, log_probs)

  def with_column(x: jax.Array, column: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(
      x, column[:, None], state.step, axis=1
    )

  result = Generation(
    ids=with_column(state.result.ids, ids),
    lengths=state.result.lengths + (~state.done).astype(jnp.int32),
    log_probs=with_column(state.result.log_probs, log_probs),
  )
  done = state.done
  for end_id in end_ids:
    done = done | (ids == end_id)
  return dataclasses.replace(
    state, step=state.step + 1, last=ids, done=done, result=result
  )


def _log_probs(logits: jax.Array, ids: jax.Array) -> jax.Array:
  """Returns the log probability of each id, float32."""
  log_probs = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
  return jnp.take_along_axis(log_probs, ids[:, None], axis=-1)[:, 0]


def _end_ids(end_id: int | Collection[int] | None) -> tuple[int, ...]:
  if end_id is None:
    return ()
  end_ids = (end_id,) if isinstance(end_id, int) else tuple(end_id)
  if not end_ids:
    raise ValueError("end_id is empty; use None to never end a sequence early.")
  return end_ids


def _check(
  prompts: jax.Array,
  prompt_lengths: jax.Array,
  max_new_tokens: int,
  num_samples: int,
) -> None:
  if max_new_tokens <= 0:
    raise ValueError(f"max_new_tokens must be positive, got {max_new_tokens}.")
  if num_samples <= 0:
    raise ValueError(f"num_samples must be positive, got {num_samples}.")
  if prompts.shape[1] == 0:
    raise ValueError(
      f"prompts of shape {prompts.shape} are empty; begin them with an id such"
      " as the begin-of-document id."
    )
  if prompt_lengths.shape != prompts.shape[:1]:
    raise ValueError(
      f"prompt_lengths of shape {prompt_lengths.shape} must have one entry "
      f"for each of the {prompts.shape[0]} prompts."
    )

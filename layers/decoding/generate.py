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
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Key

from paxon.layers.decoding import cache_rows, samplers, sampling
from paxon.sharding import axes

# (ids, positions, segment_ids, each [B,P], *, cache_length: int, at: int [B])
#   -> (logits [B,1,V] of the token with index `at` of each sequence,
#       a cache with that many slots)
Prefill = Callable[..., tuple[jax.Array, Any]]

# (cache, ids, positions, segment_ids, each [B,1]) -> (logits [B,1,V], cache)
DecodeStep = Callable[
  [Any, jax.Array, jax.Array, jax.Array], tuple[jax.Array, Any]
]

# (cache, count, *, length: int) -> the cache of `count` adjacent samples of
# each prompt, whose tokens take `length` slots.
Repeat = Callable[..., Any]


# (cache, indices int [R]) -> the cache of those sequences.
Take = Callable[[Any, jax.Array], Any]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Generation:
  """Generated tokens, without the prompts.

  Attributes:
    ids: int32 [R, max_new_tokens]; 0 after the end of a sequence. Samples of a
      prompt are adjacent.
    lengths: int32 [R]; number of generated ids, including an `end_id`.
    log_probs: float32 [R, max_new_tokens]; log probability of each id under the
      model, independent of the sampler; 0 after the end of a sequence. A
      sequence ends where it is NaN.
    ended: bool [R]; whether the last id is an `end_id`. Otherwise the sequence
      has reached its maximum length.
    top_ids: int32 [R, max_new_tokens, num_alternatives]; the most likely ids of
      each step, in descending order; 0 after the end of a sequence.
    top_log_probs: float32, of the same shape; their log probabilities.
    scores: float32 [R]; what a search has maximized; None without a search.
    suffix_log_probs: float32 [R,U]; log likelihood of each suffix
      (`methods.score_suffixes`); None without suffixes.
    measured: float32 [R, max_new_tokens, M]; values of `Hooks.measure`, 0 after
      the end of a sequence; None without.
  """

  ids: jax.Array
  lengths: jax.Array
  log_probs: jax.Array
  ended: jax.Array
  top_ids: jax.Array
  top_log_probs: jax.Array
  scores: jax.Array | None = None
  suffix_log_probs: jax.Array | None = None
  measured: jax.Array | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hooks:
  """Optional parts of a generation, for methods such as those of `methods`.

  Attributes:
    measure: Maps the logits [R,V] of a step to values [R,M], which the
      generation keeps.
    select: Maps the generation after some ids to the indices [R] of the
      sequences that continue as each one; called after each `interval` ids but
      the last one.
    interval: Number of ids between two selections.
    stages: Increasing numbers of new ids, at least 2. The slots of the cache
      grow from one to the next, so that steps before it read fewer slots.
    take: Selects the sequences of a cache.
  """

  measure: Callable[[jax.Array], jax.Array] | None = None
  select: Callable[[Generation], jax.Array] | None = None
  interval: int = 1
  stages: tuple[int, ...] = ()
  take: Take = cache_rows.take


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class _State:
  """Loop state; `last` [R] and `done` [R] are those of the last step.

  `history` is None unless each sequence has its own settings.
  """

  step: jax.Array
  cache: Any
  last: jax.Array
  done: jax.Array
  history: sampling.History | None
  result: Generation


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Rule:
  """How ids are chosen, and where sequences end.

  `limits` [R] are the maximum numbers of ids.
  """

  sampler: samplers.Sampler | sampling.BatchSettings
  key: jax.Array
  end_ids: tuple[int, ...]
  limits: jax.Array
  hooks: Hooks = Hooks()

  def extend(self, state: _State, logits: jax.Array) -> _State:
    """Draws an id of each sequence, given the logits [R,V], and appends it."""
    if isinstance(self.sampler, sampling.BatchSettings):
      history = state.history
      assert history is not None
      step = jnp.full(state.done.shape, state.step)
      ids = self.sampler.draw(logits, self.key, history, step, self.end_ids)
      history = history.add(ids, ~state.done)
      state = dataclasses.replace(state, history=history)
    else:
      ids = self.sampler(logits, jax.random.fold_in(self.key, state.step))
    state = _append(state, ids, logits, self)
    return state if self.hooks.select is None else self._select(state)

  def _select(self, state: _State) -> _State:
    """Continues selected sequences, if it is time to."""

    def reorder(state: _State) -> _State:
      assert self.hooks.select is not None
      at = self.hooks.select(state.result)
      last, done, history, result = jax.tree.map(
        lambda x: jnp.take(x, at, axis=0),
        (state.last, state.done, state.history, state.result),
      )
      return dataclasses.replace(
        state,
        cache=self.hooks.take(state.cache, at),
        last=last,
        done=done,
        history=history,
        result=result,
      )

    is_due = state.step % self.hooks.interval == 0
    is_due &= state.step < state.result.ids.shape[1]
    return jax.lax.cond(is_due, reorder, lambda state: state, state)


@runtime_checkable
class Method(Protocol):
  """Another way to generate, such as those of `methods`."""

  def generate(
    self,
    prefill: Prefill,
    decode_step: DecodeStep,
    prompts: jax.Array,
    prompt_lengths: jax.Array,
    **shared: Any,
  ) -> Generation:
    """Returns the generated tokens; the arguments are those of `generate`."""
    ...


def generate(
  prefill: Prefill,
  decode_step: DecodeStep,
  prompts: Int[Array, "batch prompt_length"],
  prompt_lengths: Int[Array, " sequences"],
  *,
  sampler: samplers.Sampler | sampling.BatchSettings,
  key: Key[Array, ""],
  max_new_tokens: int,
  end_id: int | Collection[int] | None = None,
  num_samples: int = 1,
  num_alternatives: int = 0,
  repeat: Repeat = cache_rows.share,
  hooks: Hooks = Hooks(),
) -> Generation:
  """Generates a continuation of each prompt, independent of other prompts.

  Args:
    prefill: Reads the prompts and creates the cache.
    decode_step: Appends one id to each sequence.
    prompts: Ids, padded on the right with anything.
    prompt_lengths: Number of ids of each prompt, from 1 to P.
    sampler: Samples ids from logits, or settings of each sequence.
    key: Random key; step `i` uses `fold_in(key, i)`, and sequences with
      settings their own keys.
    max_new_tokens: Maximum number of generated ids.
    end_id: Id, or ids, that end a sequence; `None` never ends one early.
    num_samples: Number of continuations of each prompt, which share its
      prefill.
    num_alternatives: Number of most likely ids to return for each step.
    repeat: Makes the cache of samples from that of their prompts.
    hooks: Optional parts.

  Returns:
    The generated tokens.

  Raises:
    ValueError: A number is not positive, `end_id` is empty, or the shapes do
      not match.
  """
  check_prompts(prompts, prompt_lengths, max_new_tokens, num_samples)
  end_ids = () if end_id is None else to_end_ids(end_id)
  num_sequences = prompts.shape[0] * num_samples
  at_end, cache, lengths = read_samples(
    prefill,
    prompts,
    prompt_lengths,
    max_new_tokens=max_new_tokens,
    num_samples=num_samples,
    repeat=repeat,
  )
  limits = jnp.full((num_sequences,), max_new_tokens, jnp.int32)
  history = None
  if isinstance(sampler, sampling.BatchSettings):
    limits = jnp.minimum(limits, sampler.max_new_tokens)
    repeated = jnp.repeat(prompts, num_samples, axis=0)
    history = sampling.begin(repeated, lengths, at_end.shape[-1])
  rule = _Rule(
    sampler=sampler, key=key, end_ids=end_ids, limits=limits, hooks=hooks
  )

  def body(state: _State) -> _State:
    # The first generated id directly follows the prompt. A sequence that has
    # ended takes no more positions, which the model may not have.
    position = lengths + jnp.minimum(state.step, limits - 1) - 1
    logits, cache = decode_step(
      state.cache,
      state.last[:, None],
      position[:, None],
      jnp.ones((num_sequences, 1), jnp.int32),
    )
    return rule.extend(dataclasses.replace(state, cache=cache), logits[:, 0])

  result = empty(num_sequences, max_new_tokens, num_alternatives)
  state = _State(
    step=jnp.int32(0),
    cache=cache,
    last=jnp.zeros((num_sequences,), jnp.int32),
    done=jnp.zeros((num_sequences,), bool),
    history=history,
    result=_with_measured(result, hooks, at_end[:, 0]),
  )
  state = rule.extend(state, at_end[:, 0])
  stages = [n for n in hooks.stages if n < max_new_tokens]
  return _run_stages(state, body, (*stages, max_new_tokens)).result


def _with_measured(
  result: Generation, hooks: Hooks, logits: jax.Array
) -> Generation:
  """Returns an empty generation with room for what the hooks measure."""
  if hooks.measure is None:
    return result
  shape = jax.eval_shape(hooks.measure, logits).shape
  shape = (shape[0], result.ids.shape[1], *shape[1:])
  return dataclasses.replace(result, measured=jnp.zeros(shape, jnp.float32))


def _run_stages(
  state: _State, body: Callable[[_State], _State], stages: tuple[int, ...]
) -> _State:
  """Runs steps until each number of ids, with as many slots as it needs."""

  def resize(cache: Any, change: int) -> Any:
    def one(x: jax.Array, axis: int) -> jax.Array:
      if change < 0:
        return jax.lax.slice_in_dim(x, 0, x.shape[axis] + change, axis=axis)
      return jnp.pad(x, [(0, change * (i == axis)) for i in range(x.ndim)])

    return cache_rows.map_axis(cache, axes.KV_LENGTH, one) if change else cache

  before = stages[-1]
  for stop in stages:
    cache = resize(state.cache, stop - before)

    def is_running(state: _State, stop: int = stop) -> jax.Array:
      return (state.step < stop) & ~jnp.all(state.done)

    state = jax.lax.while_loop(
      is_running, body, dataclasses.replace(state, cache=cache)
    )
    before = stop
  return state


def read_prompts(
  prefill: Prefill,
  prompts: jax.Array,
  prompt_lengths: jax.Array,
  max_new_tokens: int,
) -> tuple[jax.Array, Any, jax.Array]:
  """Returns the logits [B,1,V] after each prompt, a cache and the lengths."""
  width = prompts.shape[1]
  lengths = prompt_lengths.astype(jnp.int32)
  positions = jax.lax.broadcasted_iota(jnp.int32, prompts.shape, 1)
  inside = positions < lengths[:, None]
  at_end, cache = prefill(
    jnp.where(inside, prompts.astype(jnp.int32), 0),
    positions,
    inside.astype(jnp.int32),
    # The last generated id is not read, so it needs no slot.
    cache_length=width + max_new_tokens - 1,
    # Only the logits of the last token are needed.
    at=lengths - 1,
  )
  return at_end, cache, lengths


def read_samples(
  prefill: Prefill,
  prompts: jax.Array,
  prompt_lengths: jax.Array,
  *,
  max_new_tokens: int,
  num_samples: int,
  repeat: Repeat,
) -> tuple[jax.Array, Any, jax.Array]:
  """Returns logits [R,1,V], a cache and lengths [R], one for each sample."""
  at_end, cache, lengths = read_prompts(
    prefill, prompts, prompt_lengths, max_new_tokens
  )
  if num_samples > 1:
    cache = repeat(cache, num_samples, length=prompts.shape[1])
    at_end, lengths = (
      jnp.repeat(x, num_samples, axis=0) for x in (at_end, lengths)
    )
  return at_end, cache, lengths


def empty(
  num_sequences: int, max_new_tokens: int, num_alternatives: int
) -> Generation:
  """Returns a generation of sequences without an id.

  Raises:
    ValueError: `num_alternatives` is negative.
  """
  if num_alternatives < 0:
    raise ValueError(
      f"num_alternatives must not be negative, got {num_alternatives}."
    )
  alternatives = (num_sequences, max_new_tokens, num_alternatives)
  return Generation(
    ids=jnp.zeros((num_sequences, max_new_tokens), jnp.int32),
    lengths=jnp.zeros((num_sequences,), jnp.int32),
    log_probs=jnp.zeros((num_sequences, max_new_tokens), jnp.float32),
    ended=jnp.zeros((num_sequences,), bool),
    top_ids=jnp.zeros(alternatives, jnp.int32),
    top_log_probs=jnp.zeros(alternatives, jnp.float32),
  )


def with_step(
  result: Generation, ids: jax.Array, logits: jax.Array, at: jax.Array
) -> Generation:
  """Returns a generation with one id of each sequence at its own step.

  Args:
    result: The generation; `lengths` and `ended` stay.
    ids: int32 [R].
    logits: Logits of the model, [R,V].
    at: int32 [R]; nothing is stored for steps after the last one.
  """
  sequences = jnp.arange(ids.shape[0])
  found = _columns(ids, logits, result.top_ids.shape[-1])
  stored = {
    name: getattr(result, name).at[sequences, at].set(x, mode="drop")
    for name, x in found.items()
  }
  return dataclasses.replace(result, **stored)


def find_nan(logits: jax.Array) -> jax.Array:
  """Returns whether the log probabilities of logits [R,V] are NaN, bool [R]."""
  # Their normalizer makes all of them NaN, or none.
  return jnp.isnan(_log_probs(logits)[:, 0])


def _log_probs(logits: jax.Array) -> jax.Array:
  return jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)


def _columns(
  ids: jax.Array, logits: jax.Array, num_alternatives: int
) -> dict[str, jax.Array]:
  """Returns the stored values of one id of each sequence."""
  log_probs = _log_probs(logits)
  top_log_probs, top_ids = jax.lax.top_k(log_probs, num_alternatives)
  return {
    "ids": ids,
    "log_probs": jnp.take_along_axis(log_probs, ids[:, None], axis=-1)[:, 0],
    "top_ids": top_ids,
    "top_log_probs": top_log_probs,
  }


def _append(
  state: _State, ids: jax.Array, logits: jax.Array, rule: _Rule
) -> _State:
  """Appends one id to each sequence that has not ended.

  A sequence ends with an end id, at its limit, or with a NaN.
  """
  result, done = state.result, state.done

  def with_column(x: jax.Array, column: jax.Array) -> jax.Array:
    is_done = done.reshape(done.shape + (1,) * (column.ndim - 1))
    column = jnp.where(is_done, 0, column).astype(x.dtype)
    return jax.lax.dynamic_update_slice_in_dim(
      x, column[:, None], state.step, axis=1
    )

  ids = jnp.where(done, 0, ids)
  columns = _columns(ids, logits, result.top_ids.shape[-1])
  if rule.hooks.measure is not None:
    columns["measured"] = rule.hooks.measure(logits)
  is_end = jnp.zeros_like(done)
  for end_id in rule.end_ids:
    is_end |= ids == end_id
  result = Generation(
    lengths=result.lengths + (~done).astype(jnp.int32),
    ended=result.ended | (is_end & ~done),
    **{n: with_column(getattr(result, n), x) for n, x in columns.items()},
  )
  done |= is_end | find_nan(logits)
  done |= state.step + 1 >= rule.limits
  return dataclasses.replace(
    state, step=state.step + 1, last=ids, done=done, result=result
  )


def to_end_ids(end_id: int | Collection[int]) -> tuple[int, ...]:
  """Returns one or more end ids; raises ValueError if there is none."""
  end_ids = (end_id,) if isinstance(end_id, int) else tuple(end_id)
  if not end_ids:
    raise ValueError("end_id is empty; use None to never end a sequence early.")
  return end_ids


def check_prompts(
  prompts: jax.Array,
  prompt_lengths: jax.Array,
  max_new_tokens: int,
  num_samples: int,
) -> None:
  """Raises ValueError if the arguments of a generation are wrong."""
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

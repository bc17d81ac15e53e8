"""Beam search: the most likely continuations of each prompt.

Each step extends the `beam_size` best live sequences of a prompt by every id.
The best extensions that do not end are the next live sequences; those that end
enter a pool of the `beam_size` best by score, the sum of log probabilities
divided by a length norm. Two definitions differ in what may enter the pool:

  pax:  every live sequence, followed by its best end id
  top:  end ids among the `beam_size` best extensions (transformers); after
        `max_new_tokens` these enter the pool without an end id, too

With `pax`, places of the pool that are empty at the end are filled with live
sequences. Of equal scores the earlier sequence, then the smaller id is better.

Beams share the cache of their prompt; what each adds is selected after each
step. A prompt's result does not depend on the other prompts.

Letters: B batch, K beam_size, N max_new_tokens, V vocab.
"""

from collections.abc import Collection
import dataclasses
import enum
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from paxon.layers.decoding import cache_rows, generate
from paxon.sharding import checks

# In the class the name of the module is that of a method.
Take = generate.Take

# The score of an empty place; sums of log probabilities are far above.
_EMPTY = -1e9


class Pool(enum.Enum):
  """Sequences that may enter the pool; see above."""

  PAX = "pax"
  TOP = "top"


class Stop(enum.Enum):
  """When the search of a prompt stops, at the latest after `max_new_tokens`.

  Attributes:
    BOUND: If no live sequence can reach the worst score of a full pool.
    HEURISTIC: If the best live sequence, ended now, had no better score than
      the worst of a full pool (`early_stopping=False` of transformers).
    FULL: As HEURISTIC, and if the pool is full (`early_stopping=True`).
  """

  BOUND = "bound"
  HEURISTIC = "heuristic"
  FULL = "full"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class _Beams:
  """Sequences of each prompt, in descending order of scores.

  Attributes:
    ids: int32 [B,K,N].
    log_probs: float32 [B,K,N].
    scores: float32 [B,K]; of live sequences without the length norm.
    lengths: int32 [B,K]; 0 for an empty place.
    ended: bool [B,K].
  """

  ids: jax.Array
  log_probs: jax.Array
  scores: jax.Array
  lengths: jax.Array
  ended: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class _State:
  """Loop state; `is_nan` [B] are the prompts with a NaN among the logits."""

  step: jax.Array
  cache: Any
  live: _Beams
  pool: _Beams
  done: jax.Array
  is_nan: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Extensions:
  """All extensions of the live sequences by one id.

  Attributes:
    live: The sequences.
    step: Number of their ids.
    log_probs: Log probabilities of the next id, float32 [B,K,V].
    scores: Scores without the length norm, float32 [B,K,V].
    ends: Whether an id ends a sequence, bool [V].
  """

  live: _Beams
  step: jax.Array
  log_probs: jax.Array
  scores: jax.Array
  ends: jax.Array

  def select(self, scores: jax.Array, at: jax.Array) -> _Beams:
    """Returns the extensions at indices [B,K] into [K * V]."""
    batch, _, vocab = self.log_probs.shape
    beam, ids = at // vocab, (at % vocab).astype(jnp.int32)
    new = jnp.take_along_axis(self.log_probs.reshape(batch, -1), at, axis=1)
    old = _select(self.live, beam)
    max_new_tokens = old.ids.shape[-1]
    column = (jnp.arange(max_new_tokens) == self.step)[None, None, :]
    return _Beams(
      ids=jnp.where(column, ids[:, :, None], old.ids),
      log_probs=jnp.where(column, new[:, :, None], old.log_probs),
      scores=scores,
      lengths=old.lengths + 1,
      ended=self.ends[ids],
    )

  def select_ended(self) -> _Beams:
    """Returns each sequence with its best end id."""
    _, size, vocab = self.scores.shape
    ending = jnp.where(self.ends[None, None, :], self.scores, 2 * _EMPTY)
    best = jnp.argmax(ending, axis=-1)
    at = best + (vocab * jnp.arange(size))[None, :]
    return self.select(jnp.take_along_axis(self._flat_scores, at, axis=1), at)

  def select_best(self) -> _Beams:
    """Returns the K best extensions of each prompt."""
    return self.select(*jax.lax.top_k(self._flat_scores, self.scores.shape[1]))

  def find_live(self, per_beam: int | None) -> tuple[jax.Array, jax.Array]:
    """Returns scores and indices of the K best without an end id.

    If `per_beam` is set, of that number of best ids of each sequence only,
    among which are end ids.
    """
    batch, size, vocab = self.scores.shape
    scores = jnp.where(self.ends[None, None, :], 2 * _EMPTY, self.scores)
    if per_beam is None:
      best, at = jax.lax.top_k(scores.reshape(batch, -1), size)
      return best, at
    # The order of the ids, not of the scores, in which those of an empty
    # sequence are all equal.
    excluded = self.scores <= 2 * _EMPTY
    order = jnp.where(excluded, 2 * _EMPTY, self.log_probs)
    _, ids = jax.lax.top_k(order, min(per_beam, vocab))
    kept = jnp.take_along_axis(scores, ids, axis=-1).reshape(batch, -1)
    best, at = jax.lax.top_k(kept, size)
    ids = jnp.take_along_axis(ids.reshape(batch, -1), at, axis=1)
    return best, at // min(per_beam, vocab) * vocab + ids

  @property
  def _flat_scores(self) -> jax.Array:
    return self.scores.reshape(self.scores.shape[0], -1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BeamSearch:
  """Settings of a beam search; the defaults are those of Pax.

  Attributes:
    beam_size: Number of live sequences, and of sequences in the pool.
    length_alpha: Exponent of the length norm of t ids; 0 for none.
    length_offset: The norm is ((offset + t) / offset)^alpha, and t^alpha for an
      offset of 0, as in transformers.
    min_new_tokens: Number of ids before an end id may follow.
    tokens_per_beam: Number of best ids of each live sequence that may become
      live, end ids included; None is all. Pax's default is `beam_size`, with
      which fewer than `beam_size` sequences may be live after an end id was
      among the best.
    pool: Sequences that may enter the pool.
    stop: When a search stops.
  """

  beam_size: int = 4
  length_alpha: float = 0.8
  length_offset: float = 5.0
  min_new_tokens: int = 0
  tokens_per_beam: int | None = None
  pool: Pool = Pool.PAX
  stop: Stop = Stop.BOUND

  def __post_init__(self) -> None:
    checks.check_size(self, "beam_size")
    checks.check_positive(self, "tokens_per_beam")
    if self.tokens_per_beam == 1 and self.beam_size > 1:
      raise ValueError(
        "BeamSearch.tokens_per_beam must be at least 2 for several beams, which"
        " begin as one sequence, got 1."
      )
    checks.check_non_negative(self, "length_offset", "min_new_tokens")
    if not math.isfinite(self.length_alpha):
      raise ValueError(
        f"BeamSearch.length_alpha must be finite, got {self.length_alpha}."
      )

  def generate(
    self,
    prefill: generate.Prefill,
    decode_step: generate.DecodeStep,
    prompts: Int[Array, "batch prompt_length"],
    prompt_lengths: Int[Array, " sequences"],
    *,
    max_new_tokens: int,
    end_id: int | Collection[int],
    num_samples: int = 1,
    repeat: generate.Repeat = cache_rows.share,
    take: Take = cache_rows.take,
  ) -> generate.Generation:
    """Returns the best continuations of each prompt, the best first.

    Args:
      prefill: Reads the prompts and creates the cache.
      decode_step: Appends one id to each sequence.
      prompts: Ids, padded on the right with anything.
      prompt_lengths: Number of ids of each prompt, from 1 to P.
      max_new_tokens: Maximum number of generated ids.
      end_id: Id, or ids, that end a sequence.
      num_samples: Number of continuations of each prompt, at most `beam_size`.
      repeat: Makes the cache of samples from that of their prompts.
      take: Selects the sequences of a cache.

    Returns:
      The tokens. If a logit of a prompt is NaN, so are all its log
      probabilities.

    Raises:
      ValueError: A number is out of range, or the shapes do not match.
    """
    generate.check_prompts(prompts, prompt_lengths, max_new_tokens, num_samples)
    if num_samples > self.beam_size:
      raise ValueError(
        f"num_samples ({num_samples}) must not exceed BeamSearch.beam_size"
        f" ({self.beam_size})."
      )
    end_ids = generate.to_end_ids(end_id)
    size, batch = self.beam_size, prompts.shape[0]
    logits, cache, lengths = generate.read_prompts(
      prefill, prompts, prompt_lengths, max_new_tokens
    )
    vocab = logits.shape[-1]
    if vocab - len(end_ids) < size:
      raise ValueError(
        f"BeamSearch.beam_size ({size}) must be at most the number of ids that"
        f" do not end a sequence ({vocab - len(end_ids)})."
      )
    cache = repeat(cache, size, length=prompts.shape[1])
    logits, lengths = (jnp.repeat(x, size, axis=0) for x in (logits, lengths))
    ones = jnp.ones((batch * size, 1), jnp.int32)

    def body(state: _State) -> _State:
      last = jax.lax.dynamic_index_in_dim(
        state.live.ids, state.step - 1, axis=2, keepdims=False
      )
      position = lengths + state.step - 1
      logits, cache = decode_step(
        state.cache, last.reshape(-1, 1), position[:, None], ones
      )
      state = dataclasses.replace(state, cache=cache)
      return self._advance(state, logits[:, 0], end_ids, take)

    def is_running(state: _State) -> jax.Array:
      return (state.step < max_new_tokens) & ~jnp.all(state.done)

    state = self._begin(cache, batch, max_new_tokens)
    state = self._advance(state, logits[:, 0], end_ids, take)
    state = jax.lax.while_loop(is_running, body, state)
    found = self._fill(state)
    # NaN scores have no order, so nothing that was found is right.
    nan = jnp.where(state.is_nan, jnp.nan, 0)[:, None, None]
    found = dataclasses.replace(found, log_probs=found.log_probs + nan)
    return _to_generation(found, num_samples)

  def _begin(self, cache: Any, batch: int, max_new_tokens: int) -> _State:
    """Returns the state before the first id."""
    size = self.beam_size

    def make_empty(scores: jax.Array) -> _Beams:
      return _Beams(
        ids=jnp.zeros((batch, size, max_new_tokens), jnp.int32),
        log_probs=jnp.zeros((batch, size, max_new_tokens), jnp.float32),
        scores=jnp.broadcast_to(scores, (batch, size)),
        lengths=jnp.zeros((batch, size), jnp.int32),
        ended=jnp.zeros((batch, size), bool),
      )

    return _State(
      step=jnp.int32(0),
      cache=cache,
      # All copies of a prompt but one are empty.
      live=make_empty(jnp.where(jnp.arange(size) == 0, 0.0, _EMPTY)),
      pool=make_empty(jnp.full((size,), _EMPTY)),
      done=jnp.zeros((batch,), bool),
      is_nan=jnp.zeros((batch,), bool),
    )

  def _advance(
    self,
    state: _State,
    logits: jax.Array,
    end_ids: tuple[int, ...],
    take: Take,
  ) -> _State:
    """Extends the live sequences by one id, given the logits [B * K, V]."""
    size, vocab = self.beam_size, logits.shape[-1]
    batch, _, max_new_tokens = state.live.ids.shape
    log_probs = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    log_probs = log_probs.reshape(batch, size, vocab)
    is_nan = jnp.any(jnp.isnan(log_probs[:, :, 0]), axis=1) & ~state.done
    scores = state.live.scores[:, :, None] + log_probs
    ends = jnp.zeros((vocab,), bool).at[jnp.asarray(end_ids)].set(True)
    is_early = state.step < self.min_new_tokens
    extensions = _Extensions(
      live=state.live,
      step=state.step,
      log_probs=log_probs,
      scores=jnp.where(ends[None, None, :] & is_early, 2 * _EMPTY, scores),
      ends=ends,
    )
    pool = self._update_pool(state, extensions)
    scores, at = extensions.find_live(self.tokens_per_beam)
    live = extensions.select(scores, at)
    flat_index = at // vocab + (size * jnp.arange(batch))[:, None]
    return _State(
      step=state.step + 1,
      cache=take(state.cache, flat_index.reshape(-1)),
      live=live,
      pool=pool,
      done=state.done
      | is_nan
      | self._is_done(live, pool, state.step + 1, max_new_tokens),
      is_nan=state.is_nan | is_nan,
    )

  def _update_pool(self, state: _State, extensions: _Extensions) -> _Beams:
    """Returns the pool after the extensions that may enter it."""
    max_new_tokens = state.pool.ids.shape[-1]
    if self.pool is Pool.PAX:
      new = extensions.select_ended()
      is_new = new.ended & (new.scores > _EMPTY)
    else:
      new = extensions.select_best()
      is_new = new.ended | (state.step + 1 == max_new_tokens)
      is_new &= new.scores > _EMPTY
    norm = self._norm(state.step + 1)
    is_new &= ~state.done[:, None]
    new = dataclasses.replace(
      new, scores=jnp.where(is_new, new.scores / norm, 2 * _EMPTY)
    )
    merged = jax.tree.map(
      lambda x, y: jnp.concatenate([x, y], axis=1), state.pool, new
    )
    _, chosen = jax.lax.top_k(merged.scores, self.beam_size)
    return _select(merged, chosen)

  def _is_done(
    self, live: _Beams, pool: _Beams, length: jax.Array, max_new_tokens: int
  ) -> jax.Array:
    """Returns whether the search of each prompt stops, bool [B]."""
    is_full = jnp.all(pool.lengths > 0, axis=1)
    reached = self._norm(length)
    if self.stop is Stop.BOUND and self.length_alpha > 0:
      # A sum of log probabilities falls, but a longer one may weigh less.
      reached = self._norm(jnp.int32(max_new_tokens))
    is_done = is_full & (live.scores[:, 0] / reached <= pool.scores[:, -1])
    return is_done | is_full if self.stop is Stop.FULL else is_done

  def _norm(self, length: jax.Array) -> jax.Array:
    ratio = length.astype(jnp.float32)
    if self.length_offset > 0:
      ratio = (self.length_offset + ratio) / self.length_offset
    return ratio**self.length_alpha

  def _fill(self, state: _State) -> _Beams:
    """Returns the pool, its empty places filled with live sequences."""
    live, pool = state.live, state.pool
    scores = live.scores / self._norm(state.step)
    rank = jnp.cumsum(pool.lengths == 0, axis=1) - 1
    fill = dataclasses.replace(live, scores=scores)
    fill = _select(fill, jnp.maximum(rank, 0))

    def choose(x: jax.Array, y: jax.Array) -> jax.Array:
      is_empty = pool.lengths == 0
      is_empty = is_empty.reshape(is_empty.shape + (1,) * (x.ndim - 2))
      return jnp.where(is_empty, y, x)

    return jax.tree.map(choose, pool, fill)


def _select(beams: _Beams, at: jax.Array) -> _Beams:
  """Returns the sequences at indices [B,K] of each prompt."""

  def select(x: jax.Array) -> jax.Array:
    index = at.reshape(at.shape + (1,) * (x.ndim - 2))
    return jnp.take_along_axis(x, index, axis=1)

  return jax.tree.map(select, beams)


def _to_generation(beams: _Beams, num_samples: int) -> generate.Generation:
  best = jax.tree.map(
    lambda x: x[:, :num_samples].reshape(-1, *x.shape[2:]), beams
  )
  none = (*best.ids.shape, 0)
  return generate.Generation(
    ids=best.ids,
    lengths=best.lengths,
    log_probs=best.log_probs,
    ended=best.ended,
    top_ids=jnp.zeros(none, jnp.int32),
    top_log_probs=jnp.zeros(none, jnp.float32),
    scores=best.scores,
  )

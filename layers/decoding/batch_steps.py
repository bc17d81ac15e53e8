"""The compiled steps of continuous batching, and the batch on the device.

  insert    reads a chunk of one prompt into its slot; after the last chunk it
            draws the first id
  generate  draws one id for each slot that has read its prompt

Shapes never change. The cache has slots for each sequence, or pages that the
sequences share (`attention.paged_slots`); both give the same ids and log
probabilities, bit by bit.

Letters: R slots, C chunk, V vocab, E end ids, A alternatives, N pages of a
sequence.
"""

from collections.abc import Callable
import dataclasses
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from paxon.layers.attention import paged_slots
from paxon.layers.decoding import cache_rows, generate, sampling
from paxon.sharding import axes, variables
from paxon.sharding import layout as layouts

# variables -> (prefill, decode step), such as those of `model_steps`.
MakeSteps: TypeAlias = Callable[
  [Any], tuple[generate.Prefill, generate.DecodeStep]
]
# Arrays of the host, or traced.
Array: TypeAlias = jax.Array | np.ndarray
# Which sequences are constrained, bool [R], and the allowed ids of each, uint32
# [R, ceil(V / 32)]: id `i` is bit `i % 32` of word `i // 32`.
Allowed: TypeAlias = tuple[Array, Array]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Slots:
  """The sequences of a batch, without their cache.

  Attributes:
    last: int32 [R]; last id, not yet in the cache.
    length: int32 [R]; number of ids in the cache.
    step: int32 [R]; number of generated ids.
    active: bool [R]; whether the slot generates.
    history: Ids of each sequence.
    settings: Settings of each request.
    end_ids: int32 [R,E], padded with -1.
    wants_top: bool [R]; whether the request needs alternatives.
  """

  last: jax.Array
  length: jax.Array
  step: jax.Array
  active: jax.Array
  history: sampling.History
  settings: sampling.BatchSettings
  end_ids: jax.Array
  wants_top: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Chunk:
  """The part of a prompt to read, and its request.

  Attributes:
    prompt: int32 [cache_length + C]; the whole prompt, padded.
    size: int32; number of ids of the prompt.
    begin: int32; number of ids that are in the cache.
    slot: int32; slot of the request.
    settings: Settings of the request.
    end_ids: int32 [1,E], padded with -1.
    wants_top: bool [1]; whether the request needs alternatives.
  """

  prompt: Array
  size: Array
  begin: Array
  slot: Array
  settings: sampling.BatchSettings
  end_ids: Array
  wants_top: Array


class BatchSteps:
  """A batch on the device, and the steps that change it.

  Attributes:
    vocab_size: Number of ids.
    is_paged: Whether pages hold all that the cache keeps of tokens.
    cache: Boxed variables.
    slots: The rest of the batch.
  """

  def __init__(
    self,
    make_steps: MakeSteps,
    model_variables: Any,
    *,
    num_slots: int,
    cache_length: int,
    chunk: int,
    key: jax.Array,
    max_end_ids: int,
    max_alternatives: int,
    num_pages: int | None,
    layout: layouts.Layout | None,
  ) -> None:
    """Creates the empty batch.

    The arguments are those of `continuous_batching.Batcher`; `num_pages` is the
    number of pages of `chunk` tokens, None for a cache without pages.
    """
    self._make_steps, self._variables = make_steps, model_variables
    self._num_slots, self._cache_length = num_slots, cache_length
    self._chunk, self._num_pages = chunk, num_pages
    self._max_end_ids, self._max_alternatives = max_end_ids, max_alternatives
    self._key = key
    logits, cache = jax.eval_shape(self._empty_cache, model_variables)
    self.vocab_size: int = logits.shape[-1]
    self.is_paged = paged_slots.is_paged(cache)
    jit, start, placed = _placement(layout, cache)
    self.cache, self.slots = jit(self._empty, **start)(model_variables)
    self._insert = jit(self._insert_step, donate_argnums=(1, 2), **placed)
    self._generate = jit(self._generate_step, donate_argnums=(1, 2), **placed)

  def insert(
    self, chunk: Chunk, allowed: Allowed, table: np.ndarray
  ) -> dict[str, jax.Array]:
    """Reads a chunk of a prompt; returns the first id after the last chunk.

    `table` are the pages int32 [R,N] of each slot; [R,0] without pages.
    """
    drawn, self.cache, self.slots = self._insert(
      self._variables, self.cache, self.slots, chunk, allowed, table
    )
    return drawn

  def generate(
    self, keep: np.ndarray, allowed: Allowed, table: np.ndarray
  ) -> dict[str, jax.Array]:
    """Returns one id for each active slot, bool [R], that is kept."""
    drawn, self.cache, self.slots = self._generate(
      self._variables, self.cache, self.slots, keep, allowed, table
    )
    return drawn

  def _empty_cache(self, model_variables: Any) -> tuple[jax.Array, Any]:
    """Returns the cache of a token of padding, which is empty, and logits."""
    prefill, _ = self._make_steps(model_variables)
    zeros = jnp.zeros((self._num_slots, 1), jnp.int32)
    logits, cache = prefill(
      zeros, zeros, zeros, cache_length=self._cache_length, at=zeros[:, 0]
    )
    cache = cache_rows.with_row_index(cache)
    if self._num_pages is not None:
      cache = paged_slots.with_pages(
        cache, num_pages=self._num_pages, length=self._chunk
      )
    return logits, jax.tree.map(jnp.zeros_like, cache)

  def _empty(self, model_variables: Any) -> tuple[Any, Slots]:
    zeros = jnp.zeros((self._num_slots,), jnp.int32)
    settings = [sampling.Settings()] * self._num_slots
    slots = Slots(
      last=zeros,
      length=zeros,
      step=zeros,
      active=zeros > 0,
      history=sampling.begin(zeros[:, None], zeros, self.vocab_size),
      settings=sampling.stack(settings, vocab_size=self.vocab_size),
      end_ids=jnp.full((self._num_slots, self._max_end_ids), -1, jnp.int32),
      wants_top=zeros > 0,
    )
    return self._empty_cache(model_variables)[1], slots

  def _insert_step(
    self,
    model_variables: Any,
    cache: Any,
    slots: Slots,
    chunk: Chunk,
    allowed: Allowed,
    table: jax.Array,
  ) -> tuple[dict[str, jax.Array], Any, Slots]:
    """Reads a chunk of a prompt; draws an id if it is the last one."""
    _, decode_step = self._make_steps(model_variables)
    begin, size = jnp.asarray(chunk.begin), jnp.asarray(chunk.size)
    slot = jnp.asarray(chunk.slot)
    count = jnp.minimum(size - begin, self._chunk)
    # What the slot's last request has left might be NaN.
    own = cache_rows.map_axis(
      paged_slots.with_table(cache, table),
      axes.BATCH,
      lambda x, axis: jnp.where(
        begin == 0, 0, jax.lax.dynamic_slice_in_dim(x, slot, 1, axis)
      ),
    )
    own = paged_slots.with_table(own, table[slot][None])
    own = paged_slots.begin_at(own, begin)
    at = jnp.arange(self._chunk, dtype=jnp.int32)
    ids = jax.lax.dynamic_slice_in_dim(chunk.prompt, begin, self._chunk)
    logits, own = decode_step(
      own,
      ids[None],
      # The model may have no position after the last token.
      jnp.where(at < count, begin + at, 0)[None],
      (at < count).astype(jnp.int32)[None],
    )
    at_end = jax.lax.dynamic_slice_in_dim(logits[0], count - 1, 1)
    one = Slots(
      last=jnp.zeros((1,), jnp.int32),
      length=(begin + count)[None],
      step=jnp.zeros((1,), jnp.int32),
      active=(begin + count == size)[None],
      history=sampling.begin(
        jnp.asarray(chunk.prompt)[None], size[None], self.vocab_size
      ),
      settings=chunk.settings,
      end_ids=jnp.asarray(chunk.end_ids),
      wants_top=jnp.asarray(chunk.wants_top),
    )
    drawn, one = self._draw(one, at_end, allowed)
    slots = jax.tree.map(
      lambda all_, x: jax.lax.dynamic_update_slice_in_dim(all_, x, slot, 0),
      slots,
      one,
    )
    return drawn, cache_rows.put(cache, own, slot), slots

  def _generate_step(
    self,
    model_variables: Any,
    cache: Any,
    slots: Slots,
    keep: jax.Array,
    allowed: Allowed,
    table: jax.Array,
  ) -> tuple[dict[str, jax.Array], Any, Slots]:
    """Appends the last id of each active slot that is kept; draws the next."""
    _, decode_step = self._make_steps(model_variables)
    active = slots.active & keep
    logits, cache = decode_step(
      paged_slots.with_table(cache, table),
      slots.last[:, None],
      slots.length[:, None],
      active.astype(jnp.int32)[:, None],
    )
    length = slots.length + active.astype(jnp.int32)
    slots = dataclasses.replace(slots, length=length, active=active)
    drawn, slots = self._draw(slots, logits[:, 0], allowed)
    return drawn, cache, slots

  def _draw(
    self,
    slots: Slots,
    logits: jax.Array,
    allowed: Allowed,
  ) -> tuple[dict[str, jax.Array], Slots]:
    """Draws one id for each slot; only the active ones change."""
    active, logits = slots.active, logits.astype(jnp.float32)
    settings = _neutral(slots.settings, ~active)
    ids = settings.draw(
      _exclude(logits, *allowed),
      self._key,
      slots.history,
      slots.step,
      slots.end_ids,
    )
    log_probs = jax.nn.log_softmax(logits, axis=-1)
    count = self._max_alternatives
    shape = (logits.shape[0], count)
    top_log_probs, top_ids = jax.lax.cond(
      jnp.any(active & slots.wants_top),
      lambda x: tuple(jax.lax.top_k(x, count)),
      lambda _: (jnp.zeros(shape, jnp.float32), jnp.zeros(shape, jnp.int32)),
      log_probs,
    )
    step = slots.step + active.astype(jnp.int32)
    is_end = jnp.any(ids[:, None] == slots.end_ids, axis=1)
    done = is_end | (step >= slots.settings.max_new_tokens)
    chosen = jnp.take_along_axis(log_probs, ids[:, None], axis=-1)[:, 0]
    slots = dataclasses.replace(
      slots,
      last=jnp.where(active, ids, slots.last),
      step=step,
      active=active & ~done,
      history=slots.history.add(ids, active),
    )
    drawn = {
      "ids": ids,
      "log_probs": chosen,
      "top_ids": top_ids,
      "top_log_probs": top_log_probs,
      "is_end": is_end,
      "done": done,
    }
    return drawn, slots


def _neutral(
  settings: sampling.BatchSettings, selected: jax.Array
) -> sampling.BatchSettings:
  """Returns settings that cost nothing for sequences that do not draw."""
  return dataclasses.replace(
    settings,
    temperature=jnp.where(selected, 0, settings.temperature),
    repetition_penalty=jnp.where(selected, 1, settings.repetition_penalty),
    presence_penalty=jnp.where(selected, 0, settings.presence_penalty),
    frequency_penalty=jnp.where(selected, 0, settings.frequency_penalty),
    min_new_tokens=jnp.where(selected, 0, settings.min_new_tokens),
  )


def _exclude(logits: jax.Array, selected: Array, masks: Array) -> jax.Array:
  """Returns logits [R,V] that are -inf for ids that a mask excludes."""

  def exclude(logits: jax.Array) -> jax.Array:
    ids = jnp.arange(logits.shape[-1], dtype=jnp.uint32)
    bits = (masks[:, ids // 32] >> (ids % 32)[None]) & 1
    return jnp.where(selected[:, None] & (bits == 0), -jnp.inf, logits)

  return jax.lax.cond(jnp.any(selected), exclude, lambda x: x, logits)


def _placement(
  layout: layouts.Layout | None, cache: Any
) -> tuple[Any, dict[str, Any], dict[str, Any]]:
  """Returns `jit`, and its options for the empty batch and for the steps."""
  if layout is None:
    return jax.jit, {}, {}
  rest = layout.replicated
  shardings = jax.tree.map(
    lambda box: box.replace(
      value=layout.stored_sharding(box.value.shape, box.names)
    ),
    cache,
    is_leaf=lambda leaf: isinstance(leaf, variables.Variable),
  )
  return (
    layout.jit,
    {"out_shardings": (shardings, rest)},
    {"out_shardings": (rest, shardings, rest)},
  )

"""Continuous batching: requests enter and leave a batch between two steps.

A batch has a fixed number of slots, each with one sequence of a cache. Two
compiled functions serve any mix of requests:

  insert    reads a chunk of one prompt into its slot; after the last chunk it
            draws the first id
  generate  draws one id for each slot that has read its prompt

Shapes never change, so nothing is compiled after the first request. A request
gets the ids that `generate.generate` gives it alone, with the same settings.

`Batcher.step` inserts at most one chunk before it generates, so long prompts do
not stall the others.

Letters: R slots, C chunk, V vocab, E end ids, A alternatives.
"""

import collections
from collections.abc import Callable, Sequence
import dataclasses
import functools
from typing import Any, Protocol, TypeAlias, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from paxon.layers.decoding import cache_rows, generate, sampling
from paxon.sharding import axes, checks, variables
from paxon.sharding import layout as layouts

# variables -> (prefill, decode step), such as those of `model_steps`.
MakeSteps: TypeAlias = Callable[
  [Any], tuple[generate.Prefill, generate.DecodeStep]
]


@runtime_checkable
class Constraint(Protocol):
  """Decides which ids may follow; of one request, and used once."""

  def mask(self) -> np.ndarray:
    """Returns the allowed ids: id `i` is bit `i % 32` of word `i // 32`.

    uint32 [ceil(V / 32)], at least one bit set.
    """
    ...

  def advance(self, number: int) -> None:
    """Appends a generated id, which the mask allowed."""
    ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
  """A prompt to continue.

  Attributes:
    prompt: Ids, at least one.
    settings: Those of sampling, with `max_new_tokens`.
    end_ids: Ids that end the sequence.
    sample: Index among the samples of the same prompt and settings, which
      differ by it.
    num_alternatives: Number of most likely ids to return for each id.
    constraint: Excludes ids; None allows all.
  """

  prompt: Sequence[int]
  settings: sampling.Settings
  end_ids: tuple[int, ...] = ()
  sample: int = 0
  num_alternatives: int = 0
  constraint: Constraint | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Token:
  """A generated id.

  Attributes:
    request: Number that `Batcher.submit` has returned.
    id: The id.
    log_prob: Log probability under the model, independent of the settings.
    alternatives: The most likely ids and their log probabilities, in descending
      order.
    finish: `stop` after an end id, `length` after the maximum number of ids,
      None if more follow.
  """

  request: int
  id: int
  log_prob: float
  alternatives: tuple[tuple[int, float], ...] = ()
  finish: str | None = None


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=(
    "last",
    "length",
    "step",
    "active",
    "history",
    "settings",
    "end_ids",
    "wants_top",
  ),
  meta_fields=(),
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class _Slots:
  """The sequences of a batch, without their cache.

  Attributes:
    last: int32 [R]; last id, not yet in the cache.
    length: int32 [R]; number of ids in the cache.
    step: int32 [R]; number of generated ids.
    active: bool [R]; whether the slot generates.
    history: Ids of each sequence.
    settings: Those of each request.
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


@dataclasses.dataclass
class _Entry:
  """A request on its way through the batch."""

  number: int
  request: Request
  slot: int = -1
  num_read: int = 0


class Batcher:
  """Generates for requests that arrive at any time; not thread-safe."""

  def __init__(
    self,
    make_steps: MakeSteps,
    model_variables: Any,
    *,
    num_slots: int,
    cache_length: int,
    key: jax.Array,
    chunk: int = 64,
    max_end_ids: int = 8,
    max_alternatives: int = 0,
    layout: layouts.Layout | None = None,
  ) -> None:
    """Creates the empty cache.

    Args:
      make_steps: Returns the steps of a decoder-only model.
      model_variables: Its variables, the argument of `make_steps`.
      num_slots: Number of requests that generate at the same time.
      cache_length: Number of tokens of each sequence, without the last one.
      key: Random key, that of `generate.generate`.
      chunk: Number of prompt ids that are read in one step.
      max_end_ids: Maximum number of end ids of a request.
      max_alternatives: Maximum number of alternatives of a request.
      layout: Layout in which the batch, which has one sequence while a prompt
        is read, is not split; None for the default device.

    Raises:
      ValueError: A number is not positive, or the layout splits the batch.
    """
    self.num_slots, self.cache_length = num_slots, cache_length
    self.chunk = min(chunk, cache_length)
    self.max_end_ids, self.max_alternatives = max_end_ids, max_alternatives
    for name in ("num_slots", "cache_length", "chunk"):
      checks.check_positive(self, name)
    if layout is not None and layout.shards(axes.BATCH) > 1:
      raise ValueError(
        "Batcher.layout must not split the batch, got"
        f" {layout.shards(axes.BATCH)} shards."
      )
    self._make_steps = make_steps
    self._variables = model_variables
    self._key = key
    logits, cache = jax.eval_shape(self._empty_cache, model_variables)
    self.vocab_size = logits.shape[-1]
    jit, start, placed = _placement(layout, cache)
    self._cache, self._slots = jit(self._empty, **start)(model_variables)
    self._insert = jit(self._inserted, donate_argnums=(1, 2), **placed)
    self._generate = jit(self._generated, donate_argnums=(1, 2), **placed)
    self._waiting: collections.deque[_Entry] = collections.deque()
    self._reading: collections.deque[_Entry] = collections.deque()
    self._running: dict[int, _Entry] = {}
    self._free = list(range(num_slots))[::-1]
    # Slots whose requests were cancelled since the last step.
    self._released: set[int] = set()
    self._next = 0

  @property
  def num_waiting(self) -> int:
    """Number of requests without a slot."""
    return len(self._waiting)

  @property
  def num_running(self) -> int:
    """Number of requests with a slot."""
    return self.num_slots - len(self._free)

  def check(self, request: Request) -> None:
    """Raises ValueError if a request can never be served."""
    size, count = len(request.prompt), request.settings.max_new_tokens
    if not size:
      raise ValueError(
        "Request.prompt is empty; begin it with an id such as the"
        " begin-of-document id."
      )
    if count is None:
      raise ValueError("Request.settings.max_new_tokens is None; set a number.")
    if size + count - 1 > self.cache_length:
      raise ValueError(
        f"Request: {size} ids of the prompt and max_new_tokens={count} exceed"
        f" the cache of {self.cache_length} tokens and a last one."
      )
    for name, ids in (
      ("prompt", request.prompt),
      ("end_ids", request.end_ids),
      ("settings.logit_bias", request.settings.logit_bias),
    ):
      wrong = [i for i in ids if not 0 <= i < self.vocab_size]
      if wrong:
        raise ValueError(
          f"Request.{name} has the id {wrong[0]}, which is not in the"
          f" vocabulary of {self.vocab_size} ids."
        )
    if request.constraint is not None and request.settings.min_new_tokens:
      raise ValueError(
        "Request.settings.min_new_tokens must be 0 with a constraint, which"
        " may allow nothing but an end id."
      )
    for name, number, most in (
      ("end_ids", len(request.end_ids), self.max_end_ids),
      ("num_alternatives", request.num_alternatives, self.max_alternatives),
    ):
      if not 0 <= number <= most:
        raise ValueError(f"Request.{name}: {number} is more than {most}.")

  def submit(self, request: Request) -> int:
    """Queues a request; returns its number.

    Raises:
      ValueError: It can never be served.
    """
    self.check(request)
    entry = _Entry(number=self._next, request=request)
    self._next += 1
    self._waiting.append(entry)
    return entry.number

  def cancel(self, number: int) -> None:
    """Removes a request and frees its slot; no tokens of it follow."""
    for queue in (self._waiting, self._reading):
      for entry in [e for e in queue if e.number == number]:
        queue.remove(entry)
        if entry.slot >= 0:
          self._free.append(entry.slot)
    for slot, entry in [*self._running.items()]:
      if entry.number == number:
        del self._running[slot]
        self._released.add(slot)
        self._free.append(slot)

  def step(self) -> list[Token]:
    """Reads a chunk of a prompt and generates an id for each other request."""
    while self._waiting and self._free:
      entry = self._waiting.popleft()
      entry.slot = self._free.pop()
      self._reading.append(entry)
    tokens = []
    if self._reading:
      tokens += self._read_chunk(self._reading[0])
    if self._running:
      tokens += self._generate_one()
    return tokens

  def run(self, requests: Sequence[Request]) -> list[list[Token]]:
    """Returns the tokens of requests that arrive together."""
    found = {self.submit(request): [] for request in requests}
    while self.num_waiting or self.num_running:
      for token in self.step():
        found[token.request].append(token)
    return [*found.values()]

  def _read_chunk(self, entry: _Entry) -> list[Token]:
    request, begin = entry.request, entry.num_read
    part = np.asarray(request.prompt[begin : begin + self.chunk], np.int32)
    entry.num_read += len(part)
    is_last = entry.num_read == len(request.prompt)
    ends = np.full((1, self.max_end_ids), -1, np.int32)
    ends[0, : len(request.end_ids)] = request.end_ids
    settings = sampling.stack([request.settings], vocab_size=self.vocab_size)
    settings = dataclasses.replace(
      settings, sample=jnp.asarray(np.asarray([request.sample], np.int32))
    )
    drawn, self._cache, self._slots = self._insert(
      self._variables,
      self._cache,
      self._slots,
      np.pad(part, (0, self.chunk - len(part))),
      np.int32(len(part)),
      np.int32(begin),
      np.int32(entry.slot),
      np.bool_(is_last),
      (settings, ends, np.asarray([request.num_alternatives > 0])),
      self._allowed([(0, entry)] if is_last else [], 1),
    )
    # The slot is that of the new request from here on.
    self._released.discard(entry.slot)
    if not is_last:
      return []
    self._reading.popleft()
    self._running[entry.slot] = entry
    return self._to_tokens(drawn, [(0, entry)])

  def _generate_one(self) -> list[Token]:
    keep = np.ones(self.num_slots, bool)
    keep[[*self._released]] = False
    self._released.clear()
    drawn, self._cache, self._slots = self._generate(
      self._variables,
      self._cache,
      self._slots,
      keep,
      self._allowed([*self._running.items()], self.num_slots),
    )
    return self._to_tokens(drawn, [*self._running.items()])

  def _allowed(
    self, entries: Sequence[tuple[int, _Entry]], count: int
  ) -> tuple[np.ndarray, np.ndarray]:
    """Returns which of `count` sequences are constrained, and their masks."""
    rows = np.zeros(count, bool)
    masks = np.zeros((count, -(-self.vocab_size // 32)), np.uint32)
    for row, entry in entries:
      if entry.request.constraint is not None:
        rows[row], masks[row] = True, entry.request.constraint.mask()
    return rows, masks

  def _to_tokens(
    self, drawn: Any, entries: Sequence[tuple[int, _Entry]]
  ) -> list[Token]:
    drawn = jax.device_get(drawn)
    tokens = []
    for row, entry in entries:
      count = entry.request.num_alternatives
      top = zip(
        drawn["top_ids"][row, :count].tolist(),
        drawn["top_log_probs"][row, :count].tolist(),
        strict=True,
      )
      finish, constraint = None, entry.request.constraint
      if constraint is not None and not drawn["done"][row]:
        constraint.advance(int(drawn["ids"][row]))
      if drawn["done"][row]:
        finish = "stop" if drawn["is_end"][row] else "length"
        del self._running[entry.slot]
        self._free.append(entry.slot)
      tokens.append(
        Token(
          request=entry.number,
          id=int(drawn["ids"][row]),
          log_prob=float(drawn["log_probs"][row]),
          alternatives=tuple(top),
          finish=finish,
        )
      )
    return tokens

  def _empty_cache(self, model_variables: Any) -> tuple[jax.Array, Any]:
    """Returns the cache of a token of padding, which is empty, and logits."""
    prefill, _ = self._make_steps(model_variables)
    zeros = jnp.zeros((self.num_slots, 1), jnp.int32)
    logits, cache = prefill(
      zeros, zeros, zeros, cache_length=self.cache_length, at=zeros[:, 0]
    )
    cache = cache_rows.with_row_index(cache)
    return logits, jax.tree.map(jnp.zeros_like, cache)

  def _empty(self, model_variables: Any) -> tuple[Any, _Slots]:
    zeros = jnp.zeros((self.num_slots,), jnp.int32)
    settings = [sampling.Settings()] * self.num_slots
    slots = _Slots(
      last=zeros,
      length=zeros,
      step=zeros,
      active=zeros > 0,
      history=sampling.begin(zeros[:, None], zeros, self.vocab_size),
      settings=sampling.stack(settings, vocab_size=self.vocab_size),
      end_ids=jnp.full((self.num_slots, self.max_end_ids), -1, jnp.int32),
      wants_top=zeros > 0,
    )
    return self._empty_cache(model_variables)[1], slots

  def _inserted(
    self,
    model_variables: Any,
    cache: Any,
    slots: _Slots,
    ids: jax.Array,
    count: jax.Array,
    begin: jax.Array,
    slot: jax.Array,
    is_last: jax.Array,
    request: tuple[sampling.BatchSettings, jax.Array, jax.Array],
    allowed: tuple[jax.Array, jax.Array],
  ) -> tuple[dict[str, jax.Array], Any, _Slots]:
    """Reads a chunk [C] of a prompt; draws an id if it is the last one."""
    _, decode_step = self._make_steps(model_variables)
    own = cache_rows.map_axis(
      cache,
      axes.BATCH,
      lambda x, axis: jax.lax.dynamic_slice_in_dim(x, slot, 1, axis),
    )
    # What the slot's last request has left might be NaN.
    own = jax.tree.map(lambda x: jnp.where(begin == 0, 0, x), own)
    at = jnp.arange(ids.shape[0], dtype=jnp.int32)
    logits, own = decode_step(
      own,
      ids[None],
      (begin + at)[None],
      (at < count).astype(jnp.int32)[None],
    )
    at_end = jax.lax.dynamic_slice_in_dim(logits[0], count - 1, 1)
    settings, end_ids, wants_top = request
    read = sampling.begin(ids[None], count[None], self.vocab_size)
    before = slots.history.in_prompt[slot][None] & (begin > 0)
    one = _Slots(
      last=jnp.zeros((1,), jnp.int32),
      length=(begin + count)[None],
      step=jnp.zeros((1,), jnp.int32),
      active=is_last[None],
      history=dataclasses.replace(read, in_prompt=read.in_prompt | before),
      settings=settings,
      end_ids=end_ids,
      wants_top=wants_top,
    )
    drawn, one = self._draw(one, at_end, allowed)
    slots = jax.tree.map(
      lambda all_, x: jax.lax.dynamic_update_slice_in_dim(all_, x, slot, 0),
      slots,
      one,
    )
    return drawn, cache_rows.put(cache, own, slot), slots

  def _generated(
    self,
    model_variables: Any,
    cache: Any,
    slots: _Slots,
    keep: jax.Array,
    allowed: tuple[jax.Array, jax.Array],
  ) -> tuple[dict[str, jax.Array], Any, _Slots]:
    """Appends the last id of each active slot that is kept; draws the next."""
    _, decode_step = self._make_steps(model_variables)
    active = slots.active & keep
    logits, cache = decode_step(
      cache,
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
    slots: _Slots,
    logits: jax.Array,
    allowed: tuple[jax.Array, jax.Array],
  ) -> tuple[dict[str, jax.Array], _Slots]:
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
    count = self.max_alternatives
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
  settings: sampling.BatchSettings, rows: jax.Array
) -> sampling.BatchSettings:
  """Returns settings that cost nothing for sequences that do not draw."""
  return dataclasses.replace(
    settings,
    temperature=jnp.where(rows, 0, settings.temperature),
    repetition_penalty=jnp.where(rows, 1, settings.repetition_penalty),
    presence_penalty=jnp.where(rows, 0, settings.presence_penalty),
    frequency_penalty=jnp.where(rows, 0, settings.frequency_penalty),
    min_new_tokens=jnp.where(rows, 0, settings.min_new_tokens),
  )


def _exclude(logits: jax.Array, rows: jax.Array, masks: jax.Array) -> jax.Array:
  """Returns logits [R,V] that are -inf for ids that a mask excludes."""

  def exclude(logits: jax.Array) -> jax.Array:
    ids = jnp.arange(logits.shape[-1], dtype=jnp.uint32)
    bits = (masks[:, ids // 32] >> (ids % 32)[None]) & 1
    return jnp.where(rows[:, None] & (bits == 0), -jnp.inf, logits)

  return jax.lax.cond(jnp.any(rows), exclude, lambda x: x, logits)


def _placement(
  layout: layouts.Layout | None, cache: Any
) -> tuple[Any, dict[str, Any], dict[str, Any]]:
  """Returns `jit`, and its options for the empty batch and for the steps."""
  if layout is None:
    return jax.jit, {}, {}
  rest = layout.replicated
  shardings = jax.tree.map(
    lambda box: box.replace(value=layout.sharding(box.names)),
    cache,
    is_leaf=lambda leaf: isinstance(leaf, variables.Variable),
  )
  return (
    layout.jit,
    {"out_shardings": (shardings, rest)},
    {"out_shardings": (rest, shardings, rest)},
  )

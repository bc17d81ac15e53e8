"""Continuous batching: requests enter and leave a batch between two steps.

A batch has a fixed number of slots, each with one sequence of a cache. The
compiled steps of `batch_steps` serve any mix of requests, so nothing is
compiled after the first request. A request gets the ids that
`generate.generate` gives it alone, with the same settings.

`Batcher.step` reads as many chunks of prompts for each sequence that generates
as there are prompts for each such sequence, at least one: long prompts do not
stall the others, and an empty batch fills at once. It launches the next ids
before it copies the last ones to the host, which would otherwise leave the
device idle; a request that ends with its maximum number of ids makes room at
once, one that ends with an end id a step later.

With pages (`pages`) requests take memory for the tokens that they have, not for
those that they may get. If none are free, requests wait, and the most recent
request is preempted and recomputed later; it gets the same ids.
"""

import collections
from collections.abc import Sequence
import dataclasses
import math
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from paxon.layers.decoding import batch_steps, sampling
from paxon.layers.decoding import pages as pages_lib
from paxon.sharding import axes, checks
from paxon.sharding import layout as layouts


@runtime_checkable
class Constraint(Protocol):
  """Decides which ids may follow; of one request, and used once."""

  def mask(self) -> np.ndarray:
    """Returns the allowed ids: id `i` is bit `i % 32` of word `i // 32`.

    uint32 [ceil(V / 32)], at least one bit set.

    Raises:
      ValueError: The request cannot go on; it ends with this error.
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
    settings: Settings of sampling, with `max_new_tokens`.
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
      `error` if the request cannot go on, None if more follow.
    error: Why it cannot go on; there is no id then.
  """

  request: int
  id: int
  log_prob: float
  alternatives: tuple[tuple[int, float], ...] = ()
  finish: str | None = None
  error: str = ""


class Steps(Protocol):
  """The methods of `batch_steps.BatchSteps` that `Batcher` calls."""

  def insert(
    self,
    chunk: batch_steps.Chunk,
    allowed: batch_steps.Allowed,
    table: np.ndarray,
  ) -> dict[str, jax.Array]:
    """Reads a chunk of a prompt; returns the first id after the last one."""
    ...

  def generate(
    self, keep: np.ndarray, allowed: batch_steps.Allowed, table: np.ndarray
  ) -> dict[str, jax.Array]:
    """Returns one id for each active slot that is kept."""
    ...


@dataclasses.dataclass
class _Entry:
  """A request on its way through the batch."""

  number: int
  request: Request
  slot: int = -1
  num_read: int = 0
  lease: pages_lib.Lease | None = None
  # All ids of it that the host has. The steps launched so far draw `num_drawn`
  # ids: fewer after its pages were taken, more while results are pending.
  ids: list[int] = dataclasses.field(default_factory=list)
  num_drawn: int = 0
  # Ended or cancelled: what is still pending of it is ignored.
  is_over: bool = False

  @property
  def size(self) -> int:
    """Number of ids of the prompt."""
    return len(self.request.prompt)


@dataclasses.dataclass
class _Launch:
  """A step whose results the host has not read.

  Attributes:
    number: Of the call of `Batcher.step`.
    drawn: Results of `BatchSteps`.
    entries: Rows of `drawn`, with their requests and indices among the ids.
  """

  number: int
  drawn: dict[str, jax.Array]
  entries: list[tuple[int, _Entry, int]]


class Batcher:
  """Generates for requests that arrive at any time; not thread-safe.

  Attributes:
    steps: The batch on the device.
    pages: Who has the pages of the cache; None without pages.
    num_preempted: Number of times that a request has lost its pages to others.
  """

  def __init__(
    self,
    make_steps: batch_steps.MakeSteps,
    model_variables: Any,
    *,
    num_slots: int,
    cache_length: int,
    key: jax.Array,
    chunk: int = 64,
    max_end_ids: int = 8,
    max_alternatives: int = 0,
    num_pages: int | None = None,
    reuse_prefixes: bool = True,
    layout: layouts.Layout | None = None,
  ) -> None:
    """Creates the empty cache.

    Args:
      make_steps: Returns the steps of a decoder-only model.
      model_variables: Its variables, the argument of `make_steps`.
      num_slots: Number of requests that generate at the same time.
      cache_length: Number of tokens of each sequence, without the last one.
      key: Random key, as for `generate.generate`.
      chunk: Number of prompt ids that are read in one step.
      max_end_ids: Maximum number of end ids of a request.
      max_alternatives: Maximum number of alternatives of a request.
      num_pages: Number of pages of the cache, of `chunk` tokens each; None for
        `cache_length` tokens in each slot.
      reuse_prefixes: Whether prompts are not read as far as pages hold the same
        ids; only if pages hold the whole cache of the model.
      layout: Layout in which the batch, which has one sequence while a prompt
        is read, is not split; None for the default device.

    Raises:
      ValueError: A number is not positive, the pages are too few for one
        sequence, or the layout splits the batch.
    """
    self.num_slots, self.cache_length = num_slots, cache_length
    self.chunk = min(chunk, cache_length)
    self.max_end_ids, self.max_alternatives = max_end_ids, max_alternatives
    self._check_sizes(num_pages, layout)
    steps = batch_steps.BatchSteps(
      make_steps,
      model_variables,
      num_slots=num_slots,
      cache_length=cache_length,
      chunk=self.chunk,
      key=key,
      max_end_ids=max_end_ids,
      max_alternatives=max_alternatives,
      num_pages=num_pages,
      layout=layout,
    )
    self.steps: Steps = steps
    self.vocab_size = steps.vocab_size
    self.pages = None
    if num_pages is not None:
      self.pages = pages_lib.Pages(
        num_pages,
        length=self.chunk,
        is_shared=reuse_prefixes and steps.is_paged,
      )
    columns = 0 if num_pages is None else self._pages_per_sequence
    self._table = np.zeros((num_slots, columns), np.int32)
    self.num_preempted = 0
    self._waiting: collections.deque[_Entry] = collections.deque()
    self._reading: collections.deque[_Entry] = collections.deque()
    self._running: dict[int, _Entry] = {}
    self._free = list(range(num_slots))[::-1]
    # Slots whose requests were cancelled since the last step.
    self._released: set[int] = set()
    self._pending: collections.deque[_Launch] = collections.deque()
    self._failed: list[tuple[_Entry, str]] = []
    self._next = 0
    self._num_steps = 0

  def _check_sizes(
    self, num_pages: int | None, layout: layouts.Layout | None
  ) -> None:
    """Raises ValueError as `__init__` does."""
    for name in ("num_slots", "cache_length", "chunk"):
      checks.check_positive(self, name)
    if layout is not None and layout.shards(axes.BATCH) > 1:
      raise ValueError(
        "Batcher.layout must not split the batch, got"
        f" {layout.shards(axes.BATCH)} shards."
      )
    if num_pages is not None and num_pages < self._pages_per_sequence:
      raise ValueError(
        f"Batcher.num_pages must be at least {self._pages_per_sequence}, for a"
        f" sequence of {self.cache_length} tokens in pages of {self.chunk}, got"
        f" {num_pages}."
      )

  @property
  def _pages_per_sequence(self) -> int:
    """Number of pages of a sequence that fills its cache."""
    return -(-self.cache_length // self.chunk)

  @property
  def is_busy(self) -> bool:
    """Whether `step` has anything to do."""
    return bool(self._waiting or self.num_running or self._pending)

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
        self._leave(entry)
    for entry in [e for e in self._running.values() if e.number == number]:
      self._stop(entry)
    for launch in self._pending:
      for _, entry, _ in launch.entries:
        entry.is_over |= entry.number == number

  def step(self) -> list[Token]:
    """Reads chunks of prompts and generates an id for each other request.

    Returns:
      The ids that the last call has launched, or this one if nothing can be
      launched before they are known.
    """
    self._num_steps += 1
    while self._waiting and self._free:
      entry = self._waiting.popleft()
      entry.slot = self._free.pop()
      self._reading.append(entry)
    for _ in range(-(-len(self._reading) // max(1, len(self._running)))):
      if self._reading and self._has_pages(self._reading[0]):
        self._read_chunk(self._reading[0])
    tokens = self._end_failed()
    if self.pages is not None:
      tokens += self._grow(self.pages)
    if any(e.request.constraint is not None for e in self._running.values()):
      # What may follow depends on the last id.
      tokens += self._collect()
    if self._running:
      self._generate_one()
    return tokens + self._collect(before=self._num_steps) + self._end_failed()

  def _end_failed(self) -> list[Token]:
    """Ends requests whose constraints have failed; what they drew is void."""
    tokens = []
    for entry, error in self._failed:
      if self._running.get(entry.slot) is entry:
        self._stop(entry)
      tokens.append(
        Token(
          request=entry.number,
          id=-1,
          log_prob=-math.inf,
          finish="error",
          error=error,
        )
      )
    self._failed.clear()
    return tokens

  def run(self, requests: Sequence[Request]) -> list[list[Token]]:
    """Returns the tokens of requests that arrive together."""
    found = {self.submit(request): [] for request in requests}
    while self.is_busy:
      for token in self.step():
        found[token.request].append(token)
    return [*found.values()]

  def _has_pages(self, entry: _Entry) -> bool:
    """Takes the pages of a request whose prompt is next, if enough are free."""
    if self.pages is None or entry.lease is not None:
      return True
    # With those that it had before others took them.
    count = entry.size + max(0, len(entry.ids) - 1)
    entry.lease = self.pages.begin(entry.request.prompt, count)
    if entry.lease is None:
      return False
    entry.num_read = entry.lease.num_shared * self.chunk
    self._set_table(entry)
    return True

  def _grow(self, pages: pages_lib.Pages) -> list[Token]:
    """Takes the pages for a next id of each request, the earliest ones first.

    The latest requests lose theirs if there are too few. The earliest one never
    does, and there are enough for one, so each request ends.

    Returns:
      The ids that had to be known before a request could lose its pages.
    """
    tokens = []
    for entry in sorted(self._running.values(), key=lambda e: e.number):
      while self._running.get(entry.slot) is entry:
        assert entry.lease is not None
        if pages.grow(entry.lease, entry.size + entry.num_drawn):
          self._set_table(entry)
          break
        if self._pending:
          tokens += self._collect()
          continue
        reading = [e for e in self._reading if e.lease is not None]
        self._preempt(
          max([*self._running.values(), *reading], key=lambda e: e.number)
        )
    return tokens

  def _preempt(self, entry: _Entry) -> None:
    """Moves a request back to those that wait; it keeps its ids."""
    if entry in self._reading:
      self._reading.remove(entry)
      self._leave(entry)
    else:
      self._stop(entry)
    entry.slot, entry.num_read, entry.num_drawn = -1, 0, 0
    self._waiting.appendleft(entry)
    self.num_preempted += 1

  def _stop(self, entry: _Entry) -> None:
    """Ends a request that generates, also on the device."""
    del self._running[entry.slot]
    self._released.add(entry.slot)
    self._leave(entry)

  def _leave(self, entry: _Entry) -> None:
    """Frees the slot and the pages of a request."""
    if entry.slot >= 0:
      self._free.append(entry.slot)
      self._table[entry.slot] = 0
    if self.pages is not None and entry.lease is not None:
      self.pages.end(entry.lease)
      entry.lease = None

  def _set_table(self, entry: _Entry) -> None:
    assert entry.lease is not None
    self._table[entry.slot, : len(entry.lease.pages)] = entry.lease.pages

  def _read_chunk(self, entry: _Entry) -> None:
    request = entry.request
    is_last = entry.num_read + self.chunk >= entry.size
    ends = np.full((1, self.max_end_ids), -1, np.int32)
    ends[0, : len(request.end_ids)] = request.end_ids
    prompt = np.zeros(self.cache_length + self.chunk, np.int32)
    prompt[: entry.size] = request.prompt
    settings = sampling.stack([request.settings], vocab_size=self.vocab_size)
    chunk = batch_steps.Chunk(
      prompt=prompt,
      size=np.asarray(entry.size, np.int32),
      begin=np.asarray(entry.num_read, np.int32),
      slot=np.asarray(entry.slot, np.int32),
      settings=dataclasses.replace(
        settings, sample=jnp.asarray(np.asarray([request.sample], np.int32))
      ),
      end_ids=ends,
      wants_top=np.asarray([request.num_alternatives > 0]),
    )
    drawn = self.steps.insert(
      chunk,
      self._find_allowed([(0, entry)] if is_last else [], 1),
      # The device may read it while the next step changes it.
      self._table.copy(),
    )
    entry.num_read = min(entry.num_read + self.chunk, entry.size)
    if self.pages is not None and entry.lease is not None:
      self.pages.share(entry.lease, entry.num_read)
      self._set_table(entry)
    # The slot is that of the new request from here on.
    self._released.discard(entry.slot)
    if is_last:
      self._reading.popleft()
      self._running[entry.slot] = entry
      self._record_launch(drawn, [(0, entry)])

  def _generate_one(self) -> None:
    keep = np.ones(self.num_slots, bool)
    keep[[*self._released]] = False
    self._released.clear()
    entries = [*self._running.items()]
    drawn = self.steps.generate(
      keep, self._find_allowed(entries, self.num_slots), self._table.copy()
    )
    self._record_launch(drawn, entries)

  def _record_launch(
    self, drawn: dict[str, jax.Array], entries: Sequence[tuple[int, _Entry]]
  ) -> None:
    """Records a step; requests that it surely ends make room."""
    pending = []
    for row, entry in entries:
      pending.append((row, entry, entry.num_drawn))
      entry.num_drawn += 1
      if entry.num_drawn == entry.request.settings.max_new_tokens:
        del self._running[entry.slot]
        self._leave(entry)
    self._pending.append(
      _Launch(number=self._num_steps, drawn=drawn, entries=pending)
    )

  def _find_allowed(
    self, entries: Sequence[tuple[int, _Entry]], count: int
  ) -> batch_steps.Allowed:
    """Returns which of `count` sequences are constrained, and their masks."""
    rows = np.zeros(count, bool)
    masks = np.zeros((count, -(-self.vocab_size // 32)), np.uint32)
    for row, entry in entries:
      if entry.num_drawn < len(entry.ids):
        rows[row] = True
        word, bit = divmod(entry.ids[entry.num_drawn], 32)
        masks[row, word] = 1 << bit
      elif entry.request.constraint is not None:
        try:
          rows[row], masks[row] = True, entry.request.constraint.mask()
        except ValueError as error:
          entry.is_over = True
          self._failed.append((entry, str(error)))
    return rows, masks

  def _collect(self, *, before: int | None = None) -> list[Token]:
    """Returns the ids of pending launches; `before` leaves later ones.

    Blocks until the device has drawn them.
    """
    tokens = []
    while self._pending and (
      before is None or self._pending[0].number < before
    ):
      launch = self._pending.popleft()
      drawn = jax.device_get(launch.drawn)
      for row, entry, index in launch.entries:
        # Ids of a request that lost its pages were returned before that.
        if not entry.is_over and index == len(entry.ids):
          tokens.append(self._to_token(drawn, row, entry))
    return tokens

  def _to_token(self, drawn: Any, row: int, entry: _Entry) -> Token:
    entry.ids.append(int(drawn["ids"][row]))
    count = entry.request.num_alternatives
    top = zip(
      drawn["top_ids"][row, :count].tolist(),
      drawn["top_log_probs"][row, :count].tolist(),
      strict=True,
    )
    finish, constraint = None, entry.request.constraint
    if drawn["done"][row]:
      finish = "stop" if drawn["is_end"][row] else "length"
      entry.is_over = True
      if self._running.get(entry.slot) is entry:
        del self._running[entry.slot]
        self._leave(entry)
    elif constraint is not None:
      constraint.advance(entry.ids[-1])
    return Token(
      request=entry.number,
      id=entry.ids[-1],
      log_prob=float(drawn["log_probs"][row]),
      alternatives=tuple(top),
      finish=finish,
    )

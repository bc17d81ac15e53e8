"""Batches of rows from any stream of examples, by any packing.

This joins a stream (`example_stream`, `mixture`, `filtered`, ...), a plan of
the rows (`packing_plan`) and the arrays (`row_arrays`). What remains here is
the batch, the position and the end.
"""

import dataclasses
import functools
import json
from typing import Any

from paxon.inputs import (
  base_input,
  example_source,
  example_stream,
  packing_plan,
  read_ahead,
  row_arrays,
  tokenizer_protocol,
)

_KEYS = {"batches", "data", "position", "waiting"}


@dataclasses.dataclass(kw_only=True, eq=False)
class PackedInput(base_input.BaseInput):
  """Batches of packed rows, endless or as long as the stream.

  A batch holds `inputs`, `targets`, `positions` and `segment_ids` as int32 and
  `weights` as float32, all [per_host_batch_size, length], and every other array
  of the examples. Examples with an encoder bring its arrays, and its
  `encoder_positions` and `encoder_segment_ids`, [.., encoder_length]. Empty
  places have weight 0 and segment 0; at the end of a stream the last batch is
  filled up with them, and `StopIteration` follows.

  The state is the stream's position and what was taken from it and waits for
  room. It does not depend on the size of batches and rows, the way of packing,
  the hosts or the workers: a run that goes on with others reads each example
  once all the same.

  Attributes:
    examples: Where they come from, in which order.
    packing: How they share rows.
    encoder_length: Places of an encoder's row; None without an encoder.
    tokenizer: Of `ids_to_strings`; and its padding fills empty places.
    cut_long_examples: Whether one that is longer than a row is cut off there.
      If not, its rest goes to another row, or, where it cannot (packing NONE,
      or an encoder), it is refused.
    max_waiting: How many examples may wait for room, in FIRST_FIT and BEST_FIT:
      more fill rows better and make the state larger.
    num_workers: How many read examples, ahead of a batch or, where lengths are
      known, those of a host's rows side by side; 0 reads one after another.
      They need an index: of a mixture they leave out the members without one.
    worker_processes: Whether workers are processes instead of threads.
  """

  examples: example_stream.Stream
  packing: packing_plan.Packing = packing_plan.Packing.SPLIT
  encoder_length: int | None = None
  tokenizer: tokenizer_protocol.Tokenizer | None = None
  cut_long_examples: bool = False
  max_waiting: int = 32
  num_workers: int = 0
  worker_processes: bool = False
  _batches: int = dataclasses.field(default=0, init=False, repr=False)
  _position: Any = dataclasses.field(default=None, init=False, repr=False)
  _waiting: list[list[Any]] = dataclasses.field(
    default_factory=list, init=False, repr=False
  )
  # What waits, by its reference: a long example is read for its first batch.
  _kept: dict[str, example_source.Example] = dataclasses.field(
    default_factory=dict, init=False, repr=False
  )
  _workers: read_ahead.Workers | None = dataclasses.field(
    default=None, init=False, repr=False
  )

  def __post_init__(self) -> None:
    super().__post_init__()
    for name, least in (("max_waiting", 1), ("num_workers", 0)):
      if getattr(self, name) < least:
        raise ValueError(
          f"PackedInput.{name} must be at least {least}, got"
          f" {getattr(self, name)}."
        )
    if self.encoder_length is not None and self.encoder_length <= 0:
      raise ValueError(
        "PackedInput.encoder_length must be positive, or None without an"
        f" encoder, got {self.encoder_length}."
      )
    is_split = self.packing is packing_plan.Packing.SPLIT
    if is_split and self.encoder_length is not None:
      raise ValueError(
        "PackedInput.packing SPLIT would part targets from what the encoder"
        " reads; use FIRST_FIT, BEST_FIT or NONE with encoder_length."
      )
    if is_split and self.cut_long_examples:
      raise ValueError(
        "PackedInput.cut_long_examples has no effect with packing SPLIT, where"
        " long examples go on in the next row; leave it False."
      )
    self.reset()

  def get_next(self) -> base_input.Batch:
    """Returns this host's rows of the next batch; see the class.

    Raises:
      StopIteration: The stream has ended.
    """
    self._start_workers()
    cache = dict(self._kept)
    read = functools.partial(self._read, cache)
    position = self._position

    def take() -> packing_plan.Item | None:
      nonlocal position
      found = self.examples.following(position, step=self._batches)
      if found is None:
        return None
      reference, position = found
      return self._item(reference, 0, read)

    plan = packing_plan.make(
      self.packing,
      waiting=[self._item(r, b, read) for r, b in self._waiting],
      take=take,
      num_rows=self.global_batch_size,
      lengths=self._lengths,
      max_waiting=self.max_waiting,
    )
    if not any(plan.rows):
      raise StopIteration
    rows = self._host_plan(plan.rows)
    like = next(row[0].reference for row in plan.rows if row)
    if self._workers is not None:
      self._prepare([like, *(p.reference for row in rows for p in row)], cache)
    batch = row_arrays.fill(
      rows,
      read=read,
      lengths=self._lengths,
      pad_id=0 if self.tokenizer is None else self.tokenizer.pad_id,
      name=self.examples.name,
      like=like,
      scalars=self.packing is packing_plan.Packing.NONE,
    )
    self._batches += 1
    self._position = position
    self._waiting = [[item.reference, item.begin] for item in plan.waiting]
    waiting = {json.dumps(reference) for reference, _ in self._waiting}
    self._kept = {k: v for k, v in cache.items() if k in waiting}
    return batch

  @property
  def is_endless(self) -> bool:
    """Whether the stream is."""
    return self.examples.is_endless

  def required_vocab_size(self) -> int | None:
    """Asks the stream."""
    return self.examples.required_vocab_size()

  def check_readable(self) -> None:
    """Refuses sources that are empty, damaged or not there."""
    self.examples.check_readable()
    if self.num_workers:
      self._indexed_leaves()

  def reset(self) -> None:
    """Goes back to the first batch."""
    self._batches, self._waiting, self._kept = 0, [], {}
    self._position = self.examples.start()

  def get_state(self) -> base_input.State:
    """Returns the position after the last batch, and what it is true of."""
    return {
      "batches": self._batches,
      "position": self._position,
      "waiting": self._waiting,
      "data": self.examples.signature(),
    }

  def set_state(self, state: base_input.State) -> None:
    """Goes to a position that `get_state` returned; reads no example.

    Raises:
      ValueError: The state is damaged or belongs to other data.
    """
    if set(state) != _KEYS:
      raise ValueError(
        f"The state of a PackedInput must have the keys {sorted(_KEYS)}, got"
        f" {sorted(state)}."
      )
    _check_same_data(state["data"], self.examples.signature())
    batches = example_stream.check_place(state["batches"], what="batches")
    for item in state["waiting"]:
      if not isinstance(item, list | tuple) or len(item) != 2:
        raise ValueError(f"The state's waiting is damaged: {item!r}.")
      example_stream.check_place(item[1], what="waiting")
    self.examples.check(state["position"])
    self._batches, self._position = batches, state["position"]
    self._waiting = [list(item) for item in state["waiting"]]
    self._kept = {}

  def documents_between(
    self, before: base_input.State, after: base_input.State
  ) -> list[int] | None:
    """Returns the numbers in the source, if the stream has just one."""
    stream = self.examples
    if not isinstance(stream, example_stream.Examples):
      return None
    waiting = [reference for reference, _ in before["waiting"]]
    numbers = stream.numbers(before["position"], after["position"])
    return list(dict.fromkeys([*waiting, *numbers]))

  def close(self) -> None:
    """Ends the workers; the next batch starts others."""
    if self._workers is not None:
      self.examples.read_ahead_with(None, every=False)
      self._workers.close()
      self._workers = None

  @property
  def _lengths(self) -> packing_plan.Lengths:
    encoder = () if self.encoder_length is None else (self.encoder_length,)
    return (self.length, *encoder)

  def _host_plan(
    self, rows: list[list[packing_plan.Part]]
  ) -> list[list[packing_plan.Part]]:
    start = self.infeed_host_index * self.per_host_batch_size
    return rows[start : start + self.per_host_batch_size]

  def _start_workers(self) -> None:
    if not self.num_workers or self._workers is not None:
      return
    self._workers = read_ahead.Workers(
      num_workers=self.num_workers,
      processes=self.worker_processes,
      sources=[leaf.source for leaf in self._indexed_leaves()],
    )
    # Of an encoder no source knows the length unread.
    every = self.encoder_length is not None
    self.examples.read_ahead_with(self._workers, every=every)

  def _indexed_leaves(self) -> list[example_stream.Examples]:
    """Returns the streams that can be read ahead."""
    leaves = self.examples.leaves()
    found = [x for x in leaves if isinstance(x, example_stream.Examples)]
    if not found:
      kinds = ", ".join(sorted({type(leaf).__name__ for leaf in leaves}))
      raise ValueError(
        f"PackedInput.num_workers is {self.num_workers}, but PackedInput."
        f"examples ({kinds}) has no index by which to read ahead; set it to 0."
      )
    return found

  def _prepare(
    self, references: list[Any], cache: dict[str, example_source.Example]
  ) -> None:
    """Has workers read what is not here yet."""
    unread = {json.dumps(r): r for r in references}
    self.examples.prepare([r for k, r in unread.items() if k not in cache])

  def _read(
    self, cache: dict[str, example_source.Example], reference: Any
  ) -> example_source.Example:
    key = json.dumps(reference)
    if key not in cache:
      cache[key] = self.examples.read(reference)
    return cache[key]

  def _item(
    self, reference: Any, begin: int, read: example_stream.Read
  ) -> packing_plan.Item:
    """Returns what is known of an example's lengths; checks them."""
    places = self.examples.num_places(reference)
    if places is None or self.encoder_length is not None:
      example = read(reference)
      places = example_source.num_places(example)
      encoder = example_source.num_places(example, example_source.ENCODER)
    else:
      encoder = 0
    name = self.examples.name
    if encoder and self.encoder_length is None:
      raise ValueError(
        f"{name(reference)} has encoder_ arrays; set PackedInput.encoder_length"
        " to the places of an encoder's row."
      )
    if not places:
      raise ValueError(
        f"{name(reference)} has no targets: it is empty, or a single token"
        " without a begin_id before it. Filter such examples, or give begin_id."
      )
    if self.cut_long_examples:
      # A state of another packing may have some of it in batches already.
      places = min(places, begin + self.length)
      encoder = min(encoder, self.encoder_length or 0)
    is_whole = (
      self.packing is packing_plan.Packing.NONE
      or self.encoder_length is not None
    )
    for count, most, what in (
      (places - begin, self.length, "length"),
      (encoder, self.encoder_length or 0, "encoder_length"),
    ):
      if is_whole and count > most:
        raise ValueError(
          f"{name(reference)} has {count} places, more than PackedInput.{what}"
          f" ({most}), and cannot be split; make rows longer, filter it, or set"
          " cut_long_examples."
        )
    lengths = (places,) if self.encoder_length is None else (places, encoder)
    return packing_plan.Item(reference=reference, begin=begin, lengths=lengths)


def _check_same_data(saved: Any, here: Any, path: str = "") -> None:
  """Checks that two signatures agree, and names the first difference."""
  if isinstance(saved, dict) and isinstance(here, dict):
    if set(saved) != set(here):
      raise ValueError(
        f"The state was saved with data of {sorted(saved)}, and this input has"
        f" {sorted(here)}{f' in {path}' if path else ''}."
      )
    for key in here:
      _check_same_data(saved[key], here[key], f"{path}.{key}".lstrip("."))
  elif saved != here:
    raise ValueError(
      f"The state was saved with {path} {saved}, and this input has {path}"
      f" {here}: it would read other examples than those that were left."
      " Restore with the same data, or start a new run."
    )

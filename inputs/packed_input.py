"""Batches of packed sequences from any stream of examples, or from documents.

`PackedInput` combines a stream (`example_stream`, `mixture`, `filtered`, ...)
with a packing algorithm (`packing`); `pack_documents` creates one for a source
of text.
"""

import dataclasses
import functools
import itertools
import json
from typing import Any, ClassVar

import numpy as np

from paxon.inputs import base_input, checks, tokenizer_protocol
from paxon.inputs import packing as packing_lib
from paxon.inputs.sources import example_source
from paxon.inputs.streams import example_stream, read_ahead

_KEYS = {"batches", "data", "position", "waiting"}
# Examples without targets that are counted.
_MAX_UNTRAINED = 100_000


@dataclasses.dataclass(kw_only=True, eq=False)
class PackedInput(base_input.BaseInput):
  """Batches of packed sequences, endless or until the stream ends.

  A batch holds `inputs`, `targets`, `positions` and `segment_ids` as int32 and
  `weights` as float32, all [per_host_batch_size, length], and every other array
  of the examples. Examples with an encoder add its arrays,
  `encoder_positions` and `encoder_segment_ids`, [..., encoder_length]. Padding
  has weight 0 and segment 0; it completes the last batch of a finite stream,
  and `StopIteration` follows.

  The state is the position in the stream and the examples that wait for room.
  It is valid for any batch size, length, packing, number of hosts and workers:
  a run that resumes with other ones still reads each example once.

  Attributes:
    examples: The stream of examples.
    packing: The packing algorithm.
    encoder_length: Length of an encoder's sequence; None without an encoder.
    tokenizer: The tokenizer for `ids_to_strings` and the padding id.
    cut_long_examples: Whether to truncate an example that is longer than a
      sequence. If not, its rest goes to another sequence; with packing NONE or
      an encoder it is an error.
    max_waiting: The maximum number of waiting examples in FIRST_FIT and
      BEST_FIT. More reduce padding and enlarge the state.
    num_workers: The number of workers that read examples: ahead of the batch
      or, if lengths are known, those of this host's sequences in parallel. 0
      reads sequentially. Workers do not read sequential sources.
    worker_processes: Whether workers are processes instead of threads.
  """

  examples: example_stream.Stream
  packing: packing_lib.Packing = packing_lib.Packing.SPLIT
  encoder_length: int | None = None
  tokenizer: tokenizer_protocol.Tokenizer | None = None
  cut_long_examples: bool = False
  max_waiting: int = 32
  num_workers: int = 0
  worker_processes: bool = False
  is_resizable: ClassVar[bool] = True
  _batches: int = dataclasses.field(default=0, init=False, repr=False)
  _position: Any = dataclasses.field(default=None, init=False, repr=False)
  _waiting: list[list[Any]] = dataclasses.field(
    default_factory=list, init=False, repr=False
  )
  # Waiting examples by reference, so that each is read once.
  _kept: dict[str, example_source.Example] = dataclasses.field(
    default_factory=dict, init=False, repr=False
  )
  _workers: read_ahead.Workers | None = dataclasses.field(
    default=None, init=False, repr=False
  )
  # Identity of a batch that was read ahead, the batch, and the fields after
  # it.
  _peeked: tuple[Any, base_input.Batch, tuple[Any, ...]] | None = (
    dataclasses.field(default=None, init=False, repr=False)
  )
  # References of the examples without targets, the first one first.
  _untrained: dict[str, None] = dataclasses.field(
    default_factory=dict, init=False, repr=False
  )

  def __post_init__(self) -> None:
    super().__post_init__()
    checks.check_positive(self, "max_waiting", optional=["encoder_length"])
    if self.num_workers < 0:
      raise ValueError(
        f"PackedInput.num_workers must be at least 0, got {self.num_workers}."
      )
    is_split = self.packing is packing_lib.Packing.SPLIT
    if is_split and self.encoder_length is not None:
      raise ValueError(
        "PackedInput.packing SPLIT would separate targets from their encoder's"
        " input; use FIRST_FIT, BEST_FIT or NONE with encoder_length."
      )
    if is_split and self.cut_long_examples:
      raise ValueError(
        "PackedInput.cut_long_examples has no effect with packing SPLIT, where"
        " long examples continue in the next sequence; leave it False."
      )
    self.reset()

  def get_next(self) -> base_input.Batch:
    """Returns this host's sequences of the next batch; see the class.

    Raises:
      StopIteration: The stream has ended.
    """
    if self._peeked is not None:
      key, batch, after = self._peeked
      self._peeked = None
      if key == self._identify():
        self._batches, self._position, self._waiting, self._kept = after
        return batch
    self._start_workers()
    cache = dict(self._kept)
    read = functools.partial(self._read, cache)
    plan, position = self._plan(read)
    if not any(plan.sequences):
      raise StopIteration
    start = self.infeed_host_index * self.per_host_batch_size
    sequences = plan.sequences[start : start + self.per_host_batch_size]
    like = next(segments[0] for segments in plan.sequences if segments)
    if self._workers is not None:
      own = [segment for segments in sequences for segment in segments]
      unread = {json.dumps(s.reference): s.reference for s in [like, *own]}
      self.examples.prepare([r for k, r in unread.items() if k not in cache])
    batch = packing_lib.fill_arrays(
      sequences,
      read=read,
      lengths=self._lengths,
      pad_id=0 if self.tokenizer is None else self.tokenizer.pad_id,
      name=self.examples.name,
      schema_from=like.reference,
      scalars=self.packing is packing_lib.Packing.NONE,
    )
    self._batches += 1
    self._position = position
    self._waiting = [[item.reference, item.begin] for item in plan.waiting]
    waiting = {json.dumps(reference) for reference, _ in self._waiting}
    self._kept = {k: v for k, v in cache.items() if k in waiting}
    return batch

  def _plan(self, read: example_stream.Read) -> tuple[packing_lib.Plan, Any]:
    """Returns the plan of the next batch, and the stream's position after it.

    `read` returns examples, or others of the same lengths.
    """
    position = self._position

    def take() -> packing_lib.Item | None:
      nonlocal position
      found = self.examples.next_example(position, step=self._batches)
      if found is None:
        return None
      reference, position = found
      return self._item(reference, 0, read)

    plan = packing_lib.make_plan(
      self.packing,
      waiting=[self._item(r, b, read) for r, b in self._waiting],
      take=take,
      num_sequences=self.global_batch_size,
      lengths=self._lengths,
      max_waiting=self.max_waiting,
    )
    return plan, position

  def count_batches(self, num_epochs: int) -> int:
    """Returns the number of batches of some epochs of a single source.

    Every example is read once, unless the source knows the lengths.

    Raises:
      ValueError: The input reads a mixture, or a source without random access.
    """
    stream = self.examples
    if not isinstance(stream, example_stream.Examples):
      raise ValueError(
        f"{type(self).__name__}.examples ({type(stream).__name__}) has no known"
        " number of examples."
      )
    finite = dataclasses.replace(
      self, examples=dataclasses.replace(stream, num_epochs=num_epochs)
    )
    if self.packing is packing_lib.Packing.NONE:
      count = num_epochs * len(stream.source)
      return -(-count // self.global_batch_size)
    # The tokens of each example and of its encoder; -1 is not yet known.
    known = np.full((len(stream.source), 2), -1, np.int32)

    def read(reference: int) -> example_source.Example:
      if known[reference, 0] < 0:
        example = finite.examples.read(reference)
        known[reference] = [
          example_source.num_tokens(example, prefix)
          for prefix in ("", example_source.ENCODER)
        ]
      names = ("inputs", f"{example_source.ENCODER}inputs")
      return {
        name: np.broadcast_to(np.int32(0), size)
        for name, size in zip(names, known[reference].tolist(), strict=True)
      }

    for count in itertools.count():
      plan, finite._position = finite._plan(read)
      if not any(plan.sequences):
        return count
      finite._waiting = [[item.reference, item.begin] for item in plan.waiting]
    raise AssertionError

  def peek(self) -> base_input.Batch:
    """Returns the next batch, which `get_next` does not read again."""
    key, before = self._identify(), self.get_state()
    batch = self.get_next()
    # A subclass changes the batch that this class returns.
    if type(self).get_next is PackedInput.get_next:
      after = self._batches, self._position, self._waiting, self._kept
      self._peeked = key, batch, after
    self.set_state(before)
    return dict(batch)

  def _identify(self) -> Any:
    """Returns the state on which the next batch depends."""
    state = self._batches, self._position, self._waiting
    hosts = self.infeed_host_index, self.num_infeed_hosts
    return json.dumps(state), hosts, self.global_batch_size

  @property
  def is_endless(self) -> bool:
    """Whether the stream is endless."""
    return self.examples.is_endless

  def batch_shapes(self) -> base_input.Shapes | None:
    """Returns the shapes if the stream is endless and its dtypes are known."""
    dtypes = self.examples.token_dtypes()
    if (
      dtypes is None
      or not self.is_endless
      # A subclass may add arrays.
      or type(self).get_next is not PackedInput.get_next
    ):
      return None
    int32, float32 = np.dtype(np.int32), np.dtype(np.float32)
    added = {"positions": int32, "segment_ids": int32, "weights": float32}
    shape = self.per_host_batch_size, self.length
    return {key: (shape, dtype) for key, dtype in (dtypes | added).items()}

  def required_vocab_size(self) -> int | None:
    """Returns the stream's `required_vocab_size`."""
    return self.examples.required_vocab_size()

  def check_readable(self) -> None:
    """Raises ValueError if a source is empty, damaged or missing."""
    self.examples.check_readable()
    if self.num_workers:
      self._indexed_leaves()

  @property
  def may_lack_targets(self) -> bool:
    """Whether examples have weights; without them each target counts."""
    dtypes = self.examples.token_dtypes()
    return dtypes is None or not {"weights", "example_weights"}.isdisjoint(
      dtypes
    )

  def find_problem_of_targets(self) -> str | None:
    """Returns a sentence if no example of an epoch has a target."""
    position, first, count = self.examples.start(), "", 0
    while found := self.examples.next_example(position, step=0):
      reference, position = found
      if self._has_target(self.examples.read(reference)):
        return None
      first = first or self.examples.name(reference)
      count += 1
      if self.examples.epoch(position):
        break
    return (
      f"none of the {count:,} examples has a target, so there is nothing to"
      f" train on, such as {first}. Targets that lie behind `length`"
      f" ({self.length}) are cut off: increase it, or use other data."
    )

  def describe_untrained(self) -> str | None:
    """Returns how many of the examples read have no target, and names one."""
    if not self._untrained:
      return None
    count, first = len(self._untrained), next(iter(self._untrained))
    # The first one read, which has no meaning in shuffled data.
    many = "at least " if count >= _MAX_UNTRAINED else ""
    have = "example has" if count == 1 else "examples have"
    return (
      f"{many}{count:,} {have} no target to learn from within `length`"
      f" ({self.length}), such as {self.examples.name(json.loads(first))}"
    )

  def _has_target(self, example: example_source.Example) -> bool:
    length = self.length if self.cut_long_examples else None
    return example_source.has_target(example, length)

  def reset(self) -> None:
    """Returns to the first batch."""
    self._batches, self._waiting, self._kept = 0, [], {}
    self._position = self.examples.start()

  def get_state(self) -> base_input.State:
    """Returns the position after the last batch.

    It has a signature of the data (number of examples, seed, ...), which must
    be the same on restore.
    """
    return {
      "batches": self._batches,
      "position": self._position,
      "waiting": self._waiting,
      "data": self.examples.signature(),
    }

  def set_state(self, state: base_input.State) -> None:
    """Sets a position from `get_state`; reads no example.

    Raises:
      ValueError: The state is damaged or belongs to other data.
    """
    checks.check_keys(self, state, _KEYS)
    _check_same_data(state["data"], self.examples.signature())
    batches = example_stream.check_position(state["batches"], what="batches")
    for item in state["waiting"]:
      if not isinstance(item, list | tuple) or len(item) != 2:
        raise ValueError(f"The state's waiting is damaged: {item!r}.")
      example_stream.check_position(item[1], what="waiting")
    self.examples.check(state["position"])
    self._batches, self._position = batches, state["position"]
    self._waiting = [list(item) for item in state["waiting"]]
    self._kept = {}

  def documents_between(
    self, before: base_input.State, after: base_input.State
  ) -> list[int] | None:
    """Returns the source's document indices, None without a single source."""
    stream = self.examples
    if not isinstance(stream, example_stream.Examples):
      return None
    waiting = [
      reference[0] if isinstance(reference, list) else reference
      for reference, _ in before["waiting"]
    ]
    numbers = stream.numbers(before["position"], after["position"])
    find = functools.partial(example_source.find_document, stream.source)
    return list(dict.fromkeys(map(find, [*waiting, *numbers])))

  def close(self) -> None:
    """Stops the workers; the next batch starts new ones."""
    if self._workers is not None:
      self.examples.set_workers(None, every=False)
      self._workers.close()
      self._workers = None

  @property
  def _lengths(self) -> packing_lib.Lengths:
    encoder = () if self.encoder_length is None else (self.encoder_length,)
    return (self.length, *encoder)

  def _start_workers(self) -> None:
    if not self.num_workers or self._workers is not None:
      return
    self._workers = read_ahead.Workers(
      num_workers=self.num_workers,
      processes=self.worker_processes,
      sources=[leaf.source for leaf in self._indexed_leaves()],
    )
    # The length of an encoder's input requires reading the example.
    every = self.encoder_length is not None
    self.examples.set_workers(self._workers, every=every)

  def _indexed_leaves(self) -> list[example_stream.Examples]:
    """Returns the leaf streams with random access."""
    leaves = self.examples.leaves()
    found = [x for x in leaves if isinstance(x, example_stream.Examples)]
    if not found:
      kinds = ", ".join(sorted({type(leaf).__name__ for leaf in leaves}))
      raise ValueError(
        f"PackedInput.num_workers is {self.num_workers}, but PackedInput."
        f"examples ({kinds}) has no index to read ahead with; set it to 0."
      )
    return found

  def _read(
    self, cache: dict[str, example_source.Example], reference: Any
  ) -> example_source.Example:
    key = json.dumps(reference)
    if key not in cache:
      cache[key] = self.examples.read(reference)
      if (
        not self._has_target(cache[key])
        and len(self._untrained) < _MAX_UNTRAINED
      ):
        self._untrained[key] = None
    return cache[key]

  def _item(
    self, reference: Any, begin: int, read: example_stream.Read
  ) -> packing_lib.Item:
    """Returns an example, or the rest of one, with its checked lengths."""
    count, encoder = self.examples.num_tokens(reference), 0
    if count is None or self.encoder_length is not None:
      example = read(reference)
      count = example_source.num_tokens(example)
      encoder = example_source.num_tokens(example, example_source.ENCODER)
    name = self.examples.name(reference)
    if encoder and self.encoder_length is None:
      raise ValueError(
        f"{name} has encoder_ arrays; set PackedInput.encoder_length to the"
        " length of an encoder's sequence."
      )
    if not count:
      raise ValueError(
        f"{name} has no targets: it is empty, or a single token without a"
        " begin_id before it. Filter such examples, or set begin_id."
      )
    if begin >= count:
      raise ValueError(
        f"The state's waiting is damaged: {name} has {count} targets, and"
        f" {begin} of them are in earlier batches."
      )
    if self.cut_long_examples:
      # A state of another packing may have used some tokens already.
      count = min(count, begin + self.length)
      encoder = min(encoder, self.encoder_length or 0)
    is_whole = (
      self.packing is packing_lib.Packing.NONE
      or self.encoder_length is not None
    )
    for size, limit, field in (
      (count - begin, self.length, "length"),
      (encoder, self.encoder_length or 0, "encoder_length"),
    ):
      if is_whole and size > limit:
        raise ValueError(
          f"{name} has {size} tokens, more than PackedInput.{field} ({limit}),"
          f" and cannot be split; increase {field}, filter long examples, or"
          " set cut_long_examples."
        )
    lengths = (count,) if self.encoder_length is None else (count, encoder)
    return packing_lib.Item(reference=reference, begin=begin, lengths=lengths)


def pack_documents(
  *,
  source: example_source.DocumentSource,
  tokenizer: tokenizer_protocol.Tokenizer,
  global_batch_size: int,
  length: int,
  shuffle_seed: int | None,
  num_epochs: int | None = None,
  chunk_length: int | None = None,
  shuffle_window: int | None = None,
  eval_loop_num_batches: int | None = None,
  reset_for_eval: bool = True,
) -> PackedInput:
  """Returns a language model's input of packed text documents.

  Every byte of every document is a target once in each epoch. Batches also
  have `target_bytes`, the bytes of text of each target, for bits per byte.

  Args:
    source: The documents; listed and read with the first batch.
    tokenizer: The tokenizer.
    global_batch_size: Sequences of a batch over all hosts.
    length: Tokens of a sequence.
    shuffle_seed: Seed of each epoch's order. None keeps the source's order.
    num_epochs: The number of epochs. None is endless.
    chunk_length: See `TokenizedDocuments`: shuffle chunks of documents instead
      of whole ones.
    shuffle_window: Read the source's files in order and shuffle this many
      documents together (`windowed_stream`): for files that are too large to
      be read before the first batch. None shuffles all documents.
    eval_loop_num_batches: See `BaseInput`.
    reset_for_eval: See `BaseInput`.
  """
  if shuffle_window is None:
    examples: example_stream.Stream = example_stream.Examples(
      source=example_source.TokenizedDocuments(
        source=source, tokenizer=tokenizer, chunk_length=chunk_length
      ),
      shuffle_seed=shuffle_seed,
      num_epochs=num_epochs,
    )
  elif chunk_length is not None:
    raise ValueError(
      f"pack_documents: chunk_length ({chunk_length}) is of a shuffle of all"
      f" documents, and shuffle_window is {shuffle_window}; leave out one."
    )
  elif not hasattr(source, "read_shard"):
    raise ValueError(
      f"pack_documents: shuffle_window is {shuffle_window}, and source"
      f" ({type(source).__name__}) has no files to read in order; leave it out."
    )
  else:
    # Most inputs have no windows.
    from paxon.inputs.streams import windowed_stream

    assert isinstance(source, windowed_stream.ShardedDocuments)
    examples = windowed_stream.WindowedDocuments(
      source=source,
      tokenizer=tokenizer,
      shuffle_seed=shuffle_seed,
      shuffle_window=shuffle_window,
      num_epochs=num_epochs,
    )
  return PackedInput(
    examples=examples,
    tokenizer=tokenizer,
    global_batch_size=global_batch_size,
    length=length,
    eval_loop_num_batches=eval_loop_num_batches,
    reset_for_eval=reset_for_eval,
  )


def _check_same_data(saved: Any, here: Any, path: str = "") -> None:
  """Raises ValueError at the first difference between two signatures."""
  if isinstance(saved, dict) and isinstance(here, dict):
    if set(saved) != set(here):
      raise ValueError(
        f"The state was saved with data of {sorted(saved)}, but this input has"
        f" {sorted(here)}{f' in {path}' if path else ''}."
      )
    for key in here:
      _check_same_data(saved[key], here[key], f"{path}.{key}".lstrip("."))
  elif saved != here:
    raise ValueError(
      f"The state was saved with {path} {saved}, but this input has {path}"
      f" {here}, so its position would be another one. Restore with the same"
      " data, or start a new run."
    )

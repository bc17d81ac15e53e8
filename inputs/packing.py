"""Packing of examples into sequences: the plan of a batch, and its arrays.

`make_plan` uses only lengths. Packing is deterministic, in one of four ways:

* SPLIT, concatenate and split: the tokens of all examples, one after the other,
  fill sequence after sequence. An example that does not fit continues in the
  next sequence or batch, as another segment. Only the last batch has padding.
* FIRST_FIT: an example goes to the first sequence with room for all of it, or
  else waits for the next batch. A batch starts with the waiting examples and is
  complete when `max_waiting` examples wait.
* BEST_FIT: the same, but with the sequence with the least sufficient room.
* NONE: one example per sequence.

An example has one length, or two with an encoder. The first three ways split an
example that is longer than a sequence.

`fill_arrays` then makes the arrays. SPLIT of the documents a b and c into two
sequences of four tokens, where 1 begins and 2 ends a document:

    inputs       1 a b 1    c 0 0 0
    targets      a b 2 c    2 0 0 0
    weights      1 1 1 1    1 0 0 0
    positions    0 1 2 0    0 0 0 0
    segment_ids  1 1 1 2    1 0 0 0
"""

from collections.abc import Callable
import dataclasses
import enum
from typing import Any

import numpy as np

from paxon.inputs.sources import example_source

Lengths = tuple[int, ...]

_PREFIXES = ("", example_source.ENCODER)
_PAD_KEYS = ("inputs", "targets")


class Packing(enum.Enum):
  """The packing algorithm; see the module."""

  SPLIT = "split"
  FIRST_FIT = "first_fit"
  BEST_FIT = "best_fit"
  NONE = "none"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Item:
  """An example, or the rest of one, that is not yet in a batch.

  Attributes:
    reference: The reference of the example.
    begin: The number of its tokens in earlier batches or segments.
    lengths: The number of its tokens, and of its encoder's if it has one.
  """

  reference: Any
  begin: int
  lengths: Lengths


@dataclasses.dataclass(frozen=True, kw_only=True)
class Segment:
  """Tokens [begin, end) of an example in a sequence, and its whole encoder."""

  reference: Any
  begin: int
  end: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
  """The sequences of one batch.

  Attributes:
    sequences: The segments of each sequence, in order.
    waiting: The items taken that are not in the batch, in order.
  """

  sequences: list[list[Segment]]
  waiting: list[Item]


def make_plan(
  packing: Packing,
  *,
  waiting: list[Item],
  take: Callable[[], Item | None],
  num_sequences: int,
  lengths: Lengths,
  max_waiting: int,
) -> Plan:
  """Plans a batch; its sequences are all empty if nothing is left.

  Args:
    packing: The packing algorithm.
    waiting: The items that come first.
    take: Returns the next item, or None at the end.
    num_sequences: The size of the batch.
    lengths: The length of a sequence, and of an encoder's if there is one.
    max_waiting: See the module; for FIRST_FIT and BEST_FIT.
  """
  queue = list(waiting)

  def pop() -> Item | None:
    return queue.pop(0) if queue else take()

  if packing is Packing.SPLIT:
    sequences, rest = _split(pop, num_sequences, lengths[0])
    return Plan(sequences=sequences, waiting=rest + queue)
  if packing is Packing.NONE:
    sequences = [[] for _ in range(num_sequences)]
    for sequence in sequences:
      if (item := pop()) is None:
        break
      sequence.append(_segment(item, item.lengths[0]))
    return Plan(sequences=sequences, waiting=queue)
  fit = _Fit(num_sequences, lengths, is_best=packing is Packing.BEST_FIT)
  for item in queue:
    fit.place(item)
  while len(fit.waiting) < max_waiting and fit.free[:, 0].any():
    if (item := take()) is None:
      break
    fit.place(item)
  return Plan(sequences=fit.sequences, waiting=fit.waiting)


def fill_arrays(
  sequences: list[list[Segment]],
  *,
  read: Callable[[Any], example_source.Example],
  lengths: Lengths,
  pad_id: int,
  name: Callable[[Any], str],
  schema_from: Any,
  scalars: bool,
) -> dict[str, np.ndarray]:
  """Returns the arrays of planned sequences.

  Args:
    sequences: The segments of each sequence.
    read: Returns the example of a reference.
    lengths: The length of a sequence, and of an encoder's if there is one.
    pad_id: Padding of `inputs` and `targets`.
    name: Returns the name of an example for messages.
    schema_from: Reference of an example whose keys all others must have.
    scalars: Whether to include arrays without dimensions; there is one example
      per sequence then.

  Returns:
    Arrays [B, length] or [B, encoder length], and [B] of scalars. Integers are
    int32, other numbers and all `weights` float32.

  Raises:
    ValueError: `inputs` or `targets` are missing, an example has other keys or
      another kind of array, or an integer exceeds int32.
  """
  first = read(schema_from)
  _check_keys(first, name(schema_from), scalars=scalars)
  batch = _make_padding(first, len(sequences), lengths, pad_id)
  for number, segments in enumerate(sequences):
    starts = [0] * len(lengths)
    for segment_id, segment in enumerate(segments, start=1):
      example = read(segment.reference)
      if example.keys() != first.keys():
        raise ValueError(
          f"{name(segment.reference)} has the arrays {sorted(example)}, but"
          f" {name(schema_from)} has {sorted(first)}; all examples of an input"
          " must have the same arrays."
        )
      for key, value in example.items():
        if problem := _find_problem(key, value, first[key]):
          raise ValueError(f"{name(segment.reference)}: {key!r} {problem}")
        if scalars and not value.ndim:
          batch[key][number] = value[()]
      for i, (prefix, length) in enumerate(
        zip(_PREFIXES, lengths, strict=False)
      ):
        begin, end = segment.begin, segment.end
        if prefix:
          begin = 0
          end = min(example_source.num_tokens(example, prefix), length)
        where = number, slice(starts[i], starts[i] + end - begin)
        _write(batch, where, example, prefix, segment_id, begin, end)
        starts[i] += end - begin
  return batch


def _segment(item: Item, end: int) -> Segment:
  return Segment(reference=item.reference, begin=item.begin, end=end)


def _split(
  pop: Callable[[], Item | None], num_sequences: int, length: int
) -> tuple[list[list[Segment]], list[Item]]:
  """Returns the segments of each sequence, and the rest of the last example."""
  sequences: list[list[Segment]] = [[] for _ in range(num_sequences)]
  number, free = 0, length
  while number < num_sequences and (item := pop()) is not None:
    begin, total = item.begin, item.lengths[0]
    while begin < total:
      if number == num_sequences:
        return sequences, [dataclasses.replace(item, begin=begin)]
      end = min(total, begin + free)
      sequences[number].append(
        Segment(reference=item.reference, begin=begin, end=end)
      )
      free -= end - begin
      begin = end
      if not free:
        number, free = number + 1, length
  return sequences, []


class _Fit:
  """Sequences with room for whole examples, for FIRST_FIT and BEST_FIT."""

  def __init__(
    self, num_sequences: int, lengths: Lengths, *, is_best: bool
  ) -> None:
    self.sequences: list[list[Segment]] = [[] for _ in range(num_sequences)]
    self.free = np.tile(np.asarray(lengths, np.int64), (num_sequences, 1))
    self.waiting: list[Item] = []
    self._length = lengths[0]
    self._is_best = is_best

  def place(self, item: Item) -> None:
    """Adds an item to the sequences; what does not fit waits."""
    while item.begin < item.lengths[0]:
      count = min(item.lengths[0] - item.begin, self._length)
      need = np.array([count, *item.lengths[1:]])
      fits = (self.free >= need).all(axis=1)
      if not fits.any():
        self.waiting.append(item)
        return
      room = np.where(fits, self.free[:, 0], self._length + 1)
      number = int(room.argmin() if self._is_best else fits.argmax())
      self.sequences[number].append(_segment(item, item.begin + count))
      self.free[number] -= need
      item = dataclasses.replace(item, begin=item.begin + count)


def _write(
  batch: dict[str, np.ndarray],
  where: tuple[int, slice],
  example: example_source.Example,
  prefix: str,
  segment_id: int,
  begin: int,
  end: int,
) -> None:
  """Writes tokens [begin, end) of an example, or of its encoder."""
  for key, value in example.items():
    if value.ndim and key.startswith(example_source.ENCODER) == bool(prefix):
      batch[key][where] = value[begin:end]
  batch[prefix + "positions"][where] = np.arange(end - begin, dtype=np.int32)
  batch[prefix + "segment_ids"][where] = segment_id
  if not prefix and "weights" not in example:
    batch["weights"][where] = 1


def _make_padding(
  example: example_source.Example,
  num_sequences: int,
  lengths: Lengths,
  pad_id: int,
) -> dict[str, np.ndarray]:
  """Returns the arrays of a batch of padding, with the example's keys."""
  batch: dict[str, np.ndarray] = {}
  for key, value in example.items():
    if not value.ndim:
      batch[key] = np.zeros(num_sequences, _to_dtype(key, value))
      continue
    length = lengths[key.startswith(example_source.ENCODER)]
    is_token = key.removeprefix(example_source.ENCODER) in _PAD_KEYS
    batch[key] = np.full(
      (num_sequences, length, *value.shape[1:]),
      pad_id if is_token else 0,
      _to_dtype(key, value),
    )
  # Last, so that errors about shapes name `inputs` first.
  for prefix, length in zip(_PREFIXES, lengths, strict=False):
    for key in ("positions", "segment_ids"):
      zeros = np.zeros((num_sequences, length), np.int32)
      batch.setdefault(prefix + key, zeros)
  weights = np.zeros((num_sequences, lengths[0]), np.float32)
  batch.setdefault("weights", weights)
  return batch


def _to_dtype(key: str, value: np.ndarray) -> np.dtype:
  if key == "weights":
    return np.dtype(np.float32)
  kinds = {"i": np.int32, "u": np.int32, "f": np.float32, "b": bool}
  return np.dtype(kinds.get(value.dtype.kind, object))


def _check_keys(
  example: example_source.Example, name: str, *, scalars: bool
) -> None:
  for key in ("inputs", "targets"):
    if key not in example:
      raise ValueError(
        f"{name} must have the array {key!r}, got {sorted(example)}."
      )
  for key, value in example.items():
    if not value.ndim and not scalars:
      raise ValueError(
        f"{name}: {key!r} has no dimensions, so it describes the example and"
        " not a token; this needs packing NONE, one example per sequence."
      )


def _find_problem(key: str, value: np.ndarray, like: np.ndarray) -> str | None:
  """Returns the error of an array that does not match another, or None."""
  dtype = _to_dtype(key, value)
  if (dtype, value.ndim, value.shape[1:]) != (
    _to_dtype(key, like),
    like.ndim,
    like.shape[1:],
  ):
    return (
      f"is {value.dtype} {list(value.shape)}, but {like.dtype}"
      f" {list(like.shape)} in another example; kinds and inner shapes must"
      " agree."
    )
  # Skipped for int32, the usual dtype.
  if dtype == np.int32 and value.size and not np.can_cast(value.dtype, dtype):
    low, high = int(value.min()), int(value.max())
    if low < -(2**31) or high >= 2**31:
      return f"has values from {low} to {high}, which exceed int32."
  return None

"""`BaseInput`, what the training loop knows of an input pipeline.

An input returns one batch after another, a plain `dict[str, np.ndarray]`, and
can name the place it has reached, so that a restored run reads on from there.
Three rules hold for every subclass:

* Batch number k has the same bytes on any number of hosts. A host returns its
  rows of that global batch, `[index * B / n, (index + 1) * B / n)`.
* The state is small, can be written as JSON, is the same on every host, and
  says what comes after the last batch that was returned.
* Restoring a state does not read again what came before it.

The tokenizer, the source and the packing are parts of a subclass; prefetching
and moving rows to devices belong to the runner and to sharding.
"""

import abc
from collections.abc import Iterator, Mapping, Sequence
import dataclasses
from typing import Any

import numpy as np

Batch = dict[str, np.ndarray]
# By the key of a batch: shape and dtype of its array.
Shapes = dict[str, tuple[tuple[int, ...], np.dtype]]
# Arrays on devices are indexed by int32.
_TOO_LARGE = 2**31
# What JSON can hold.
State = dict[str, Any]


def is_end(error: BaseException) -> bool:
  """Whether an exception of `get_next` says that the input has ended.

  It does if it is `StopIteration`, or TensorFlow's `OutOfRangeError`, which an
  input over TensorFlow's iterators may let through; that one is known by its
  name, so that nobody has to import TensorFlow to ask.
  """
  return isinstance(error, StopIteration) or any(
    c.__name__ == "OutOfRangeError" and c.__module__.startswith("tensorflow.")
    for c in type(error).__mro__
  )


@dataclasses.dataclass(kw_only=True, eq=False)
class BaseInput(abc.ABC):
  """One batch after another, from any position.

  A subclass is a keyword-only dataclass too. It may extend another input by
  overriding `get_next`, calling `super().get_next()` and editing the rows; the
  state keeps working, because it is about the position only.

  Attributes:
    global_batch_size: Rows of one batch over all hosts together.
    length: Tokens of a row.
    eval_loop_num_batches: How many batches one evaluation reads. `None` is all
      of one epoch, until the input ends.
    reset_for_eval: Whether each evaluation begins at the first batch. If not,
      it goes on after the one before, also in a run that goes on, and from the
      first batch again where the input ends; that needs
      `eval_loop_num_batches`.
    infeed_host_index: Which host's rows `get_next` returns.
    num_infeed_hosts: Over how many hosts the rows of a batch are spread.
  """

  global_batch_size: int
  length: int
  eval_loop_num_batches: int | None = None
  reset_for_eval: bool = True
  infeed_host_index: int = dataclasses.field(default=0, init=False)
  num_infeed_hosts: int = dataclasses.field(default=1, init=False)

  def __post_init__(self) -> None:
    for name in ("global_batch_size", "length"):
      value = getattr(self, name)
      if value <= 0:
        raise ValueError(
          f"{type(self).__name__}.{name} must be positive, got {value}."
        )
      if value >= _TOO_LARGE:
        raise ValueError(
          f"{type(self).__name__}.{name} must be less than 2**31, got {value}."
        )
    number = self.eval_loop_num_batches
    if number is not None and number <= 0:
      raise ValueError(
        f"{type(self).__name__}.eval_loop_num_batches must be positive, or None"
        f" for a whole epoch, got {number}."
      )
    if number is None and not self.reset_for_eval:
      raise ValueError(
        f"{type(self).__name__}.reset_for_eval is False, so each evaluation"
        " goes on where the one before ended; eval_loop_num_batches must say"
        " after how many batches that is. A whole epoch begins at its first"
        " batch: leave reset_for_eval True for it."
      )

  @property
  def is_endless(self) -> bool:
    """Whether `get_next` is known never to end.

    Such an input evaluates only with `eval_loop_num_batches`.
    """
    return False

  def required_vocab_size(self) -> int | None:
    """Returns what a model's vocabulary must have at least.

    All ids are below it; `None`, the default, is an input that cannot say.
    """
    return None

  @abc.abstractmethod
  def get_next(self) -> Batch:
    """Returns this host's rows of the next batch.

    Raises:
      StopIteration: A finite input has ended; it stays so until `reset`, or
        until a state is set. All hosts end after the same number of batches.
    """

  def batch_shapes(self) -> Shapes | None:
    """Returns shape and dtype of this host's arrays, if known without reading.

    None, the default, has the runner read one batch to learn them.
    """
    return None

  def check_readable(self) -> None:  # noqa: B027
    """Raises ValueError if `get_next` is bound to fail.

    A program that reads calls it before it computes anything; one that only
    wants to know shapes does not.
    """

  def close(self) -> None:  # noqa: B027
    """Ends the threads and processes that read ahead, if there are any.

    A program calls it when it has read what it wants. The position stays, and
    another batch may be asked for.
    """

  def peek(self) -> Batch:
    """Returns what `get_next` would, and stays where it is.

    Raises:
      StopIteration: A finite input has ended.
    """
    state = self.get_state()
    try:
      return self.get_next()
    finally:
      self.set_state(state)

  def ids_to_strings(
    self,
    ids: np.ndarray,
    lengths: Sequence[int] | np.ndarray,
    key: str | None = None,
  ) -> list[str]:
    """Returns the texts of rows of ids, by the input's `tokenizer`.

    Args:
      ids: [B, T] integers.
      lengths: [B], how many ids of each row count.
      key: Of which array of a batch they are, for an input whose arrays have
        tokenizers of their own.

    Raises:
      ValueError: The input has no tokenizer.
    """
    del key
    tokenizer = getattr(self, "tokenizer", None)
    if tokenizer is None:
      raise ValueError(
        f"{type(self).__name__} has no tokenizer, so ids have no text; give it"
        " one, or override ids_to_strings."
      )
    return [
      tokenizer.decode(row[:length])
      for row, length in zip(ids, lengths, strict=True)
    ]

  @abc.abstractmethod
  def reset(self) -> None:
    """Goes back to the first batch."""

  @abc.abstractmethod
  def get_state(self) -> State:
    """Returns the position after the last batch that was returned."""

  @abc.abstractmethod
  def set_state(self, state: State) -> None:
    """Goes to a position that `get_state` returned.

    Args:
      state: It may come from a run on another number of hosts.

    Raises:
      ValueError: The state is damaged or belongs to other data.
    """

  def documents_between(self, before: State, after: State) -> list[int] | None:
    """Returns the numbers of the documents between two positions, if known.

    It changes nothing, so that it may be asked while a thread reads batches.

    Args:
      before: What `get_state` returned.
      after: What it returned later.
    """
    del before, after

  @property
  def per_host_batch_size(self) -> int:
    """The rows that one call of `get_next` returns."""
    return self.global_batch_size // self.num_infeed_hosts

  def set_infeed_hosts(
    self, *, infeed_host_index: int, num_infeed_hosts: int
  ) -> None:
    """Chooses the rows of this host; the runner calls it, once, at the start.

    Args:
      infeed_host_index: The place of this host, from 0.
      num_infeed_hosts: How many hosts share each batch.

    Raises:
      ValueError: There is no such host, or the batch cannot be divided.
    """
    if num_infeed_hosts <= 0:
      raise ValueError(
        f"num_infeed_hosts must be positive, got {num_infeed_hosts}."
      )
    if not 0 <= infeed_host_index < num_infeed_hosts:
      raise ValueError(
        f"infeed_host_index must be at least 0 and less than num_infeed_hosts"
        f" ({num_infeed_hosts}), got {infeed_host_index}."
      )
    if self.global_batch_size % num_infeed_hosts:
      raise ValueError(
        f"{type(self).__name__}.global_batch_size ({self.global_batch_size})"
        f" must be a multiple of the number of infeed hosts"
        f" ({num_infeed_hosts})."
      )
    self.infeed_host_index = infeed_host_index
    self.num_infeed_hosts = num_infeed_hosts

  def host_rows(self, batch: Mapping[str, np.ndarray]) -> Batch:
    """Returns this host's rows of a global batch, for use in `get_next`.

    Args:
      batch: Arrays of `global_batch_size` rows each.
    """
    for key, value in batch.items():
      if value.shape[:1] != (self.global_batch_size,):
        raise ValueError(
          f"The array {key!r} of a global batch must have"
          f" {self.global_batch_size} rows (global_batch_size), got the shape"
          f" {value.shape}."
        )
    start = self.infeed_host_index * self.per_host_batch_size
    rows = slice(start, start + self.per_host_batch_size)
    return {key: value[rows] for key, value in batch.items()}

  def __iter__(self) -> Iterator[Batch]:
    """Iterates from the position reached, without going back first."""
    return self

  def __next__(self) -> Batch:
    return self.get_next()

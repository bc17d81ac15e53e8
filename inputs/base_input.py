"""`BaseInput`, the interface between an input pipeline and the training loop.

An input returns batches, plain `dict[str, np.ndarray]`, and a state from which
a resumed run continues. Three rules hold for every subclass:

* Batch k has the same bytes on any number of hosts. A host returns sequences
  `[index * B / n, (index + 1) * B / n)` of that global batch.
* The state is small, JSON, the same on every host, and describes the position
  after the last batch that was returned.
* Setting a state does not read the data before it.

Prefetching and transfers to devices belong to the runner and to sharding.
"""

import abc
from collections.abc import Iterator, Mapping, Sequence
import dataclasses
from typing import Any, ClassVar

import numpy as np

from paxon.inputs import checks, tokenizer_protocol

Batch = dict[str, np.ndarray]
# By the key of a batch: shape and dtype of its array.
Shapes = dict[str, tuple[tuple[int, ...], np.dtype]]
# JSON values.
State = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExampleView:
  """An example of a batch to look at or listen to, in a report.

  Attributes:
    caption: Description of one line.
    image: Pixels, uint8 [H,W], or [H,W,C] with 1 or 3 channels, or None.
    audio: Samples from -1 to 1, [N], or None.
    sample_rate: Samples of the audio per second.
  """

  caption: str
  image: np.ndarray | None = None
  audio: np.ndarray | None = None
  sample_rate: int = 16_000


def is_end(error: BaseException) -> bool:
  """Returns whether an exception of `get_next` means the end of the input.

  These are `StopIteration`, and TensorFlow's `OutOfRangeError`, recognized by
  name so that TensorFlow need not be imported.
  """
  return isinstance(error, StopIteration) or any(
    c.__name__ == "OutOfRangeError" and c.__module__.startswith("tensorflow.")
    for c in type(error).__mro__
  )


@dataclasses.dataclass(kw_only=True, eq=False)
class BaseInput(abc.ABC):
  """An iterator of batches with positions.

  A subclass is a keyword-only dataclass. It may extend another input by editing
  the result of `super().get_next()` in `get_next`.

  Attributes:
    global_batch_size: Sequences of a batch over all hosts.
    length: Tokens of a sequence.
    eval_loop_num_batches: Number of batches of an evaluation. `None` reads
      until the input ends.
    reset_for_eval: Whether each evaluation starts at the first batch. If not,
      it continues after the previous one, also in a resumed run, and wraps
      around at the end; this requires `eval_loop_num_batches`.
    infeed_host_index: The host whose sequences `get_next` returns.
    num_infeed_hosts: The number of hosts that share a batch.
    is_resizable: Whether positions are the same for any batch size.
  """

  global_batch_size: int
  length: int
  eval_loop_num_batches: int | None = None
  reset_for_eval: bool = True
  infeed_host_index: int = dataclasses.field(default=0, init=False)
  num_infeed_hosts: int = dataclasses.field(default=1, init=False)
  is_resizable: ClassVar[bool] = False

  def __post_init__(self) -> None:
    checks.check_positive(
      self,
      "global_batch_size",
      "length",
      optional=["eval_loop_num_batches"],
    )
    for name, size in checks.get_values(self, "global_batch_size", "length"):
      # Arrays on devices are indexed by int32.
      if size >= 2**31:
        raise ValueError(
          f"{type(self).__name__}.{name} must be less than 2**31, got {size}."
        )
    if self.eval_loop_num_batches is None and not self.reset_for_eval:
      raise ValueError(
        f"{type(self).__name__}.reset_for_eval=False requires"
        " eval_loop_num_batches, the number of batches of each evaluation;"
        " leave reset_for_eval True to evaluate a whole epoch."
      )

  @property
  def is_endless(self) -> bool:
    """Whether `get_next` never ends; evaluation needs a number of batches."""
    return False

  @property
  def unit(self) -> str:
    """Unit of the loss's weight in messages, such as "images".

    Metrics have its rate, `<unit>_per_second`.
    """
    return "tokens"

  def required_vocab_size(self) -> int | None:
    """Returns a bound above all ids, or None, the default, if unknown."""
    return None

  @abc.abstractmethod
  def get_next(self) -> Batch:
    """Returns this host's sequences of the next batch.

    Raises:
      StopIteration: A finite input has ended; it stays so until `reset`, or
        until a state is set. All hosts end after the same number of batches.
    """

  def batch_shapes(self) -> Shapes | None:
    """Returns the shapes and dtypes of this host's arrays.

    With None, the default, the runner reads a batch to find them.
    """
    return None

  def check_readable(self) -> None:  # noqa: B027
    """Raises ValueError if `get_next` is bound to fail.

    Called by programs that read, before they compute anything.
    """

  def count_batches(self, num_epochs: int) -> int:
    """Returns the number of batches of some epochs, the last one not full.

    Raises:
      ValueError: The number of examples is not known.
    """
    del num_epochs
    raise ValueError(f"{type(self).__name__} has no known number of examples.")

  @property
  def may_lack_targets(self) -> bool:
    """Whether a batch may have no target, a token with a weight.

    False lets a training step leave out what such a batch needs.
    """
    return True

  def find_problem_of_targets(self) -> str | None:  # noqa: B027
    """Returns a sentence if no example has a target: a token with a weight.

    Called before training and evaluation. Reads up to the first example that
    has one. None, the default, for no problem.
    """

  def describe_untrained(self) -> str | None:  # noqa: B027
    """Returns how many of the examples read have no target, and the first.

    by default None.
    """

  def peek(self) -> Batch:
    """Returns the batch that `get_next` returns next; the position stays.

    Raises:
      StopIteration: The input has no further batch.
    """
    position = self.get_state()
    batch = self.get_next()
    self.set_state(position)
    return batch

  def view_example(
    self,
    batch: Mapping[str, np.ndarray],
    index: int,
    predicted: Mapping[str, np.ndarray],
  ) -> ExampleView | None:
    """Returns a view of an example for reports; by default None.

    Args:
      batch: A batch of this input.
      index: Index of the example.
      predicted: Results of the model's `predict` for the batch; empty if it has
        no such method.
    """
    del batch, index, predicted

  def close(self) -> None:  # noqa: B027
    """Ends threads and processes that read ahead; the position stays."""

  def find_tokenizer(self) -> tokenizer_protocol.Tokenizer | None:
    """Returns the field `tokenizer`, None for an input without one."""
    return getattr(self, "tokenizer", None)

  def ids_to_strings(
    self,
    ids: np.ndarray,
    lengths: Sequence[int] | np.ndarray,
    key: str | None = None,
  ) -> list[str]:
    """Decodes sequences [B, T] with lengths [B] by the input's `tokenizer`.

    `key` is the array of a batch that they are from, for an input with several
    tokenizers.

    Raises:
      ValueError: The input has no tokenizer.
    """
    del key
    tokenizer = self.find_tokenizer()
    if tokenizer is None:
      raise ValueError(
        f"{type(self).__name__} has no tokenizer to decode ids; set one, or"
        " override ids_to_strings."
      )
    return [
      tokenizer.decode(row[:length])
      for row, length in zip(ids, lengths, strict=True)
    ]

  @abc.abstractmethod
  def reset(self) -> None:
    """Returns to the first batch."""

  @abc.abstractmethod
  def get_state(self) -> State:
    """Returns the position after the last batch that was returned."""

  @abc.abstractmethod
  def set_state(self, state: State) -> None:
    """Sets a position from `get_state`, possibly on another number of hosts.

    Raises:
      ValueError: The state is damaged or belongs to other data.
    """

  def documents_between(self, before: State, after: State) -> list[int] | None:
    """Returns the numbers of the documents between two states, if known.

    Thread-safe: it may be called while another thread reads batches.
    """
    del before, after

  @property
  def per_host_batch_size(self) -> int:
    """The number of sequences that `get_next` returns."""
    return self.global_batch_size // self.num_infeed_hosts

  def set_global_batch_size(self, size: int) -> None:
    """Sets the size of the batches that follow; the position stays.

    Raises:
      ValueError: Positions depend on the size, or hosts cannot share it.
    """
    if not self.is_resizable:
      raise ValueError(
        f"{type(self).__name__} has positions that depend on its batch size, so"
        " the size cannot change."
      )
    if size <= 0 or size % self.num_infeed_hosts:
      raise ValueError(
        f"{type(self).__name__}.global_batch_size must be a positive multiple"
        f" of the number of infeed hosts ({self.num_infeed_hosts}), got {size}."
      )
    self.global_batch_size = size

  def set_infeed_hosts(
    self, *, infeed_host_index: int, num_infeed_hosts: int
  ) -> None:
    """Selects this host's sequences; called once, at the start.

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
    """Returns this host's sequences of a batch [global_batch_size, ...]."""
    for key, value in batch.items():
      if value.shape[:1] != (self.global_batch_size,):
        raise ValueError(
          f"The array {key!r} of a global batch must have the first dimension"
          f" global_batch_size ({self.global_batch_size}), got the shape"
          f" {value.shape}."
        )
    start = self.infeed_host_index * self.per_host_batch_size
    rows = slice(start, start + self.per_host_batch_size)
    return {key: value[rows] for key, value in batch.items()}

  def __iter__(self) -> Iterator[Batch]:
    """Iterates from the current position."""
    return self

  def __next__(self) -> Batch:
    return self.get_next()

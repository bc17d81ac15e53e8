"""Batches of a generator that can only be asked for the next ones.

Such a generator, Lingvo's are the model, has a method
`GetPreprocessedInputBatch()` that returns arrays or tensors [rows, ...], maybe
nested, and ends by `StopIteration` or TensorFlow's OutOfRange. Its batches may
have another number of rows than ours: rows are passed on one after another.

It knows no position. One that gives the same rows each time it is opened is
`repeatable`: a run goes on by reading what it has read again. One that does not
is opened anew, and each host has one of its own.
"""

from collections.abc import Callable, Iterator, Mapping
import dataclasses
import itertools
from typing import Any

import numpy as np

from paxon.inputs import base_input

# What language models of Pax call their arrays.
_NAMES = {
  "ids": "inputs",
  "labels": "targets",
  "segment_pos": "positions",
}
_KEYS = {"batches", "repeatable"}
Row = dict[str, np.ndarray]


def paxon_names(batch: Mapping[str, np.ndarray]) -> base_input.Batch:
  """Returns a batch of Pax's language models by our names.

  Args:
    batch: `ids`, `labels`, `segment_pos`, `paddings` and others, which pass
      unchanged. Without `weights` they are 1 where there is no padding.
  """
  renamed = {_NAMES.get(key, key): value for key, value in batch.items()}
  paddings = renamed.pop("paddings", None)
  if paddings is not None and "weights" not in renamed:
    renamed["weights"] = (1 - paddings).astype(np.float32)
  return renamed


@dataclasses.dataclass(kw_only=True, eq=False)
class GeneratorInput(base_input.BaseInput):
  """A generator's rows in batches of our size.

  Pax has four classes for what are fields here: the adaptor itself, one with a
  new batch size (`global_batch_size`), one for evaluation (`num_samples`) and
  its lazy form (`keep_rows=False`).

  Attributes:
    open: Returns a new generator; see `LingvoGenerator`.
    repeatable: Whether each one gives the same rows in the same order.
    num_samples: How many rows there are to evaluate; then the input ends after
      them, the last batch is filled up with rows of zeros, and
      `example_weights` float32 [B] says which these are. None has no such end.
    num_batches: After how many batches the input ends; None is never, or where
      the generator does. Then, without `num_samples`, its last rows are left
      out if they do not fill a batch. Of several hosts that read generators of
      their own none may end earlier, as others might not.
    keep_rows: Whether rows of an evaluation are held after they were read once,
      so that the next one reads nothing.
    convert: Makes our batch of the generator's.
  """

  open: Callable[[], Any]
  repeatable: bool = False
  num_samples: int | None = None
  num_batches: int | None = None
  keep_rows: bool = True
  convert: Callable[[Mapping[str, np.ndarray]], base_input.Batch] = paxon_names
  _batches: int = dataclasses.field(default=0, init=False, repr=False)
  _rows: Iterator[Row] | None = dataclasses.field(
    default=None, init=False, repr=False
  )
  _kept: list[Row] | None = dataclasses.field(
    default=None, init=False, repr=False
  )

  def __post_init__(self) -> None:
    super().__post_init__()
    for name in ("num_samples", "num_batches"):
      value = getattr(self, name)
      if value is not None and value <= 0:
        raise ValueError(
          f"GeneratorInput.{name} must be positive, or None, got {value}."
        )
    seed = getattr(self.open, "file_random_seed", 0)
    if seed and not self.repeatable and self.num_samples is None:
      raise ValueError(
        f"GeneratorInput.open has the fixed file_random_seed {seed}: a run that"
        " was stopped would train on the same rows again. Set it to 0, or set"
        " repeatable, which goes on after them by reading them again."
      )

  def get_next(self) -> base_input.Batch:
    """Returns this host's rows of the next batch.

    Raises:
      StopIteration: There is no more.
      ValueError: This host's own generator has ended, and others may go on.
    """
    # A run may go on with fewer batches than it has read already.
    if self.num_batches is not None and self._batches >= self.num_batches:
      raise StopIteration
    if self._rows is None:
      self._rows = self._open_rows()
    wanted = (
      self.global_batch_size if self._is_shared else self.per_host_batch_size
    )
    rows = list(itertools.islice(self._rows, wanted))
    if not rows or (len(rows) < wanted and self.num_samples is None):
      self._check_others()
      raise StopIteration
    batch = {k: np.stack([row[k] for row in rows]) for k in rows[0]}
    if self.num_samples is not None:
      batch = _filled(batch, wanted)
    self._batches += 1
    return self.host_rows(batch) if self._is_shared else batch

  @property
  def is_endless(self) -> bool:
    """Whether neither a number of samples nor of batches is given."""
    return self.num_samples is None and self.num_batches is None

  def reset(self) -> None:
    """Goes back to the first row; opens another generator."""
    self._batches, self._rows = 0, None

  def get_state(self) -> base_input.State:
    """Returns how many batches have been read."""
    return {"batches": self._batches, "repeatable": self._is_shared}

  def set_state(self, state: base_input.State) -> None:
    """Goes on after some batches; see the module for what that means.

    Raises:
      ValueError: The state is damaged, or of a generator of another kind.
    """
    number = state.get("batches")
    if (
      set(state) != _KEYS
      or not isinstance(number, int)
      or isinstance(number, bool)
      or number < 0
    ):
      raise ValueError(
        "The state of a GeneratorInput must have the number `batches` and"
        f" `repeatable`, got {state!r}."
      )
    if state["repeatable"] != self._is_shared:
      raise ValueError(
        f"The state was saved with repeatable {state['repeatable']}, and this"
        f" input has repeatable {self._is_shared}; rows would be lost or read"
        " twice."
      )
    self.reset()
    if self._is_shared and number:
      self._rows = self._open_rows()
      skipped = number * self.global_batch_size
      self._rows = itertools.islice(self._rows, skipped, None)
    self._batches = number

  @property
  def _is_shared(self) -> bool:
    """Whether all hosts read the same rows, and take theirs of them."""
    return self.repeatable or self.num_samples is not None

  def _check_others(self) -> None:
    if self._is_shared or self.num_infeed_hosts == 1:
      return
    raise ValueError(
      f"The generator of host {self.infeed_host_index} of"
      f" {self.num_infeed_hosts} ended after {self._batches} batches; those of"
      " others may end elsewhere, as GeneratorInput.repeatable is False. Set"
      " repeatable, or num_batches to what every host has."
    )

  def _open_rows(self) -> Iterator[Row]:
    if self.num_samples is None:
      return self._read()
    if self._kept is not None:
      return iter(self._kept)
    rows = self._samples(self.num_samples)
    if not self.keep_rows:
      return rows
    self._kept = list(rows)
    return iter(self._kept)

  def _samples(self, number: int) -> Iterator[Row]:
    count = 0
    for row in itertools.islice(self._read(), number):
      yield row
      count += 1
    if count < number:
      raise ValueError(
        f"GeneratorInput.num_samples is {number}, and the generator ended after"
        f" {count} rows."
      )

  def _read(self) -> Iterator[Row]:
    """Yields the rows of a new generator."""
    generator = self.open()
    while True:
      try:
        given = generator.GetPreprocessedInputBatch()
      except Exception as error:
        if base_input.is_end(error):
          return
        raise
      batch = self.convert(_flat(given))
      sizes = {key: len(value) for key, value in batch.items()}
      if len(set(sizes.values())) != 1:
        raise ValueError(
          "The arrays of a generator's batch must have one number of rows, got"
          f" {sizes}."
        )
      for row in range(next(iter(sizes.values()))):
        yield {key: value[row] for key, value in batch.items()}


def _flat(batch: Mapping[str, Any], prefix: str = "") -> Row:
  """Returns nested tensors as arrays, by names such as `outer/inner`."""
  found: Row = {}
  for key, value in batch.items():
    if isinstance(value, Mapping):
      found |= _flat(value, f"{prefix}{key}/")
    else:
      found[f"{prefix}{key}"] = np.asarray(value)
  return found


def _filled(batch: base_input.Batch, rows: int) -> base_input.Batch:
  """Returns a batch with `rows` rows; those that are added weigh nothing."""
  count = len(next(iter(batch.values())))
  weights = np.arange(rows) < count
  if "example_weights" in batch:
    raise ValueError(
      "The generator's batch has example_weights already; which rows fill up"
      " the last batch is said by that key."
    )
  filled = {
    key: np.concatenate(
      [value, np.zeros((rows - count, *value.shape[1:]), value.dtype)]
    )
    for key, value in batch.items()
  }
  return {**filled, "example_weights": weights.astype(np.float32)}

"""Input from batch generators with Lingvo's interface.

A generator has a method `GetPreprocessedInputBatch()` that returns a possibly
nested dictionary of arrays or tensors [B, ...], and ends with `StopIteration`
or TensorFlow's OutOfRange. Its batches are split into examples and rebatched.

Generators have no position to restore. If a generator is `repeatable`, that is,
returns the same examples each time it is opened, a run resumes by reading and
skipping the earlier ones. Otherwise each host opens its own, and resuming opens
new ones.
"""

from collections.abc import Callable, Iterator, Mapping
import contextlib
import dataclasses
import importlib
import itertools
from typing import Any

import numpy as np

from paxon.inputs import base_input, checks
from paxon.inputs.streams import example_stream

# Array names of Pax's language models, and Paxon's.
_NAMES = {
  "ids": "inputs",
  "labels": "targets",
  "segment_pos": "positions",
}
_KEYS = {"batches", "repeatable"}
Row = dict[str, np.ndarray]


def paxon_names(batch: Mapping[str, np.ndarray]) -> base_input.Batch:
  """Renames `ids`, `labels`, `segment_pos` of a batch to Paxon's names.

  If `weights` is missing, it is 1 - `paddings`. Other arrays are unchanged.
  """
  renamed = {_NAMES.get(key, key): value for key, value in batch.items()}
  paddings = renamed.pop("paddings", None)
  if paddings is not None and "weights" not in renamed:
    renamed["weights"] = (1 - paddings).astype(np.float32)
  return renamed


@dataclasses.dataclass(frozen=True, kw_only=True)
class LingvoGenerator:
  """Creates the generator of Lingvo's params.

  Lingvo is not in Paxon's lock files, because its compiled operations need a
  newer C library than some supported systems have. Install it separately.

  Attributes:
    params: Lingvo's params of an input generator.
    do_eval: Whether to create the generator in Lingvo's evaluation mode.
  """

  params: Any
  do_eval: bool = False

  @property
  def file_random_seed(self) -> int:
    """The seed of the params; with 0 the order differs on each start."""
    return int(getattr(self.params, "file_random_seed", 0) or 0)

  def __call__(self) -> Any:
    """Returns a new generator.

    Raises:
      ModuleNotFoundError: Lingvo is not installed.
      ImportError: Its operations do not load on this system.
    """
    with contextlib.ExitStack() as stack:
      if self.do_eval:
        name = "lingvo.core.cluster_factory"
        stack.enter_context(importlib.import_module(name).SetEval(True))
      return self.params.Instantiate()


@dataclasses.dataclass(kw_only=True, eq=False)
class GeneratorInput(base_input.BaseInput):
  """A generator's examples in batches of `global_batch_size`.

  Replaces four classes of Pax: the adaptor, the adaptor with a new batch size
  (`global_batch_size`), the one for evaluation (`num_samples`) and its lazy
  form (`keep_rows=False`).

  Attributes:
    open: Returns a new generator; see `LingvoGenerator`.
    repeatable: Whether each generator returns the same examples in order.
    num_samples: The number of examples to evaluate. The last batch is padded
      with zeros and `example_weights`, float32 [B], is 0 for padding. None is
      for training.
    num_batches: The number of batches. None reads until the generator ends.
      Without `num_samples`, an incomplete last batch is dropped. If hosts read
      separate generators, a generator that ends before is an error.
    keep_rows: Whether to keep the examples of an evaluation in memory for the
      next one.
    convert: Converts a batch of the generator to Paxon's names.
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
    checks.check_positive(self, optional=["num_samples", "num_batches"])
    seed = getattr(self.open, "file_random_seed", 0)
    if seed and not self.repeatable and self.num_samples is None:
      raise ValueError(
        f"GeneratorInput.open has the fixed file_random_seed {seed}: a"
        " resumed run would train on the same examples again. Set it to 0, or"
        " set repeatable, which reads and skips them."
      )

  def get_next(self) -> base_input.Batch:
    """Returns this host's part of the next batch.

    Raises:
      StopIteration: The input has ended.
      ValueError: This host's generator has ended; those of other hosts may not
        have.
    """
    # A run may resume with a lower num_batches.
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
      batch = _pad(batch, wanted)
    self._batches += 1
    return self.host_rows(batch) if self._is_shared else batch

  @property
  def is_endless(self) -> bool:
    """Whether `num_samples` and `num_batches` are both None."""
    return self.num_samples is None and self.num_batches is None

  def reset(self) -> None:
    """Restarts with a new generator."""
    self._batches, self._rows = 0, None

  def get_state(self) -> base_input.State:
    """Returns the number of batches read."""
    return {"batches": self._batches, "repeatable": self._is_shared}

  def set_state(self, state: base_input.State) -> None:
    """Restores a state that `get_state` returned; see the module.

    Raises:
      ValueError: The state is damaged, or `repeatable` differs.
    """
    checks.check_keys(self, state, _KEYS)
    number = example_stream.check_position(state["batches"], what="batches")
    if state["repeatable"] != self._is_shared:
      raise ValueError(
        f"The state was saved with repeatable {state['repeatable']}, and this"
        f" input has repeatable {self._is_shared}; examples would be lost or"
        " read twice."
      )
    self.reset()
    if self._is_shared and number:
      self._rows = self._open_rows()
      skipped = number * self.global_batch_size
      self._rows = itertools.islice(self._rows, skipped, None)
    self._batches = number

  @property
  def _is_shared(self) -> bool:
    """Whether all hosts read the same examples and select their own."""
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
        f" {count} examples."
      )

  def _read(self) -> Iterator[Row]:
    """Yields the examples of a new generator."""
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
          "The arrays of a generator's batch must have the same batch size, got"
          f" {sizes}."
        )
      for row in range(next(iter(sizes.values()))):
        yield {key: value[row] for key, value in batch.items()}


def _flat(batch: Mapping[str, Any], prefix: str = "") -> Row:
  """Flattens nested tensors to arrays with names such as `outer/inner`."""
  found: Row = {}
  for key, value in batch.items():
    if isinstance(value, Mapping):
      found |= _flat(value, f"{prefix}{key}/")
    else:
      found[f"{prefix}{key}"] = np.asarray(value)
  return found


def _pad(batch: base_input.Batch, rows: int) -> base_input.Batch:
  """Returns a batch padded to `rows` examples, with `example_weights`."""
  count = len(next(iter(batch.values())))
  weights = np.arange(rows) < count
  if "example_weights" in batch:
    raise ValueError(
      "The generator's batch has example_weights already, the key that marks"
      " padding in the last batch."
    )
  filled = {
    key: np.concatenate(
      [value, np.zeros((rows - count, *value.shape[1:]), value.dtype)]
    )
    for key, value in batch.items()
  }
  return {**filled, "example_weights": weights.astype(np.float32)}

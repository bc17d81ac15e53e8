"""A random-access source of the examples of a SeqIO task's split.

Tasks stored as records (a cached task, TFRecord files, a TensorFlow data set)
are read one record at a time, so resuming at example 10^7 is immediate. Other
tasks (text lines, functions, random preprocessing) are run once and held in
memory; cache large ones.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
from typing import Any, Protocol, runtime_checkable

import numpy as np

from paxon.inputs import checks, optional_library
from paxon.inputs.seqio_tasks import (
  feature_converters,
  task_records,
  task_steps,
)
from paxon.inputs.sources import example_source, record_files

# The prefix of provenance keys, as in Pax.
PROVENANCE = "_seqio_provenance"


@runtime_checkable
class _Examples(Protocol):
  """Features by index, with their origins."""

  def __len__(self) -> int: ...

  def features(self, index: int, /) -> dict[str, np.ndarray] | None: ...

  def place(self, index: int, /) -> tuple[str, int]: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskSource(record_files.PickledFields):
  """Examples of a task, converted for the model.

  An example that the task filters out is empty; skip it by `Filtered` with
  `MinTokens`.

  Attributes:
    task: The task's name in SeqIO's registry.
    split: One of its splits.
    converter: Converts the task's features to arrays.
    register: Registers the task, or imports a module that does; called if the
      task is not registered. None requires a registered task.
    use_cached: Whether to read the cache made by SeqIO's caching tool.
    sequence_length: Lengths by feature, passed to the preprocessing; features
      are truncated to them. None does not truncate, as for packing.
    seed: The seed of random preprocessing, which runs once for all epochs.
    provenance: Whether to add `example_ids`, `_seqio_provenance/task`, `/file`
      and `/index`, and `example_weights`, which is 0 for examples that pad a
      batch. Only for packing NONE.
    first_id: The first of `example_ids`, which a mixture sets apart by task.
    index_folder: The folder of saved record indices. None indexes the files at
      each start.
    max_in_memory: The maximum number of examples to hold in memory.
  """

  task: str
  split: str
  converter: feature_converters.FeatureConverter
  register: Callable[[], object] | None = None
  use_cached: bool = False
  sequence_length: Mapping[str, int] | None = None
  seed: int = 0
  provenance: bool = False
  first_id: int = 0
  index_folder: str | None = None
  max_in_memory: int = 1_000_000

  def __post_init__(self) -> None:
    checks.check_not_empty(self, "task", "split")
    checks.check_positive(self, "max_in_memory")

  def __len__(self) -> int:
    return len(self._examples)

  def __getitem__(self, index: int, /) -> example_source.Example:
    """Returns one example, empty if the task filters it out.

    Raises:
      ValueError: It cannot be read; names the file and the record.
    """
    features = self.features(index)
    if features is None:
      return self.converter(
        dict.fromkeys(self.converter.keys, np.zeros(0, np.int32))
      )
    try:
      example = self.converter(features)
    except ValueError as error:
      raise ValueError(f"{self.name(index)}: {error}") from error
    return {**example, **self._provenance(index)}

  def features(self, index: int) -> dict[str, np.ndarray] | None:
    """Returns the features for the converter, None if filtered out."""
    return self._examples.features(index)

  def all_features(self, index: int) -> dict[str, np.ndarray] | None:
    """Returns all features of the task, None if filtered out."""
    return self._unconverted.features(index)

  def name(self, index: int) -> str:
    """Returns the file and record of an example for messages."""
    file, number = self._examples.place(index)
    return f"{file}, record {number}"

  def required_vocab_size(self) -> int:
    """Returns the largest vocabulary size of the converter's features."""
    features = self.seqio_task.output_features
    sizes = [
      features[key].vocabulary.vocab_size
      for key in self.converter.keys
      if key in features
    ]
    if not sizes:
      raise ValueError(
        f"The task {self.task!r} has no output feature of"
        f" {list(self.converter.keys)}; it has {sorted(features)}."
      )
    return max(sizes)

  @functools.cached_property
  def seqio_task(self) -> Any:
    """The `seqio.Task`.

    Raises:
      ValueError: The task or the split does not exist.
    """
    registry = optional_library.seqio().TaskRegistry
    if self.register is not None and self.task not in registry.names():
      self.register()
    if self.task not in registry.names():
      raise ValueError(
        f"SeqIO knows no task {self.task!r}; TaskSource.register must add it,"
        " or import the module that does."
      )
    task = registry.get(self.task)
    if self.split not in task.splits:
      raise ValueError(
        f"The task {self.task!r} has no split {self.split!r}; it has"
        f" {sorted(task.splits)}."
      )
    return task

  def _provenance(self, index: int) -> example_source.Example:
    if not self.provenance:
      return {}
    file, number = self._examples.place(index)
    return {
      "example_ids": np.array(self.first_id + index, np.int32),
      "example_weights": np.array(1.0, np.float32),
      f"{PROVENANCE}/task": np.array(self.task, object),
      f"{PROVENANCE}/file": np.array(file, object),
      f"{PROVENANCE}/index": np.array(number, np.int32),
    }

  @functools.cached_property
  def _examples(self) -> _Examples:
    return self._open(self.converter.keys)

  @functools.cached_property
  def _unconverted(self) -> _Examples:
    return self._open(None)

  def _open(self, keys: Sequence[str] | None) -> _Examples:
    records = task_records.open_task(
      self.seqio_task,
      split=self.split,
      use_cached=self.use_cached,
      index_folder=self.index_folder,
    )
    if records is not None:
      steps = task_steps.TaskSteps(
        self.seqio_task,
        split=self.split,
        records=records,
        is_cached=self.use_cached,
        keys=keys,
        sequence_length=self.sequence_length,
      )
      if not steps.is_random:
        return _Stored(records, steps)
    return _InMemory(self, keys)


class _Stored:
  """Examples from stored records."""

  def __init__(
    self, records: task_records.TaskRecords, steps: task_steps.TaskSteps
  ) -> None:
    self._records = records
    self._steps = steps

  def __len__(self) -> int:
    return len(self._records)

  def features(self, index: int, /) -> dict[str, np.ndarray] | None:
    record = self._records[index]
    try:
      return self._steps(record)
    except ValueError as error:
      file, number = self.place(index)
      raise ValueError(f"{file}, record {number}: {error}") from error

  def place(self, index: int, /) -> tuple[str, int]:
    file, number = self._records.place(index)
    return file.path, number


class _InMemory:
  """Examples of one run of the task, held in memory."""

  def __init__(self, source: TaskSource, keys: Sequence[str] | None) -> None:
    self._name = f"{source.task}:{source.split}"
    dataset = source.seqio_task.get_dataset(
      source.sequence_length,
      split=source.split,
      use_cached=source.use_cached,
      shuffle=False,
      seed=source.seed,
      num_epochs=1,
      try_in_mem_cache=False,
    )
    kept = task_steps.select_specs(source.task, keys, dataset.element_spec)
    dataset = dataset.map(lambda example: {key: example[key] for key in kept})
    self._features: list[dict[str, np.ndarray]] = []
    for features in dataset.as_numpy_iterator():
      if len(self._features) == source.max_in_memory:
        raise ValueError(
          f"{self._name} has more than TaskSource.max_in_memory"
          f" ({source.max_in_memory}) examples, and neither is stored as"
          " TFRecords nor has steps that deal with one example at a time; cache"
          " the task with SeqIO's tool and set use_cached, or raise the limit."
        )
      self._features.append(features)

  def __len__(self) -> int:
    return len(self._features)

  def features(self, index: int, /) -> dict[str, np.ndarray]:
    return self._features[index]

  def place(self, index: int, /) -> tuple[str, int]:
    return self._name, index

"""A split of a SeqIO task as examples by number.

What is stored as records (a cached task, TFRecord files, a TensorFlow data set)
is read one record at a time, so a run goes on at example 10^7 at once. Other
tasks (text lines, functions, random preprocessing) are run once from end to end
and held in memory; for large ones of these, cache the task.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
from typing import Any, Protocol, runtime_checkable

import numpy as np

from paxon.inputs import example_source
from paxon.inputs.seqio_tasks import (
  feature_converters,
  seqio_library,
  task_records,
  task_steps,
)

# Of keys that say where an example is from. Pax's name.
PROVENANCE = "_seqio_provenance"


@runtime_checkable
class _Examples(Protocol):
  """Features by number, with words for where they are from."""

  def __len__(self) -> int: ...

  def features(self, index: int, /) -> dict[str, np.ndarray] | None: ...

  def place(self, index: int, /) -> tuple[str, int]: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskSource:
  """Examples of a task, as a model sees them.

  An example that the task's own filters leave out has no places; `Filtered`
  with `MinTokens` skips it.

  Attributes:
    task: The task's name in SeqIO's registry.
    split: One of its splits.
    converter: Makes the arrays of its features.
    register: Called where SeqIO does not know the task yet; it adds the task,
      or imports the module that does. None where somebody has done so.
    use_cached: Whether to read what SeqIO's own tool cached of the task.
    sequence_length: By feature, what the task's steps are told and features are
      cut to; None cuts nothing, which is right where examples are packed.
    seed: Of the steps that draw random numbers; they draw once, not anew in
      each epoch.
    provenance: Whether an example has `example_ids`, its number, and the keys
      `_seqio_provenance/task`, `/file` and `/index`; and `example_weights`,
      1, which is 0 in rows that only fill a batch. Only for packing NONE.
    index_folder: Where the places of records in files are kept; None finds
      them at each start.
    max_in_memory: How many examples may be held in memory.
  """

  task: str
  split: str
  converter: feature_converters.FeatureConverter
  register: Callable[[], object] | None = None
  use_cached: bool = False
  sequence_length: Mapping[str, int] | None = None
  seed: int = 0
  provenance: bool = False
  index_folder: str | None = None
  max_in_memory: int = 1_000_000

  def __post_init__(self) -> None:
    for name in ("task", "split"):
      if not getattr(self, name):
        raise ValueError(f"TaskSource.{name} must not be empty.")
    if self.max_in_memory <= 0:
      raise ValueError(
        f"TaskSource.max_in_memory must be positive, got {self.max_in_memory}."
      )

  def __getstate__(self) -> dict[str, Any]:
    # TensorFlow's graphs do not travel to other processes; they are made anew.
    names = {field.name for field in dataclasses.fields(self)}
    return {k: v for k, v in self.__dict__.items() if k in names}

  def __setstate__(self, state: dict[str, Any]) -> None:
    self.__dict__.update(state)

  def __len__(self) -> int:
    return len(self._examples)

  def __getitem__(self, index: int, /) -> example_source.Example:
    """Returns one example; with no places if the task leaves it out.

    Raises:
      ValueError: It cannot be read; the message names file and record.
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
    """Returns the features that the converter needs; None if left out."""
    return self._examples.features(index)

  def all_features(self, index: int) -> dict[str, np.ndarray] | None:
    """Returns what the task gives, what is not for the model included."""
    return self._unconverted.features(index)

  def name(self, index: int) -> str:
    """Returns an example's place, for messages."""
    file, number = self._examples.place(index)
    return f"{file}, record {number}"

  def required_vocab_size(self) -> int:
    """Returns what all ids are below, by the features' vocabularies."""
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
      ValueError: There is none of this name, or it has no such split.
    """
    registry = seqio_library.seqio().TaskRegistry
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
      "example_ids": np.array(index, np.int32),
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
    records = task_records.of_task(
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
  """Examples of records."""

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
  """Examples that one run over the task has given."""

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

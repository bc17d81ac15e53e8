"""A stream of the examples of a SeqIO task or mixture.

Nothing is imported, listed or read before the first example or state, so
experiments can be built and printed without TensorFlow.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
from typing import Any

from paxon.inputs import checks, optional_library
from paxon.inputs.seqio_tasks import feature_converters, task_source
from paxon.inputs.sources import example_source
from paxon.inputs.streams import example_stream, filtered, mixture, read_ahead


@dataclasses.dataclass(kw_only=True, eq=False)
class TaskStream(example_stream.Stream):
  """The examples of a task, or of a mixture's tasks by their rates.

  Shuffling, mixing and positions are those of `Examples` and `Mixture`, not
  SeqIO's: each task is shuffled globally, and rates are exact.

  Attributes:
    name_in_registry: The name of the task or mixture.
    split: The split of all tasks. A mixture omits tasks without it, as in
      SeqIO.
    converter: Converts a task's features to arrays.
    shuffle_seed: The seed of each epoch's order. None is the stored order.
    num_epochs: The number of epochs of each task. None repeats without end.

  The other attributes are those of `TaskSource`.
  """

  name_in_registry: str
  split: str
  converter: feature_converters.FeatureConverter
  shuffle_seed: int | None
  num_epochs: int | None = None
  register: Callable[[], object] | None = None
  use_cached: bool = False
  sequence_length: Mapping[str, int] | None = None
  provenance: bool = False
  index_folder: str | None = None
  max_in_memory: int = 1_000_000

  def __post_init__(self) -> None:
    checks.check_not_empty(self, "name_in_registry", "split")
    checks.check_positive(self, optional=["num_epochs"])

  def start(self) -> None:
    """Returns None, which stands for the start without reading."""
    return

  def next_example(self, position: Any, *, step: int) -> tuple[Any, Any] | None:
    """Returns the example's reference and the position after it."""
    return self._stream.next_example(self._place(position), step=step)

  def read(self, reference: Any) -> example_source.Example:
    """Returns an example."""
    return self._stream.read(reference)

  def check(self, position: Any) -> None:
    """Checks a position."""
    self._stream.check(self._place(position))

  def signature(self) -> dict[str, Any]:
    """Returns the name, the split and the tasks' signatures."""
    return {
      "name": self.name_in_registry,
      "split": self.split,
      "tasks": self._stream.signature(),
    }

  @property
  def is_endless(self) -> bool:
    """Whether `num_epochs` is None."""
    return self.num_epochs is None

  def epoch(self, position: Any) -> int:
    """Returns the number of epochs completed at a position."""
    return self._stream.epoch(self._place(position))

  def name(self, reference: Any) -> str:
    """Returns the name of an example for messages."""
    return self._stream.name(reference)

  def required_vocab_size(self) -> int | None:
    """Returns the largest vocabulary size of the tasks."""
    return max(s.required_vocab_size() for s in self.sources.values())

  def check_readable(self) -> None:
    """Raises ValueError if reading would fail."""
    self._stream.check_readable()

  def set_workers(
    self, workers: read_ahead.Workers | None, *, every: bool
  ) -> None:
    """Sets the workers of the tasks' streams."""
    self._stream.set_workers(workers, every=every)

  def prepare(self, references: Sequence[Any]) -> None:
    """Passes the references to the tasks' streams."""
    self._stream.prepare(references)

  def leaves(self) -> list[example_stream.Stream]:
    """Returns the tasks' streams."""
    return self._stream.leaves()

  @functools.cached_property
  def sources(self) -> dict[str, task_source.TaskSource]:
    """The sources by task name.

    Raises:
      ValueError: The task or mixture does not exist, or no task has the split.
    """
    found: dict[str, task_source.TaskSource] = {}
    first_id = 0
    for name in self._rates:
      found[name] = self._source(name, first_id=first_id)
      if self.provenance and len(self._rates) > 1:
        first_id += len(found[name])
    return found

  @functools.cached_property
  def _rates(self) -> dict[str, float]:
    """The mixing rate of each task."""
    seqio, name = optional_library.seqio(), self.name_in_registry
    registries = (seqio.TaskRegistry, seqio.MixtureRegistry)
    if self.register is not None and not any(
      name in registry.names() for registry in registries
    ):
      self.register()
    if name in seqio.TaskRegistry.names():
      return {name: 1.0}
    if name not in seqio.MixtureRegistry.names():
      raise ValueError(
        f"SeqIO knows neither a task nor a mixture {name!r};"
        " TaskStream.register must add it, or import the module that does."
      )
    found = seqio.MixtureRegistry.get(name)
    rates = {
      task.name: found.get_rate(task)
      for task in found.tasks
      if self.split in task.splits
    }
    if not rates:
      raise ValueError(
        f"No task of the mixture {name!r} has the split {self.split!r}; they"
        f" have {sorted(found.splits)}."
      )
    return rates

  def _source(self, task: str, *, first_id: int) -> task_source.TaskSource:
    names = {f.name for f in dataclasses.fields(task_source.TaskSource)}
    shared: dict[str, Any] = {
      f.name: getattr(self, f.name)
      for f in dataclasses.fields(self)
      if f.name in names
    }
    return task_source.TaskSource(task=task, first_id=first_id, **shared)

  @functools.cached_property
  def _stream(self) -> example_stream.Stream:
    # Skips the empty examples that the tasks filter out.
    members: dict[str, example_stream.Stream] = {
      name: filtered.Filtered(
        stream=_TaskExamples(
          source=source,
          shuffle_seed=self.shuffle_seed,
          num_epochs=self.num_epochs,
        ),
        keep=filtered.MinTokens(tokens=1),
      )
      for name, source in self.sources.items()
    }
    if len(members) == 1:
      return next(iter(members.values()))
    return mixture.Mixture(members=members, weights=self._rates)

  def _place(self, position: Any) -> Any:
    return self._stream.start() if position is None else position


@dataclasses.dataclass(kw_only=True, eq=False)
class _TaskExamples(example_stream.Examples):
  """Examples named by file and record."""

  def name(self, reference: int) -> str:
    assert isinstance(self.source, task_source.TaskSource)
    return self.source.name(reference)

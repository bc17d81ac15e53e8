"""A SeqIO task or mixture as a stream of examples.

Nothing is imported, listed or read before an example or a state is asked for:
an experiment may be built, printed and compared where TensorFlow is missing.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
from typing import Any

from paxon.inputs import (
  example_source,
  example_stream,
  filtered,
  mixture,
  read_ahead,
)
from paxon.inputs.seqio_tasks import (
  feature_converters,
  seqio_library,
  task_source,
)


@dataclasses.dataclass(kw_only=True, eq=False)
class TaskStream(example_stream.Stream):
  """The examples of a task, or of a mixture's tasks by their rates.

  Order, shares and position are those of `Examples` and `Mixture`, not SeqIO's:
  every task is shuffled as a whole, and shares are exact.

  Attributes:
    name_in_registry: Of the task or mixture.
    split: The split of every task. Tasks of a mixture that do not have it are
      left out, as SeqIO does.
    converter: Makes the arrays of a task's features.
    shuffle_seed: The seed of each epoch's order; None is the stored order.
    num_epochs: After how many epochs of each task the stream ends; None never.
    register: As in `TaskSource`.
    use_cached: As there.
    sequence_length: As there.
    provenance: As there.
    index_folder: As there.
    max_in_memory: As there.
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
    for name in ("name_in_registry", "split"):
      if not getattr(self, name):
        raise ValueError(f"TaskStream.{name} must not be empty.")
    if self.num_epochs is not None and self.num_epochs <= 0:
      raise ValueError(
        "TaskStream.num_epochs must be positive, or None for no end, got"
        f" {self.num_epochs}."
      )

  def start(self) -> None:
    """Returns None, which is the beginning of whatever is found later."""
    return

  def following(self, position: Any, *, step: int) -> tuple[Any, Any] | None:
    """Returns what stands at a position, and the one after it."""
    return self._stream.following(self._place(position), step=step)

  def read(self, reference: Any) -> example_source.Example:
    """Returns an example."""
    return self._stream.read(reference)

  def check(self, position: Any) -> None:
    """Checks that there is such a position."""
    self._stream.check(self._place(position))

  def signature(self) -> dict[str, Any]:
    """Returns the names, and what the tasks say."""
    return {
      "name": self.name_in_registry,
      "split": self.split,
      "tasks": self._stream.signature(),
    }

  @property
  def is_endless(self) -> bool:
    """Whether no number of epochs is given."""
    return self.num_epochs is None

  def epoch(self, position: Any) -> int:
    """Returns how many epochs stand before a position."""
    return self._stream.epoch(self._place(position))

  def name(self, reference: Any) -> str:
    """Returns the words for an example in messages."""
    return self._stream.name(reference)

  def required_vocab_size(self) -> int | None:
    """Returns what all ids are below."""
    return max(s.required_vocab_size() for s in self.sources.values())

  def check_readable(self) -> None:
    """Raises ValueError where reading is bound to fail."""
    self._stream.check_readable()

  def read_ahead_with(
    self, workers: read_ahead.Workers | None, *, every: bool
  ) -> None:
    """Tells the tasks' streams."""
    self._stream.read_ahead_with(workers, every=every)

  def prepare(self, references: Sequence[Any]) -> None:
    """Tells the tasks' streams."""
    self._stream.prepare(references)

  def leaves(self) -> list[example_stream.Stream]:
    """Returns the tasks' streams."""
    return self._stream.leaves()

  @functools.cached_property
  def sources(self) -> dict[str, task_source.TaskSource]:
    """The tasks' examples, by the names of the tasks.

    Raises:
      ValueError: There is no such task or mixture, or no task has the split.
    """
    return {name: self._source(name) for name in self._rates}

  @functools.cached_property
  def _rates(self) -> dict[str, float]:
    """The shares of the tasks."""
    seqio, name = seqio_library.seqio(), self.name_in_registry
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

  def _source(self, task: str) -> task_source.TaskSource:
    return task_source.TaskSource(
      task=task,
      split=self.split,
      converter=self.converter,
      register=self.register,
      use_cached=self.use_cached,
      sequence_length=self.sequence_length,
      provenance=self.provenance,
      index_folder=self.index_folder,
      max_in_memory=self.max_in_memory,
    )

  @functools.cached_property
  def _stream(self) -> example_stream.Stream:
    # What the task's own filters leave out has no places.
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
  """Examples whose names are files and records."""

  def name(self, reference: int) -> str:
    assert isinstance(self.source, task_source.TaskSource)
    return self.source.name(reference)

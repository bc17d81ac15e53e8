"""The preprocessing of a task, applied to one stored record at a time.

The steps of a task are functions of data sets. Here they are traced once, over
a data set of the one example that is given, so that example number k can be had
without those before it. That is the same as running them over the whole split
where each step deals with each example alone. A step that draws random numbers
does not: its numbers come one after another.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from paxon.inputs.seqio_tasks import element_specs, seqio_library, task_records

_RANDOM = ("Random", "Shuffle", "TruncatedNormal", "Multinomial")


class TaskSteps:
  """What a task does with a record."""

  def __init__(
    self,
    task: Any,
    *,
    split: str,
    records: task_records.TaskRecords,
    is_cached: bool,
    keys: Sequence[str] | None,
    sequence_length: Mapping[str, int] | None,
  ) -> None:
    """Traces the steps; runs nothing.

    Args:
      task: A `seqio.Task`.
      split: The split's name, which a step may ask for.
      records: Where records come from.
      is_cached: Whether they went through the steps before the cache.
      keys: The features to return; None returns all but ragged ones.
      sequence_length: What the steps are told, and features are cut to.

    Raises:
      ValueError: The task does not give these features.
    """
    tensorflow = seqio_library.tensorflow()
    alone = _with_one_example(task, split=split, is_cached=is_cached)

    def run(record: Any) -> tuple[Any, dict[str, Any]]:
      dataset = alone.dataset(records.parse(record), sequence_length)
      specs = kept(task.name, keys, dataset.element_spec)
      none = {
        key: tensorflow.zeros([0] * len(shape), dataset.element_spec[key].dtype)
        for key, (shape, _) in specs.items()
      }
      count = tensorflow.zeros([], tensorflow.int64)
      return dataset.reduce(
        (count, none),
        lambda state, example: (state[0] + 1, {k: example[k] for k in specs}),
      )

    self._task_name = task.name
    self._run = tensorflow.function(
      run,
      input_signature=[tensorflow.TensorSpec([], tensorflow.string)],
      autograph=False,
    ).get_concrete_function()
    self._constant = tensorflow.constant

  @property
  def is_random(self) -> bool:
    """Whether a step draws random numbers."""
    graph = self._run.graph.as_graph_def()
    nodes = [*graph.node]
    for function in graph.library.function:
      nodes.extend(function.node_def)
    return any(
      node.op.startswith(_RANDOM) and "Seed" not in node.op for node in nodes
    )

  def __call__(self, record: bytes) -> dict[str, np.ndarray] | None:
    """Returns the features of a record; None where the task leaves it out.

    Raises:
      ValueError: The task makes several examples of it.
    """
    count, features = self._run(self._constant(record))
    number = int(count)
    if not number:
      return None
    if number > 1:
      raise ValueError(
        f"the task {self._task_name!r} makes {number} examples of it, so they"
        " have no number each; put that step before a CacheDatasetPlaceholder"
        " and cache the task, or leave it out: packing is done here."
      )
    return {key: value.numpy() for key, value in features.items()}


class _OneExample:
  """A task over a data set of one example."""

  def __init__(self, task: Any, split: str) -> None:
    self._split = split
    self._example: Any = None
    source = seqio_library.seqio().FunctionDataSource(
      self._make, splits=[split]
    )
    self._task = task.replace(source=source)

  def dataset(
    self, example: Any, sequence_length: Mapping[str, int] | None
  ) -> Any:
    self._example = example
    return self._task.get_dataset(
      sequence_length,
      split=self._split,
      shuffle=False,
      seed=0,
      num_epochs=1,
      try_in_mem_cache=False,
    )

  def _make(
    self, split: str, shuffle_files: bool, seed: int | None = None
  ) -> Any:
    del split, shuffle_files, seed
    dataset = seqio_library.tensorflow().data.Dataset
    return dataset.from_tensors(self._example)


def _with_one_example(task: Any, *, split: str, is_cached: bool) -> _OneExample:
  if is_cached:
    placeholder = seqio_library.seqio().CacheDatasetPlaceholder
    steps = list(task.preprocessors)
    place = [isinstance(step, placeholder) for step in steps].index(True)
    task = task.replace(preprocessors=steps[place + 1 :])
  return _OneExample(task, split)


def kept(
  name: str, keys: Sequence[str] | None, element_spec: Mapping[str, Any]
) -> dict[str, element_specs.Spec]:
  """Returns the shapes and dtypes of the features that are wanted.

  Args:
    name: The task's.
    keys: The features; None for all but ragged ones.
    element_spec: Of the task's data set.

  Raises:
    ValueError: It has no such feature.
  """
  specs = element_specs.specs_of(element_spec)
  ragged = seqio_library.tensorflow().RaggedTensorSpec
  plain = {k for k in specs if not isinstance(element_spec.get(k), ragged)}
  plain &= element_spec.keys()  # No dictionaries within dictionaries.
  for key in keys or ():
    if key not in plain:
      raise ValueError(
        f"The task {name!r} gives no feature {key!r} that is a plain tensor; it"
        f" has {sorted(plain)}."
      )
  return {k: specs[k] for k in (sorted(plain) if keys is None else keys)}

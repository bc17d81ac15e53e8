"""The preprocessing of a SeqIO task, applied to one record at a time.

Preprocessing steps are functions of data sets. They are traced once over a data
set of one example, so example k can be processed without those before it. The
result equals that over the whole split if each step processes examples
independently, unlike steps that draw random numbers in sequence.
"""

from collections.abc import Callable, Mapping, Sequence
import threading
from typing import Any

import numpy as np

from paxon.inputs import optional_library
from paxon.inputs.seqio_tasks import task_records

Spec = tuple[tuple[int | None, ...], np.dtype]

_RANDOM = ("Random", "Shuffle", "TruncatedNormal", "Multinomial")


class TaskSteps:
  """The preprocessing of a task."""

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
    """Traces the steps of a `seqio.Task` without running them.

    Args:
      task: The task.
      split: The split's name, passed to the steps.
      records: The records.
      is_cached: Whether to skip the steps before the cache placeholder.
      keys: The features to return; None returns all but ragged ones.
      sequence_length: Passed to the steps; features are truncated to it.

    Raises:
      ValueError: The task has no such features.
    """
    tensorflow = optional_library.tensorflow()
    alone = _with_one_example(task, split=split, is_cached=is_cached)

    def run(record: Any) -> Any:
      """Returns the task's examples of a record, then an end marker."""
      dataset = alone.dataset(records.parse(record), sequence_length)
      specs = select_specs(task.name, keys, dataset.element_spec)
      end = {
        key: tensorflow.zeros(
          [1] + [0] * len(shape), dataset.element_spec[key].dtype
        )
        for key, (shape, _) in specs.items()
      }
      found = dataset.map(
        lambda example: (True, {key: example[key] for key in specs})
      )
      return found.concatenate(
        tensorflow.data.Dataset.from_tensor_slices(([False], end))
      )

    self._task_name = task.name
    self._run = tensorflow.function(
      run,
      input_signature=[tensorflow.TensorSpec([], tensorflow.string)],
      autograph=False,
    ).get_concrete_function()
    self._lock = threading.Lock()
    self._stream: _Stream | None = None

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
    """Returns the features of a record; None if the task drops it.

    Raises:
      ValueError: The task makes several examples of the record.
    """
    with self._lock:
      if self._stream is None:
        self._stream = _Stream(self._run)
      try:
        found = self._stream.examples(record)
      except BaseException:
        # Discards the rest of this record's output.
        self._stream = None
        raise
    if len(found) > 1:
      raise ValueError(
        f"the task {self._task_name!r} makes {len(found)} examples of it, which"
        " therefore have no index; put that step before a"
        " CacheDatasetPlaceholder and cache the task, or remove it if it packs:"
        " PackedInput packs."
      )
    return found[0] if found else None


class _Stream:
  """The steps as one endless data set, fed record by record.

  It is reused because starting a data set is much slower than a record.
  """

  def __init__(self, run: Callable[[Any], Any]) -> None:
    tensorflow = optional_library.tensorflow()
    self._records = tensorflow.queue.FIFOQueue(
      1, [tensorflow.string], shapes=[[]]
    )
    dataset = tensorflow.data.Dataset.from_tensors(0).repeat()
    dataset = dataset.map(lambda _: self._records.dequeue()).flat_map(run)
    options = tensorflow.data.Options()
    # Prevents reading ahead of the enqueued record.
    options.autotune.enabled = False
    options.experimental_optimization.apply_default_optimizations = False
    self._outputs = iter(dataset.with_options(options))

  def examples(self, record: bytes) -> list[dict[str, np.ndarray]]:
    """Returns the examples of a record."""
    self._records.enqueue(record)
    found = []
    while True:
      is_example, features = next(self._outputs)
      if not is_example:
        return found
      found.append({key: value.numpy() for key, value in features.items()})


class _OneExample:
  """A task over a data set of one example."""

  def __init__(self, task: Any, split: str) -> None:
    self._split = split
    self._example: Any = None
    source = optional_library.seqio().FunctionDataSource(
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
    dataset = optional_library.tensorflow().data.Dataset
    return dataset.from_tensors(self._example)


def _with_one_example(task: Any, *, split: str, is_cached: bool) -> _OneExample:
  if is_cached:
    placeholder = optional_library.seqio().CacheDatasetPlaceholder
    steps = list(task.preprocessors)
    place = [isinstance(step, placeholder) for step in steps].index(True)
    task = task.replace(preprocessors=steps[place + 1 :])
  return _OneExample(task, split)


def select_specs(
  name: str, keys: Sequence[str] | None, element_spec: Mapping[str, Any]
) -> dict[str, Spec]:
  """Returns the shapes and dtypes of features of a task's data set.

  `keys` None selects all but ragged ones.

  Raises:
    ValueError: The data set does not have a feature of `keys`.
  """
  specs = find_specs(element_spec)
  ragged = optional_library.tensorflow().RaggedTensorSpec
  plain = {k for k in specs if not isinstance(element_spec.get(k), ragged)}
  plain &= element_spec.keys()  # No dictionaries within dictionaries.
  for key in keys or ():
    if key not in plain:
      raise ValueError(
        f"The task {name!r} has no dense feature {key!r}; it has"
        f" {sorted(plain)}."
      )
  return {k: specs[k] for k in (sorted(plain) if keys is None else keys)}


def find_specs(element_spec: Any) -> dict[str, Spec]:
  """Returns shape and dtype of each feature of an element.

  Strings have dtype object; a ragged size is None.

  Args:
    element_spec: The `element_spec` of a `tf.data.Dataset` of dictionaries;
      nested ones give names such as `outer/inner`.

  Raises:
    ValueError: An element is not a dictionary of tensors.
  """
  if not isinstance(element_spec, Mapping):
    raise ValueError(
      "The elements of a data set must be dictionaries of features, got"
      f" {type(element_spec).__name__}."
    )
  found: dict[str, Spec] = {}
  for name, spec in element_spec.items():
    if isinstance(spec, Mapping):
      inner = find_specs(spec)
      found |= {f"{name}/{key}": value for key, value in inner.items()}
    else:
      found[str(name)] = _to_spec(str(name), spec)
  return found


def _to_spec(name: str, spec: Any) -> Spec:
  shape, dtype = getattr(spec, "shape", None), getattr(spec, "dtype", None)
  if shape is None or dtype is None:
    raise ValueError(
      f"The feature {name!r} must be a tensor, a ragged or a sparse one, got"
      f" {type(spec).__name__}."
    )
  if shape.rank is None:
    raise ValueError(f"The feature {name!r} has no known number of dimensions.")
  # `tf.string.as_numpy_dtype` is `object`.
  return tuple(shape.as_list()), np.dtype(dtype.as_numpy_dtype)

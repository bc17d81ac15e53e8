"""Random access to the stored records of a SeqIO task's split.

Supports cached tasks, tasks over TFRecord files, and TensorFlow data sets in
TFRecord files. A record is a serialized message; `parse` converts it to
features.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
import json
import pathlib
from typing import Any

import numpy as np

from paxon.inputs import optional_library
from paxon.inputs.sources import record_files
from paxon.inputs.tf_records import tf_record_files


@dataclasses.dataclass(frozen=True)
class Part:
  """A range of consecutive records of a file.

  Attributes:
    file: The file.
    first: The index of the first record.
    count: The number of records. None is all that follow.
  """

  file: tf_record_files.TfRecordFile
  first: int = 0
  count: int | None = None

  def __len__(self) -> int:
    return len(self.file) - self.first if self.count is None else self.count


@dataclasses.dataclass(frozen=True)
class TaskRecords:
  """Serialized examples by index.

  Attributes:
    parts: The ranges of records, in order.
    parse: Parses a record, a string tensor, into TensorFlow features.
  """

  parts: Sequence[Part]
  parse: Callable[[Any], Mapping[str, Any]]

  def __len__(self) -> int:
    return self._ends[-1]

  def __getitem__(self, index: int, /) -> bytes:
    """Returns one record.

    Raises:
      ValueError: The record is damaged.
    """
    file, number = self.place(index)
    return file[number]

  def place(self, index: int) -> tuple[tf_record_files.TfRecordFile, int]:
    """Returns a record's file and its index in the file."""
    number, offset = record_files.locate(self._ends, index)
    part = self.parts[number]
    return part.file, part.first + offset

  @functools.cached_property
  def _ends(self) -> list[int]:
    return np.cumsum([0, *map(len, self.parts)]).tolist()[1:] or [0]


def open_task(
  task: Any, *, split: str, use_cached: bool, index_folder: str | None
) -> TaskRecords | None:
  """Returns the records of a `seqio.Task`'s split, or of its cache.

  None if the source does not support random access.

  Raises:
    ValueError: Files are missing, or do not match the cache's metadata.
  """
  open_file = functools.partial(
    tf_record_files.TfRecordFile, index_folder=index_folder
  )
  if use_cached:
    return _open_cache(task, split, open_file)
  seqio, source = optional_library.seqio(), task.source
  if isinstance(source, seqio.TfdsDataSource):
    return _open_tfds(source, split, open_file)
  tensorflow = optional_library.tensorflow()
  if getattr(source, "reader_cls", None) is not tensorflow.data.TFRecordDataset:
    return None
  parse = getattr(source, "parse_fn", None)
  parse = getattr(source, "decode_proto_fn", None) if parse is None else parse
  if parse is None:
    return None
  files = source.list_shards(split)
  if not files:
    raise ValueError(f"{task.name}: no file of the split {split!r} was found.")
  return TaskRecords([Part(open_file(_local(path))) for path in files], parse)


def _open_cache(
  task: Any,
  split: str,
  open_file: Callable[[str], tf_record_files.TfRecordFile],
) -> TaskRecords:
  seqio = optional_library.seqio()
  if not task.supports_caching or not task.cache_dir:
    raise ValueError(
      f"{task.name} is not cached: there is no folder with its name and a file"
      f" COMPLETED in {list(seqio.get_global_cache_dirs())}. Set use_cached to"
      " False, or name its folder to seqio.add_global_cache_dirs."
    )
  folder = task.cache_dir
  paths = seqio.utils
  try:
    info = _json(paths.get_cached_info_path(folder, split))
    stats = _json(paths.get_cached_stats_path(folder, split))
  except FileNotFoundError as error:
    raise ValueError(
      f"{task.name} has no cached split {split!r} in {folder}: {error.filename}"
      " is missing."
    ) from error
  prefix = pathlib.Path(_local(paths.get_cached_tfrecord_prefix(folder, split)))
  files = sorted(
    str(path) for path in prefix.parent.glob(prefix.name + "-*-of-*")
  )
  if len(files) != info["num_shards"]:
    raise ValueError(
      f"{task.name}: {folder} has {len(files)} files of the split {split!r},"
      f" and its info lists {info['num_shards']}; the cache is incomplete."
    )
  records = TaskRecords(
    [Part(open_file(path)) for path in files],
    functools.partial(_parse_cached, info["features"]),
  )
  if len(records) != stats["examples"]:
    raise ValueError(
      f"{task.name}: {folder} has {len(records)} examples of the split"
      f" {split!r}, and its stats list {stats['examples']}; the cache is"
      " incomplete."
    )
  return records


def _open_tfds(
  source: Any,
  split: str,
  open_file: Callable[[str], tf_record_files.TfRecordFile],
) -> TaskRecords | None:
  info = source.tfds_dataset.info
  if getattr(info.file_format, "value", info.file_format) != "tfrecord":
    return None
  parts = []
  for instruction in source.tfds_dataset.files(split):
    count = instruction.take
    if count < 0:
      count = instruction.examples_in_shard - instruction.skip
    file = open_file(_local(str(instruction.filename)))
    parts.append(Part(file, instruction.skip, count))
  return TaskRecords(parts, info.features.deserialize_example)


def _parse_cached(features: Mapping[str, Any], record: Any) -> dict[str, Any]:
  """Returns the features of a cached example with their original dtypes."""
  tensorflow = optional_library.tensorflow()
  description = {
    name: _description(name, feature["shape"], feature["dtype"])
    for name, feature in features.items()
  }
  parsed = tensorflow.io.parse_single_example(record, description)
  # Legacy caches have the older suffix.
  return {
    name.replace("_plaintext", "_pretokenized"): tensorflow.cast(
      value, features[name]["dtype"]
    )
    for name, value in parsed.items()
  }


def _description(name: str, shape: list[int | None], dtype: str) -> Any:
  """Returns the TensorFlow parsing spec of a feature."""
  io = optional_library.tensorflow().io
  utils = optional_library.seqio().utils
  # The format has no other integer type.
  stored = "int64" if dtype in ("int32", "bool") else dtype
  if None in shape[1:]:
    lengths = (i for i in range(len(shape)))
    partitions = [
      io.RaggedFeature.RowLengths(
        utils.tfexample_ragged_length_key(name, next(lengths))
      )
      if size is None
      else io.RaggedFeature.UniformRowLength(size)
      for size in shape[1:]
    ]
    return io.RaggedFeature(value_key=name, partitions=partitions, dtype=stored)
  if shape and shape[0] is None:
    return io.FixedLenSequenceFeature(shape[1:], stored, allow_missing=True)
  return io.FixedLenFeature(shape, stored)


def _json(path: str) -> dict[str, Any]:
  return json.loads(pathlib.Path(_local(path)).read_text())


def _local(path: str) -> str:
  if "://" in path:
    raise ValueError(
      f"{path}: records are read from a file system; mount or copy the files."
    )
  return path

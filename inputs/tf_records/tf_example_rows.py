"""TFRecord files of Examples as rows with columns."""

import dataclasses

from paxon.inputs.tf_records import tf_example, tf_record_files


@dataclasses.dataclass(frozen=True, kw_only=True)
class TfExampleRows:
  """The features of each Example, by name.

  Attributes:
    records: The files.
  """

  records: tf_record_files.TfRecordFiles

  def __len__(self) -> int:
    return len(self.records)

  def __getitem__(self, index: int, /) -> tf_example.Features:
    """Returns 1-D arrays of int64, float32 or bytes.

    Raises:
      ValueError: The record is damaged, or no Example; names file and record.
    """
    record = self.records[index]
    try:
      return tf_example.parse(record)
    except ValueError as error:
      raise ValueError(f"{self.name(index)}: {error}") from error

  def name(self, index: int) -> str:
    """Returns a record's file and number, for messages."""
    return self.records.name(index)

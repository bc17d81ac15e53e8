"""`tf.train.Example`, the usual content of a TFRecord, as numpy arrays.

The message is declared here for protobuf, since TensorFlow alone ships it:

    message BytesList { repeated bytes value = 1; }
    message FloatList { repeated float value = 1; }
    message Int64List { repeated int64 value = 1; }
    message Feature {
      oneof kind {
        BytesList bytes_list = 1;
        FloatList float_list = 2;
        Int64List int64_list = 3;
      }
    }
    message Features { map<string, Feature> feature = 1; }
    message Example { Features features = 1; }
"""

from collections.abc import Mapping
import dataclasses
import functools
from typing import Any

from google.protobuf import (
  descriptor_pb2,
  descriptor_pool,
  message,
  message_factory,
)
import numpy as np

from paxon.inputs.tf_records import tf_record_files

Features = dict[str, np.ndarray]

_PACKAGE = "paxon"
# By kind of list: the name and type of its message, and our dtype.
_KINDS = {
  "bytes_list": ("BytesList", "TYPE_BYTES", object),
  "float_list": ("FloatList", "TYPE_FLOAT", np.float32),
  "int64_list": ("Int64List", "TYPE_INT64", np.int64),
}
_KIND_OF_DTYPE = {
  "i": "int64_list",
  "u": "int64_list",
  "b": "int64_list",
  "f": "float_list",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TfExampleRecords:
  """The features of each Example of TFRecord files, by name.

  Attributes:
    files: The files.
  """

  files: tf_record_files.TfRecordFiles

  def __len__(self) -> int:
    return len(self.files)

  def __getitem__(self, index: int, /) -> Features:
    """Returns 1-D arrays of int64, float32 or bytes.

    Raises:
      ValueError: The record is damaged, or not an Example; names file and
        record.
    """
    record = self.files[index]
    try:
      return parse(record)
    except ValueError as error:
      raise ValueError(f"{self.name(index)}: {error}") from error

  def name(self, index: int) -> str:
    """Returns a record's file and number, for messages."""
    return self.files.name(index)


def parse(record: bytes) -> Features:
  """Returns the features of a serialized Example as 1-D arrays.

  They are int64, float32, or objects of type bytes. A feature without a value
  is an empty float32 array.

  Raises:
    ValueError: The bytes are not an Example.
  """
  try:
    example = _make_class().FromString(record)
  except message.DecodeError as error:
    raise ValueError("not a tf.train.Example.") from error
  features = {}
  for name, feature in example.features.feature.items():
    kind = feature.WhichOneof("kind") or "float_list"
    values = getattr(feature, kind).value
    features[name] = np.empty(len(values), _KINDS[kind][2])
    features[name][:] = values
  return features


def serialize(features: Mapping[str, np.ndarray]) -> bytes:
  """Returns an Example of 1-D arrays of integers, floats or bytes."""
  example = _make_class()()
  for name, given in features.items():
    values = np.asarray(given)
    if values.ndim != 1:
      raise ValueError(
        f"The feature {name!r} must be 1-D, got the shape {values.shape}."
      )
    kind = _KIND_OF_DTYPE.get(values.dtype.kind, "bytes_list")
    elements = values.tolist()
    if kind == "bytes_list":
      elements = [v.encode() if isinstance(v, str) else v for v in elements]
      if not all(isinstance(v, bytes) for v in elements):
        raise ValueError(
          f"The feature {name!r} must hold integers, floats or bytes, got"
          f" {values.dtype}."
        )
    getattr(example.features.feature[name], kind).value.extend(elements)
  return example.SerializeToString(deterministic=True)


@functools.cache
def _make_class() -> Any:
  """Returns protobuf's class of the message."""
  file = descriptor_pb2.FileDescriptorProto(
    name="paxon/tf_example.proto", package=_PACKAGE, syntax="proto3"
  )
  feature = descriptor_pb2.DescriptorProto(name="Feature")
  feature.oneof_decl.add(name="kind")
  for kind, (name, element, _) in _KINDS.items():
    _add_field(file.message_type.add(name=name), "value", element, many=True)
    _add_field(feature, kind, name).oneof_index = 0
  file.message_type.append(feature)
  features = file.message_type.add(name="Features")
  entry = features.nested_type.add(name="FeatureEntry")
  entry.options.map_entry = True
  _add_field(entry, "key", "TYPE_STRING")
  _add_field(entry, "value", "Feature")
  _add_field(features, "feature", "Features.FeatureEntry", many=True)
  _add_field(file.message_type.add(name="Example"), "features", "Features")
  # Apart from the default pool, where TensorFlow registers its own.
  pool = descriptor_pool.DescriptorPool()
  pool.AddSerializedFile(file.SerializeToString())
  descriptor = pool.FindMessageTypeByName(f"{_PACKAGE}.Example")
  return message_factory.GetMessageClass(descriptor)


def _add_field(
  owner: Any, name: str, element: str, *, many: bool = False
) -> Any:
  """Adds a field of a scalar type or of a message."""
  fields = descriptor_pb2.FieldDescriptorProto
  field = owner.field.add(
    name=name,
    number=len(owner.field) + 1,
    label=fields.LABEL_REPEATED if many else fields.LABEL_OPTIONAL,
  )
  if element.startswith("TYPE_"):
    field.type = fields.Type.Value(element)
  else:
    field.type = fields.TYPE_MESSAGE
    field.type_name = f".{_PACKAGE}.{element}"
  return field

"""`tf.train.Example`, the usual content of a TFRecord, as numpy arrays.

    Example  = 1: Features
    Features = 1: repeated (1: name, 2: Feature)
    Feature  = 1: bytes list | 2: float list | 3: int64 list
    list     = 1: repeated values, packed or one by one

That is all there is of the format, so it is read and written here: protobuf
would need the message's description, which only TensorFlow carries.
"""

from collections.abc import Iterator, Mapping

import numpy as np

Features = dict[str, np.ndarray]

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


def parse(record: bytes) -> Features:
  """Returns the features of a serialized Example.

  Args:
    record: Its bytes.

  Returns:
    By name a 1-D array: int64, float32, or objects of type bytes. A feature
    without a value is an empty float32 array.

  Raises:
    ValueError: The bytes are no Example.
  """
  features: Features = {}
  try:
    for number, _, part in _fields(memoryview(record)):
      if number == 1 and isinstance(part, memoryview):
        for inner, _, entry in _fields(part):
          if inner == 1 and isinstance(entry, memoryview):
            name, feature = _entry(entry)
            features[name] = feature
  except (IndexError, UnicodeDecodeError, ValueError) as error:
    raise ValueError(f"no tf.train.Example ({error}).") from error
  return features


def serialize(features: Mapping[str, np.ndarray]) -> bytes:
  """Returns an Example of 1-D arrays of integers, floats or bytes."""
  entries = b""
  for name in sorted(features):
    feature = _message(2, _feature(name, np.asarray(features[name])))
    entries += _message(1, _message(1, name.encode()) + feature)
  return _message(1, entries)


def _entry(entry: memoryview) -> tuple[str, np.ndarray]:
  name, feature = "", np.zeros(0, np.float32)
  for number, _, part in _fields(entry):
    if not isinstance(part, memoryview):
      raise ValueError("an entry of features has a number in it")
    if number == 1:
      name = bytes(part).decode()
    elif number == 2:
      for kind, _, values in _fields(part):
        if not isinstance(values, memoryview):
          raise ValueError("a feature has a number in it")
        feature = _values(kind, values)
  return name, feature


def _values(kind: int, message: memoryview) -> np.ndarray:
  """Returns the values of a bytes, float or int64 list."""
  parts = [part for number, _, part in _fields(message) if number]
  if kind == 1:
    found = np.empty(len(parts), object)
    found[:] = [_bytes(part) for part in parts]
    return found
  if kind == 2:
    raw = b"".join(map(_bytes, parts))
    return np.frombuffer(raw, "<f4").astype(np.float32)
  if kind == 3:
    arrays = [
      _varints(part)
      if isinstance(part, memoryview)
      else np.array([part], np.uint64)
      for part in parts
    ]
    return np.concatenate([np.zeros(0, np.uint64), *arrays]).view(np.int64)
  raise ValueError(f"a feature has the unknown kind {kind}")


def _bytes(part: int | memoryview) -> bytes:
  if isinstance(part, int):
    raise ValueError("a number stands where bytes belong")
  return bytes(part)


def _varints(packed: memoryview) -> np.ndarray:
  """Returns packed varints as uint64."""
  data = np.frombuffer(packed, np.uint8)
  if not len(data):
    return np.zeros(0, np.uint64)
  is_last = data < 0x80
  if not is_last[-1]:
    raise ValueError("a number is cut off")
  begins = np.concatenate(([0], np.flatnonzero(is_last)[:-1] + 1))
  lengths = np.diff(np.append(begins, len(data)))
  if lengths.max() > 10:
    raise ValueError("a number has more than 10 bytes")
  shift = 7 * (np.arange(len(data)) - np.repeat(begins, lengths))
  bits = (data & 0x7F).astype(np.uint64) << shift.astype(np.uint64)
  return np.bitwise_or.reduceat(bits, begins)


def _fields(
  message: memoryview,
) -> Iterator[tuple[int, int, int | memoryview]]:
  """Yields number, wire type and value of each field of a message."""
  place, end = 0, len(message)
  while place < end:
    key, place = _varint(message, place)
    number, wire = key >> 3, key & 7
    if wire == _VARINT:
      value, place = _varint(message, place)
      yield number, wire, value
      continue
    if wire == _BYTES:
      length, place = _varint(message, place)
    elif wire in (_FIXED64, _FIXED32):
      length = 8 if wire == _FIXED64 else 4
    else:
      raise ValueError(f"a field has the wire type {wire}")
    if place + length > end:
      raise ValueError("a field is longer than its message")
    yield number, wire, message[place : place + length]
    place += length


def _varint(message: memoryview, place: int) -> tuple[int, int]:
  value = shift = 0
  while True:
    byte = message[place]
    place += 1
    value |= (byte & 0x7F) << shift
    if byte < 0x80:
      return value & (2**64 - 1), place
    shift += 7


def _message(number: int, data: bytes) -> bytes:
  return _number(number << 3 | _BYTES) + _number(len(data)) + data


def _number(value: int) -> bytes:
  found = bytearray()
  while value >= 0x80:
    found.append(value & 0x7F | 0x80)
    value >>= 7
  return bytes([*found, value])


def _feature(name: str, values: np.ndarray) -> bytes:
  if values.ndim != 1:
    raise ValueError(
      f"The feature {name!r} must be 1-D, got the shape {values.shape}."
    )
  if values.dtype.kind in "iub":
    packed = b"".join(_number(int(v) % 2**64) for v in values)
    return _message(3, _message(1, packed))
  if values.dtype.kind == "f":
    return _message(2, _message(1, values.astype("<f4").tobytes()))
  texts = [v.encode() if isinstance(v, str) else v for v in values]
  if all(isinstance(v, bytes) for v in texts):
    return _message(1, b"".join(_message(1, v) for v in texts))
  raise ValueError(
    f"The feature {name!r} must hold integers, floats or bytes, got"
    f" {values.dtype}."
  )

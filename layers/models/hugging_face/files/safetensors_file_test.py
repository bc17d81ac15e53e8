"""Tests for files of tensors, against the `safetensors` package."""

import tracemalloc

from etils import epath
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import numpy as oracle

from paxon.layers.models.hugging_face.files import safetensors_file


def _tensors():
  random = np.random.RandomState(0)
  return {
    "b": random.standard_normal((3, 4)).astype(np.float32),
    "a": random.standard_normal((5,)).astype(jnp.bfloat16),
    "ä": random.standard_normal((2, 2, 2)).astype(np.float16),
    "c": np.arange(6, dtype=np.int64).reshape(6),
    "scalar": np.asarray(3, np.float32),
  }


def _write(path, tensors):
  described = {n: (x.dtype, x.shape) for n, x in tensors.items()}
  with safetensors_file.Writer(path, described) as file:
    for name, x in tensors.items():
      for row in range(len(x) if x.ndim else 0):
        file.write_rows(name, row, x[row : row + 1])


def test_reads_what_the_package_writes(tmp_path):
  path = epath.Path(tmp_path / "x.safetensors")
  tensors = _tensors()
  oracle.save_file(tensors, path)
  entries = safetensors_file.read_header(path)
  assert set(entries) == set(tensors)
  for name, x in tensors.items():
    assert entries[name].shape == x.shape
    if not x.ndim:
      continue
    rows = safetensors_file.read_rows(path, entries[name], 1, len(x))
    assert rows.dtype == x.dtype
    np.testing.assert_array_equal(rows, x[1:])


def test_writes_what_the_package_writes(tmp_path):
  tensors = {name: x for name, x in _tensors().items() if x.ndim}
  _write(epath.Path(tmp_path / "ours"), tensors)
  oracle.save_file(tensors, tmp_path / "theirs", metadata={"format": "pt"})
  ours, theirs = (tmp_path / n for n in ("ours", "theirs"))
  assert ours.read_bytes() == theirs.read_bytes()


def test_truncated_files_are_rejected(tmp_path):
  path = epath.Path(tmp_path / "x.safetensors")
  oracle.save_file(_tensors(), path)
  content = path.read_bytes()
  path.write_bytes(content[:-1])
  size = len(content)
  with pytest.raises(
    safetensors_file.DamagedFileError,
    match=f"truncated to {size - 1:,} of {size:,} bytes; copy it again",
  ):
    safetensors_file.read_header(path)
  path.write_bytes(content[:100])
  with pytest.raises(
    safetensors_file.DamagedFileError,
    match="truncated to 100 bytes; the header has",
  ):
    safetensors_file.read_header(path)


def test_other_files_are_rejected(tmp_path):
  path = epath.Path(tmp_path / "x.safetensors")
  path.write_bytes(b"PK\x03\x04 a file of pickled tensors, for example")
  with pytest.raises(
    safetensors_file.DamagedFileError, match="it is not a safetensors file"
  ):
    safetensors_file.read_header(path)
  path.write_bytes((8).to_bytes(8, "little") + b"{'a': 1}")
  with pytest.raises(
    safetensors_file.DamagedFileError, match="its header is invalid"
  ):
    safetensors_file.read_header(path)


def test_inconsistent_sizes_are_rejected(tmp_path):
  path = epath.Path(tmp_path / "x.safetensors")
  header = b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}  '
  path.write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 4)
  with pytest.raises(
    safetensors_file.DamagedFileError, match="bytes of a do not match its shape"
  ):
    safetensors_file.read_header(path)


def test_unsupported_dtypes_are_rejected(tmp_path):
  path = epath.Path(tmp_path / "x.safetensors")
  header = b'{"a":{"dtype":"F8_E5M2","shape":[4],"data_offsets":[0,4]}}'
  header += b" " * (-len(header) % 8)
  path.write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 4)
  entry = safetensors_file.read_header(path)["a"]
  with pytest.raises(
    safetensors_file.DamagedFileError, match="Unsupported dtype F8_E5M2"
  ):
    safetensors_file.read_rows(path, entry, 0, 4)
  with pytest.raises(ValueError, match="does not support dtype complex64"):
    safetensors_file.dtype_name(np.complex64)


def _one(begin, end, shape="[1]"):
  return f'{{"dtype":"F32","shape":{shape},"data_offsets":[{begin},{end}]}}'


@pytest.mark.parametrize(
  ("header", "size", "message"),
  [
    (f'{{"a":{_one(0, 4)},"b":{_one(0, 4)}}}', 4, "b overlaps another tensor"),
    (f'{{"a":{_one(0, 4)},"b":{_one(8, 12)}}}', 12, "b follows a gap"),
    (f'{{"a":{_one(4, 8)}}}', 8, "a follows a gap"),
    (f'{{"a":{_one(0, 4)}}}', 8, "4 bytes belong to no tensor"),
    (f'{{"a":{_one(0, 4)},"a":{_one(4, 8)}}}', 8, "'a' is there twice"),
    (f'{{"a":{_one(0, 4, "[-1,-1]")}}}', 4, "is no list of sizes"),
    (f'{{"a":{_one(0, 4, "[1.0]")}}}', 4, "is no list of sizes"),
    (f'{{"a":{_one(0, 4, "[true]")}}}', 4, "is no list of sizes"),
    (f'{{"__metadata__":{{"a":[1]}},"a":{_one(0, 4)}}}', 4, "is no text"),
  ],
)
def test_tensors_fill_the_file_once(tmp_path, header, size, message):
  path = epath.Path(tmp_path / "x.safetensors")
  text = header.encode()
  path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(size))
  with pytest.raises(safetensors_file.DamagedFileError, match=message):
    safetensors_file.read_header(path)
  # The package accepts a name that is there twice, unlike the format.
  if "twice" not in message:
    with pytest.raises(Exception, match=r"(?i)header|offset|metadata|invalid"):
      oracle.load(path.read_bytes())


def test_empty_tensors_and_metadata_are_read(tmp_path):
  path = epath.Path(tmp_path / "x.safetensors")
  tensors = {f"t{i}": np.zeros((0, i), np.float32) for i in range(5)}
  tensors["a"] = np.ones(3, np.float32)
  oracle.save_file(tensors, path, metadata={"a": "[[{,"})
  assert set(safetensors_file.read_header(path)) == set(tensors)


def test_the_last_of_many_names_is_there_twice(tmp_path):
  """A search in quadratic time would reach the time limit of the target."""
  path = epath.Path(tmp_path / "x.safetensors")
  names = [*range(100_000), 99_999]
  text = "{" + ",".join(f'"{i}":{_one(0, 0, "[0]")}' for i in names) + "}"
  path.write_bytes(len(text).to_bytes(8, "little") + text.encode())
  with pytest.raises(safetensors_file.DamagedFileError, match="'99999' is the"):
    safetensors_file.read_header(path)


@pytest.mark.parametrize("kind", ["tensors", "lists"])
def test_headers_of_a_million_values_are_rejected_at_once(tmp_path, kind):
  path = epath.Path(tmp_path / "x.safetensors")
  tensors = ",".join(f'"{i}":{_one(0, 0, "[0]")}' for i in range(1_000_000))
  text = f"{{{tensors}}}" if kind == "tensors" else f"[{'[],' * 9_000_000}0]"
  path.write_bytes(len(text).to_bytes(8, "little") + text.encode())
  tracemalloc.start()
  with pytest.raises(safetensors_file.DamagedFileError, match="it has"):
    safetensors_file.read_header(path)
  _, peak = tracemalloc.get_traced_memory()
  tracemalloc.stop()
  assert peak < 200 << 20

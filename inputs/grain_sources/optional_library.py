"""Lazy imports of optional libraries that read data sets."""

from collections.abc import Generator
import contextlib
import importlib
from typing import Any

from paxon.inputs import missing_library


def array_record() -> Any:
  """Returns `array_record.python.array_record_data_source`."""
  with _telling("array_record"):
    return importlib.import_module(
      "array_record.python.array_record_data_source"
    )


def datasets() -> Any:
  """Returns Hugging Face `datasets`."""
  with _telling("datasets"):
    return importlib.import_module("datasets")


def grain() -> Any:
  """Returns `grain`."""
  with _telling("grain"):
    return importlib.import_module("grain")


def parquet() -> Any:
  """Returns `pyarrow.parquet`."""
  with _telling("pyarrow"):
    return importlib.import_module("pyarrow.parquet")


@contextlib.contextmanager
def _telling(library: str) -> Generator[None, None, None]:
  """Raises an error with install instructions if a library is missing."""
  try:
    yield
  except ModuleNotFoundError as error:
    if error.name is None or error.name.partition(".")[0] != library:
      raise
    raise missing_library.MissingLibraryError(library, extra="data") from error

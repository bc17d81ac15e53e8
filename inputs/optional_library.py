"""Lazy imports of optional libraries that read data sets.

Importing SeqIO and TensorFlow takes seconds and 0.8 GB, so only this module
imports them, and only when called.
"""

from collections.abc import Generator
import contextlib
import importlib
import os
from typing import Any

# Extras whose wheels are named by the targets that need them, or that Bazel
# does not have.
_NAMED = ("optuna", "serve", "text")


class MissingLibraryError(ImportError, ValueError):
  """An optional library is not installed.

  Also a ValueError, because the user can fix it; the message states how.
  """


def array_record() -> Any:
  """Returns `array_record.python.array_record_data_source`."""
  with explain("array_record"):
    return importlib.import_module(
      "array_record.python.array_record_data_source"
    )


def arrow() -> Any:
  """Returns `pyarrow`."""
  with explain("pyarrow"):
    return importlib.import_module("pyarrow")


def datasets() -> Any:
  """Returns Hugging Face `datasets`."""
  with explain("datasets"):
    return importlib.import_module("datasets")


def grain() -> Any:
  """Returns `grain`."""
  with explain("grain"):
    return importlib.import_module("grain")


def hub() -> Any:
  """Returns `huggingface_hub`."""
  with explain("huggingface_hub"):
    return importlib.import_module("huggingface_hub")


def parquet() -> Any:
  """Returns `pyarrow.parquet`."""
  with explain("pyarrow"):
    return importlib.import_module("pyarrow.parquet")


def pillow() -> Any:
  """Returns `PIL.Image`."""
  with explain("PIL", name="Pillow", extra="tf"):
    return importlib.import_module("PIL.Image")


def seqio() -> Any:
  """Returns `seqio`."""
  # Silences TensorFlow's startup messages.
  os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
  with explain("seqio", "tensorflow", name="SeqIO", extra="tf", exact=True):
    return importlib.import_module("seqio")


def tensorflow() -> Any:
  """Returns `tensorflow`, without access to GPUs."""
  seqio()
  library = importlib.import_module("tensorflow")
  # TensorFlow would allocate the GPU memory that JAX needs.
  library.config.set_visible_devices([], "GPU")
  return library


@contextlib.contextmanager
def explain(
  *modules: str,
  name: str | None = None,
  extra: str = "data",
  exact: bool = False,
) -> Generator[None, None, None]:
  """Raises an error with install instructions if a library is missing.

  Args:
    *modules: The import names of the library and its dependencies.
    name: The name in the message, by default the first module.
    extra: The extra of Paxon with the library. Targets name the wheels of
      `serve` and `text` themselves, so with Bazel only the others can be
      missing.
    exact: Whether a missing submodule is not a missing library.
  """
  try:
    yield
  except ModuleNotFoundError as error:
    missing = error.name or ""
    if (missing if exact else missing.partition(".")[0]) not in modules:
      raise
    library = name or modules[0]
    start = f"start with `bazel run --config={extra} ...`, or "
    raise MissingLibraryError(
      f"{library} is not installed: {'' if extra in _NAMED else start}install"
      f" paxon with its extra `{extra}`.",
      name=library,
    ) from error

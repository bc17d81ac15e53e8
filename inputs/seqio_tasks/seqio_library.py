"""Lazy imports of SeqIO and TensorFlow.

Importing both takes seconds and 0.8 GB, so only this module imports them.
"""

import importlib
import os
from typing import Any

from paxon.inputs import missing_library


def seqio() -> Any:
  """Returns the module `seqio`.

  Raises:
    MissingLibraryError: It is not installed.
  """
  # Silences TensorFlow's startup messages.
  os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
  try:
    return importlib.import_module("seqio")
  except ModuleNotFoundError as error:
    if error.name not in ("seqio", "tensorflow"):
      raise
    raise missing_library.MissingLibraryError("SeqIO", extra="tf") from error


def tensorflow() -> Any:
  """Returns the module `tensorflow`, without access to GPUs.

  Raises:
    MissingLibraryError: It is not installed.
  """
  seqio()
  library = importlib.import_module("tensorflow")
  # TensorFlow would allocate the GPU memory that JAX needs.
  library.config.set_visible_devices([], "GPU")
  return library

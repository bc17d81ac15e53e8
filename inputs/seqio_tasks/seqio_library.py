"""SeqIO and TensorFlow, imported when something first needs them.

Both together take seconds and 0.8 GB, and runs that do not read with SeqIO need
neither; so this is the one place that imports them.
"""

import importlib
import os
from typing import Any

from paxon.inputs import missing_library


def seqio() -> Any:
  """Returns the module `seqio`.

  Raises:
    MissingLibraryError: It is not installed; says how to get it.
  """
  # TensorFlow's notes about its own start are no news here.
  os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
  try:
    return importlib.import_module("seqio")
  except ModuleNotFoundError as error:
    if error.name not in ("seqio", "tensorflow"):
      raise
    raise missing_library.MissingLibraryError("SeqIO", extra="tf") from error


def tensorflow() -> Any:
  """Returns the module `tensorflow`, which never gets hold of a GPU.

  Raises:
    MissingLibraryError: It is not installed; says how to get it.
  """
  seqio()
  library = importlib.import_module("tensorflow")
  # The devices are JAX's. TensorFlow would take their memory at first use.
  library.config.set_visible_devices([], "GPU")
  return library

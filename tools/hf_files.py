"""`config.json` and the tokenizer files of Hugging Face models."""

from collections.abc import Iterable, Mapping
import json
import os
from typing import Any

from etils import epath
import numpy as np

from paxon.runner import user_error

CONFIG = "config.json"
# Folder of these files in an imported run directory.
FOLDER = "hugging_face"
_BESIDE = """
  added_tokens.json chat_template.jinja chat_template.json
  generation_config.json merges.txt sentencepiece.bpe.model
  special_tokens_map.json spiece.model tokenizer.json tokenizer.model
  tokenizer_config.json vocab.json vocab.txt
  """


def read_config(folder: epath.Path) -> Mapping[str, Any]:
  """Returns the content of `config.json`.

  Raises:
    user_error.UserError: The file is missing or invalid.
  """
  path = folder / CONFIG
  try:
    config = json.loads(path.read_text())
  except FileNotFoundError as error:
    raise user_error.UserError(
      f"{os.fspath(path)} is missing; it describes the model."
    ) from error
  except (OSError, ValueError) as error:
    raise user_error.UserError(
      f"{os.fspath(path)} cannot be read ({error})."
    ) from error
  if not isinstance(config, dict):
    raise user_error.UserError(f"{os.fspath(path)} is not a JSON object.")
  return config


def copy_beside(
  source: epath.Path, target: epath.Path, *, dtype: str | None = None
) -> list[str]:
  """Copies `config.json` and a tokenizer's files; returns their names.

  Args:
    source: The folder that holds them.
    target: Created if missing.
    dtype: Dtype of the weights, for `config.json`; None keeps what it says.
  """
  target.mkdir(parents=True, exist_ok=True)
  names = sorted(
    str(each.name)
    for each in source.iterdir()
    if each.name in _BESIDE.split() or each.name == CONFIG
  )
  for name in names:
    (source / name).copy(target / name, overwrite=True)
  config = dict(read_config(source))
  # The older name, if the file has it.
  name = "torch_dtype" if "torch_dtype" in config else "dtype"
  if dtype is not None and config.get(name) != dtype:
    config[name] = dtype
    text = json.dumps(config, indent=2, ensure_ascii=False)
    (target / CONFIG).write_text(text + "\n")
  return names


def find_dtype(dtypes: Iterable[Any]) -> str | None:
  """Returns the name of the dtype of all weights; None if they have several."""
  found = {np.dtype(each).name for each in dtypes}
  return found.pop() if len(found) == 1 else None

"""What lies beside weights: `config.json`, and the files of a tokenizer."""

from collections.abc import Mapping
import json
import os
from typing import Any

from etils import epath

from paxon.runner import user_error

CONFIG = "config.json"
# In the folder of an imported checkpoint.
FOLDER = "hugging_face"
_BESIDE = """
  added_tokens.json chat_template.jinja chat_template.json
  generation_config.json merges.txt sentencepiece.bpe.model
  special_tokens_map.json spiece.model tokenizer.json tokenizer.model
  tokenizer_config.json vocab.json vocab.txt
  """


def read_config(folder: epath.Path) -> Mapping[str, Any]:
  """Returns the content of a folder's `config.json`.

  Args:
    folder: That has one.

  Raises:
    user_error.UserError: It has none, or it cannot be read.
  """
  path = folder / CONFIG
  try:
    config = json.loads(path.read_text())
  except FileNotFoundError as error:
    raise user_error.UserError(
      f"There is no {os.fspath(path)}; it says what the weights are of."
    ) from error
  except (OSError, ValueError) as error:
    raise user_error.UserError(
      f"{os.fspath(path)} cannot be read ({error})."
    ) from error
  if not isinstance(config, dict):
    raise user_error.UserError(f"{os.fspath(path)} is no JSON object.")
  return config


def copy_beside(
  source: epath.Path, target: epath.Path, *, dtype: str | None = None
) -> list[str]:
  """Copies `config.json` and a tokenizer's files; returns their names.

  Args:
    source: The folder that has them.
    target: Made when missing.
    dtype: What `config.json` says of the weights' dtype; `None` leaves it.
  """
  target.mkdir(parents=True, exist_ok=True)
  names = sorted(
    str(each.name)
    for each in source.iterdir()
    if each.name in _BESIDE.split() or each.name == CONFIG
  )
  for name in names:
    (source / name).copy(target / name, overwrite=True)
  if dtype is not None:
    config = dict(read_config(source))
    # The older name, where the file has it.
    config["torch_dtype" if "torch_dtype" in config else "dtype"] = dtype
    text = json.dumps(config, indent=2, ensure_ascii=False)
    (target / CONFIG).write_text(text + "\n")
  return names

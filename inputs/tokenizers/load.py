"""Loads the tokenizer of a file or of a Hugging Face folder."""

import os

from paxon.inputs import byte_tokenizer, tokenizer_protocol
from paxon.inputs.tokenizers import tokenizer_json

BYTES = "bytes"
_NAMES = ("tokenizer.json",)
# Where `tools/hf import` keeps the files of the original folder.
_IMPORTED = "hugging_face"


def load(
  path: str,
  *,
  begin: str | None = None,
  end: str | None = None,
  padded_size: int | None = None,
) -> tokenizer_protocol.Tokenizer:
  """Returns the tokenizer of a file or folder; the file is read when used.

  Args:
    path: `bytes`, for a `ByteTokenizer`; a `tokenizer.json`; a Hugging Face
      folder with such a file, or a folder made by `tools/hf import`.
    begin: See `TextTokenizer`.
    end: See `TextTokenizer`.
    padded_size: See `TextTokenizer`.

  Raises:
    ValueError: There is no such file, or no tokenizer in it.
  """
  if path == BYTES:
    return byte_tokenizer.ByteTokenizer()
  return tokenizer_json.TokenizerJson(
    path=find(path), begin=begin, end=end, padded_size=padded_size
  )


def find(path: str) -> str:
  """Returns the path of the vocabulary file at `path`.

  Raises:
    ValueError: There is none.
  """
  path = os.path.expanduser(path)
  if os.path.isfile(path):
    return path
  folders = (os.path.join(path, _IMPORTED), path)
  for folder in folders:
    for name in _NAMES:
      if os.path.isfile(os.path.join(folder, name)):
        return os.path.join(folder, name)
  if not os.path.isdir(path):
    raise ValueError(
      f"tokenizer={path!r}: there is no such file or folder; give {BYTES!r}, a"
      " vocabulary file, or a Hugging Face folder."
    )
  raise ValueError(
    f"tokenizer={path!r}: the folder has no tokenizer; it must have"
    f" {', '.join(_NAMES)}."
  )

"""Loads the tokenizer of a file or of a Hugging Face folder."""

import os
import re
from typing import TYPE_CHECKING

from paxon.inputs import byte_tokenizer, tokenizer_protocol

if TYPE_CHECKING:
  from paxon.inputs.tokenizers import text_tokenizer

BYTES = byte_tokenizer.NAME
# Files of a Hugging Face folder, in order of preference.
NAMES = (
  *("tokenizer.json", "tokenizer.model", "spiece.model"),
  *("sentencepiece.bpe.model", "spm.model"),
)
ENDINGS = (".tiktoken", ".model")
# Names of special tokens and the chat template.
_BESIDE = (
  *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
  *("chat_template.jinja", "chat_template.json"),
)
# Where `tools/hf import` keeps the files of the original folder.
_IMPORTED = "hugging_face"
_RANK_LINE = re.compile(rb"[A-Za-z0-9+/]+=* [0-9]+\r?\n")


def load(
  path: str,
  *,
  begin: str | None = None,
  end: str | None = None,
  padded_size: int | None = None,
) -> tokenizer_protocol.Tokenizer:
  """Returns the tokenizer of a file or folder; most is read when it is used.

  Args:
    path: `bytes`, for a `ByteTokenizer`; a `tokenizer.json`; a SentencePiece
      model; a rank file of tiktoken; a Hugging Face folder with one of them,
      or a folder made by `tools/hf import`.
    begin: See `TextTokenizer`.
    end: See `TextTokenizer`.
    padded_size: See `TextTokenizer`.

  Raises:
    ValueError: There is no such file, or no tokenizer in it.
  """
  if path == BYTES:
    return byte_tokenizer.ByteTokenizer()
  found = find(path)
  return _find_kind(found)(
    path=found, begin=begin, end=end, padded_size=padded_size
  )


def find(path: str) -> str:
  """Returns the path of the vocabulary file at `path`.

  Raises:
    ValueError: There is none.
  """
  path = os.path.expanduser(path)
  if os.path.isfile(path):
    return path
  for folder in (os.path.join(path, _IMPORTED), path):
    present = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    others = [name for name in present if name.endswith(ENDINGS)]
    for name in (*NAMES, *(others if len(others) == 1 else ())):
      if name in present:
        found = os.path.join(folder, name)
        # A pipe would block the reader.
        if not os.path.isfile(found):
          raise ValueError(f"tokenizer={path!r}: {found} is not a file.")
        return found
  if not os.path.isdir(path):
    raise ValueError(
      f"tokenizer={path!r}: there is no such file or folder; give {BYTES!r}, a"
      " vocabulary file, or a Hugging Face folder."
    )
  raise ValueError(
    f"tokenizer={path!r}: the folder has no tokenizer; it must have"
    f" {', '.join(NAMES)}, or one file *{' or *'.join(ENDINGS)}."
  )


def find_files(path: str) -> list[str]:
  """Returns a vocabulary file and what is read beside it; none if missing."""
  try:
    found = find(path)
  except ValueError:
    return []
  folder = os.path.dirname(found)
  beside = (os.path.join(folder, name) for name in _BESIDE)
  return [found, *(each for each in beside if os.path.isfile(each))]


def _find_kind(path: str) -> "type[text_tokenizer.TextTokenizer]":
  """Returns the class for a file, by its first bytes."""
  # Bytes, which most experiments begin with, need none of these.
  from paxon.inputs.tokenizers import rank_file, sentence_piece, tokenizer_json

  with open(path, "rb") as file:
    start = file.read(4096)
  if start.lstrip()[:1] in (b"{", b"["):
    return tokenizer_json.TokenizerJson
  # Llama 3 calls its rank file `tokenizer.model`, as SentencePiece's are.
  if _RANK_LINE.match(start):
    return rank_file.RankFile
  if start.startswith(b"\n"):
    return sentence_piece.SentencePiece
  if start.startswith(b"version https://git-lfs"):
    raise ValueError(
      f"tokenizer={path!r} is a Git LFS pointer, not the file itself; run `git"
      " lfs pull` in its folder."
    )
  raise ValueError(
    f"tokenizer={path!r} is neither a tokenizer.json, nor a SentencePiece"
    " model, nor a rank file of tiktoken."
  )

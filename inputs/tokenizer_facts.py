"""What is written down of the tokenizer that made a file."""

import hashlib
from typing import Any

import numpy as np

from paxon.inputs import tokenizer_protocol

# Words, numbers, spaces, code, several scripts, and a character of four bytes.
_PROBE = (
  "The quick brown fox jumps over 13 lazy dogs; 3.14159 isn't 22/7!\n\n"
  "def f(x):\n    return {x: [x ** 2, None]}\n\tÜber naïve façades, ¿qué? "
  "Быстрая лиса 敏捷的狐狸 すばやい狐 الثعلب 🦊 <s> </s> [SEP]"
)


def of(tokenizer: tokenizer_protocol.Tokenizer) -> dict[str, Any]:
  """Returns facts that differ between tokenizers, JSON values.

  Returns:
    `tokenizer`, the name of its class; `vocab_size`; and `probe`, a hash of the
    ids of a fixed text, in which two vocabularies of one class and size differ.
  """
  ids = np.asarray(tokenizer.encode(_PROBE)).astype("<i4")
  return {
    "tokenizer": type(tokenizer).__name__,
    "vocab_size": tokenizer.vocab_size,
    "probe": hashlib.sha256(ids.tobytes()).hexdigest()[:16],
  }

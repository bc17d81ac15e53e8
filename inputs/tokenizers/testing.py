"""A tokenizer of characters and a chat template, for tests."""

import numpy as np
import numpy.typing as npt

# "U:1 + 1?;A:2;" with "A:" as the prompt for the assistant.
TEMPLATE = (
  "{% for m in messages %}"
  "{% if m.role not in ('user', 'assistant') %}"
  "{{ raise_exception('unknown role ' + m.role) }}{% endif %}"
  "{% if m.role == 'user' %}U:{{ m.content }};"
  "{% else %}A:{{ m.content }};{% endif %}{% endfor %}"
  "{% if add_generation_prompt %}A:{% endif %}"
)


class Letters:
  """Characters as ids."""

  vocab_size = 128
  pad_id = begin_id = end_id = 0

  def encode(self, text: str) -> npt.NDArray[np.int32]:
    """Returns the code point of each character."""
    return self.encode_special(text)

  def decode(self, ids: npt.ArrayLike) -> str:
    """Returns the characters."""
    return "".join(map(chr, np.asarray(ids)))

  def encode_special(self, text: str) -> npt.NDArray[np.int32]:
    """Returns the code point of each character."""
    return np.asarray([ord(letter) for letter in text], np.int32)

  def byte_counts(self, ids: npt.ArrayLike) -> npt.NDArray[np.int32]:
    """Returns 1 for each id."""
    return np.ones_like(np.asarray(ids), np.int32)

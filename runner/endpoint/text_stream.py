"""The text of a token stream, in chunks that never change afterwards."""

from collections.abc import Sequence
from typing import Any

import numpy as np

# Ids of a prompt that decide how the first generated id is written.
_CONTEXT = 8
# Stands for bytes that are no character yet.
_INCOMPLETE = "\ufffd"


class TextStream:
  """Decodes ids one at a time, and stops at a text.

  Text is held back while it ends within a character, or may be the beginning
  of a stop text. The chunks together are the text of all ids, up to the first
  stop text.

  Attributes:
    stopped: Whether a stop text was found; what follows is ignored.
  """

  def __init__(
    self,
    tokenizer: Any,
    *,
    before: Sequence[int] = (),
    stops: Sequence[str] = (),
  ) -> None:
    """Begins after the ids of a prompt, whose text is not returned."""
    self.stopped = False
    self._tokenizer = tokenizer
    self._stops = tuple(stops)
    self._ids = list(before[-_CONTEXT:])
    # Ids before `_read` have their text in `_text`; those from `_window` on are
    # decoded again with the next ones.
    self._window, self._read = 0, len(self._ids)
    self._known = self._decode(self._ids)
    self._text, self._pending = "", ""
    self._num_sent = 0

  def add(self, number: int) -> str:
    """Returns the text that is certain after one more id."""
    if self.stopped:
      return ""
    self._ids.append(number)
    whole = self._decode(self._ids[self._window :])
    if not whole.startswith(self._known):
      # The id continues a character that the ids before it began.
      self._window, self._known = self._read, ""
      whole = self._decode(self._ids[self._window :])
    self._pending = whole.removeprefix(self._known)
    searched = self._text + self._pending
    places = [
      at
      for stop in self._stops
      if (at := searched.find(stop, max(0, self._num_sent - len(stop)))) >= 0
    ]
    if places:
      self.stopped = True
      self._text, self._pending = searched[: min(places)], ""
      return self._send(len(self._text))
    if not whole.endswith(_INCOMPLETE):
      self._text, self._pending = searched, ""
      self._window, self._read = self._read, len(self._ids)
      self._known = self._decode(self._ids[self._window :])
    return self._send(len(self._text) - self._num_held())

  def finish(self) -> str:
    """Returns the text that was held back."""
    self._text, self._pending = self._text + self._pending, ""
    return self._send(len(self._text))

  def _send(self, end: int) -> str:
    begin, self._num_sent = self._num_sent, max(self._num_sent, end)
    return self._text[begin : self._num_sent]

  def _num_held(self) -> int:
    """Returns the length of the longest end that may begin a stop text."""
    return max(
      (
        size
        for stop in self._stops
        for size in range(1, len(stop))
        if self._text.endswith(stop[:size])
      ),
      default=0,
    )

  def _decode(self, ids: Sequence[int]) -> str:
    return self._tokenizer.decode(np.asarray(ids, np.int32))

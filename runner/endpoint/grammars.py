"""Constraints by JSON schemas, regular expressions and grammars.

`llguidance` finds the ids that may follow. It is imported when a request first
needs it.
"""

from collections.abc import Callable, Sequence
import json
import threading
from typing import Any, TypeAlias

import numpy as np

from paxon.inputs import optional_library
from paxon.layers.decoding import continuous_batching

# Makes the constraint of one completion.
MakeConstraint: TypeAlias = Callable[[], continuous_batching.Constraint]

# Models would fill a context with white space, which JSON allows anywhere.
_JSON_OPTIONS = {"whitespace_flexible": False}
# Bytes that no text has: ids that stand for none.
_NO_TEXT = b"\xff"


class Grammars:
  """Compiles grammars for one tokenizer; may be used from any thread."""

  def __init__(
    self, tokenizer: Any, *, vocab_size: int, end_ids: Sequence[int]
  ) -> None:
    """Records the arguments; the ids are read once they are needed.

    Args:
      tokenizer: With the method `decode_bytes`.
      vocab_size: Number of ids of the model, at least those of the tokenizer.
      end_ids: Ids that end a completion.
    """
    self._tokenizer, self._vocab_size = tokenizer, vocab_size
    self._end_ids = list(end_ids)
    self._lock = threading.Lock()
    self._made: Any = None

  def compile(self, kind: str, source: Any) -> MakeConstraint:
    """Returns what makes the constraints of a grammar.

    Args:
      kind: `json` for a JSON schema, `regex`, or `grammar` for one in
        llguidance's form of Lark.
      source: The schema, or a text.

    Raises:
      ValueError: The grammar is not valid or not supported, or the library is
        not installed.
    """
    with optional_library.explain("llguidance", extra="serve"):
      import llguidance
    library: Any = llguidance
    matcher = library.LLMatcher
    if kind == "json":
      grammar = matcher.grammar_from_json_schema(
        json.dumps(source), defaults=_JSON_OPTIONS
      )
    elif kind == "regex":
      grammar = matcher.grammar_from_regex(source)
    else:
      grammar = matcher.grammar_from_lark(source)
    with self._lock:
      if self._made is None:
        self._made = self._make(library)
    problem = matcher.validate_grammar(grammar, self._made)
    if problem:
      raise ValueError(f"The grammar is not valid: {problem.strip()}")
    return lambda: _Matched(
      matcher(self._made, grammar), self._vocab_size, self._end_ids
    )

  def _make(self, library: Any) -> Any:
    tokenizer = self._tokenizer
    if not hasattr(tokenizer, "decode_bytes"):
      raise ValueError(
        f"A {type(tokenizer).__name__} has no decode_bytes, which grammars"
        " need."
      )
    tokens = [
      tokenizer.decode_bytes(np.asarray([i], np.int32))
      if i < tokenizer.vocab_size and i not in self._end_ids
      else b""
      for i in range(self._vocab_size)
    ]
    wrapper = _Wrapped(tokenizer, tokens, self._end_ids)
    return library.LLTokenizer(
      library.TokenizerWrapper(wrapper), eos_token=self._end_ids
    )


class _Wrapped:
  """A tokenizer as llguidance reads it."""

  def __init__(
    self, tokenizer: Any, tokens: Sequence[bytes], end_ids: Sequence[int]
  ) -> None:
    self._tokenizer = tokenizer
    self.eos_token_id, self.bos_token_id = end_ids[0], None
    self.special_token_ids = [i for i, text in enumerate(tokens) if not text]
    self.tokens = [
      text or _NO_TEXT + f"<{i}>".encode() for i, text in enumerate(tokens)
    ]

  def __call__(self, text: str | bytes) -> list[int]:
    return self._tokenizer.encode(text).tolist()


class _Matched:
  """A `continuous_batching.Constraint` by a matcher of llguidance."""

  def __init__(
    self, matcher: Any, vocab_size: int, end_ids: Sequence[int]
  ) -> None:
    self._matcher = matcher
    self._only_end = np.zeros(-(-vocab_size // 32), np.uint32)
    for i in end_ids:
      self._only_end[i // 32] |= np.uint32(1 << i % 32)

  def mask(self) -> np.ndarray:
    """Returns the ids that may follow; the end ids after an error."""
    found = np.zeros_like(self._only_end)
    if not self._matcher.is_error():
      self._matcher.unsafe_compute_mask_ptr(found.ctypes.data, found.nbytes)
    is_empty = self._matcher.is_error() or not found.any()
    return self._only_end if is_empty else found

  def advance(self, number: int) -> None:
    """Appends an id."""
    self._matcher.consume_token(number)

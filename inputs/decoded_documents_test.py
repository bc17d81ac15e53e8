"""Tests for examples read back as text."""

import numpy as np
import pytest

from paxon.inputs import (
  byte_tokenizer,
  decoded_documents,
  document_source,
  example_source,
)

_TOKENIZER = byte_tokenizer.ByteTokenizer()


def test_text_comes_back_without_begin_and_end():
  texts = ["In the beginning", "", "naïve café"]
  examples = example_source.TokenizedDocuments(
    source=document_source.InMemoryDocuments(texts), tokenizer=_TOKENIZER
  )
  found = decoded_documents.DecodedDocuments(
    source=examples, tokenizer=_TOKENIZER
  )
  assert [found[i] for i in range(len(found))] == [t.encode() for t in texts]


def test_what_is_no_text_is_an_error():
  examples = example_source.InMemoryExamples(
    [np.array([1, 3 + 0xFF, 2], np.int32)]
  )
  found = decoded_documents.DecodedDocuments(
    source=examples, tokenizer=_TOKENIZER
  )
  with pytest.raises(ValueError, match=r"example 0 has 3 bytes of text.*for 1"):
    _ = found[0]

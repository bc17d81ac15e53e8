"""Tests for documents in memory."""

import pytest

from paxon.inputs import document_source


def test_documents_are_bytes_by_index():
  documents = document_source.InMemoryDocuments(["é", b"\xff", ""])
  assert len(documents) == 3
  assert [documents[i] for i in range(3)] == [b"\xc3\xa9", b"\xff", b""]


def test_is_a_document_source():
  source = document_source.InMemoryDocuments([b"a"])
  assert isinstance(source, document_source.DocumentSource)
  assert not isinstance(3, document_source.DocumentSource)


def test_rejects_a_single_string():
  with pytest.raises(ValueError, match=r"got one str; write \[text\]"):
    document_source.InMemoryDocuments("text")

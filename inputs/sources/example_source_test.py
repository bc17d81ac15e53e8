"""Tests for held-out parts of a source of examples."""

import numpy as np
import pytest

from paxon.inputs import byte_tokenizer
from paxon.inputs.sources import example_source, json_lines


def _parts(size, every):
  source = example_source.InMemoryExamples(
    [np.array([i, i]) for i in range(size)]
  )
  return [
    example_source.HeldOut(source=source, every=every, is_held_out=is_held_out)
    for is_held_out in (False, True)
  ]


@pytest.mark.parametrize("size", [0, 1, 4, 5, 6, 23])
@pytest.mark.parametrize("every", [2, 5])
def test_every_example_is_in_one_split(size, every):
  train, held = (
    [int(part[i]["inputs"][0]) for i in range(len(part))]
    for part in _parts(size, every)
  )
  assert held == list(range(every - 1, size, every))
  assert train == [i for i in range(size) if i not in held]
  with pytest.raises(IndexError, match=rf"no example {len(train)} of"):
    _ = _parts(size, every)[0][len(train)]


def test_rejects_holding_out_every_example():
  with pytest.raises(ValueError, match=r"every must be at least 2, got 1"):
    _parts(3, 1)


def test_num_tokens_is_that_of_the_source():
  class Known(example_source.InMemoryExamples):
    def num_tokens(self, index):
      return 10 * index

  train, held = (
    example_source.HeldOut(
      source=Known([np.array([i, i]) for i in range(7)]),
      every=3,
      is_held_out=is_held_out,
    )
    for is_held_out in (False, True)
  )
  of_train, of_held = train.num_tokens, held.num_tokens
  assert of_train is not None
  assert of_held is not None
  assert [of_train(i) for i in range(len(train))] == [0, 10, 30, 40, 60]
  assert [of_held(i) for i in range(len(held))] == [20, 50]
  assert _parts(7, 3)[0].num_tokens is None


def test_a_held_out_example_is_from_the_document_of_its_source():
  class Two(example_source.InMemoryExamples):
    def document_number(self, index):
      return index // 2

    def token_dtypes(self):
      return {"inputs": np.dtype(np.int32)}

  examples = Two([np.array([i, i]) for i in range(7)])
  train, held = (
    example_source.HeldOut(source=examples, every=3, is_held_out=is_held_out)
    for is_held_out in (False, True)
  )
  assert [train.document_number(i) for i in range(5)] == [0, 0, 1, 2, 3]
  assert [held.document_number(i) for i in range(2)] == [1, 2]
  assert held.token_dtypes() == examples.token_dtypes()
  # A source without the member numbers its examples.
  assert _parts(7, 3)[1].document_number(1) == 5


def test_documents_are_bytes_by_index():
  documents = example_source.InMemoryDocuments(["é", b"\xff", ""])
  assert len(documents) == 3
  assert [documents[i] for i in range(3)] == [b"\xc3\xa9", b"\xff", b""]


def test_is_a_document_source():
  source = example_source.InMemoryDocuments([b"a"])
  assert isinstance(source, example_source.DocumentSource)
  assert not isinstance(3, example_source.DocumentSource)


def test_rejects_a_single_string():
  with pytest.raises(ValueError, match=r"got one str; write \[text\]"):
    example_source.InMemoryDocuments("text")


def test_the_hash_of_content_is_that_of_values():
  def content(text, number=1):
    # Strings that are other objects in memory each time.
    copy = "".join(list(text))
    example = {
      "inputs": np.asarray([number], np.int32),
      "name": np.asarray([copy], object),
    }
    return example_source.content_hash([example, {"inputs": np.zeros(0)}])

  assert content("some text") == content("some text")
  assert content("some text") != content("other text")
  assert content("some text") != content("some text", number=2)
  assert example_source.content_hash([]) == example_source.content_hash([])
  documents = [b"ab\0", b""]
  assert example_source.content_hash(documents) != (
    example_source.content_hash([b"ab", b""])
  )


class _Rejecting(byte_tokenizer.ByteTokenizer):
  """Rejects a text, as of a token that the model does not embed."""

  def encode(self, text):
    if b"bad" in text:
      raise ValueError("the token 'bad' is not embedded")
    return super().encode(text)


def test_a_text_that_cannot_be_tokenized_is_named(tmp_path):
  path = tmp_path / "a.jsonl"
  path.write_text('{"text": "fine"}\n{"text": "bad"}\n')
  made = example_source.TokenizedDocuments(
    source=json_lines.JsonLines(files=str(path)), tokenizer=_Rejecting()
  )
  assert len(made[0]["targets"]) == 5
  with pytest.raises(ValueError, match=r"a\.jsonl, line 2: the token 'bad' is"):
    _ = made[1]

"""Tests for the text of a token stream."""

import numpy as np
import pytest

from paxon.inputs import byte_tokenizer
from paxon.runner.endpoint import text_stream

BYTES = byte_tokenizer.ByteTokenizer()


class Words:
  """Decodes as SentencePiece: the first word has no space before it."""

  def decode(self, ids):
    return " ".join(f"w{i}" for i in np.asarray(ids).tolist())


def _streamed(tokenizer, ids, **fields):
  """Returns the chunks, the last one at the end, and the stream."""
  stream = text_stream.TextStream(tokenizer, **fields)
  chunks = [stream.add(i) for i in ids]
  return [*chunks, stream.finish()], stream


@pytest.mark.parametrize(
  "text", ["", "plain", "façade 🦊 é", b"\xff\xf0\x9f", b"a\xe2\x82b\x80"]
)
def test_chunks_are_the_text_of_all_ids(text):
  ids = BYTES.encode(text).tolist()
  for size in range(len(ids) + 1):
    chunks, stream = _streamed(BYTES, ids[size:], before=ids[:size])
    try:
      text_before = bytes(BYTES.decode(ids[:size]), "utf-8")
      is_whole = BYTES.decode(ids).encode().startswith(text_before)
    except UnicodeError:
      is_whole = False
    if is_whole:
      expected = BYTES.decode(ids)[len(BYTES.decode(ids[:size])) :]
      assert "".join(chunks) == expected
    assert not stream.stopped


def test_a_character_is_sent_once_it_is_whole():
  ids = BYTES.encode("aé🦊").tolist()
  chunks, _ = _streamed(BYTES, ids)
  assert chunks == ["a", "", "é", "", "", "", "🦊", ""]


def test_spaces_are_those_of_the_whole_text():
  chunks, _ = _streamed(Words(), [3, 4, 5], before=[1, 2])
  assert chunks == [" w3", " w4", " w5", ""]
  chunks, _ = _streamed(Words(), [3, 4, 5])
  assert chunks == ["w3", " w4", " w5", ""]


@pytest.mark.parametrize(
  ("stops", "chunks"),
  [
    (("cd",), ["a", "b", "", "", "", "", "", ""]),
    (("ab",), ["", "", "", "", "", "", "", ""]),
    # What may begin a stop is held back until it does not.
    (("bcx",), ["a", "", "", "bcd", "a", "", "", "bc"]),
    (("da", "cda"), ["a", "b", "", "", "", "", "", ""]),
    (("zz",), ["a", "b", "c", "d", "a", "b", "c", ""]),
  ],
)
def test_a_stop_text_ends_the_stream(stops, chunks):
  found, stream = _streamed(
    BYTES, BYTES.encode("abcdabc").tolist(), stops=stops
  )
  assert found == chunks
  assert stream.stopped == (stops[0] in "abcdabc")


def test_random_bytes_and_stops_are_cut_where_the_whole_text_is():
  rng = np.random.default_rng(0)
  alphabet = np.frombuffer("abé€".encode(), np.uint8)
  for _ in range(300):
    text = bytes(rng.choice(alphabet, 12))
    stops = [
      BYTES.decode(BYTES.encode(bytes(rng.choice(alphabet, 2)))).strip("�")
      for _ in range(2)
    ]
    stops = [stop for stop in stops if stop]
    ids = BYTES.encode(text).tolist()
    expected = BYTES.decode(ids)
    # As decoding cuts it: before the first whole stop.
    for size in range(1, len(ids) + 1):
      part = BYTES.decode(ids[:size])
      places = [at for s in stops if (at := part.find(s)) >= 0]
      if places:
        expected = part[: min(places)]
        break
    chunks, _ = _streamed(BYTES, ids, stops=stops)
    assert "".join(chunks) == expected

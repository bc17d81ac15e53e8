"""Tests for the speeds of inputs: every case reads, and the page says so."""

import os

from paxon.inputs import missing_library
from paxon.tools.benchmarks import (
  input_library_cases,
  input_speeds,
)


def _measured(monkeypatch):
  """All cases but those of libraries that other tests read with."""
  whole = input_library_cases.make

  def make(documents, folder):
    def missing():
      raise missing_library.MissingLibraryError("SeqIO", extra="tf")

    cases = whole(documents, folder)
    plain = ("TFRecord", "TFRecord of Examples")
    return {k: v if k in plain else missing for k, v in cases.items()}

  def no_pieces(documents, folder):
    raise missing_library.MissingLibraryError("SeqIO", extra="tf")

  monkeypatch.setattr(input_library_cases, "make", make)
  monkeypatch.setattr(input_library_cases, "sentence_pieces", no_pieces)
  return input_speeds.measure(num_bytes=60_000, seconds=0.0, num_steps=0)


def test_every_case_reads_or_says_what_is_missing(monkeypatch):
  cores = os.sched_getaffinity(0)
  by_name = {speed.name: speed for speed in _measured(monkeypatch)}
  assert os.sched_getaffinity(0) == cores
  assert len(by_name) == 24
  assert by_name["token file"].filled == 1
  for packing in ("first fit", "best fit"):
    filled = by_name[f"token file, {packing}"].filled
    assert filled is not None
    assert 0.8 < filled <= 1
  for name in ("TFRecord", "TFRecord of Examples", "JSON lines, gzip"):
    assert by_name[name].text.endswith(" M tokens/s")
  assert by_name["tokenizing lines, bytes"].text.endswith(" MB/s")
  assert by_name["going on at example 10,000,000, with a batch"].text.endswith(
    " ms"
  )
  missing = [s.name for s in by_name.values() if "not measured" in s.text]
  assert missing == [
    "ArrayRecord",
    "Grain over ArrayRecord",
    "Parquet, in order",
    "Hugging Face data set",
    "SeqIO, bytes",
    "SeqIO, SentencePiece",
    "tokenizing lines, SentencePiece of 4,096",
  ]
  page = input_speeds.to_markdown(
    list(by_name.values()),
    environment={"machine": "a test"},
    command="tools/bench inputs",
  )
  assert "- machine: a test\n" in page
  assert page.count("| token file | ") == 1
  assert "The text is that of Python's library" in page
  assert "| SeqIO, bytes | not measured: SeqIO is not installed" in page

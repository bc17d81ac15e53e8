"""Tests for the speeds of inputs: every case reads, and the page says so."""

from paxon.tools.benchmarks import input_speeds


def test_every_case_reads():
  speeds = input_speeds.measure(num_bytes=60_000, seconds=0.0)
  assert len(speeds) == 13
  assert all(speed.value > 0 for speed in speeds)
  by_name = {speed.name: speed for speed in speeds}
  assert by_name["token file"].filled == 1
  first_fit = by_name["token file, first fit"].filled
  best_fit = by_name["token file, best fit"].filled
  assert first_fit is not None
  assert best_fit is not None
  assert 0.8 < first_fit <= 1
  assert 0.8 < best_fit <= 1
  page = input_speeds.to_markdown(
    speeds, environment={"machine": "a test"}, command="tools/bench inputs"
  )
  assert "- machine: a test\n" in page
  assert page.count("| token file | ") == 1
  assert "The text is that of Python's library" in page

"""Every input case reads, and the table lists it."""

import os

from paxon.tools.benchmarks import input_speeds


def test_every_case_reads():
  cores = os.sched_getaffinity(0)
  speeds = input_speeds.measure(num_bytes=60_000, seconds=0.0, num_steps=0)
  assert os.sched_getaffinity(0) == cores
  by_name = {speed.name: speed for speed in speeds}
  assert len(by_name) == 12
  assert by_name["token file"].filled == 1
  for packing in ("first fit", "best fit"):
    filled = by_name[f"token file, {packing}"].filled
    assert filled is not None
    assert 0.8 < filled <= 1
  for name in ("TFRecord", "JSON lines, gzip"):
    assert by_name[name].text.endswith(" M tokens/s")
  assert by_name["tokenizing lines"].text.endswith(" MB/s")
  assert by_name["resuming at example 10,000,000, with a batch"].text.endswith(
    " ms"
  )
  lines = input_speeds.to_lines(speeds)
  assert len(lines) == 13
  assert sum(line.startswith("token file  ") for line in lines) == 1

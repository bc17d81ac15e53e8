"""A test of the measurement of imports."""

import re

import pytest

from paxon.tools.benchmarks import pax_import


def test_measures_memory_and_speed(capfd):
  sizes = ["--gigabytes=0.02", "--embed_dim=256", "--vocab_size=512"]
  assert pax_import.main(sizes) == 0
  output = capfd.readouterr().out
  assert output.count("optimizer: Adam, after 100 updates") == 2
  assert re.search(r"peak memory: .* x the largest array\n", output)
  assert re.search(
    r"speed: \S+ MB/s after a start of \d+ s, cp \d+ MB/s;"
    r" \S+ s of CPU per GB\n",
    output,
  )


def test_wrong_sizes_are_rejected(capsys):
  with pytest.raises(SystemExit):
    pax_import.main(["--gigabytes=0"])
  assert "--gigabytes must be positive" in capsys.readouterr().err

"""Tests of the comparison of steps with uneven and even vocabularies."""

import pytest

from paxon.tools.benchmarks import uneven_step


@pytest.mark.nightly
def test_two_vocabularies_are_compared(capsys):
  sizes = {"vocab_size": 65, "embed_dim": 16, "length": 8, "rounds": 1}
  assert uneven_step.main([f"--{k}={v}" for k, v in sizes.items()]) == 0
  uneven, even, ratio = capsys.readouterr().out.splitlines()
  assert uneven.startswith("step with 65 words: ")
  assert even.startswith("step with 128 words: ")
  assert ratio.startswith("ratio: ")


def test_sizes_are_positive(capsys):
  with pytest.raises(SystemExit):
    uneven_step.main(["--tensor=0"])
  assert "--tensor must be positive, got 0" in capsys.readouterr().err

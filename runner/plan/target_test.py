"""Tests for targets."""

import pytest

from paxon.runner.plan import target


@pytest.mark.parametrize(
  ("text", "name", "shape", "slices", "chips", "devices"),
  [
    ("cpu:8", "cpu", (8,), 1, 8, 8),
    ("h200:1x1", "h200", (1, 1), 1, 1, 1),
    ("h200:64x8", "h200", (64, 8), 1, 512, 512),
    ("v4:4x4x4", "v4", (4, 4, 4), 1, 64, 64),
    ("v4:8x16x16", "v4", (8, 16, 16), 1, 2048, 2048),
    ("v4:2x(4x4x4)", "v4", (4, 4, 4), 2, 128, 128),
    ("v5e:16x16", "v5e", (16, 16), 1, 256, 256),
    ("v5p:2x2x1", "v5p", (2, 2, 1), 1, 4, 4),
    ("h100-pcie:1x2", "h100-pcie", (1, 2), 1, 2, 2),
    ("gb200:18x4", "gb200", (18, 4), 1, 72, 72),
    # Four devices a chip.
    ("trn2:4x16", "trn2", (4, 16), 1, 64, 256),
    # Two devices a chip.
    ("v7x:2x2x1", "v7x", (2, 2, 1), 1, 4, 8),
  ],
)
def test_reads_a_target(text, name, shape, slices, chips, devices):
  found = target.parse(text)
  assert (found.hardware.name, found.shape, found.slices) == (
    name,
    shape,
    slices,
  )
  assert (found.num_chips, found.num_devices) == (chips, devices)
  assert str(found) == text


@pytest.mark.parametrize(
  ("text", "message"),
  [
    ("tpu:1x8", r"--target=tpu:1x8 is not a target: .*use cpu:8, .*kinds are"),
    ("h10:1x8", r"not a target: did you mean h100, h20, h200\? use cpu:8"),
    ("gb20:2x4", r"did you mean gb200"),
    ("RTX4090:1x1", r"did you mean rtx5090"),
    ("h200", r"is not a target: use cpu:8, h200:HOSTSxGPUS"),
    ("h200:", "is not a target"),
    ("h200:8 gpus", r"has no size '8 gpus': write"),
    ("h200:8", r"write hosts and GPUs of each, such as h200:64x8"),
    ("h200:2x(4x8)", "write hosts and GPUs"),
    ("h200:0x8", "sizes must be positive"),
    ("h200:1x3", r"a host has 1, 2, 4 or 8 GPUs, not 3"),
    ("gb200:2x8", r"a host has 1, 2 or 4 GPUs, not 8"),
    ("trn2:1x32", r"a host has 1, 2, 4, 8 or 16 chips, not 32"),
    ("mi300x:8", r"write hosts and GPUs of each, such as mi300x:64x8"),
    ("h200:2x4", r"of several hosts each has all its 8 GPUs"),
    ("cpu:2x4", r"the cpu takes one number"),
    ("v5e:32x32", r"no v5e slice of 32x32; there are 1x1, 2x2, .*16x16"),
    ("v5e:4x4x4", r"no v5e slice of 4x4x4"),
    ("v4:3x4x4", r"no v4 slice of 3x4x4; there are 2x2x1, .* multiples of 4"),
    ("v4:16x16", r"no v4 slice of 16x16"),
    ("v4:24x16x16", r"no v4 slice of 24x16x16.* up to 4096 chips"),
    ("v4:2x(4x4)", r"no v4 slice of 4x4"),
  ],
)
def test_says_what_is_wrong_with_a_target(text, message):
  with pytest.raises(ValueError, match=message):
    target.parse(text)


def test_reads_several_targets():
  found = target.parse_all("cpu:8, v4:2x(4x4x4)")
  assert [one.text for one in found] == ["cpu:8", "v4:2x(4x4x4)"]


@pytest.mark.parametrize(
  ("text", "message"),
  [
    ("cpu:8,", r"--target=cpu:8, has an empty entry; write targets with one"),
    ("cpu:8,,cpu:4", "has an empty entry"),
    ("cpu:8,cpu:4, cpu:8", r"--target=cpu:8,cpu:4, cpu:8 names cpu:8 twice"),
    # One bad entry is a slip of the pen, and nothing is planned.
    ("cpu:8,h300:1x8", r"--target=h300:1x8 is not a target"),
  ],
)
def test_says_what_is_wrong_with_several_targets(text, message):
  with pytest.raises(ValueError, match=message):
    target.parse_all(text)

"""Tests for the spellings of replica groups."""

import numpy as np
import pytest

from paxon.runner.plan.program_text import replica_groups


def _of(text, num_devices=8):
  groups = replica_groups.find_groups(
    f"channel_id=1, replica_groups={text}, to_apply=%add",
    num_devices=num_devices,
  )
  return groups.tolist()


_EVEN_AND_ODD = [[0, 2, 4, 6], [1, 3, 5, 7]]
_PAIRS = [[0, 1], [2, 3], [4, 5], [6, 7]]


@pytest.mark.parametrize(
  ("text", "expected"),
  [
    ("{{0,1},{2,3},{4,5},{6,7}}", _PAIRS),
    ("{{0,1,2,3,4,5,6,7}}", [list(range(8))]),
    ("{}", [list(range(8))]),
    ("[4,2]<=[8]", _PAIRS),
    ("[2,4]<=[4,2]T(1,0)", _EVEN_AND_ODD),
    ("[1,8]<=[8]", [list(range(8))]),
    ("mesh['axis_0'=4,'axis_1'=2] {'axis_1'}", _PAIRS),
    ("mesh['axis_0'=4,'axis_1'=2] {'axis_0'}", _EVEN_AND_ODD),
    ("mesh['axis_0'=4,'axis_1'=1,'axis_2'=2] {'axis_2'}", _PAIRS),
    (
      "mesh['axis_0'=4,'axis_1'=2] {'axis_0','axis_1'}",
      [[0, 1, 2, 3, 4, 5, 6, 7]],
    ),
    # Named in another order, they are numbered in that order.
    (
      "mesh['axis_0'=4,'axis_1'=2] {'axis_1','axis_0'}",
      [[0, 2, 4, 6, 1, 3, 5, 7]],
    ),
    (
      "mesh['axis_0'=2,'axis_1'=1,'axis_2'=4], device_ids=([4,2]T(1,0))"
      " {'axis_0'}",
      _PAIRS,
    ),
    (
      "mesh['axis_0'=2,'axis_1'=4], device_ids=(7,6,5,4,3,2,1,0) {'axis_0'}",
      [[7, 3], [6, 2], [5, 1], [4, 0]],
    ),
    # The inner and the outer half of an axis of eight.
    ("mesh['axis_0'=8] {'axis_0':(4)2}", _PAIRS),
    ("mesh['axis_0'=8] {'axis_0':(1)2}", [[0, 4], [1, 5], [2, 6], [3, 7]]),
    ("mesh['axis_0'=8] {'axis_0':(2)2}", [[0, 2], [1, 3], [4, 6], [5, 7]]),
  ],
)
def test_reads_all_spellings(text, expected):
  assert _of(text) == expected


def test_everyone_where_nothing_is_said():
  groups = replica_groups.find_groups("channel_id=1", num_devices=3)
  assert groups.tolist() == [[0, 1, 2]]


def test_says_what_it_does_not_know():
  with pytest.raises(ValueError, match="Not known as replica groups: 'odd'"):
    replica_groups.find_groups("replica_groups=odd", num_devices=2)


@pytest.mark.parametrize(
  ("members", "axes", "covers"),
  [
    ([0, 1], ("tensor",), True),
    ([0, 2, 4, 6], ("fsdp",), True),
    # Half of the axis.
    ([0, 2], ("fsdp",), False),
    ([0, 8], ("data",), True),
    ([0, 1, 2, 3, 4, 5, 6, 7], ("fsdp", "tensor"), True),
    ([5], (), True),
  ],
)
def test_finds_our_axes_by_the_members(members, axes, covers):
  mesh = {"data": 2, "fsdp": 4, "expert": 1, "tensor": 2}
  found = replica_groups.mesh_axes(np.array(members), mesh)
  assert found == (axes, covers)

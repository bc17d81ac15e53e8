"""Tests for the largest number, as one process knows it."""

from paxon.runner.hosts import late_maximum
from paxon.sharding import layout, mesh


def test_it_is_known_one_call_later():
  made = layout.Layout(mesh.make_mesh(mesh.MeshSpec.parse("data=4,tensor=2")))
  largest = late_maximum.LateMaximum(made)
  assert [largest(number) for number in (0, 15, 2, 0)] == [0, 0, 15, 2]

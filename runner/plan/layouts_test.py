"""Tests of meshes that are enumerated, and of their order.

Tests of the estimates themselves are in `tasks/plans:layouts_test`: they take
experiments.
"""

from paxon.runner.plan import layouts


def test_ranked_puts_equal_times_in_order_of_memory():
  points = [(1.0, 9), (1.01, 3), (1.03, 1), (2.0, 0), (1.04, 0)]
  assert layouts.rank(points, step=lambda p: p[0], memory=lambda p: p[1]) == [
    (1.01, 3),
    (1.0, 9),
    (1.04, 0),
    (1.03, 1),
    (2.0, 0),
  ]

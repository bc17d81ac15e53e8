"""Tests for agreement, with stubs of JAX's collectives."""

import jax
from jax.experimental import multihost_utils
import numpy as np
import pytest

from paxon.runner import user_error
from paxon.runner.hosts import agreement
from paxon.sharding import layout, mesh


class _Wire:
  """Runs the first of two processes and then, with what it sent, the other."""

  def __init__(self, monkeypatch):
    self._monkeypatch = monkeypatch
    self._sent = []

  def run(self, index, make):
    left = iter(self._sent)

    def broadcast(value, is_source=None):
      assert is_source in (None, not index)
      if not index:
        self._sent.append(value)
        return value
      arrived = next(left)
      assert np.shape(value) == np.shape(arrived)
      return arrived

    with self._monkeypatch.context() as patch:
      patch.setattr(jax, "process_count", lambda: 2)
      patch.setattr(jax, "process_index", lambda: index)
      patch.setattr(multihost_utils, "broadcast_one_to_all", broadcast)
      return agreement.from_first(make)


@pytest.fixture(name="wire")
def _wire(monkeypatch):
  return _Wire(monkeypatch)


def _never():
  raise AssertionError("only the first process is asked")


@pytest.mark.parametrize("value", [None, 7, {"error": "a value"}, "ä" * 300])
def test_all_get_the_value_of_the_first(wire, value):
  assert wire.run(0, lambda: value) == value
  assert wire.run(1, _never) == value


def test_error_of_the_first_is_raised_by_all(wire):
  def refuse():
    raise user_error.UserError("mesh 'data=3' needs exactly 3 devices.")

  for index, make in ((0, refuse), (1, _never)):
    with pytest.raises(user_error.UserError, match=r"^mesh 'data=3' needs"):
      wire.run(index, make)


def test_maximum_is_returned_one_call_later():
  made = layout.Layout(mesh.make_mesh(mesh.MeshSpec.parse("data=4,tensor=2")))
  largest = agreement.DelayedMaximum(made)
  assert [largest(number) for number in (0, 15, 2, 0)] == [0, 0, 15, 2]

"""Tests that cycles are freed where the loop says, and only there."""

import gc
import weakref

import pytest

from paxon.runner.training import train_loop


class _Cycle:
  def __init__(self):
    self.own = self


def _lost_cycle():
  return weakref.ref(_Cycle())


@pytest.fixture(autouse=True)
def _nothing_is_set_aside():
  """As in a program of its own: who runs the tests has set imports aside."""
  gc.unfreeze()
  yield
  gc.freeze()


def test_cycles_live_until_they_are_collected():
  before = _lost_cycle()
  with train_loop.DeferredGarbageCollection() as postponed:
    assert before() is None
    assert not gc.isenabled()
    lost = [_lost_cycle() for _ in range(3000)]
    assert all(ref() is not None for ref in lost)
    postponed.collect()
    assert all(ref() is None for ref in lost)


def test_what_was_there_before_is_set_aside():
  with train_loop.DeferredGarbageCollection():
    assert gc.get_freeze_count() > 1000
    assert len(gc.get_objects()) < 1000
  assert gc.get_freeze_count() == 0


def test_what_others_have_set_aside_stays_so():
  gc.freeze()
  with train_loop.DeferredGarbageCollection():
    pass
  assert gc.get_freeze_count() > 1000


def test_cycles_are_freed_now_and_then_without_being_asked():
  with train_loop.DeferredGarbageCollection() as postponed:
    lost = _lost_cycle()
    for _ in range(999):
      postponed.after_step()
    assert lost() is not None
    postponed.after_step()
    assert lost() is None


@pytest.mark.parametrize("enabled", [True, False])
def test_the_setting_of_before_is_restored_also_after_an_error(enabled):
  was = gc.isenabled()
  (gc.enable if enabled else gc.disable)()
  try:
    with pytest.raises(KeyError), train_loop.DeferredGarbageCollection():
      raise KeyError
    assert gc.isenabled() == enabled
  finally:
    (gc.enable if was else gc.disable)()

"""Tests of calls that process 0 makes on all processes."""

import queue
import threading

import jax.numpy as jnp
import numpy as np
import pytest

from paxon.runner.hosts import agreement, followers


@pytest.fixture(name="wire")
def _wire(monkeypatch):
  """Messages of a leader to a follower, which are threads here."""
  sent = queue.Queue()

  def broadcast(data):
    if not data:
      return sent.get(timeout=60)
    sent.put(data)
    return data

  monkeypatch.setattr(agreement, "is_alone", lambda: False)
  monkeypatch.setattr(agreement, "broadcast", broadcast)
  return sent


def test_followers_make_the_calls_of_the_leader(wire):
  calls = {"leader": [], "follower": []}

  def functions(name):
    return {
      "add": lambda x, rows: calls[name].append((x, rows)) or len(calls[name]),
      "clear": calls[name].clear,
    }

  follower = threading.Thread(
    target=followers.follow, args=[functions("follower")]
  )
  follower.start()
  leader = followers.Leader(functions("leader"))
  leader.call("add", 0, {})
  leader.call("clear")
  leader.wait()
  rows = {"ids": jnp.arange(70_000), "mask": np.zeros((3, 2), bool)}
  assert leader.call("add", 2.5, rows) == 1
  leader.close()
  follower.join(timeout=60)
  assert not follower.is_alive()
  [(number, found)] = calls["follower"]
  assert number == 2.5
  assert found.keys() == rows.keys()
  for name, value in rows.items():
    assert isinstance(found[name], np.ndarray)
    assert found[name].dtype == value.dtype
    np.testing.assert_array_equal(found[name], value)


def test_one_process_sends_nothing(monkeypatch):
  monkeypatch.delattr(agreement, "broadcast")
  leader = followers.Leader({"add": lambda x, y: x + y})
  assert leader.call("add", 1, 2) == 3
  leader.wait()
  leader.close()

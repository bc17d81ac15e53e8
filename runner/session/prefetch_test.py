"""Tests for batches read by a thread."""

import re
import threading
import time

import jax.numpy as jnp
import pytest

from paxon.runner import user_error
from paxon.runner.session import prefetch
from paxon.runner.training import testing


def _source():
  job, _ = testing.make()
  return job.train_input


def _identity(batch):
  return {name: jnp.asarray(value) for name, value in batch.items()}


def _inputs(batches):
  return [batch.arrays["inputs"].tolist() for batch in batches]


def _direct(source, count):
  return [source.get_next()["inputs"].tolist() for _ in range(count)]


def test_gives_the_batches_of_the_input_in_order():
  with prefetch.Prefetcher(_source(), place=_identity, limit=5) as batches:
    assert _inputs(batches) == _direct(_source(), 5)


def test_going_on_from_a_batch_neither_skips_nor_repeats():
  with prefetch.Prefetcher(_source(), place=_identity) as batches:
    read = []
    for batch in batches:
      read.append(batch)
      if len(read) == 3:
        break
  source = _source()
  source.set_state(read[1].position)
  expected = _direct(_source(), 6)
  with prefetch.Prefetcher(source, place=_identity, limit=4) as batches:
    assert _inputs(batches) == expected[2:]


def test_ends_where_a_finite_input_ends():
  job, _ = testing.make()
  source = job.eval_inputs["validation"]
  expected = len(list(source))
  source.reset()
  with prefetch.Prefetcher(source, place=_identity) as batches:
    assert len(list(batches)) == expected > 1


@pytest.mark.parametrize(
  ("error", "expected", "message"),
  [
    (OSError("disk gone"), user_error.UserError, "read: disk gone. (prefetch_"),
    (ValueError("a.txt: x"), user_error.UserError, "cannot be read: a.txt: x."),
    (KeyError("text"), KeyError, "text"),
  ],
)
def test_an_error_of_the_input_is_raised_here(error, expected, message):
  class Broken(testing.SlowInput):
    def get_next(self):
      raise error

  source = _source()
  broken = Broken(
    examples=source.examples,
    tokenizer=source.tokenizer,
    global_batch_size=8,
    length=16,
  )
  with (
    prefetch.Prefetcher(broken, place=_identity) as batches,
    pytest.raises(expected, match=re.escape(message)),
  ):
    list(batches)


def test_reads_ahead_no_further_than_its_depth():
  placed = []

  def place(batch):
    placed.append(batch)
    if len(placed) == 3:
      third.set()
    return _identity(batch)

  third = threading.Event()
  with prefetch.Prefetcher(_source(), place=place, depth=2):
    # Two are ready, and the thread holds one more.
    assert third.wait()
    assert not any(t.join(0.05) for t in threading.enumerate() if t.daemon)
    assert len(placed) == 3


def test_closing_ends_the_thread():
  batches = prefetch.Prefetcher(_source(), place=_identity)
  next(iter(batches))
  batches.close()
  assert "prefetch" not in {t.name for t in threading.enumerate()}


def test_is_ready_if_a_batch_is_available_without_waiting():
  go_on = threading.Event()

  def place(batch):
    go_on.wait()
    return _identity(batch)

  with prefetch.Prefetcher(_source(), place=place, limit=1) as batches:
    assert not batches.is_ready()
    go_on.set()
    next(iter(batches))
    # The end can be had too.
    while not batches.is_ready():
      time.sleep(0.001)

"""The largest batch that fits, for memories that are known."""

import dataclasses
import math

import pytest

from paxon.runner.plan import result, sample_plan
from paxon.runner.planning import largest_batch

_USABLE = 1000.0


def _plan(peak):
  """Returns a plan with this peak; None as the TPU compiler rejects it."""
  error = "RESOURCE_EXHAUSTED" if peak is None else None
  memory = sample_plan.memory(peak=peak, usable=_USABLE, compiler_error=error)
  return dataclasses.replace(
    sample_plan.plan(), memory=memory, fit=memory.fit.value
  )


def _find(peak, *, first=8, unit=8):
  tried = []

  def make(batch):
    tried.append(batch)
    return _plan(peak(batch))

  found = largest_batch.find(first, _plan(peak(first)), make, unit=unit)
  assert all(batch % unit == 0 for batch in tried)
  assert list(found.plans) == sorted({first, *tried})
  return found, len(tried)


def _linear(batch):
  return round(100 + 3.5 * batch)


def _steps(batch):
  """As with padding: memory grows every 32 sequences."""
  return 100 + 120 * math.ceil(batch / 32)


def _rejected(batch):
  return None if batch > 96 else 100 + 2 * batch


@pytest.mark.parametrize(
  ("peak", "largest"),
  [
    # (1000 - 100) / 3.5 is 257.1.
    (_linear, 256),
    # 100 + 7 * 120 is 940.
    (_steps, 224),
    (_rejected, 96),
    # 900 to the power of 1 / 1.2 is 289.6.
    (lambda batch: round(100 + batch**1.2), 288),
  ],
  ids=["linear", "steps", "rejected", "power"],
)
@pytest.mark.parametrize("first", [8, 64, 512])
def test_finds_the_largest_multiple_that_fits(peak, largest, first):
  found, count = _find(peak, first=first)
  assert found.batch == largest
  assert found.is_certain
  assert count <= 10


def test_a_state_that_does_not_fit_has_no_batch():
  found, _ = _find(lambda batch: 1200 + batch, first=32)
  assert found.batch is None
  assert found.is_certain


def test_a_plan_that_cannot_be_made_ends_the_search():
  def make(batch):
    return result.Failure(target="h200:1x8", message="no")

  found = largest_batch.find(8, _plan(200), make, unit=8)
  assert (found.batch, found.is_certain) == (8, False)

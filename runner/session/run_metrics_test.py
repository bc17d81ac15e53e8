"""Tests for training summaries and throughput."""

import jax
import jax.numpy as jnp
import pytest

from paxon.learners import metrics as metrics_lib
from paxon.runner.monitoring import metrics_file, observer
from paxon.runner.session import run_metrics


class _Memory(metrics_file.SummaryWriter):
  def __init__(self):
    self.written, self.histograms = [], []

  def write_histogram(self, step, split, name, histogram):
    self.histograms.append((step, split, name, histogram))

  def write(self, step, split, values):
    self.written.append((step, split, dict(values)))

  def close(self):
    pass


def _metrics(loss):
  return {"loss": (jnp.float32(loss * 4), jnp.float32(4))}


def test_metrics_are_read_one_step_late():
  memory = _Memory()
  summaries = run_metrics.TrainMetrics(memory, every_steps=1, last_step=3)
  summaries.add(1, _metrics(1.5))
  assert memory.written == []
  summaries.add(2, _metrics(2.5))
  assert [step for step, _, _ in memory.written] == [1]
  summaries.drain()
  summaries.drain()
  assert [(s, v["loss"]) for s, _, v in memory.written] == [(1, 1.5), (2, 2.5)]


def test_every_nth_step_and_the_last_one_are_written():
  memory = _Memory()
  summaries = run_metrics.TrainMetrics(memory, every_steps=3, last_step=7)
  for step in range(1, 8):
    summaries.add(step, _metrics(step))
  summaries.drain()
  assert [(s, split) for s, split, _ in memory.written] == [
    (3, "train"),
    (6, "train"),
    (7, "train"),
  ]
  assert memory.written[0][2]["loss"] == 3.0
  assert memory.written[0][2]["tokens_per_second"] > 0


def test_throughput_counts_tokens_and_time_since_the_last_report():
  now = [100.0]
  rate = run_metrics.Throughput(clock=lambda: now[0])
  rate.add(30.0)
  rate.add(10.0)
  now[0] += 8
  assert rate.report() == 5.0
  rate.add(6.0)
  now[0] += 2
  assert rate.report() == 3.0


def test_throughput_leaves_out_pauses():
  now = [0.0]
  rate = run_metrics.Throughput(clock=lambda: now[0])
  now[0] += 1
  with rate.pause():
    now[0] += 1000
  now[0] += 1
  rate.add(10.0)
  assert rate.report() == 5.0


def test_throughput_of_no_time_is_no_division_by_zero():
  assert run_metrics.Throughput(clock=lambda: 1.0).report() == 0.0


def test_throughput_counts_a_failed_pause_as_one():
  now = [0.0]
  rate = run_metrics.Throughput(clock=lambda: now[0])

  def fail():
    with rate.pause():
      now[0] += 5
      raise OSError("disk")

  with pytest.raises(OSError, match="disk"):
    fail()
  now[0] += 2
  rate.add(4.0)
  assert rate.report() == 2.0


class _Witness(observer.Observer):
  """Notes what it is told."""

  def __init__(self):
    super().__init__()
    self.told = []

  def on_finish(self, step, values):
    self.told.append((step, dict(values)))

  def figures(self, step_seconds):
    return {"step_seconds": step_seconds}


def test_each_step_is_observed_and_only_written_metrics_are_read():
  memory, witness = _Memory(), _Witness()
  summaries = run_metrics.TrainMetrics(
    memory, every_steps=2, last_step=3, observer=witness
  )
  for step in (1, 2, 3):
    many = {"accuracy": (jnp.float32(2), jnp.float32(4))}
    summaries.add(step, _metrics(step) | many)
  summaries.drain()
  assert [step for step, _ in witness.told] == [1, 2, 3]
  assert [values["loss"] for _, values in witness.told] == [1.0, 2.0, 3.0]
  assert "accuracy" not in witness.told[0][1]
  assert [(step, v["accuracy"]) for step, _, v in memory.written] == [
    (2, 0.5),
    (3, 0.5),
  ]
  assert all(v["step_seconds"] > 0 for _, _, v in memory.written)


def test_devices_are_busy_until_the_last_step_is_there():
  @jax.jit
  def slow(x):
    return jax.lax.fori_loop(0, 200, lambda _, x: jnp.sin(x @ x), x)[0, 0]

  x = jnp.ones((256, 256))
  slow(x).block_until_ready()
  summaries = run_metrics.TrainMetrics(_Memory(), every_steps=1, last_step=3)
  assert not summaries.is_busy()
  loss = slow(x), jnp.float32(4)
  summaries.add(1, {"loss": loss})
  assert summaries.is_busy()
  # Each of them: they are made one after another, in any order.
  jax.block_until_ready(loss)
  assert not summaries.is_busy()


def test_mean_time_of_a_step_since_the_last_report():
  now = [100.0]
  rate = run_metrics.Throughput(clock=lambda: now[0])
  for _ in range(4):
    rate.add(1.0)
  now[0] += 8
  assert rate.step_seconds() == 2.0
  rate.report()
  rate.add(1.0)
  now[0] += 3
  assert rate.step_seconds() == 3.0


def test_maxima_and_histograms_are_written():
  memory = _Memory()
  summaries = run_metrics.TrainMetrics(memory, every_steps=2, last_step=2)
  values, weights = jnp.array([0.1, 0.6, 7.0]), jnp.array([1.0, 2.0, 1.0])
  more = metrics_lib.maximum("size", values, weights=weights)
  more |= metrics_lib.histogram(
    "size", values, weights=weights, low=0.0, high=1.0, bins=2
  )
  empty = metrics_lib.histogram(
    "none", values, weights=0 * weights, low=0.0, high=1.0
  )
  for step in (1, 2):
    summaries.add(step, _metrics(1.0) | more | empty)
  summaries.drain()
  ((step, _, found),) = memory.written
  assert (step, found["size/max"]) == (2, 7.0)
  assert not any("bins" in name for name in found)
  ((step, split, name, histogram),) = memory.histograms
  assert (step, split, name) == (2, "train", "size")
  assert (histogram.minimum, histogram.maximum) == (0.0, 1.0)
  assert (histogram.limits, histogram.counts) == ((0.5, 1.0), (1.0, 3.0))
  assert (histogram.count, histogram.total) == (4.0, pytest.approx(8.3))

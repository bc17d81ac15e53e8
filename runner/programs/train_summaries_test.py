"""Tests for training summaries and throughput."""

import jax.numpy as jnp
import pytest

from paxon.runner.programs import throughput, train_summaries
from paxon.runner.summaries import summary_writer


class _Memory(summary_writer.SummaryWriter):
  def __init__(self):
    self.written = []

  def write(self, step, split, values):
    self.written.append((step, split, dict(values)))

  def close(self):
    pass


def _metrics(loss):
  return {"loss": (jnp.float32(loss * 4), jnp.float32(4))}


def test_metrics_are_read_one_step_late():
  memory = _Memory()
  summaries = train_summaries.TrainSummaries(memory, every_steps=1, last_step=3)
  summaries.add(1, _metrics(1.5))
  assert memory.written == []
  summaries.add(2, _metrics(2.5))
  assert [step for step, _, _ in memory.written] == [1]
  summaries.drain()
  summaries.drain()
  assert [(s, v["loss"]) for s, _, v in memory.written] == [(1, 1.5), (2, 2.5)]


def test_every_nth_step_and_the_last_one_are_written():
  memory = _Memory()
  summaries = train_summaries.TrainSummaries(memory, every_steps=3, last_step=7)
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
  rate = throughput.Throughput(clock=lambda: now[0])
  rate.add(30.0)
  rate.add(10.0)
  now[0] += 8
  assert rate.report() == 5.0
  rate.add(6.0)
  now[0] += 2
  assert rate.report() == 3.0


def test_throughput_leaves_out_pauses():
  now = [0.0]
  rate = throughput.Throughput(clock=lambda: now[0])
  now[0] += 1
  with rate.paused():
    now[0] += 1000
  now[0] += 1
  rate.add(10.0)
  assert rate.report() == 5.0


def test_throughput_of_no_time_is_no_division_by_zero():
  assert throughput.Throughput(clock=lambda: 1.0).report() == 0.0


def test_throughput_counts_a_failed_pause_as_one():
  now = [0.0]
  rate = throughput.Throughput(clock=lambda: now[0])

  def fail():
    with rate.paused():
      now[0] += 5
      raise OSError("disk")

  with pytest.raises(OSError, match="disk"):
    fail()
  now[0] += 2
  rate.add(4.0)
  assert rate.report() == 2.0

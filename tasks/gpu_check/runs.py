"""Train steps of experiments on this machine's devices."""

from collections.abc import Mapping, Sequence
import dataclasses
import statistics
import time
from typing import Any

import jax
import numpy as np

from paxon.inputs import synthetic_lm_input
from paxon.runner.configuration import overrides, resolving
from paxon.runner.plan import flops, hardware
from paxon.runner.session import compiled_steps
from paxon.runner.session import session as session_lib

_WARMUP = 3

Knobs = Sequence[tuple[str, str]]


@dataclasses.dataclass(kw_only=True, eq=False)
class Steps:
  """A compiled train step with its state and a batch of random tokens.

  Attributes:
    step: The compiled step; it donates its state.
    state: The current state.
    batch: A batch on the devices, one document in each sequence.
    compile_seconds: Time to trace and compile.
    flops: Causal model FLOPs of a step on all devices.
    loss: Loss of the last step, for tests of runs.
  """

  step: jax.stages.Compiled
  state: Any
  batch: Mapping[str, jax.Array]
  compile_seconds: float
  flops: float
  loss: float | None = None

  @property
  def tokens(self) -> int:
    """Tokens of a batch."""
    return self.batch["inputs"].size

  def advance(self, *, steps: int) -> Any:
    """Runs steps and waits for the last one; returns its metrics."""
    metrics: Any = {}
    for _ in range(steps):
      self.state, metrics = self.step(self.state, self.batch)
    return jax.block_until_ready((self.state, metrics))[1]

  def measure(self, *, blocks: int, steps: int) -> float:
    """Returns the median over blocks of the seconds of a step.

    Steps of a block follow each other without waiting, as in a run.
    """
    metrics = self.advance(steps=_WARMUP)
    times = []
    for _ in range(blocks):
      begin = time.perf_counter()
      metrics = self.advance(steps=steps)
      times.append((time.perf_counter() - begin) / steps)
    total, weight = metrics["loss"]
    self.loss = float(total) / float(weight)
    return statistics.median(times)


def start(experiment: str, knobs: Knobs) -> Steps:
  """Compiles the train step of an experiment and makes its first state.

  Args:
    experiment: As `--exp` takes it.
    knobs: Assignments of `--fdl.`.

  Raises:
    UserError: A knob does not exist, or the mesh does not fit the devices.
  """
  given = [overrides.Override(*knob) for knob in knobs]
  resolved = resolving.resolve(experiment, given)
  job = resolving.build(resolved.config)
  session = session_lib.open_session(job)
  begin = time.perf_counter()
  traced = compiled_steps.trace_train_step(session)
  step = compiled_steps.compile_train_step(session, traced)
  seconds = time.perf_counter() - begin
  batch_size, length = session.batch["inputs"].shape
  tokens = synthetic_lm_input.SyntheticLmInput(
    global_batch_size=batch_size,
    length=length,
    vocab_size=resolved.experiment.vocab_size,  # pyrefly: ignore
    random_seed=0,
  )
  # Other arrays, such as numbers of bytes, only go into metrics.
  ones = {name: np.ones(x.shape, x.dtype) for name, x in session.batch.items()}
  return Steps(
    step=step,
    state=session.initial_state(),
    batch=session.place({**ones, **tokens.get_next()}),
    compile_seconds=seconds,
    flops=flops.count(traced.jaxpr).causal_model_flops(length),
  )


def peak_memory(step: jax.stages.Compiled) -> int:
  """Returns the peak memory of a device in bytes.

  Without statistics of the device, as on CPUs, it is what the compiler reports.
  """
  stats = jax.local_devices()[0].memory_stats() or {}
  peak = stats.get("peak_bytes_in_use")
  if peak is not None:
    return peak
  sizes = step.memory_analysis()
  assert sizes is not None
  more = sizes.output_size_in_bytes - sizes.alias_size_in_bytes
  return sizes.argument_size_in_bytes + sizes.temp_size_in_bytes + more


def mfu(flops_per_step: float, seconds: float) -> float | None:
  """Returns the model FLOPs utilization; None without datasheet rates."""
  kind = hardware.find_by_device_kind(jax.devices()[0].device_kind)
  peak = kind.peak_flops() if kind else None
  if peak is None:
    return None
  return flops_per_step / seconds / peak / jax.device_count()

"""Workloads of the bench: both train steps, compiled, in blocks of steps."""

from collections.abc import Sequence
import dataclasses
from typing import Any

import jax

from paxon.runner import job as job_lib
from paxon.runner.plan import flops, hardware
from paxon.runner.training import compiled_steps
from paxon.runner.training import session as session_lib
from paxon.tools.benchmarks import decoder_lm_job, pure_jax_decoder_lm

# Batches that are kept on the device and used in turn.
_NUM_BATCHES = 4
PURE_JAX_KEYS = ("inputs", "targets", "weights", "positions", "segment_ids")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
  """Sizes of a model and of its batches.

  Attributes:
    config: Sizes of the model.
    global_batch_size: Sequences per batch.
    length: Tokens per sequence.
  """

  config: pure_jax_decoder_lm.Config
  global_batch_size: int
  length: int

  def job(self, **fields: Any) -> job_lib.Job:
    """Returns the training job, with other fields replaced."""
    return decoder_lm_job.make_job(
      self.config,
      global_batch_size=self.global_batch_size,
      length=self.length,
      **fields,
    )

  @property
  def tokens(self) -> int:
    """Tokens per batch, with padding."""
    return self.global_batch_size * self.length

  def facts(self) -> dict[str, Any]:
    """Returns the sizes for reports."""
    c = self.config
    return {
      "layers": c.num_layers,
      "embed": c.embed_dim,
      "mlp": c.mlp_dim,
      "heads": f"{c.num_heads}/{c.num_kv_heads}x{c.head_dim}",
      "vocab": c.vocab_size,
      "batch": f"{self.global_batch_size}x{self.length}",
      "dtype": c.dtype,
    }


class Steps:
  """A block of train steps; a call runs them and waits for the result."""

  def __init__(
    self,
    step: jax.stages.Compiled,
    state: Any,
    batches: Sequence[Any],
    *,
    count: int,
  ) -> None:
    """Initializes.

    Args:
      step: `(state, batch) -> (state, metrics)`, which donates the state.
      state: The initial state.
      batches: Arrays on the devices, used in turn.
      count: Steps in a block.
    """
    self.step = step
    self._batches = batches
    self._count = count
    self.state = state

  def __call__(self) -> None:
    """Runs the steps of a block."""
    metrics = None
    for i in range(self._count):
      batch = self._batches[i % len(self._batches)]
      self.state, metrics = self.step(self.state, batch)
    jax.block_until_ready((self.state, metrics))


@dataclasses.dataclass(frozen=True, kw_only=True)
class OurSteps:
  """Our train step.

  Attributes:
    session: The job on its devices.
    traced: The traced step.
    step: The compiled step.
    batches: Batches on the devices.
  """

  session: session_lib.Session
  traced: jax.stages.Traced
  step: jax.stages.Compiled
  batches: list[dict[str, jax.Array]]

  def start(self, *, count: int) -> Steps:
    """Returns blocks of `count` steps that begin at the initial state."""
    state = self.session.initial_state()
    return Steps(self.step, state, self.batches, count=count)

  def flops_per_step(self, length: int) -> float:
    """Returns the causal FLOPs of one step, without recomputation."""
    return flops.count(self.traced.jaxpr).causal_model_flops(length)


def compile_ours(
  job: job_lib.Job, *, devices: Sequence[jax.Device] | None = None
) -> OurSteps:
  """Compiles our train step and transfers batches to the devices."""
  session = session_lib.open_session(job, devices=devices)
  traced = compiled_steps.trace_train_step(session)
  batches = [
    session.place(job.train_input.get_next()) for _ in range(_NUM_BATCHES)
  ]
  job.train_input.reset()
  return OurSteps(
    session=session,
    traced=traced,
    step=compiled_steps.compile_train_step(session, traced),
    batches=batches,
  )


def pure_jax_steps(ours: OurSteps, workload: Workload, *, count: int) -> Steps:
  """Returns the plain JAX step with our initial state and batches."""
  state = decoder_lm_job.to_pure_jax(ours.session.initial_state())
  batches = [
    {name: batch[name] for name in PURE_JAX_KEYS} for batch in ours.batches
  ]
  step = pure_jax_decoder_lm.compile_step(workload.config, state, batches[0])
  return Steps(step, state, batches, count=count)


def rates(
  *, tokens: int, flops_per_step: float, seconds: float, dtype: str
) -> dict[str, float]:
  """Returns tokens and FLOPs per second, and MFU where the peak is known.

  Args:
    tokens: In a step, over all devices.
    flops_per_step: Over all devices.
    seconds: Of a step.
    dtype: Of the operands of matmuls.
  """
  devices = jax.devices()
  result = {
    "tokens/s": tokens / seconds,
    "TFLOP/s": flops_per_step / seconds / 1e12,
  }
  kind = hardware.for_device_kind(devices[0].device_kind)
  peak = kind.peak_flops(dtype) if kind else None
  if peak:
    result["MFU"] = flops_per_step / seconds / peak / len(devices)
  return result

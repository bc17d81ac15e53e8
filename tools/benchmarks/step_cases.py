"""Cases of single steps: their time, their compilation, a save after each.

A step of the model is compared with plain JAX, with the same step whose forward
pass is tuned by hand, with flax.linen and optax, and with `torch.compile`.
"""

from collections.abc import Callable
import enum
import tempfile
import time

from etils import epath
import jax

from paxon.runner.checkpoints import checkpointer
from paxon.runner.session import compiled_steps
from paxon.runner.session import session as session_lib
from paxon.tools.benchmarks import (
  decoder_lm_workload,
  flax_decoder_lm,
  pure_jax_decoder_lm,
  timing,
  torch_decoder_lm,
  tuned_jax_forward,
)

# The overhead of a framework that the design accepts.
STEP_LIMIT = 1.05
SAVE_LIMIT = 1.0
COMPILE_LIMIT = 1.2


class Baseline(enum.Enum):
  """Steps that ours is compared with."""

  PLAIN = "plain JAX"
  TUNED = "tuned JAX"
  FLAX = "flax and optax"
  TORCH = "torch.compile"
  EAGER_TORCH = "torch, eager"


# Limits that depend on the dtype: torch has faster bfloat16 kernels than XLA.
_TORCH_LIMITS = {"float32": 1.0, "bfloat16": 1.25}
_IN_TORCH = (Baseline.TORCH, Baseline.EAGER_TORCH)


def run(
  workload: decoder_lm_workload.Workload,
  *,
  name: str,
  rounds: int,
  steps: int,
  baseline: Baseline = Baseline.PLAIN,
) -> timing.Comparison:
  """Returns the time of our train step over another's, on one device.

  Both begin with the same state.

  Raises:
    ImportError: The baseline is torch, and it is not installed.
  """
  job = workload.job()
  ours = decoder_lm_workload.compile_ours(job, devices=jax.devices()[:1])
  first = ours.start(count=steps)
  second = _start_baseline(baseline, ours, workload, count=steps)
  blocks = timing.interleave(first, second, rounds=rounds)
  pairs = timing.Pairs(
    first=tuple(seconds / steps for seconds in blocks.first),
    second=tuple(seconds / steps for seconds in blocks.second),
  )
  rates = decoder_lm_workload.rates(
    tokens=workload.tokens,
    flops_per_step=ours.flops_per_step(workload.length),
    seconds=timing.median_interval(pairs.first).median,
    dtype=workload.config.dtype,
  )
  return timing.Comparison(
    case=name,
    first="our train step",
    second=baseline.value,
    pairs=pairs,
    limit=STEP_LIMIT
    if baseline not in _IN_TORCH
    else _TORCH_LIMITS[workload.config.dtype],
    facts={**workload.facts(), **rates},
  )


def _start_baseline(
  baseline: Baseline,
  ours: decoder_lm_workload.OurSteps,
  workload: decoder_lm_workload.Workload,
  *,
  count: int,
) -> Callable[[], None]:
  """Returns blocks of `count` steps of a baseline, from our initial state."""
  if baseline in (Baseline.PLAIN, Baseline.TUNED):
    is_plain = baseline is Baseline.PLAIN
    return decoder_lm_workload.pure_jax_steps(
      ours,
      workload,
      count=count,
      forward=(
        pure_jax_decoder_lm.forward if is_plain else tuned_jax_forward.forward
      ),
    )
  c, batches = workload.config, decoder_lm_workload.pure_jax_batches(ours)
  state = decoder_lm_workload.to_pure_jax(ours.session.initial_state())
  if baseline is Baseline.FLAX:
    first = flax_decoder_lm.initial_state(c, state["params"])
    compiled = flax_decoder_lm.compile_step(c, first, batches[0])
    return decoder_lm_workload.Steps(compiled, first, batches, count=count)
  step = torch_decoder_lm.TrainStep(
    c, state, is_compiled=baseline is Baseline.TORCH
  )
  placed = [step.place(batch) for batch in batches]

  def run_block() -> None:
    for i in range(count):
      step(placed[i % len(placed)])

  return run_block


def run_compile(
  workload: decoder_lm_workload.Workload, *, name: str, rounds: int
) -> timing.Comparison:
  """Returns the time to trace and compile our step over that of plain JAX.

  JAX's caches are cleared before each.
  """
  job, devices = workload.job(), jax.devices()[:1]
  ours = decoder_lm_workload.compile_ours(job, devices=devices)
  state = decoder_lm_workload.to_pure_jax(ours.session.initial_state())
  batch = decoder_lm_workload.pure_jax_batches(ours)[0]

  def compile_ours() -> float:
    jax.clear_caches()
    session = session_lib.open_session(job, devices=devices)
    begin = time.perf_counter()
    traced = compiled_steps.trace_train_step(session)
    compiled_steps.compile_train_step(session, traced)
    return time.perf_counter() - begin

  def compile_theirs() -> float:
    jax.clear_caches()
    begin = time.perf_counter()
    pure_jax_decoder_lm.compile_step(workload.config, state, batch)
    return time.perf_counter() - begin

  first, second = [], []
  for i in range(rounds):
    order = ((compile_ours, first), (compile_theirs, second))
    for measure, seconds in order if i % 2 == 0 else reversed(order):
      seconds.append(measure())
  return timing.Comparison(
    case=name,
    first="compiling our step",
    second="plain JAX",
    pairs=timing.Pairs(first=tuple(first), second=tuple(second)),
    limit=COMPILE_LIMIT,
    facts=workload.facts(),
  )


def run_save(
  workload: decoder_lm_workload.Workload, *, name: str, rounds: int
) -> timing.Comparison:
  """Returns the time that `save` blocks over the time of a step.

  Each round makes one step and saves its state. Waiting for the background
  work of a save counts for neither.
  """
  ours = decoder_lm_workload.compile_ours(
    workload.job(), devices=jax.devices()[:1]
  )
  steps = ours.start(count=1)
  saves, single_steps = [], []
  with (
    tempfile.TemporaryDirectory() as folder,
    checkpointer.Checkpointer(epath.Path(folder) / "checkpoints") as manager,
  ):
    for i in range(rounds + 1):
      begin = time.perf_counter()
      steps()
      middle = time.perf_counter()
      manager.save(i, steps.state, specs=ours.session.state_specs, data={})
      end = time.perf_counter()
      manager.wait()
      if i:
        single_steps.append(middle - begin)
        saves.append(end - middle)
  size = sum(x.nbytes for x in jax.tree.leaves(steps.state))
  return timing.Comparison(
    case=name,
    first="blocked by a save",
    second="a step",
    pairs=timing.Pairs(first=tuple(saves), second=tuple(single_steps)),
    limit=SAVE_LIMIT,
    facts={**workload.facts(), "state_MB": size / 1e6},
  )

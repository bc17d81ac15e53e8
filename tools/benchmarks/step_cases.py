"""Cases that time single steps: the train step, and a save after each step."""

import tempfile
import time

from etils import epath
import jax

from paxon.runner.checkpoints import checkpointer
from paxon.tools.benchmarks import decoder_lm_workload, timing

# The overhead of a framework that the design accepts.
STEP_LIMIT = 1.05
SAVE_LIMIT = 1.0


def run(
  workload: decoder_lm_workload.Workload, *, name: str, rounds: int, steps: int
) -> timing.Comparison:
  """Returns the time of our train step over that of plain JAX, on one device.

  Both begin with the same state.
  """
  job = workload.job()
  ours = decoder_lm_workload.compile_ours(job, devices=jax.devices()[:1])
  first = ours.start(count=steps)
  second = decoder_lm_workload.pure_jax_steps(ours, workload, count=steps)
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
    second="plain JAX",
    pairs=pairs,
    limit=STEP_LIMIT,
    facts={**workload.facts(), **rates},
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

"""Our train step beside the hand-written one, from the same state on."""

import jax

from paxon.tools.benchmarks import (
  comparison,
  decoder_lm_workload,
  interleaving,
  intervals,
)

# Of DESIGN: a framework may cost this much over code written by hand.
LIMIT = 1.05


def run(
  workload: decoder_lm_workload.Workload, *, name: str, rounds: int, steps: int
) -> comparison.Comparison:
  """Returns our time of a step over that of plain JAX, on one device.

  Args:
    workload: Sizes.
    name: Of the comparison.
    rounds: How often a block of steps of each is timed.
    steps: Steps in a block.
  """
  job = workload.job()
  ours = decoder_lm_workload.compile_ours(job, devices=jax.devices()[:1])
  first = ours.start(count=steps)
  second = decoder_lm_workload.pure_jax_steps(ours, workload, count=steps)
  blocks = interleaving.interleave(first, second, rounds=rounds)
  pairs = interleaving.Pairs(
    first=tuple(seconds / steps for seconds in blocks.first),
    second=tuple(seconds / steps for seconds in blocks.second),
  )
  rates = decoder_lm_workload.rates(
    tokens=workload.tokens,
    flops_per_step=ours.flops_per_step(workload.length),
    seconds=intervals.of_median(pairs.first).median,
    dtype=workload.config.dtype,
  )
  return comparison.Comparison(
    case=name,
    first="our train step",
    second="plain JAX",
    pairs=pairs,
    limit=LIMIT,
    facts={**workload.facts(), **rates},
  )

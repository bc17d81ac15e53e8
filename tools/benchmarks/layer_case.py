"""Forward and backward passes of one layer, ours beside the hand-written."""

import jax

from paxon.tools.benchmarks import (
  comparison,
  decoder_lm_workload,
  interleaving,
  layer_contests,
)

# Of issue 5: a layer may cost this much over one written by hand.
LIMIT = 1.05


def run(
  workload: decoder_lm_workload.Workload, *, name: str, rounds: int, calls: int
) -> comparison.Comparison:
  """Returns our time of a pass over that of plain JAX, on one device.

  Args:
    workload: Sizes.
    name: Of the contest.
    rounds: How often a block of calls of each is timed.
    calls: Calls in a block.
  """
  contest = layer_contests.CONTESTS[name][1](workload)
  arguments = jax.device_put(contest.arguments(), jax.devices()[0])

  def block_of(step: jax.stages.Compiled):
    def block() -> None:
      out = [step(*arguments) for _ in range(calls)]
      jax.block_until_ready(out)

    return block

  blocks = interleaving.interleave(
    block_of(contest.compiled(contest.ours)),
    block_of(contest.compiled(contest.baseline)),
    rounds=rounds,
  )
  facts = workload.facts()
  del facts["layers"], facts["vocab"]
  return comparison.Comparison(
    case=name,
    first="our layer",
    second="plain JAX",
    pairs=interleaving.Pairs(
      first=tuple(seconds / calls for seconds in blocks.first),
      second=tuple(seconds / calls for seconds in blocks.second),
    ),
    limit=LIMIT,
    facts=facts,
  )

"""How long a save keeps training waiting, beside one step."""

import tempfile
import time

from etils import epath
import jax

from paxon.runner.checkpoints import checkpointer
from paxon.tools.benchmarks import (
  comparison,
  decoder_lm_workload,
  interleaving,
)

LIMIT = 1.0


def run(
  workload: decoder_lm_workload.Workload, *, name: str, rounds: int
) -> comparison.Comparison:
  """Returns the time in which `save` blocks over the time of a step.

  In each round one step is made, and its state saved. What a save does in the
  background is waited for outside of both times.

  Args:
    workload: Sizes.
    name: Of the comparison.
    rounds: How often both are timed, after one untimed round.
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
  return comparison.Comparison(
    case=name,
    first="blocked by a save",
    second="a step",
    pairs=interleaving.Pairs(first=tuple(saves), second=tuple(single_steps)),
    limit=LIMIT,
    facts={**workload.facts(), "state_MB": size / 1e6},
  )

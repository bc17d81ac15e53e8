"""The search varies the exchange of tokens of a mixture of experts."""

import dataclasses

from paxon.layers.moe import dispatch
from paxon.runner.configuration import overrides, resolving
from paxon.runner.plan import target as targets
from paxon.runner.planning import search_space, subject


def test_a_mixture_can_exchange_tokens():
  experiment = "tasks.lm.params.quickstart_moe.PythonStdlibMoe"
  given = [overrides.parse_argument("--fdl.mesh=expert=8")]
  space = search_space.Space(
    subject.resolve(experiment, given, targets.parse("h200:1x8"))
  )
  exchanged = dataclasses.replace(space.current.layout, is_exchanged=True)
  (candidate,) = [c for c in space.candidates() if c.layout == exchanged]
  resolved = resolving.resolve(experiment, [*given, *candidate.overrides])
  built = resolving.build(resolved.config).task.model.stack.blocks[0]
  assert built.feed_forward.dispatch == dispatch.Dropless(bound=1.5)
  # Two choices over eight devices: 2 * 1.5 * 2 copies of a token in two
  # exchanges, or 7 in bfloat16 and 7 in float32.
  assert (
    space.layouts.predict(exchanged).step
    < space.layouts.predict(space.current.layout).step
  )

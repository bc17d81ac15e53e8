"""Public names of `import paxon`: `paxon.plan` and `paxon.assert_plan`."""

import inspect

from paxon.runner.plan.functions import expectations, function_plan


class Planner:
  """Plans functions: `paxon.plan(step, state, batch, target="h200:1x8")`."""

  # `inspect` would take the first argument for `self`.
  __signature__ = inspect.signature(function_plan.plan)
  __call__ = staticmethod(function_plan.plan)
  devices = staticmethod(function_plan.devices)


plan = Planner()
assert_plan = expectations.assert_plan

"""Maker of golden plans: `--mode=plan` for one pair, without cache."""

import datetime
import time

from paxon.runner import user_error
from paxon.runner.configuration import resolving
from paxon.runner.plan import golden
from paxon.runner.planning import child, job_lint
from paxon.tasks.plans import pairs

_TIME_LIMIT = 1800.0


def measure(pair: pairs.Pair) -> golden.GoldenPlan:
  """Lints and compiles a pair.

  Args:
    pair: Experiment and target.

  Raises:
    UserError: The experiment cannot run on the target, or the target's compiler
      is not installed.
  """
  begin = time.monotonic()
  target = pair.parsed_target
  if pair.missing:
    raise user_error.UserError(
      f"{pair.name} needs {' and '.join(pair.missing)}, not installed here."
    )
  job = resolving.build(
    resolving.resolve(pair.experiment, pair.overrides).config
  )
  findings = job_lint.check(
    job, num_devices=target.num_devices, num_slices=target.slices
  )
  errors = [found.message for found in findings if found.is_error]
  if errors:
    raise user_error.UserError(f"{pair.name}: {'; '.join(errors)}.")
  plan = child.plan(
    pair.experiment,
    pair.overrides,
    target,
    is_compiled=True,
    time_limit=_TIME_LIMIT,
  )
  return golden.get_golden_values(
    plan,
    platform=target.hardware.platform.value,
    date=datetime.datetime.now(tz=datetime.UTC).strftime("%Y-%m-%d"),
    seconds=time.monotonic() - begin,
  )

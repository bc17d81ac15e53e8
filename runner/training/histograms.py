"""Histograms of a run's variables at intervals of steps.

Each is computed on the devices by a program apart from the training step, which
thus costs nothing in other steps: one pass over a variable for each bin, and no
copy. Variables that are not floating-point have none.
"""

import contextlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paxon.layers import summaries
from paxon.learners import train_state
from paxon.runner import user_error
from paxon.runner.hosts import agreement
from paxon.runner.monitoring import metrics_file, stages
from paxon.runner.session import run_metrics
from paxon.runner.session import session as session_lib
from paxon.runner.training import hooks

_NUM_BINS = 32
_FIELD = "MonitoringSettings.histogram_names"


class Histograms(hooks.Hook):
  """Histograms of the variables whose names match a pattern."""

  runs_last = True

  def __init__(
    self,
    session: session_lib.Session,
    *,
    every_steps: int,
    names: str | None = None,
  ) -> None:
    """Prepares; the program is compiled at its first use.

    Args:
      session: The job on its devices.
      every_steps: The interval.
      names: Regular expression of whole logical names; None for all.

    Raises:
      user_error.UserError: The pattern is no regular expression, or matches no
        floating-point variable.
    """
    self.every_steps = every_steps
    specs = jax.tree.leaves(session.specs)
    try:
      pattern = re.compile(names or ".*")
    except re.error as error:
      raise user_error.UserError(
        f"{_FIELD} must be a regular expression, got {names!r}: {error}."
      ) from error
    self._chosen = {
      index: spec.name
      for index, spec in enumerate(specs)
      if pattern.fullmatch(spec.name)
      and jnp.issubdtype(spec.dtype, jnp.floating)
    }
    if not self._chosen:
      raise user_error.UserError(
        f"{_FIELD} ({names!r}) matches no floating-point variable; it must"
        f" match a whole name, such as {specs[0].name!r}."
      )
    self._program = session.layout.jit(
      self._compute, out_shardings=session.layout.replicated
    )

  def run(self, progress: hooks.Progress) -> None:
    """Writes the histograms."""
    for name, histogram in self.compute(progress.state).items():
      progress.writer.write_histogram(
        progress.step, run_metrics.TRAIN, f"variables/{name}", histogram
      )

  def compute(
    self, state: train_state.TrainState
  ) -> dict[str, metrics_file.Histogram]:
    """Returns histograms by logical name; all processes must call it.

    A variable without any finite value has none.
    """
    shown = contextlib.nullcontext()
    if agreement.is_first():
      shown = stages.heartbeat("computing histograms")
    with shown:
      computed = jax.tree.map(np.asarray, self._program(state.variables))
    return {
      name: metrics_file.Histogram(
        minimum=float(limits[0]),
        maximum=float(limits[-1]),
        count=float(below[-1]),
        total=float(total),
        total_squares=float(squares),
        limits=limits[1:].tolist(),
        counts=np.diff(below, prepend=0.0).tolist(),
      )
      for name, (limits, below, total, squares) in computed.items()
      if below[-1]
    }

  def _compute(self, variables: Any) -> dict[str, Any]:
    leaves = jax.tree.leaves(variables)
    return {
      name: _histogram(leaves[index]) for index, name in self._chosen.items()
    }


def _histogram(
  x: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
  """Returns limits [bins + 1], values up to each [bins], and two sums."""
  x = jnp.atleast_1d(x).astype(jnp.float32)
  finite = jnp.isfinite(x)
  low = jnp.min(jnp.where(finite, x, jnp.inf))
  high = jnp.max(jnp.where(finite, x, -jnp.inf))
  # Not `linspace`, whose last value may be rounded to less than the maximum.
  share = jnp.arange(1, _NUM_BINS, dtype=jnp.float32) / _NUM_BINS
  inner = low * (1 - share) + high * share
  limits = jnp.concatenate([low[None], inner, high[None]])
  # One limit after the other: all at once would need an array for each.
  below = jax.lax.map(
    lambda limit: summaries.count(finite & (x <= limit)), limits[1:]
  )
  kept = jnp.where(finite, x, 0.0)
  return limits, below, jnp.sum(kept), jnp.sum(kept**2)

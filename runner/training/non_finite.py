"""Detection of losses, gradients and parameters that are not finite.

The loss and the gradient norm of every step are read anyway, one step late.
Before a checkpoint is saved, all arrays of its state are checked on the
devices, in one small program: so no checkpoint of a NaN is ever committed, and
the last finite one is not deleted in favor of it.
"""

from collections.abc import Mapping
import json
import math
from typing import Any

import jax
import jax.numpy as jnp

from paxon.learners import train_state
from paxon.runner import exit_status, user_error
from paxon.runner.session import session as session_lib
from paxon.runner.settings import training
from paxon.runner.training import hooks
from paxon.sharding import host_memory

Position = Mapping[str, Any]

_METRICS = ("loss", "grad_norm")


class NonFiniteError(user_error.UserError):
  """A value that is not finite; the message names it, the step and the data.

  Attributes:
    step: The step that computed the value.
    position: The state of the training input after the batch of the step.
  """

  status = exit_status.ExitStatus.NUMERICS

  def __init__(self, text: str, *, step: int, position: Position) -> None:
    """Creates the error with its message."""
    super().__init__(text)
    self.step = step
    self.position = position

  def with_advice(
    self, newest: int | None, settings: training.NonFinite
  ) -> "NonFiniteError":
    """Returns the error with the remaining state and a remedy.

    Args:
      newest: Step of the newest checkpoint, `None` without one.
      settings: Settings of the job.
    """
    if settings.policy is training.NonFinitePolicy.ROLL_BACK:
      advice = f"gave up after {settings.limit} roll-backs (NonFinite.limit)"
    else:
      advice = (
        "lower the learning rate, or skip the data with"
        " --fdl.non_finite=roll_back"
      )
    kept = "there is no checkpoint"
    if newest is not None:
      kept = f"the newest checkpoint, of step {newest}, is finite"
    return NonFiniteError(
      f"{self}; {kept}; {advice}.", step=self.step, position=self.position
    )


class Guard(hooks.Hook):
  """Checks every step and every saved state of a training."""

  def __init__(self, session: session_lib.Session) -> None:
    """Prepares; the check of a state is compiled for the first checkpoint."""
    self._session = session
    self._settings = session.job.non_finite
    self._skips = session.job.task.learner.skip is not None
    self._skipped = 0
    # Positions before and after the batches in flight, at most two.
    self._positions: dict[int, tuple[Position, Position]] = {}
    names = jax.tree.leaves(
      jax.tree.map(lambda spec: spec.name, session.state_specs)
    )
    self._names = [str(name) for name in names]
    self._finite = session.layout.jit(_are_finite)

  def on_dispatch(
    self, step: int, *, before: Position, after: Position
  ) -> None:
    """Records the data position before and after the batch of a step."""
    self._positions[step] = before, after

  def on_finish(self, step: int, values: Mapping[str, float]) -> None:
    """Checks the metrics of a finished step; steps come in order.

    Raises:
      NonFiniteError: The loss or the gradient norm is not finite, and the step
        was not skipped, or too many steps in sequence were.
    """
    before, after = self._positions.pop(step, ({}, {}))
    bad = [n for n in _METRICS if not math.isfinite(values.get(n, 0.0))]
    if not bad or self._settings.policy is training.NonFinitePolicy.IGNORE:
      self._skipped = 0
      return
    text = f"{bad[0]} is {values[bad[0]]} at step {step}"
    if self._skips:
      self._skipped += 1
      if self._skipped <= self._settings.limit:
        return
      text += (
        f", and the {self._settings.limit} updates before it were skipped"
        " (NonFinite.limit)"
      )
    raise NonFiniteError(
      f"{text}; its batch is at data position {json.dumps(before)} to"
      f" {json.dumps(after)}",
      step=step,
      position=after,
    )

  def check_state(self, progress: hooks.Progress) -> None:
    """Checks a state that is about to be saved.

    Raises:
      NonFiniteError: An array of the state is not finite.
    """
    if self._settings.policy is training.NonFinitePolicy.IGNORE:
      return
    finite = jax.device_get(self._finite(progress.state))
    for name, is_finite in zip(self._names, finite, strict=True):
      if not is_finite:
        raise NonFiniteError(
          f"{name} is not finite after step {progress.step}; the last batch"
          f" ends at data position {json.dumps(progress.position)}",
          step=progress.step,
          position=progress.position,
        )


def _are_finite(state: train_state.TrainState) -> jax.Array:
  """Returns whether each array of a state is finite, bool [arrays]."""
  return jnp.stack(
    [
      # In float32, because isfinite does not support fp8.
      jnp.all(jnp.isfinite(leaf.astype(jnp.float32)))
      if jnp.issubdtype(leaf.dtype, jnp.floating)
      else jnp.bool_(True)
      for leaf in jax.tree.leaves(host_memory.to_device(state))
    ]
  )

"""Evaluation of splits, whole or some batches of each."""

from collections.abc import Callable
import time
from typing import Any

import jax

from paxon.inputs import base_input
from paxon.learners import metrics as metrics_lib
from paxon.learners import train_state
from paxon.runner.hosts import agreement
from paxon.runner.training import (
  compiled_steps,
  data_positions,
  prefetch,
  row_outputs,
)
from paxon.runner.training import session as session_lib


class Evaluator:
  """Measures a state on the splits of a job.

  Sums are exact, and a mean is taken once over all batches. Those are the
  whole split, or as many as its input's `eval_loop_num_batches` says.
  """

  def __init__(self, session: session_lib.Session) -> None:
    """Prepares; the step is compiled when the first batch is there.

    Args:
      session: The job on its devices.
    """
    self._session = session
    self._steps: dict[Any, jax.stages.Compiled] = {}
    # By split; kept, because each compiles programs of its own.
    self._rows: dict[str, row_outputs.RowOutputs | None] = {}
    # The newest evaluation's step, and where rolling inputs were before it.
    self._newest: tuple[int, dict[str, base_input.State]] | None = None

  def positions(self, step: int) -> dict[str, base_input.State]:
    """Returns where rolling inputs were before the evaluation at a step.

    A run that goes on from a checkpoint of that step makes the evaluation, or
    skips it if it is recorded; so it does not matter which of the two, the
    checkpoint and the evaluation, came first.

    Args:
      step: The newest evaluation's, or a later one.

    Returns:
      Positions by split.
    """
    if self._newest is not None and self._newest[0] == step:
      return self._newest[1]
    return data_positions.of_rolling(self._session.job.eval_inputs)

  def skip(self, step: int) -> None:
    """Has rolling inputs read on over one evaluation, made at a step before."""
    inputs = self._session.job.eval_inputs
    self._newest = step, data_positions.of_rolling(inputs)
    for source in inputs.values():
      if not source.reset_for_eval:
        for _ in range(source.eval_loop_num_batches or 0):
          prefetch.next_batch(source, rolling=True)

  def evaluate(
    self,
    state: train_state.TrainState,
    *,
    is_stopped: Callable[[], bool] = lambda: False,
  ) -> dict[str, dict[str, float]] | None:
    """Returns the metrics of every split.

    Args:
      state: Placed as the session's shardings say; only what evaluation needs.
      is_stopped: Asked after each batch; true gives up.

    Returns:
      Values by metric by split, or `None` if it gave up.
    """
    results, inputs = {}, self._session.job.eval_inputs
    positions = data_positions.of_rolling(inputs)
    for split, source in inputs.items():
      values = self._evaluate_split(
        source,
        session_lib.for_evaluation(state),
        is_stopped,
        self._rows_of(split, source),
      )
      if values is None:
        # The evaluation will be made anew, on the same batches.
        data_positions.restore_rolling(inputs, positions)
        return None
      results[split] = values
    self._newest = int(state.step), positions
    return results

  def _evaluate_split(
    self,
    source: base_input.BaseInput,
    state: train_state.TrainState,
    is_stopped: Callable[[], bool],
    rows: row_outputs.RowOutputs | None,
  ) -> dict[str, float] | None:
    totals, pending = metrics_lib.Totals(), None
    seconds, begin = 0.0, time.monotonic()
    if source.reset_for_eval:
      source.reset()
    with prefetch.Prefetcher(
      source,
      place=self._session.place,
      limit=source.eval_loop_num_batches,
      rolling=not source.reset_for_eval,
    ) as batches:
      for batch in batches:
        if is_stopped():
          return None
        step, compiling = self._step(batch.arrays)
        seconds -= compiling
        metrics = step(state, batch.arrays)
        # One batch late, so that the device never waits for the host.
        if pending is not None:
          totals.add(pending)
        pending = metrics
        if rows is not None:
          seconds -= _add_rows(rows, state, batch.arrays, after=metrics)
      if pending is not None:
        totals.add(pending)
    seconds += time.monotonic() - begin
    # All processes have the same figures, and may decide by any of them.
    seconds = agreement.from_first(lambda: seconds)
    measured = {} if rows is None else rows.metrics()
    return (
      totals.means()
      | measured
      | {"tokens_per_second": totals.weight("loss") / max(seconds, 1e-9)}
    )

  def _rows_of(
    self, split: str, source: base_input.BaseInput
  ) -> row_outputs.RowOutputs | None:
    """Returns what computes the rows of a split, without rows yet."""
    if split not in self._rows:
      self._rows[split] = row_outputs.of_input(source, session=self._session)
    rows = self._rows[split]
    if rows is not None:
      rows.begin()
    return rows

  def _step(
    self, batch: dict[str, jax.Array]
  ) -> tuple[jax.stages.Compiled, float]:
    """Returns the step for a batch, and the seconds it took to compile."""
    begin = time.monotonic()
    key = tuple(sorted((k, v.shape, v.dtype.name) for k, v in batch.items()))
    if key not in self._steps:
      self._steps[key] = compiled_steps.compile_eval_step(self._session, batch)
    return self._steps[key], time.monotonic() - begin


def _add_rows(
  rows: row_outputs.RowOutputs,
  state: train_state.TrainState,
  batch: dict[str, jax.Array],
  *,
  after: Any,
) -> float:
  """Returns the seconds it took, which are not those of the step.

  Args:
    rows: Gets the batch.
    state: As the step's.
    batch: As the step's.
    after: What the step returns; its time counts as its own.
  """
  jax.block_until_ready(after)
  begin = time.monotonic()
  rows.add(state, batch)
  return time.monotonic() - begin

"""Evaluation of all splits, the log of evaluations, and early stopping.

Early stopping is decided from the recorded evaluations only, so that an
interrupted run ends at the same step as an uninterrupted one.
"""

from collections.abc import Callable, Iterable, Mapping
import math
import time
from typing import Any

import jax

from paxon.inputs import base_input
from paxon.learners import metrics as metrics_lib
from paxon.learners import train_state
from paxon.runner import user_error
from paxon.runner.evaluation import example_outputs
from paxon.runner.hosts import agreement
from paxon.runner.monitoring import metrics_file
from paxon.runner.session import compiled_steps, prefetch, restore, run_metrics
from paxon.runner.session import session as session_lib
from paxon.runner.settings import training
from paxon.sharding import suggestions


class Evaluator:
  """Evaluates a state on the splits of a job.

  A mean is taken once, over all batches of a split: the whole split, or the
  first `eval_loop_num_batches` of its input.
  """

  def __init__(self, session: session_lib.Session) -> None:
    """Prepares; the step is compiled for the first batch."""
    self._session = session
    self._steps: dict[Any, jax.stages.Compiled] = {}
    # By split; kept because each compiles its own programs.
    self._outputs: dict[str, example_outputs.ExampleOutputs | None] = {}
    # The last evaluation's step, and the rolling positions before it.
    self._last: tuple[int, dict[str, base_input.State]] | None = None
    # Results of the last evaluation, by split.
    self._distributions: dict[str, dict[str, metrics_lib.Distribution]] = {}

  def positions(self, step: int) -> dict[str, base_input.State]:
    """Returns the rolling positions before the evaluation at a step.

    A run that resumes from a checkpoint of that step evaluates, or skips the
    evaluation if it is recorded; so it does not matter which of the two, the
    checkpoint and the evaluation, came first.

    Args:
      step: The last evaluation's, or a later one.

    Returns:
      Positions by split.
    """
    if self._last is not None and self._last[0] == step:
      return self._last[1]
    return restore.rolling_positions(self._session.job.eval_inputs)

  def skip(self, step: int) -> None:
    """Advances rolling inputs past an evaluation recorded at `step`."""
    inputs = self._session.job.eval_inputs
    self._last = step, restore.rolling_positions(inputs)
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
    """Returns the metrics of every split; None if stopped after a batch.

    A split without targets has no metrics.
    """
    results, inputs = {}, self._session.job.eval_inputs
    positions = restore.rolling_positions(inputs)
    for split, source in inputs.items():
      values = self._evaluate_split(
        split,
        source,
        session_lib.strip_for_evaluation(state),
        is_stopped,
        self._reset_outputs(split, source),
      )
      if values is None:
        # The evaluation will be repeated, on the same batches.
        restore.restore_rolling_positions(inputs, positions)
        return None
      results[split] = values
    self._last = int(state.step), positions
    return results

  def write(
    self,
    writer: metrics_file.SummaryWriter,
    step: int,
    results: run_metrics.Results,
  ) -> None:
    """Writes the results of the last evaluation, with their histograms."""
    for split, values in results.items():
      writer.write(step, split, values)
      run_metrics.write_distributions(
        writer, step, split, self._distributions.get(split, {})
      )

  def _evaluate_split(
    self,
    split: str,
    source: base_input.BaseInput,
    state: train_state.TrainState,
    is_stopped: Callable[[], bool],
    outputs: example_outputs.ExampleOutputs | None,
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
        # Read one batch late, so that the device never waits for the host.
        if pending is not None:
          totals.add(pending)
        pending = metrics
        if outputs is not None:
          seconds -= _add_outputs(outputs, state, batch.arrays, after=metrics)
      if pending is not None:
        totals.add(pending)
    self._distributions[split] = totals.distributions()
    seconds += time.monotonic() - begin
    # All processes need the same metrics, because they decide by them.
    seconds = agreement.from_first(lambda: seconds)
    measured = {} if outputs is None else outputs.metrics()
    found = totals.means() | measured
    if weight := totals.weight("loss"):
      found[metrics_file.name_rate(source.unit)] = weight / max(seconds, 1e-9)
    return found

  def _reset_outputs(
    self, split: str, source: base_input.BaseInput
  ) -> example_outputs.ExampleOutputs | None:
    """Returns the per-example outputs of a split, emptied."""
    if split not in self._outputs:
      self._outputs[split] = example_outputs.make_outputs(
        source, session=self._session
      )
    outputs = self._outputs[split]
    if outputs is not None:
      outputs.begin()
    return outputs

  def _step(
    self, batch: dict[str, jax.Array]
  ) -> tuple[jax.stages.Compiled, float]:
    """Returns the compiled step for a batch, and the seconds to compile it."""
    begin = time.monotonic()
    key = tuple(sorted((k, v.shape, v.dtype.name) for k, v in batch.items()))
    if key not in self._steps:
      self._steps[key] = compiled_steps.compile_eval_step(self._session, batch)
    return self._steps[key], time.monotonic() - begin


def _add_outputs(
  outputs: example_outputs.ExampleOutputs,
  state: train_state.TrainState,
  batch: dict[str, jax.Array],
  *,
  after: Any,
) -> float:
  """Adds a batch after a step; returns the seconds, for the throughput."""
  jax.block_until_ready(after)
  begin = time.monotonic()
  outputs.add(state, batch)
  return time.monotonic() - begin


class EvaluationLog:
  """A run's evaluations by step, including those of earlier processes."""

  def __init__(
    self,
    records: Iterable[metrics_file.Record] = (),
    *,
    splits: Iterable[str],
    until: int = 0,
  ) -> None:
    """Reads the recorded evaluations up to a step; later ones are repeated."""
    self._splits = frozenset(splits)
    self._results: dict[int, dict[str, Mapping[str, float]]] = {}
    self._made: set[int] = set()
    for record in records:
      if record.split in self._splits and record.step <= until:
        self._results.setdefault(record.step, {})[record.split] = record.values

  def add(self, step: int, results: run_metrics.Results) -> None:
    """Records an evaluation of all splits."""
    self._results[step] = dict(results)
    self._made.add(step)

  def forget_after(self, step: int) -> None:
    """Drops the evaluations of later steps, which training repeats."""
    self._results = {k: v for k, v in self._results.items() if k <= step}

  def at(self, step: int) -> run_metrics.Results | None:
    """Returns the evaluation at a step, `None` if it is incomplete."""
    results = self._results.get(step, {})
    return results if results.keys() == self._splits else None

  def complete(self) -> dict[int, run_metrics.Results]:
    """Returns the complete evaluations by step."""
    return {
      step: results
      for step, results in sorted(self._results.items())
      if results.keys() == self._splits
    }

  def is_from_this_process(self, step: int) -> bool:
    """Whether this process evaluated at a step, not an earlier one."""
    return step in self._made

  def reason_to_stop(
    self, rule: training.EarlyStopping, *, every_steps: int
  ) -> str | None:
    """Returns why training stops early, `None` if it does not.

    Args:
      rule: The job's early stopping.
      every_steps: Only evaluations at its multiples count. The one at the end
        of a run that was extended later would not exist in a run that was as
        long from the start.

    Raises:
      UserError: The evaluations do not have the rule's metric.
    """
    return reason_to_stop(
      rule,
      {
        step: early_stopping_value(rule, results)
        for step, results in self._results.items()
        if step % every_steps == 0 and self.at(step) is not None
      },
    )


def early_stopping_value(
  rule: training.EarlyStopping, results: run_metrics.Results
) -> float:
  """Returns the monitored metric of one evaluation, or raises UserError."""
  split, _, name = rule.metric.partition("/")
  values = results.get(split, {})
  if split in results and not values:
    return math.nan  # It has no targets.
  if name not in values:
    known = [f"{s}/{n}" for s, values in results.items() for n in values]
    raise user_error.UserError(
      f"EarlyStopping.metric is {rule.metric!r}, which the evaluation does not"
      f" have{suggestions.suggest(rule.metric, known, count=2)}"
    )
  return values[name]


def reason_to_stop(
  rule: training.EarlyStopping, values: Mapping[int, float]
) -> str | None:
  """Returns why training stops, from the metric by step; None to continue."""
  sign = 1.0 if rule.goal is training.Goal.MIN else -1.0
  if rule.target is not None:
    for step, value in sorted(values.items()):
      if sign * value <= sign * rule.target:
        return (
          f"{rule.metric} is {value:.6g} at step {step}, and the target is"
          f" {rule.target:.6g}"
        )
  if rule.patience is None:
    return None
  best_step, best, waited = None, math.inf, 0
  for step, value in sorted(values.items()):
    if sign * value < best - (0.0 if best == math.inf else rule.min_delta):
      best_step, best, waited = step, sign * value, 0
    else:
      waited += 1
  if waited < rule.patience:
    return None
  text = f"{rule.metric} has not improved for {waited} evaluations"
  if best_step is None:
    return f"{text} and was never a number"
  return f"{text}; best {sign * best:.6g} at step {best_step}"

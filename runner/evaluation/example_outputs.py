"""Per-example model outputs for metrics that are computed on the host.

An input whose examples have ids may have a method `row_metrics()` that returns
a collector. It gets the score of each example (the log likelihood of its
targets), and the text that the model generates for its prompt.
"""

from collections.abc import Callable, Mapping
import dataclasses
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from paxon.inputs import base_input
from paxon.layers import contracts
from paxon.layers.decoding import generate, model_steps, samplers
from paxon.learners import train_state
from paxon.runner import user_error
from paxon.runner.session import model_loss
from paxon.runner.session import session as session_lib
from paxon.sharding import rules as rules_lib

Batch = Mapping[str, jax.Array]

_KEYS = ("example_ids", "example_weights")
_ENCODER = ("encoder_inputs", "encoder_positions", "encoder_segment_ids")


@runtime_checkable
class ExampleMetrics(Protocol):
  """A collector of the examples of one evaluation."""

  @property
  def needs_scores(self) -> bool:
    """Whether `add` requires `scores`."""
    ...

  @property
  def needs_predictions(self) -> bool:
    """Whether `add` requires `predictions`."""
    ...

  def add(self, values: Mapping[str, np.ndarray]) -> None:
    """Adds a batch: `example_ids`, `example_weights` and required outputs."""
    ...

  def compute(self) -> dict[str, float]:
    """Returns the metrics of all added examples."""
    ...


@runtime_checkable
class HasRowMetrics(Protocol):
  """An input with metrics of its examples."""

  def row_metrics(self) -> ExampleMetrics:
    """Returns an empty collector."""
    ...


class ExampleOutputs:
  """Computes the outputs that a collector requires, batch by batch."""

  def __init__(
    self, session: session_lib.Session, make: Callable[[], ExampleMetrics]
  ) -> None:
    """Raises UserError if the model cannot generate required predictions."""
    self._make = make
    self._collector = collector = make()
    options: dict[str, Any] = {"compiler_options": session.compiler_options}
    model = session.job.task.model
    wanted = {}
    if collector.needs_scores:
      wanted["scores"] = session.layout.jit(
        lambda state, batch: _scores(session, state, batch),
        out_shardings=session.layout.replicated,
        **options,
      )
    if collector.needs_predictions:
      if session.job.task.tokenizer is None or not isinstance(
        model, contracts.Generator
      ):
        raise user_error.UserError(
          f"{session.job.experiment} has metrics of predictions, but cannot"
          " generate: the task needs a tokenizer and a model with prefill."
        )
      # A decoding step has one token per sequence: no length to split.
      rules = rules_lib.keep_lengths(session.layout.rules)
      layout = dataclasses.replace(session.layout, rules=rules)
      wanted["predictions"] = layout.jit(
        lambda state, batch: _predictions(session, state, batch),
        out_shardings=layout.replicated,
        **options,
      )
    self._ids = session.layout.jit(
      lambda batch: {key: batch[key] for key in _KEYS},
      out_shardings=session.layout.replicated,
      **options,
    )
    self._programs = wanted

  @property
  def is_needed(self) -> bool:
    """Whether the collector requires any output of the model."""
    return bool(self._programs)

  def begin(self) -> None:
    """Starts an evaluation with an empty collector."""
    self._collector = self._make()

  def add(self, state: train_state.TrainState, batch: Batch) -> None:
    """Computes the outputs of a batch and adds them to the collector."""
    values = dict(self._ids({key: batch[key] for key in _KEYS}))
    for name, program in self._programs.items():
      values[name] = program(state, dict(batch))
    self._collector.add({k: np.asarray(v) for k, v in values.items()})

  def metrics(self) -> dict[str, float]:
    """Returns the collector's metrics."""
    return self._collector.compute()


def make_outputs(
  source: base_input.BaseInput, *, session: session_lib.Session
) -> ExampleOutputs | None:
  """Returns the outputs that an input's metrics require, or None."""
  if not isinstance(source, HasRowMetrics):
    return None
  outputs = ExampleOutputs(session, source.row_metrics)
  return outputs if outputs.is_needed else None


def _scores(
  session: session_lib.Session, state: train_state.TrainState, batch: Batch
) -> jax.Array:
  """Returns the log likelihood of each example's targets, float32 [B]."""
  loss_fn = model_loss.make_loss_fn(
    session.job.task.model, specs=session.specs, deterministic=True
  )
  outputs = loss_fn(session.evaluation_variables(state), batch, {}).outputs
  return -outputs["row_nll"].astype(jnp.float32)


def _predictions(
  session: session_lib.Session, state: train_state.TrainState, batch: Batch
) -> jax.Array:
  """Returns a greedy continuation of each example's prompt, int32 [B,T].

  The prompt is the example's prefix, or its first input, which begins a text.
  An encoder reads its own inputs.
  """
  model, tokenizer = session.job.task.model, session.job.task.tokenizer
  assert tokenizer is not None
  variables = session.evaluation_variables(state)
  source: dict[str, Any] = {key: batch[key] for key in _ENCODER if key in batch}
  ids = batch["inputs"]
  if "prefix" in batch:
    lengths = jnp.sum(batch["prefix"].astype(jnp.int32), axis=1)
    # Examples that only pad the batch have none.
    lengths = jnp.maximum(lengths, 1)
  else:
    ids = ids[:, :1]
    lengths = jnp.ones(ids.shape[:1], jnp.int32)
  result = generate.generate(
    model_steps.make_prefill(model, variables, **source),
    model_steps.make_decode_step(model, variables),
    ids,
    lengths,
    sampler=samplers.Greedy(),
    key=jax.random.key(0),
    max_new_tokens=batch["targets"].shape[1],
    end_id=tokenizer.end_id,
  )
  return result.ids

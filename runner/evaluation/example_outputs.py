"""Per-example model outputs for metrics that are computed on the host.

An input whose examples have ids may have a method `row_metrics()` that returns
a collector. It gets the score of each example (the log likelihood of its
targets), and the text that the model generates for its prompt.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from paxon.inputs import base_input
from paxon.learners import train_state
from paxon.runner.session import model_loss
from paxon.runner.session import session as session_lib
from paxon.runner.settings import generation

Batch = Mapping[str, jax.Array]

_KEYS = ("example_ids", "example_weights")
# Keys of prompts; a batch has some of them.
_PROMPTS = ("inputs", "prefix", "encoder_inputs", "encoder_segment_ids")


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
class TextMetrics(ExampleMetrics, Protocol):
  """A collector of examples and generated texts."""

  def lines(self) -> Iterator[dict[str, Any]]:
    """Yields the texts and outputs of each example, as JSON values."""
    ...


@runtime_checkable
class HasTextMetrics(Protocol):
  """An input with metrics of texts that a model generates for its examples."""

  def text_metrics(self) -> TextMetrics:
    """Returns an empty collector, which requires predictions only."""
    ...


@runtime_checkable
class HasRowMetrics(Protocol):
  """An input with metrics of its examples."""

  def row_metrics(self) -> ExampleMetrics:
    """Returns an empty collector."""
    ...


class ExampleOutputs:
  """Computes the outputs that a collector requires, batch by batch.

  Attributes:
    collector: The collector of the current evaluation.
  """

  def __init__(
    self,
    session: session_lib.Session,
    make: Callable[[], ExampleMetrics],
    *,
    settings: generation.GenerationSettings | None = None,
  ) -> None:
    """Compiles nothing.

    Args:
      session: The job on its devices.
      make: Returns an empty collector.
      settings: How texts are generated, as many tokens as targets have. Of
        several samples the most likely counts. None selects the most likely
        token.

    Raises:
      UserError: The model cannot generate required predictions.
    """
    self._make = make
    self.collector = collector = make()
    options: dict[str, Any] = {
      "out_shardings": session.layout.replicated,
      "compiler_options": session.compiler_options,
    }
    self._score = self._writer = None
    if collector.needs_scores:
      self._score = session.layout.jit(
        lambda state, batch: _scores(session, state, batch), **options
      )
    if collector.needs_predictions:
      # Other evaluations do not load what generates texts.
      from paxon.runner.evaluation import prediction_writer

      self._writer = prediction_writer.PredictionWriter(
        session, settings or generation.GenerationSettings()
      )
    self._read = session.layout.jit(_read_examples, **options)

  @property
  def is_needed(self) -> bool:
    """Whether the collector requires any output of the model."""
    return self._score is not None or self._writer is not None

  def begin(self) -> None:
    """Starts an evaluation with an empty collector."""
    self.collector = self._make()

  def add(self, state: train_state.TrainState, batch: Batch) -> None:
    """Computes the outputs of a batch and adds them to the collector.

    Raises:
      UserError: A text cannot be generated, such as with NaN.
    """
    keys = [key for key in (*_KEYS, *_PROMPTS) if key in batch]
    values = jax.device_get(self._read({key: batch[key] for key in keys}))
    if self._score is not None:
      values["scores"] = np.asarray(self._score(state, dict(batch)))
    if self._writer is not None:
      length = batch["targets"].shape[1]
      values["predictions"] = self._writer.write(state, values, length)
    self.collector.add(values)

  def metrics(self) -> dict[str, float]:
    """Returns the collector's metrics; frees the copy of the state."""
    if self._writer is not None:
      self._writer.release()
    return self.collector.compute()


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


def _read_examples(batch: Batch) -> dict[str, jax.Array]:
  """Returns ids, weights, and the prompt of each example with its length.

  The prompt is the input of an encoder, the example's prefix, or its first
  input, which begins a text.
  """
  ids = batch["inputs"]
  if "encoder_inputs" in batch:
    ids, inside = batch["encoder_inputs"], batch["encoder_segment_ids"]
  elif "prefix" in batch:
    inside = batch["prefix"]
  else:
    ids, inside = ids[:, :1], jnp.ones_like(ids[:, :1])
  # Examples that only pad the batch have none.
  lengths = jnp.maximum(jnp.sum((inside > 0).astype(jnp.int32), axis=1), 1)
  found = {key: batch[key] for key in _KEYS}
  return found | {"prompts": ids, "prompt_lengths": lengths}

"""Per-example model outputs for metrics that are computed on the host.

An input whose examples have ids may have a method `row_metrics()` that returns
a collector. It gets the score of each example (the log likelihood of its
targets), and the text that the model generates for its prompt.
"""

from collections.abc import Callable, Iterator, Mapping
import dataclasses
import math
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from paxon.inputs import base_input
from paxon.learners import train_state
from paxon.runner import user_error
from paxon.runner.generation import decode_file, generation_program, samples
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
      self._writer = _Writer(
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


class _Writer:
  """Generates a text for the prompt of each example."""

  def __init__(
    self,
    session: session_lib.Session,
    settings: generation.GenerationSettings,
  ) -> None:
    reason = generation_program.generation_problem(session.job)
    if reason is not None:
      raise user_error.UserError(
        f"{session.job.experiment} has metrics of predictions, but cannot"
        f" generate: {reason}."
      )
    if settings.stop:
      raise user_error.UserError(
        "GenerationSettings.stop must be () for metrics of predictions, which"
        f" are computed from ids, got {settings.stop}; use end_ids."
      )
    # Not asked for by metrics.
    self._settings = dataclasses.replace(
      settings, prompts=("",), suffixes=(), num_alternatives=0
    )
    self._session = session
    self._generator: samples.Generator | None = None
    self._state: train_state.TrainState | None = None

  def release(self) -> None:
    """Drops the state, of which decoding may have a copy."""
    if self._generator is not None:
      self._generator.release()
    self._state = None

  def write(
    self,
    state: train_state.TrainState,
    values: Mapping[str, np.ndarray],
    length: int,
  ) -> np.ndarray:
    """Returns ids int32 [B, length], from the end of a text on end ids."""
    generator = self._prepare(state, length)
    settings, job = generator.settings, self._session.job
    sizes = values["prompt_lengths"].tolist()
    prompts = [
      samples.Encoded(text="", ids=ids[:size].tolist(), is_chat=True)
      for ids, size in zip(values["prompts"], sizes, strict=True)
    ]
    each, base = None, decode_file.find_base(settings, job.seed)
    if base is not None:
      # The sequence of a decoder has the prompt, too.
      has_prompt = not generation_program.reads_source(job)
      each = [
        dataclasses.replace(
          base,
          seed=(base.seed + number) % 2**31,
          max_new_tokens=max(length - has_prompt * (size - 1), 1),
        )
        for number, size in zip(
          values["example_ids"].tolist(), sizes, strict=True
        )
      ]
    drawn = generator.draw(
      prompts,
      each=each,
      length=values["prompts"].shape[1],
      batch_size=len(prompts),
      stream=0 if base is not None else int(values["example_ids"][0]),
    )
    found = np.full((len(prompts), length), generator.tokenizer.end_id)
    for row, first in zip(
      found, range(0, len(drawn), settings.num_samples), strict=True
    ):
      group = drawn[first : first + settings.num_samples]
      best = group[0]  # Of a search.
      if settings.search is None:
        best = max(group, key=lambda sample: math.fsum(sample.log_probs))
      ids = best.ids[:-1] if best.finish == "stop" else best.ids
      row[: len(ids)] = ids
    return found.astype(np.int32)

  def _prepare(
    self, state: train_state.TrainState, length: int
  ) -> samples.Generator:
    """Returns the model with a state."""
    generator = self._generator
    if generator is None or generator.settings.max_new_tokens != length:
      settings = dataclasses.replace(self._settings, max_new_tokens=length)
      job = dataclasses.replace(self._session.job, generation=settings)
      session = dataclasses.replace(self._session, job=job)
      generator = self._generator = samples.Generator(session, state)
    elif state is not self._state:
      # Its program is compiled.
      generator.use(state)
    self._state = state
    return generator


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

"""Texts that a model generates for the examples of an evaluation."""

from collections.abc import Mapping
import dataclasses
import math

import numpy as np

from paxon.learners import train_state
from paxon.runner import user_error
from paxon.runner.generation import decode_file, generation_program, samples
from paxon.runner.session import session as session_lib
from paxon.runner.settings import generation


class PredictionWriter:
  """Generates a text for the prompt of each example."""

  def __init__(
    self,
    session: session_lib.Session,
    settings: generation.GenerationSettings,
  ) -> None:
    """Compiles nothing.

    Raises:
      UserError: The model cannot generate, or texts end at a stop text.
    """
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

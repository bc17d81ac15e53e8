"""Rollouts: training batches from samples of the model in training.

For each prompt of a batch, the model of this step samples a group of answers,
and the task's function of texts rewards them. The random key depends on the
seed and the step, so a resumed run samples what the undisturbed one does.
With several processes each has all answers, and calls the function for a part.
"""

from typing import Any

import jax
import numpy as np

from paxon.learners import train_state
from paxon.runner import job as job_lib
from paxon.runner import user_error
from paxon.runner.generation import generation_program, samples
from paxon.runner.hosts import agreement
from paxon.runner.session import session as session_lib
from paxon.runner.training import hooks


def check(job: job_lib.Job) -> None:
  """Checks that a job with a reward can sample and train on the answers.

  Raises:
    UserError: It cannot.
  """
  reason = generation_program.generation_problem(job)
  if reason is not None:
    raise user_error.UserError(f"Task.reward: {reason}.")
  if job.generation is None or job.generation.num_samples < 2:
    raise user_error.UserError(
      "Task.reward requires samples in groups; set num_samples to at least 2,"
      " and temperature to 1."
    )


class Rollouts(hooks.Hook):
  """Completes batches of `inputs.prompt_groups` with answers and rewards."""

  def __init__(self, session: session_lib.Session) -> None:
    """Compiles nothing.

    Raises:
      UserError: See `check`.
    """
    check(session.job)
    self._session = session
    self._generator: samples.Generator | None = None
    self._gather = session.layout.jit(
      lambda batch: batch, out_shardings=session.layout.replicated
    )

  def prepare(
    self, state: train_state.TrainState, batch: hooks.Batch
  ) -> hooks.Batch:
    """Returns a batch of prompts with the answers of the model of a state."""
    if self._generator is None:
      self._generator = samples.Generator(self._session, state)
    else:
      self._generator.use(state)
    given: dict[str, Any] = jax.device_get(self._gather(dict(batch)))
    settings, task = self._generator.settings, self._session.job.task
    assert task.tokenizer is not None
    groups, size = given["inputs"].shape[0], settings.num_samples
    length = given["inputs"].shape[1] // size
    prompts = []
    for row, mask in zip(given["inputs"], given["is_token"], strict=True):
      ids = row[: int(mask.sum())].tolist()
      text = task.tokenizer.decode(ids)
      prompts.append(samples.Encoded(text=text, ids=ids, is_chat=False))
    answers = self._generator.draw(
      prompts, length=length - settings.max_new_tokens
    )
    made = {
      name: np.zeros((groups * size, length), x.dtype)
      for name, x in given.items()
    }
    for name in ("inputs", "targets"):
      made[name][:] = task.tokenizer.pad_id
    rewards = agreement.map_shared(self._reward, answers)
    for row, (answer, reward) in enumerate(zip(answers, rewards, strict=True)):
      ids = [*prompts[row // size].ids, *answer.ids]
      begin, end = len(ids) - len(answer.ids) - 1, len(ids) - 1
      made["inputs"][row, :end] = ids[:-1]
      made["targets"][row, :end] = ids[1:]
      made["is_token"][row, :end] = 1
      made["segment_ids"][row, :end] = 1
      made["weights"][row, begin:end] = 1
      made["rewards"][row] = reward
    made["positions"][:] = np.arange(length)
    here = self._here(groups)
    return self._session.place(
      {name: x.reshape(given[name].shape)[here] for name, x in made.items()}
    )

  def _reward(self, answer: samples.Sample) -> float:
    reward = self._session.job.task.reward
    assert reward is not None
    found = float(reward(answer.prompt, answer.continuation))
    if not np.isfinite(found):
      raise user_error.UserError(
        f"Task.reward must return a finite number, got {found} for the prompt"
        f" {answer.prompt!r} and the answer {answer.continuation!r}."
      )
    return found

  def _here(self, groups: int) -> slice:
    """Returns which groups of a batch this process places."""
    source = self._session.job.train_input
    size = groups // source.num_infeed_hosts
    first = source.infeed_host_index * size
    return slice(first, first + size)

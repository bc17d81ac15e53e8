"""Tests for batches printed of a job, and for evaluations that roll."""

import jax.numpy as jnp
import pytest

from paxon.runner import user_error
from paxon.runner.session import prefetch
from paxon.runner.training import inspect_input, testing


def _identity(batch):
  return {name: jnp.asarray(value) for name, value in batch.items()}


def test_prints_the_first_batches_of_every_split(capsys):
  job, _ = testing.make()
  assert inspect_input.run(job) == 0
  text = capsys.readouterr().out
  assert text.startswith("train: SlowInput, global_batch_size ")
  assert "\nvalidation: PackedInput, global_batch_size " in text
  assert text.count("packing efficiency") == 4
  assert text.count("\nbatch 1\n") == 2


def test_reports_unreadable_splits_and_their_ends(capsys):
  job, _ = testing.make()
  source = job.eval_inputs["validation"]

  class Broken(type(source)):
    def check_readable(self):
      raise ValueError("the disk is gone")

  class Short(type(source)):
    def get_next(self):
      if self.get_state()["batches"]:
        raise StopIteration
      return super().get_next()

  class Empty(type(source)):
    def get_next(self):
      raise StopIteration

  object.__setattr__(source, "__class__", Short)
  inspect_input.run(job)
  assert capsys.readouterr().out.endswith("the split ends after 1 batches\n")
  object.__setattr__(source, "__class__", Empty)
  with pytest.raises(user_error.UserError, match=r"'validation' has no batch"):
    inspect_input.run(job)
  object.__setattr__(source, "__class__", Broken)
  with pytest.raises(user_error.UserError, match=r"'validation': the disk is"):
    inspect_input.run(job)


def test_a_rolling_evaluation_continues_and_wraps_around():
  job, _ = testing.make()
  source = job.eval_inputs["validation"]
  every = [batch["inputs"].tolist() for batch in source]
  source.reset()
  read = []
  for _ in range(3):
    with prefetch.Prefetcher(
      source, place=_identity, limit=len(every) - 1, rolling=True
    ) as batches:
      read.extend(batch.arrays["inputs"].tolist() for batch in batches)
  assert read == (3 * every)[: 3 * (len(every) - 1)]


def test_the_end_of_tensorflow_is_an_end():
  # As TensorFlow defines it, without TensorFlow.
  out_of_range = type(
    "OutOfRangeError",
    (Exception,),
    {"__module__": "tensorflow.python.framework.errors_impl"},
  )
  job, _ = testing.make()
  source = job.eval_inputs["validation"]

  class Ending(type(source)):
    def get_next(self):
      try:
        return super().get_next()
      except StopIteration:
        raise out_of_range("End of sequence") from None

  expected = len(list(source))
  source.reset()
  object.__setattr__(source, "__class__", Ending)
  with prefetch.Prefetcher(source, place=_identity) as batches:
    assert len(list(batches)) == expected

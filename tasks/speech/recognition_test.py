"""Tests for the base class of experiments that recognize speech."""

from typing import Any

import fiddle as fdl
import numpy as np
import pytest

from paxon.inputs.speech import speech_sources
from paxon.tasks.speech import recognition


class Small(recognition.SpeechRecognition):
  """Made-up words, of which each split has others."""

  num_train_steps = 20
  global_batch_size = 4
  max_test_seconds = 6.0

  def table(self, split: str) -> str:
    """Returns no file that exists."""
    return f"/none/{split}.tsv"

  def test_splits(self) -> tuple[str, ...]:
    """Returns one split."""
    return ("held_out",)

  def data_hint(self) -> str:
    """Returns how to get the data."""
    return "Get it."


def test_knobs_reach_the_model_and_the_input():
  made = Small(clips="tones", num_bins=20, symbols=" abc", subsampling=1)
  config: Any = made.job()
  model = config.task.model
  assert model.head.output_dim == 5
  assert model.space_id == 1
  assert model.encoder.features.num_bins == 20
  assert len(model.encoder.subsampling) == 1
  assert config.train_input.alphabet.symbols == " abc"
  assert config.task.learner.optimizer.schedule.warmup_steps == 2


def test_test_splits_are_whole_and_longer():
  job = fdl.build(Small(clips="tones").job())
  test = job.eval_inputs["held_out"]
  batches = list(test)
  assert sum(b["example_weights"].sum() for b in batches) == 8
  assert batches[0]["audio"].shape == (4, 48_000)
  train = job.train_input.get_next()
  assert train["audio"].shape == (4, 40_000)
  assert not np.array_equal(train["labels"][0], batches[0]["labels"][0, :100])


def test_joining_fills_the_batches_of_training_only():
  jobs = [
    fdl.build(Small(clips="tones", join_clips=joins, max_seconds=8.0).job())
    for joins in (False, True)
  ]
  apart, joined = (job.train_input for job in jobs)
  assert len(joined.source) < len(apart.source)
  lengths = [x.get_next()["audio_lengths"].mean() for x in (apart, joined)]
  assert lengths[1] > 1.5 * lengths[0]
  assert isinstance(
    jobs[1].eval_inputs["held_out"].source, speech_sources.ToneSpeech
  )


def test_a_plan_needs_no_files():
  job = fdl.build(Small().job())
  assert isinstance(job.train_input.source, speech_sources.TranscribedFiles)
  assert job.train_input.batch_shapes()["audio"][0] == (4, 40_000)
  assert job.train_input.source.max_seconds == 5
  assert job.eval_inputs["held_out"].source.max_seconds == 6
  with pytest.raises(ValueError, match=r"/none/train.tsv: No such.*Get it\."):
    job.train_input.check_readable()

"""Tests of masked text; see `tools:hf_encoders_test` for imported encoders."""

import fiddle as fdl
import numpy as np

from paxon.tasks.lm.params import hugging_face


def test_begin_and_end_are_read_and_not_masked():
  made = hugging_face.HuggingFaceBert(num_train_steps=1).shrink()
  config = made.job()
  masking = config.task.model.masking
  # Bytes have free ids after them.
  assert (masking.mask_id, masking.special_ids) == (259, (0, 1, 2))
  example = fdl.build(config).train_input.examples.source[0]
  assert example["inputs"][[0, -1]].tolist() == [1, 2]
  np.testing.assert_array_equal(example["inputs"], example["targets"])
  own = hugging_face.HuggingFaceBert(mask_id=5).job().task.model.masking
  assert own.mask_id == 5

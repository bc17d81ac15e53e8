"""Tests for the base class of experiments that classify images."""

from typing import Any

import fiddle as fdl
import numpy as np
import pytest

from paxon.inputs.images import augmentation, image_files
from paxon.layers.vision import resnet
from paxon.tasks.vision import image_classification


class Small(image_classification.ImageClassification):
  """Random images of another size and number of classes."""

  num_train_steps = 20
  global_batch_size = 8
  image_shape = (8, 6, 3)
  num_classes = 3

  def encoder(self) -> fdl.Config[Any]:
    """Returns a small residual network."""
    return fdl.Config(resnet.ResNet, **resnet.SIZES[5])

  def source(self, split: str) -> fdl.Config[Any]:
    """Returns no file that exists."""
    return image_classification.find_idx_images("/none", split, "Get it.")


def test_knobs_reach_the_input():
  made = Small(images="random", crop_padding=2, cutout=3)
  config = made.job()
  train = fdl.build(config.train_input)
  assert list(train.augmentations) == [
    augmentation.PaddedCrop(2),
    augmentation.Flip(),
    augmentation.Cutout(3),
  ]
  batch = train.get_next()
  assert batch["images"].shape == (8, 8, 6, 3)
  assert set(batch["labels"]) <= {0, 1, 2}
  plain = fdl.build(made.replace(flip=False, crop_padding=None).job())
  assert list(plain.train_input.augmentations) == [augmentation.Cutout(3)]


def test_the_test_split_is_whole_and_not_augmented():
  test = fdl.build(Small(images="random").job().eval_inputs["test"])
  assert not test.augmentations
  (batch,) = test
  assert batch["example_weights"].sum() == 16
  train = image_files.RandomImages(
    num_examples=16, shape=(8, 6, 3), num_classes=3
  )
  expected = np.asarray(train[0]["image"]) / 255 * 2 - 1
  assert np.abs(batch["images"][0] - expected).max() > 0.1


def test_a_plan_needs_no_files():
  source = fdl.build(Small().job()).train_input
  assert source.batch_shapes()["images"][0] == (8, 8, 6, 3)
  with pytest.raises(ValueError, match=r"/none/train-images-idx3.*Get it\."):
    source.check_readable()


def test_the_schedule_ends_with_training():
  optimizer = Small().job().task.learner.optimizer
  assert optimizer.schedule.total_steps == 20
  assert optimizer.schedule.warmup_steps == 2

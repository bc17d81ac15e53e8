"""Tests for the experiments on ImageNet."""

import fiddle as fdl
import jax
import numpy as np
import pytest

from paxon.inputs.images import cropping, encoded_images
from paxon.tasks import golden
from paxon.tasks.vision.params import imagenet


@pytest.mark.nightly
def test_parameters_are_those_of_resnet_50():
  specs = golden.get_specs(imagenet.ResNet50Pjit().job())
  leaves = jax.tree.leaves(specs["params"])
  assert sum(np.prod(leaf.shape) for leaf in leaves) == 25_557_032


@pytest.mark.parametrize(
  ("epoch", "rate"),
  [(0, 0), (2.5, 0.1), (5, 0.2), (29, 0.2), (31, 0.02), (61, 2e-3), (81, 2e-4)],
)
def test_the_learning_rate_is_that_of_the_paper(epoch, rate):
  optimizer = fdl.build(imagenet.ResNet50Pjit().optimizer())
  found = optimizer.optimizer.schedule(round(2502 * epoch))
  np.testing.assert_allclose(found, rate, rtol=1e-3)


def test_inputs_of_both_layouts():
  job = imagenet.ResNet50Pjit().job()
  train = fdl.build(job.train_input)
  test = fdl.build(job.eval_inputs["test"])
  assert isinstance(train.crop, cropping.DistortedCrop)
  assert isinstance(test.crop, cropping.CenterCrop)
  assert isinstance(train.source, encoded_images.TfRecordImages)
  assert train.source.files == "/data/imagenet/train-*"
  assert train.source.first_label == 1
  job = imagenet.ResNet50Pjit(layout="folders", data="/x").job()
  assert fdl.build(job.train_input).source.folder == "/x/train"

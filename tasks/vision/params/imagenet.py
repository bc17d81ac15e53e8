r"""ImageNet (ILSVRC 2012): 1,281,167 photographs of 1000 classes.

Russakovsky et al. 2015, https://arxiv.org/abs/1409.0575. The data must be there
already, as the TFRecords of TensorFlow's script (`train-*-of-01024` and
`validation-*-of-00128`, labels from 1 on) or as a folder for each class in
`train` and `validation`. Pillow decodes it.

  bazel run //runner:main -- \
    --exp=tasks.vision.params.imagenet.ResNet50Pjit --fdl.data=/data/imagenet
"""

import os
from typing import Any, Literal

import fiddle as fdl
from flax import linen as nn

from paxon.inputs.images import cropping, encoded_images
from paxon.layers import initializers
from paxon.layers.norms import batch_norm
from paxon.layers.vision import resnet
from paxon.learners import schedules
from paxon.learners.optimizers import regularization, sgd
from paxon.tasks.vision import image_classification

TRAIN_EXAMPLES = 1_281_167
_SPLITS = {"train": "train", "test": "validation"}
# Epochs of 90 at which the learning rate drops.
_DROPS = (30, 60, 80)


class ResNet50Pjit(image_classification.ImageClassification):
  """Pax's ResNet-50: 90 epochs of "ImageNet in 1 Hour".

  Goyal et al. 2017, https://arxiv.org/abs/1706.02677. As in Pax, batch norm has
  the moments of the global batch, and the warmup begins at zero.

  Attributes:
    data: Folder of the data.
    layout: Whether it has TFRecords, or a folder for each class.
    depth: Number of layers, a key of `resnet.SIZES`.
  """

  num_train_steps = TRAIN_EXAMPLES // 512 * 90
  global_batch_size = 512
  image_shape = (224, 224, 3)
  num_classes = 1000
  dtype = "bfloat16"
  mesh = "data=8"
  label_smoothing = 0.0
  peak_learning_rate = 0.2
  # Five epochs.
  warmup_fraction = 5 / 90
  weight_decay = 1e-4
  max_grad_norm = None
  eval_every_steps = TRAIN_EXAMPLES // 512
  checkpoint_every_steps = 5000
  summary_every_steps = 1000

  data: str = "/data/imagenet"
  layout: Literal["records", "folders"] = "records"
  depth: int = 50

  path_knobs = ("data",)

  def source(self, split: str) -> fdl.Config[Any]:
    """Returns the encoded images of a split."""
    name = _SPLITS[split]
    if self.layout == "folders":
      return fdl.Config(
        encoded_images.FolderImages,
        folder=os.path.join(self.data, name),
        how="--fdl.data is the folder of ImageNet.",
      )
    return fdl.Config(
      encoded_images.TfRecordImages,
      files=os.path.join(self.data, f"{name}-*"),
      first_label=1,
    )

  def crop(self, split: str) -> dict[str, fdl.Config[Any]]:
    """Returns distorted crops in training, and the middle in evaluation."""
    if split == "train":
      return {"crop": fdl.Config(cropping.DistortedCrop)}
    return {"crop": fdl.Config(cropping.CenterCrop)}

  def normalization(self) -> dict[str, Any]:
    """Returns the mean and deviation of each colour of the training pixels."""
    return {
      "mean": (0.485, 0.456, 0.406),
      "deviation": (0.229, 0.224, 0.225),
    }

  def encoder(self) -> fdl.Config[Any]:
    """Returns a ResNet whose blocks begin as identities."""
    norm = {"decay": 0.9, "scale_offset": 1.0}
    return fdl.Config(
      resnet.ResNet,
      **resnet.SIZES[self.depth],
      norm=fdl.Config(batch_norm.BatchNorm, **norm),
      last_norm=fdl.Config(
        batch_norm.BatchNorm, scale_init=nn.initializers.zeros, **norm
      ),
    )

  def head_init(self) -> fdl.Config[Any]:
    """Returns a Gaussian, as in the paper."""
    return fdl.Config(initializers.Normal, scale=0.01)

  def optimizer(self) -> fdl.Config[Any]:
    """Returns Nesterov momentum with three drops of the learning rate."""
    peak, steps = self.peak_learning_rate, self.num_train_steps
    warmup = max(1, int(self.warmup_fraction * steps))
    drops = (steps * epoch // 90 for epoch in _DROPS)
    return fdl.Config(
      regularization.Regularized,
      optimizer=fdl.Config(
        sgd.Sgd,
        schedule=fdl.Config(
          schedules.Joined,
          boundaries=[warmup],
          schedules=[
            fdl.Config(
              schedules.PiecewiseLinear, steps=[0, warmup], values=[0.0, peak]
            ),
            fdl.Config(
              schedules.PiecewiseConstant,
              boundaries=[
                max(i + 1, at - warmup) for i, at in enumerate(drops)
              ],
              values=[peak * 0.1**i for i in range(len(_DROPS) + 1)],
            ),
          ],
        ),
        momentum=0.9,
        nesterov=True,
      ),
      l2=self.weight_decay,
    )

  def shrink(self) -> Any:
    """Returns a toy-sized version."""
    return super().shrink().replace(depth=5, image_shape=(16, 16, 3))

"""Base class of experiments that classify images."""

import abc
import os
from typing import Any, Literal

import fiddle as fdl

from paxon.inputs.images import augmentation, image_files, image_input
from paxon.layers import initializers, linear
from paxon.layers.models import classifier
from paxon.learners import learner, schedules
from paxon.learners.optimizers import adamw
from paxon.runner import experiment
from paxon.runner import task as task_lib
from paxon.sharding import axes


class ImageClassification(experiment.Experiment):
  """Trains an encoder of images and a linear head.

  Attributes:
    image_shape: Height, width and channels.
    num_classes: Number of labels.
    images: `files`, or `random`, noise around one image for each class, which
      needs no data.
    crop_padding: Pixels of the padded crop in training; None does not crop.
    flip: Whether training mirrors half of the images.
    cutout: Width of the square that training sets to zero; None is none.
    label_smoothing: Weight of the uniform distribution in the targets.
    dropout: Rate of the dropout before the head; None disables it.
    peak_learning_rate: Learning rate after the warmup; it decays to zero with a
      cosine.
    warmup_fraction: Share of the steps that warm up.
    weight_decay: Decoupled weight decay, multiplied by the learning rate.
    max_grad_norm: Largest global norm of the gradients; None does not clip.
  """

  image_shape: tuple[int, ...]
  num_classes: int
  images: Literal["files", "random"] = "files"
  crop_padding: int | None = None
  flip: bool = True
  cutout: int | None = None
  label_smoothing: float = 0.1
  peak_learning_rate: float = 1e-3
  warmup_fraction: float = 0.1
  weight_decay: float = 0.05
  max_grad_norm: float | None = 1.0

  @abc.abstractmethod
  def encoder(self) -> fdl.Config[Any]:
    """Returns the encoder from images [B,H,W,C] to features [B,D]."""

  @abc.abstractmethod
  def source(self, split: str) -> fdl.Config[Any]:
    """Returns the images of the split `train` or `test`."""

  def task(self) -> fdl.Config[task_lib.Task]:
    """Returns the model and its learner."""
    model = fdl.Config(
      classifier.Classifier,
      encoder=self.encoder(),
      head=fdl.Config(
        linear.Linear,
        output_dim=self.num_classes,
        # Few classes are not split.
        kernel_axes=(axes.EMBED, None),
        kernel_init=self.head_init(),
      ),
      input_keys=("images",),
      label_smoothing=self.label_smoothing,
    )
    return fdl.Config(
      task_lib.Task,
      name=self.name,
      model=model,
      learner=fdl.Config(
        learner.Learner,
        optimizer=self.optimizer(),
        max_grad_norm=self.max_grad_norm,
      ),
    )

  def optimizer(self) -> fdl.Config[Any]:
    """Returns AdamW."""
    return fdl.Config(
      adamw.AdamW, schedule=self.schedule(), weight_decay=self.weight_decay
    )

  def schedule(self) -> fdl.Config[Any]:
    """Returns a learning rate with a warmup and a cosine to zero."""
    steps = self.num_train_steps
    return fdl.Config(
      schedules.WarmupCosine,
      peak=self.peak_learning_rate,
      warmup_steps=int(self.warmup_fraction * steps),
      total_steps=steps,
      end=0.0,
    )

  def head_init(self) -> fdl.Config[Any]:
    """Returns the initializer of the kernel of the head."""
    return fdl.Config(initializers.Constant, value=0.0)

  def crop(self, split: str) -> dict[str, fdl.Config[Any]]:
    """Returns the `crop` of a split whose images have any size, by that name.

    Images of `random` have the shape of the batch's.
    """
    del split
    return {}

  def datasets(self) -> dict[str, fdl.Config]:
    """Returns endless training images and one epoch of test images."""
    augmentations: list[fdl.Config[Any]] = []
    if self.crop_padding is not None:
      augmentations.append(
        fdl.Config(augmentation.PaddedCrop, padding=self.crop_padding)
      )
    if self.flip:
      augmentations.append(fdl.Config(augmentation.Flip))
    if self.cutout is not None:
      augmentations.append(fdl.Config(augmentation.Cutout, size=self.cutout))
    return {
      "train": fdl.Config(
        image_input.ImageInput,
        source=self._source("train"),
        global_batch_size=self.global_batch_size,
        shuffle_seed=self.seed,
        augmentations=augmentations,
        **self._get_shared_fields("train"),
      ),
      "test": fdl.Config(
        image_input.ImageInput,
        source=self._source("test"),
        global_batch_size=4 * self.global_batch_size,
        shuffle_seed=None,
        num_epochs=1,
        **self._get_shared_fields("test"),
      ),
    }

  def normalization(self) -> dict[str, Any]:
    """Returns `mean` and `deviation` of the pixels."""
    return {"mean": 0.5, "deviation": 0.5}

  def shrink(self) -> Any:
    """Returns a toy-sized version on random images."""
    return super().shrink().replace(images="random")

  def _get_shared_fields(self, split: str) -> dict[str, Any]:
    return {
      "image_shape": self.image_shape,
      **self.crop(split),
      **self.normalization(),
    }

  def _source(self, split: str) -> fdl.Config[Any]:
    files = self.source(split)
    if self.images == "files":
      return files
    return fdl.Config(
      image_files.RandomImages,
      num_examples=2 * self.global_batch_size,
      shape=self.image_shape,
      num_classes=self.num_classes,
      seed=("train", "test").index(split),
    )


def find_idx_images(
  folder: str, stem: str, how: str
) -> fdl.Config[image_files.IdxImages]:
  """Returns the images and labels of a split of MNIST's files."""
  return fdl.Config(
    image_files.IdxImages,
    images=os.path.join(folder, f"{stem}-images-idx3-ubyte.gz"),
    labels=os.path.join(folder, f"{stem}-labels-idx1-ubyte.gz"),
    how=how,
  )

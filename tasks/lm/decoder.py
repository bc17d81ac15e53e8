"""What experiments with decoder-only language models have in common.

A family (`transformer_lm_spmd`, `params/gpt2`, `params/llama`) says how the
model and the optimizer are made from these knobs; its members set the knobs.
Data comes from `datasets`.
"""

import abc
from typing import Any

import fiddle as fdl

from paxon.layers import remat
from paxon.learners import learner
from paxon.runner import experiment
from paxon.runner import task as task_lib

# The byte tokenizer's, so that text can be read at toy size too.
_TOY_VOCABULARY = 264


class Decoder(experiment.Experiment):
  """Sizes of the model, and how it learns.

  Attributes:
    length: Tokens of a row.
    num_layers: Number of layers.
    embed_dim: Width of the residual stream.
    mlp_dim: Width of the feed-forward layers.
    num_heads: Number of query heads.
    head_dim: Width of a head.
    vocab_size: Rows of the embedding table.
    remat_policy: What a layer saves for its backward pass, of `layers.remat`;
      None is everything.
    learning_rate: The highest.
    weight_decay: Share of a parameter that is subtracted at rate one.
    max_grad_norm: The gradient of all parameters is scaled down to this.
    num_microbatches: Parts that a batch is computed in, one after the other.
  """

  length: int
  num_layers: int
  embed_dim: int
  mlp_dim: int
  num_heads: int
  head_dim: int
  vocab_size: int
  remat_policy: remat.Policy | None = None
  learning_rate: float
  weight_decay: float
  max_grad_norm: float = 1.0
  num_microbatches: int = 1

  @abc.abstractmethod
  def model(self) -> fdl.Config[Any]:
    """Returns the model."""

  @abc.abstractmethod
  def optimizer(self) -> fdl.Config[Any]:
    """Returns the optimizer with its schedule."""

  def of_data(self) -> dict[str, Any]:
    """Returns fields of the task that the data gives, such as a tokenizer."""
    return {}

  def task(self) -> fdl.Config[task_lib.Task]:
    """Returns the model and how it learns."""
    return fdl.Config(
      task_lib.Task,
      name=self.name,
      model=self.model(),
      learner=fdl.Config(
        learner.Learner,
        optimizer=self.optimizer(),
        max_grad_norm=self.max_grad_norm,
        num_microbatches=self.num_microbatches,
      ),
      **self.of_data(),
    )

  def shrink(self) -> Any:
    """Returns a toy of the same parts, for any number of devices up to 8."""
    return (
      super()
      .shrink()
      .replace(
        # Eight rows, whatever the size of the real batch, over all devices.
        global_batch_size=8,
        mesh="fsdp=-1",
        length=32,
        num_layers=2,
        embed_dim=32,
        mlp_dim=64,
        num_heads=4,
        head_dim=8,
        vocab_size=_TOY_VOCABULARY,
        num_microbatches=1,
      )
    )

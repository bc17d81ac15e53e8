"""Base of experiments with decoder-only language models.

A family (`transformer_lm_spmd`, `gpt3`, `llama_lm`, `params/gpt2`) defines the
layers, and its experiments set the knobs. `lm_data` provides the data.
"""

import abc
from collections.abc import Callable
from typing import Any

import fiddle as fdl

from paxon.layers import embedding as embedding_lib
from paxon.layers import remat
from paxon.layers.attention import kernels
from paxon.layers.losses import softmax_loss
from paxon.layers.models import pre_norm_decoder
from paxon.learners import learner, parameter_average, schedules
from paxon.learners.optimizers import adamw
from paxon.runner import task as task_lib
from paxon.tasks.lm import pipelining

# The byte tokenizer's size, so that toys read text, too.
_TOY_VOCABULARY = 264


class Decoder(pipelining.Pipelining):
  """Base class of experiments with decoder-only models.

  Attributes:
    length: Sequence length in tokens.
    num_layers: Number of layers.
    embed_dim: Width of the residual stream.
    mlp_dim: Width of the feed-forward layers.
    num_heads: Number of query heads.
    head_dim: Width of a head.
    vocab_size: Size of the vocabulary.
    attention_kernel: Attention function. cuDNN's requires NVIDIA GPUs; use
      `layers.attention.kernels.auto` elsewhere.
    remat_policy: Which values a layer saves for its backward pass, from
      `layers.remat`; None saves all.
    logit_cap: Soft-cap of the logits; None disables it.
    loss_chunk_length: Positions per chunk of the loss; None computes all at
      once.
    learning_rate: Peak learning rate.
    warmup_steps: Warmup steps of the learning rate.
    weight_decay: Decoupled weight decay, multiplied by the learning rate.
    decayed_variables: Regular expression of the variables that decay, `.*` for
      all; None decays matrices, see `learners.learner.Learner`.
    ema_decay: Decay of a moving average of the parameters, with which
      evaluation runs; None keeps none.
    max_grad_norm: Gradients are clipped to this global norm.
    num_microbatches: Gradient accumulation: microbatches per batch.
  """

  length: int
  num_layers: int
  embed_dim: int
  mlp_dim: int
  num_heads: int
  head_dim: int
  vocab_size: int
  attention_kernel: Callable[..., Any] = kernels.auto
  remat_policy: remat.Policy | str | None = None
  logit_cap: float | None = None
  loss_chunk_length: int | None = None
  learning_rate: float
  warmup_steps: int
  weight_decay: float
  decayed_variables: str | None = None
  ema_decay: float | None = None
  max_grad_norm: float = 1.0
  num_microbatches: int = 1

  @abc.abstractmethod
  def norm(self) -> fdl.Config[Any]:
    """Returns the configuration of a norm, a new one for each call."""

  @abc.abstractmethod
  def attention(self) -> fdl.Config[Any]:
    """Returns the attention of a layer."""

  @abc.abstractmethod
  def feed_forward(self) -> fdl.Config[Any]:
    """Returns the feed-forward submodule of a layer."""

  def embedding(self) -> fdl.Config[embedding_lib.Embedding]:
    """Returns the token embedding."""
    return fdl.Config(
      embedding_lib.Embedding,
      vocab_size=self.vocab_size,
      embed_dim=self.embed_dim,
    )

  def position_embedding(self) -> fdl.Config[Any] | None:
    """Returns the position embedding, or None."""
    return None

  def head(self) -> fdl.Config[Any] | None:
    """Returns the head; None ties it to the token embedding."""
    return None

  def model(self) -> fdl.Config[Any]:
    """Returns the model."""
    model = pre_norm_decoder.compose(
      fdl.Config,
      embedding=self.embedding(),
      position_embedding=self.position_embedding(),
      norm=self.norm,
      attention=self.attention(),
      feed_forward=self.feed_forward(),
      num_layers=self.num_layers,
      remat_policy=remat.to_policy(self.remat_policy),
      head=self.head(),
      logit_cap=self.logit_cap,
      token_loss=fdl.Config(
        softmax_loss.SoftmaxLoss, chunk_length=self.loss_chunk_length
      ),
    )
    model.stack = self.split_stack(model.stack)
    return model

  def schedule(self) -> fdl.Config[Any]:
    """Returns a cosine schedule that ends at a tenth of the peak."""
    return fdl.Config(
      schedules.WarmupCosine,
      peak=self.learning_rate,
      warmup_steps=min(self.warmup_steps, self.num_train_steps),
      total_steps=self.num_train_steps,
      end=0.1 * self.learning_rate,
    )

  def optimizer(self) -> fdl.Config[Any]:
    """Returns AdamW with `b2=0.95`, common for large language models."""
    return fdl.Config(
      adamw.AdamW,
      schedule=self.schedule(),
      b2=0.95,
      weight_decay=self.weight_decay,
    )

  def average(self) -> fdl.Config[parameter_average.ParameterAverage] | None:
    """Returns the moving average of the parameters, or None."""
    if self.ema_decay is None:
      return None
    return fdl.Config(parameter_average.ParameterAverage, decay=self.ema_decay)

  def get_data_fields(self) -> dict[str, Any]:
    """Returns the fields of the task set by the data, such as `tokenizer`."""
    return {}

  def task(self) -> fdl.Config[task_lib.Task]:
    """Returns the model and its learner."""
    return fdl.Config(
      task_lib.Task,
      name=self.name,
      model=self.model(),
      learner=fdl.Config(
        learner.Learner,
        optimizer=self.optimizer(),
        max_grad_norm=self.max_grad_norm,
        num_microbatches=self.num_microbatches,
        decayed_variables=self.decayed_variables,
        average=self.average(),
      ),
      **self.get_data_fields(),
    )

  def shrink(self) -> Any:
    """Returns a toy-sized version for up to 8 devices."""
    return (
      super()
      .shrink()
      .replace(
        # Eight sequences, split over all devices.
        global_batch_size=8,
        mesh="fsdp=-1",
        length=32,
        num_layers=2,
        embed_dim=32,
        mlp_dim=64,
        num_heads=4,
        head_dim=8,
        vocab_size=_TOY_VOCABULARY,
        attention_kernel=kernels.auto,
        num_microbatches=1,
      )
      .toy_stages()
    )

"""Base of experiments with decoder-only language models.

A family (`transformer_lm_spmd`, `gpt3`, `llama_lm`, `params/gpt2`) says which
parts the layers are made of; its members set the knobs. Data comes from
`lm_data`.
"""

import abc
from collections.abc import Callable
from typing import Any

import fiddle as fdl

from paxon.layers import embedding as embedding_lib
from paxon.layers import remat, softmax_loss
from paxon.layers.attention import kernels
from paxon.layers.models import pre_norm_decoder
from paxon.learners import adamw, learner, schedules
from paxon.runner import task as task_lib
from paxon.tasks.lm import pipelining

# The byte tokenizer's, so that text can be read at toy size too.
_TOY_VOCABULARY = 264


class Decoder(pipelining.Pipelining):
  """Sizes of the model, and how it learns.

  Attributes:
    length: Tokens of a row.
    num_layers: Number of layers.
    embed_dim: Width of the residual stream.
    mlp_dim: Width of the feed-forward layers.
    num_heads: Number of query heads.
    head_dim: Width of a head.
    vocab_size: Rows of the embedding table.
    attention_kernel: Computes attention. cuDNN's is for NVIDIA GPUs; elsewhere
      set `layers.attention.kernels.plain`.
    remat_policy: What a layer saves for its backward pass, of `layers.remat`;
      None is everything.
    logit_cap: Bends the logits of the head into this range.
    loss_chunk_length: How many positions of a row the head computes at once;
      None is all of them.
    learning_rate: The highest.
    warmup_steps: Steps until the highest learning rate.
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
  attention_kernel: Callable[..., Any] = kernels.plain
  remat_policy: remat.Policy | None = None
  logit_cap: float | None = None
  loss_chunk_length: int | None = None
  learning_rate: float
  warmup_steps: int
  weight_decay: float
  max_grad_norm: float = 1.0
  num_microbatches: int = 1

  @abc.abstractmethod
  def norm(self) -> fdl.Config[Any]:
    """Returns a norm, another one at each call."""

  @abc.abstractmethod
  def attention(self) -> fdl.Config[Any]:
    """Returns the attention of a layer."""

  @abc.abstractmethod
  def feed_forward(self) -> fdl.Config[Any]:
    """Returns the feed-forward part of a layer."""

  def embedding(self) -> fdl.Config[embedding_lib.Embedding]:
    """Returns the table of tokens."""
    return fdl.Config(
      embedding_lib.Embedding,
      vocab_size=self.vocab_size,
      embed_dim=self.embed_dim,
    )

  def position_embedding(self) -> fdl.Config[Any] | None:
    """Returns what is added to embedded tokens; None for nothing."""
    return None

  def head(self) -> fdl.Config[Any] | None:
    """Returns the head; None for the table of tokens."""
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
      remat_policy=self.remat_policy,
      head=self.head(),
      logit_cap=self.logit_cap,
      token_loss=fdl.Config(
        softmax_loss.SoftmaxLoss, chunk_length=self.loss_chunk_length
      ),
    )
    model.stack = self.pipelined(model.stack)
    return model

  def schedule(self) -> fdl.Config[Any]:
    """Returns the learning rate: half a cosine, down to a tenth."""
    return fdl.Config(
      schedules.WarmupCosine,
      peak=self.learning_rate,
      warmup_steps=min(self.warmup_steps, self.num_train_steps),
      total_steps=self.num_train_steps,
      end=0.1 * self.learning_rate,
    )

  def optimizer(self) -> fdl.Config[Any]:
    """Returns the optimizer: AdamW, as papers on large models have it."""
    return fdl.Config(
      adamw.AdamW,
      schedule=self.schedule(),
      b2=0.95,
      weight_decay=self.weight_decay,
    )

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
        attention_kernel=kernels.plain,
        num_microbatches=1,
      )
      .toy_stages()
    )

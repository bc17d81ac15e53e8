"""MLP language models: the next token from the current token alone.

Pax's smallest scaling experiments. Layers have no residual connections.
"""

from collections.abc import Sequence
from typing import Any

import fiddle as fdl
from flax import linen as nn
from jaxtyping import Array, Float

from paxon.layers import embedding, linear, token_context
from paxon.layers.models import decoder_lm
from paxon.learners import learner, schedules
from paxon.learners.optimizers import adamw
from paxon.runner import experiment
from paxon.runner import task as task_lib
from paxon.sharding import axes

_STEPS_OF_DECAY = 300_000
_TOY_WIDTH = 32


class TokenWise(nn.Module):
  """A sequence of layers, as the stack of a `DecoderLm`.

  Attributes:
    parts: Layers; each maps [B,T,D] to [B,T,D'].
  """

  parts: Sequence[nn.Module]

  def __post_init__(self) -> None:
    # A tuple is hashable.
    self.parts = tuple(self.parts)
    super().__post_init__()

  def __call__(
    self,
    x: Float[Array, "batch length embed"],
    context: token_context.TokenContext = token_context.ONE_DOCUMENT,
    **kwargs: Any,
  ) -> Float[Array, "batch length embed"]:
    """Applies the layers to each token, wherever it stands."""
    del context, kwargs
    for part in self.parts:
      x = part(x)
    return x


class MlpLm(experiment.Experiment):
  """Base class of `lm_cloud.LargeMlp` and `SmallMlp`.

  Attributes:
    length: Sequence length in tokens.
    num_layers: Number of layers, including the first and the last.
    embed_dim: Width of the input and output, and size of the vocabulary.
    mlp_dim: Width of the hidden layers.
    learning_rate: Peak learning rate.
    warmup_steps: Warmup steps of the learning rate.
    weight_decay: Decoupled weight decay, multiplied by the learning rate.
  """

  num_train_steps = 10
  checkpoint_every_steps = 5
  summary_every_steps = 5

  length: int = 1024
  num_layers: int = 8
  embed_dim: int
  mlp_dim: int
  learning_rate: float = 1e-3
  warmup_steps: int = 4000
  weight_decay: float = 1e-3

  @property
  def vocab_size(self) -> int:
    """`embed_dim`, as in Pax."""
    return self.embed_dim

  def task(self) -> fdl.Config[task_lib.Task]:
    """Returns the model and its learner."""
    hidden = [
      fdl.Config(
        linear.Linear,
        output_dim=self.mlp_dim,
        activation=nn.relu,
        kernel_axes=(axes.EMBED if i == 0 else None, axes.MLP),
      )
      for i in range(self.num_layers - 1)
    ]
    last = fdl.Config(
      linear.Linear,
      output_dim=self.embed_dim,
      kernel_axes=(axes.MLP, axes.EMBED),
    )
    model = fdl.Config(
      decoder_lm.DecoderLm,
      embedding=fdl.Config(
        embedding.Embedding,
        vocab_size=self.vocab_size,
        embed_dim=self.embed_dim,
      ),
      stack=fdl.Config(TokenWise, parts=[*hidden, last]),
      final_norm=None,
    )
    optimizer = fdl.Config(
      adamw.AdamW,
      schedule=fdl.Config(
        schedules.WarmupExponential,
        peak=self.learning_rate,
        warmup_steps=self.warmup_steps,
        total_steps=_STEPS_OF_DECAY,
        end=0.1 * self.learning_rate,
      ),
      b2=0.99,
      epsilon=1e-6,
      weight_decay=self.weight_decay,
      max_update_rms=1.0,
    )
    return fdl.Config(
      task_lib.Task,
      name=self.name,
      model=model,
      learner=fdl.Config(
        learner.Learner, optimizer=optimizer, max_grad_norm=5.0
      ),
    )

  def shrink(self) -> Any:
    """Returns a toy-sized version with as many layers."""
    return (
      super()
      .shrink()
      .replace(length=32, embed_dim=_TOY_WIDTH, mlp_dim=_TOY_WIDTH)
    )

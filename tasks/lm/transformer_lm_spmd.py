"""The dense language models of Pax: one family, from 1 B to 1 T parameters.

Pre-norm layers of attention with capped logits and a feed-forward layer, layer
norm, sines as positions, and a head tied to the embedding; computed in
bfloat16, with float32 parameters and Adam.

What differs from Pax, and why:

* Queries are scaled by `head_dim ** -0.5`; Pax learns a factor per feature of a
  head on top (0.0001 % of the parameters), which later models dropped.
* The head has no bias on the logits (another 0.002 %).
* Initial weights are truncated normal, scaled by their true fan-in, instead of
  Xavier's uniform ones, so that depth and width do not change the size of
  activations.
* Moments, the norm of gradients and the schedule are the same, but the first
  step has a learning rate above zero, and training ends where the learning
  rate's decay ends (Pax: after 10 million steps, which nobody waits for).
* The mesh is named: Pax's axes replica, data and mdl are `data`, `fsdp` and
  `tensor`.
"""

from collections.abc import Callable
import functools
import math
from typing import Any

import fiddle as fdl
from flax import linen as nn
import jax

from paxon.layers import (
  embedding,
  feed_forward,
  layer_norm,
  position_embedding,
  remat,
  softmax_loss,
)
from paxon.layers.attention import grouped_query, projections
from paxon.layers.models import pre_norm_decoder
from paxon.learners import adamw, warmup_decay
from paxon.runner.checkpoints import retention
from paxon.sharding import axes
from paxon.sharding import rules as rules_lib
from paxon.tasks.lm import decoder

_STEPS_OF_DECAY = 300_000

# Pax's SAVE_CONTEXT_AND_OUT_PROJ.
SAVE_CONTEXT_AND_OUTPUT = remat.save_only(
  remat.ATTENTION_CONTEXT, remat.ATTENTION_OUTPUT
)


class TransformerLmSpmd(decoder.Decoder):
  """The base of `lm_cloud`, `c4` and `c4_multislice`.

  Attributes:
    activation: Of the feed-forward layers.
    attention_logit_cap: Bends the logits of attention into this range.
    logit_cap: Bends the logits of the head into this range.
    warmup_steps: Steps until the highest learning rate.
    decay_steps: The step at which the learning rate ends, at a tenth.
    loss_chunk_length: How many positions of a row the head computes at once;
      None is all of them, as Pax does.
  """

  num_train_steps = _STEPS_OF_DECAY
  checkpoint_every_steps = 5000
  eval_every_steps = 100
  summary_every_steps = 100
  dtype = "bfloat16"

  length = 1024
  head_dim = 128
  vocab_size = 32_000
  remat_policy = remat.save_nothing
  weight_decay = 1e-3
  max_grad_norm = 5.0

  activation: Callable[[jax.Array], jax.Array] = nn.relu
  attention_logit_cap: float | None = 50.0
  logit_cap: float | None = 30.0
  warmup_steps: int = 4000
  decay_steps: int = _STEPS_OF_DECAY
  loss_chunk_length: int | None = None

  @property
  def mlp_dim(self) -> int:  # pyrefly: ignore[bad-override]
    """Four times the width."""
    return 4 * self.embed_dim

  @property
  def num_heads(self) -> int:  # pyrefly: ignore[bad-override]
    """As many heads as make up the width."""
    return self.embed_dim // self.head_dim

  def model(self) -> fdl.Config[Any]:
    """Returns the model."""
    attention = fdl.Config(
      grouped_query.GroupedQueryAttention,
      num_heads=self.num_heads,
      num_kv_heads=self.num_heads,
      head_dim=self.head_dim,
      projections=fdl.Config(projections.CombinedProjections),
      logit_cap=self.attention_logit_cap,
    )
    return pre_norm_decoder.compose(
      fdl.Config,
      embedding=fdl.Config(
        embedding.Embedding,
        vocab_size=self.vocab_size,
        embed_dim=self.embed_dim,
        input_scale=math.sqrt(self.embed_dim),
      ),
      position_embedding=fdl.Config(position_embedding.SinusoidalPositions),
      norm=functools.partial(fdl.Config, layer_norm.LayerNorm),
      attention=attention,
      feed_forward=fdl.Config(
        feed_forward.FeedForward,
        mlp_dim=self.mlp_dim,
        activation=self.activation,
      ),
      num_layers=self.num_layers,
      remat_policy=self.remat_policy,
      logit_cap=self.logit_cap,
      token_loss=fdl.Config(
        softmax_loss.SoftmaxLoss, chunk_length=self.loss_chunk_length
      ),
    )

  def optimizer(self) -> fdl.Config[adamw.AdamW]:
    """Returns Adam, whose updates are clipped by their RMS."""
    return fdl.Config(
      adamw.AdamW,
      schedule=fdl.Config(
        warmup_decay.WarmupExponential,
        peak=self.learning_rate,
        warmup_steps=self.warmup_steps,
        total_steps=self.decay_steps,
        end=0.1 * self.learning_rate,
      ),
      b1=0.9,
      b2=0.99,
      epsilon=1e-6,
      weight_decay=self.weight_decay,
      max_update_rms=1.0,
    )

  def rules(self) -> rules_lib.Rules:
    """Returns the rules with the residual stream split over `tensor` too.

    Between layers nothing else is saved, and of 142 layers that is most of the
    memory; each layer then gathers what it reads, as in Pax.
    """
    split = {axes.ACTIVATION_EMBED: axes.TENSOR}
    return tuple(
      (name, split.get(name, mesh_axes))
      for name, mesh_axes in rules_lib.DEFAULT_RULES
    )

  def retention(self) -> fdl.Config[retention.Retention]:
    """Returns Pax's choice: the ten newest."""
    return fdl.Config(retention.Retention, newest=10)

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
)
from paxon.layers.attention import grouped_query, kernels, projections
from paxon.learners import adamw, schedules
from paxon.runner.settings import training
from paxon.tasks.lm import decoder

_STEPS_OF_DECAY = 300_000

# Pax's SAVE_CONTEXT_AND_OUT_PROJ.
SAVE_CONTEXT_AND_OUTPUT = remat.save_only(
  remat.ATTENTION_CONTEXT, remat.ATTENTION_OUTPUT
)
# Pax's SAVE_DOT_FOR_MLPERF_200B.
SAVE_ATTENTION = remat.save_only(*remat.ATTENTION)


class TransformerLmSpmd(decoder.Decoder):
  """The base of `lm_cloud`, `c4`, `c4_multislice` and `optimal_scaling`.

  Attributes:
    activation: Of the feed-forward layers.
    attention_logit_cap: Bends the logits of attention into this range.
    init_stddev: Standard deviation of all initial weights; None is each part's
      own.
    decay_steps: The step at which the learning rate ends, at a tenth.
  """

  num_train_steps = _STEPS_OF_DECAY
  checkpoint_every_steps = 5000
  eval_every_steps = 100
  summary_every_steps = 100
  dtype = "bfloat16"
  # Between layers nothing else is saved, and of 142 layers that is most of the
  # memory: it is split over `tensor` too, as in Pax.
  rules = "2d"

  length = 1024
  head_dim = 128
  vocab_size = 32_000
  remat_policy = remat.save_nothing
  logit_cap = 30.0
  warmup_steps = 4000
  weight_decay = 1e-3
  max_grad_norm = 5.0

  activation: Callable[[jax.Array], jax.Array] = nn.relu
  attention_logit_cap: float | None = 50.0
  init_stddev: float | None = None
  decay_steps: int = _STEPS_OF_DECAY

  @property
  def mlp_dim(self) -> int:  # pyrefly: ignore[bad-override]
    """Four times the width."""
    return 4 * self.embed_dim

  @property
  def num_heads(self) -> int:  # pyrefly: ignore[bad-override]
    """As many heads as make up the width."""
    return self.embed_dim // self.head_dim

  def initial(self, *fields: str) -> dict[str, fdl.Config[Any]]:
    """Returns the named fields of a part, if `init_stddev` sets them."""
    if self.init_stddev is None:
      return {}
    return {
      field: fdl.Config(nn.initializers.normal, self.init_stddev)
      for field in fields
    }

  def norm(self) -> fdl.Config[Any]:
    """Returns a layer norm."""
    return fdl.Config(layer_norm.LayerNorm)

  def embedding(self) -> fdl.Config[embedding.Embedding]:
    """Returns a table whose rows are scaled to entries of size one."""
    return fdl.Config(
      embedding.Embedding,
      vocab_size=self.vocab_size,
      embed_dim=self.embed_dim,
      input_scale=math.sqrt(self.embed_dim),
      **self.initial("embedding_init"),
    )

  def position_embedding(self) -> fdl.Config[Any] | None:
    """Returns sines."""
    return fdl.Config(position_embedding.SinusoidalPositions)

  def attention(self) -> fdl.Config[Any]:
    """Returns attention with one kernel for queries, keys and values."""
    return fdl.Config(
      grouped_query.GroupedQueryAttention,
      num_heads=self.num_heads,
      num_kv_heads=self.num_heads,
      head_dim=self.head_dim,
      kernel=self.attention_kernel,
      projections=fdl.Config(
        projections.CombinedProjections,
        **self.initial("kernel_init", "output_init"),
      ),
      logits=fdl.Config(kernels.Logits, cap=self.attention_logit_cap),
    )

  def feed_forward(self) -> fdl.Config[Any]:
    """Returns a layer without gates."""
    return fdl.Config(
      feed_forward.FeedForward,
      mlp_dim=self.mlp_dim,
      activation=self.activation,
      **self.initial("kernel_init"),
    )

  def schedule(self) -> fdl.Config[Any]:
    """Returns the learning rate: an exponential decay to a tenth."""
    return fdl.Config(
      schedules.WarmupExponential,
      peak=self.learning_rate,
      warmup_steps=self.warmup_steps,
      total_steps=self.decay_steps,
      end=0.1 * self.learning_rate,
    )

  def cosine_schedule(self) -> fdl.Config[Any]:
    """Returns half a cosine, down to a tenth: what GPT-3's heirs take."""
    return fdl.Config(
      schedules.WarmupCosine,
      peak=self.learning_rate,
      warmup_steps=self.warmup_steps,
      total_steps=self.decay_steps,
      end=0.1 * self.learning_rate,
    )

  def optimizer(self) -> fdl.Config[Any]:
    """Returns Adam, whose updates are clipped by their RMS."""
    return fdl.Config(
      adamw.AdamW,
      schedule=self.schedule(),
      b1=0.9,
      b2=0.99,
      epsilon=1e-6,
      weight_decay=self.weight_decay,
      max_update_rms=1.0,
    )

  def retention(self) -> fdl.Config[training.Retention]:
    """Returns Pax's choice: the ten newest."""
    return fdl.Config(training.Retention, newest=10)

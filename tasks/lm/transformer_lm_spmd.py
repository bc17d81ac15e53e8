"""Pax's dense language models, from 1 B to 1 T parameters.

Pre-norm layers with soft-capped attention logits, layer norm, sinusoidal
positions and a head tied to the embedding; computed in bfloat16, with float32
parameters and Adam.

Differences from Pax:

* Queries are scaled by `head_dim ** -0.5`; Pax also learns a scale per feature
  of a head (0.0001 % of the parameters), which later models dropped.
* The head has no bias (0.002 % of the parameters).
* Initialization is truncated normal, scaled by the fan-in, instead of Xavier
  uniform, so that the scale of activations does not depend on depth and width.
* Weight decay leaves out biases and the scales of norms.
* The first step has a learning rate above zero.
* Training ends with the decay of the learning rate; Pax's ends after 10 million
  steps.
* Pax's mesh axes replica, data and mdl are `data`, `fsdp` and `tensor`.

`exact=True` undoes the first five, so that losses can be compared with Pax's.
"""

from collections.abc import Callable
import math
from typing import Any

import fiddle as fdl
from flax import linen as nn
import jax

from paxon.layers import embedding, feed_forward, initializers, remat
from paxon.layers.attention import (
  grouped_query,
  head_norm,
  kernels,
  projections,
)
from paxon.layers.norms import layer_norm
from paxon.layers.positions import position_embedding
from paxon.learners import parameter_average, schedules
from paxon.learners.optimizers import adafactor, adamw
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
  """Base class of `lm_cloud`, `c4`, `c4_multislice` and `optimal_scaling`.

  Attributes:
    activation: Activation of the feed-forward layers.
    attention_logit_cap: Soft-cap of the attention logits; None disables it.
    init_stddev: Standard deviation of all initial weights; None uses each
      layer's default initializer.
    decay_steps: Step at which the learning rate reaches a tenth of the peak.
    exact: Whether to add Pax's scale per feature of a head and bias of the
      head, to initialize with its distributions, to decay all variables, to
      average parameters before updates, with Pax's warmup, and to have its
      learning rate in each step.
  """

  num_train_steps = _STEPS_OF_DECAY
  checkpoint_every_steps = 5000
  eval_every_steps = 100
  summary_every_steps = 100
  dtype = "bfloat16"
  # As in Pax, saved layer inputs, most of the memory of deep models, are split
  # over `tensor` too.
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
  exact: bool = False

  @property
  def mlp_dim(self) -> int:  # pyrefly: ignore[bad-override]
    """Four times `embed_dim`."""
    return 4 * self.embed_dim

  @property
  def num_heads(self) -> int:  # pyrefly: ignore[bad-override]
    """`embed_dim // head_dim`."""
    return self.embed_dim // self.head_dim

  @property
  def decayed_variables(  # pyrefly: ignore[bad-override]
    self,
  ) -> str | None:
    """All variables with `exact`, else matrices."""
    return ".*" if self.exact else None

  def initial(self, *fields: str) -> dict[str, fdl.Config[Any]]:
    """Returns initializers for the named fields if `init_stddev` is set."""
    if self.init_stddev is None:
      return {}
    return {
      field: fdl.Config(nn.initializers.normal, self.init_stddev)
      for field in fields
    }

  def norm(self) -> fdl.Config[Any]:
    """Returns a layer norm; with `exact`, its scale is stored minus one."""
    norm = fdl.Config(layer_norm.LayerNorm)
    if self.exact:
      # So that weight decay pulls the scale to one, as in Pax.
      norm.scale_offset = 1.0
    return norm

  def embedding(self) -> fdl.Config[embedding.Embedding]:
    """Returns a token embedding scaled by the square root of its width."""
    return fdl.Config(
      embedding.Embedding,
      vocab_size=self.vocab_size,
      embed_dim=self.embed_dim,
      input_scale=math.sqrt(self.embed_dim),
      use_bias=self.exact,
      **self.initial("embedding_init"),
    )

  def position_embedding(self) -> fdl.Config[Any] | None:
    """Returns sinusoidal positions."""
    return fdl.Config(position_embedding.SinusoidalPositions)

  def attention(self) -> fdl.Config[Any]:
    """Returns attention with combined query, key and value projections."""
    attention = fdl.Config(
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
    if self.exact:
      attention.logits.query_scale = fdl.Config(head_norm.PerDimScale)
      if self.init_stddev is None:
        # Pax draws [3, D, N, H] and [D, N, H] by Xavier's rule for the last two
        # dimensions: the fans are D N and D H, times 3 for the former.
        attention.projections.kernel_init = fdl.Config(
          initializers.xavier, 3**-0.5
        )
        attention.projections.output_init = fdl.Config(
          initializers.xavier, in_axes=(2, 0), out_axes=(2, 1)
        )
    return attention

  def feed_forward(self) -> fdl.Config[Any]:
    """Returns a feed-forward layer without gates."""
    initial: dict[str, Any] = self.initial("kernel_init")
    if self.exact and not initial:
      initial = {"kernel_init": fdl.Config(initializers.xavier)}
    return fdl.Config(
      feed_forward.FeedForward,
      mlp_dim=self.mlp_dim,
      activation=self.activation,
      **initial,
    )

  def schedule(self) -> fdl.Config[Any]:
    """Returns an exponential schedule that ends at a tenth of the peak."""
    return self._schedule(schedules.WarmupExponential, schedules.Exponential)

  def cosine_schedule(self) -> fdl.Config[Any]:
    """Returns a cosine schedule that ends at a tenth of the peak."""
    return self._schedule(schedules.WarmupCosine, schedules.Cosine)

  def _schedule(
    self, warmup_decay: type[schedules.WarmupDecay], decay: type
  ) -> fdl.Config[Any]:
    """Returns a warmup and a decay; with `exact`, from a rate of zero."""
    if self.exact:
      return fdl.Config(
        schedules.RampHoldDecay,
        peak=self.learning_rate,
        warmup_steps=self.warmup_steps,
        decay_start=self.warmup_steps + 1,
        decay_end=self.decay_steps,
        min_ratio=0.1,
        decay=decay,
      )
    return fdl.Config(
      warmup_decay,
      peak=self.learning_rate,
      warmup_steps=self.warmup_steps,
      total_steps=self.decay_steps,
      end=0.1 * self.learning_rate,
    )

  def optimizer(self) -> fdl.Config[Any]:
    """Returns Adam with updates clipped by their RMS."""
    return fdl.Config(
      adamw.AdamW,
      schedule=self.schedule(),
      b1=0.9,
      b2=0.99,
      epsilon=1e-6,
      weight_decay=self.weight_decay,
      max_update_rms=1.0,
    )

  def average(self) -> fdl.Config[parameter_average.ParameterAverage] | None:
    """Returns the moving average; with `exact`, in Pax's order and warmup."""
    average = super().average()
    if average is not None and self.exact:
      average.warmup = average.before_update = True
    return average

  def adafactor(self) -> fdl.Config[Any]:
    """Returns Pax's Adafactor; its momentum is float32 instead of int8."""
    return fdl.Config(
      adafactor.Adafactor,
      schedule=self.schedule(),
      b1=0.9,
      b2=0.99,
      factoring=adafactor.Factoring.LAST,
      momentum_after_rate=True,
      min_param_rms=None,
      weight_decay=self.weight_decay,
    )

  def stop_at_log_pplx(
    self, target: float | None
  ) -> fdl.Config[training.EarlyStopping] | None:
    """Returns the end of training at a validation loss, if there is a split.

    Args:
      target: Training ends when the loss is at most this; None for no end.
    """
    if target is None or "validation" not in self.datasets():
      return None
    return fdl.Config(
      training.EarlyStopping,
      metric="validation/log_pplx",
      patience=None,
      target=target,
    )

  def retention(self) -> fdl.Config[training.Retention]:
    """Returns Pax's retention: the ten newest checkpoints."""
    return fdl.Config(training.Retention, newest=10)

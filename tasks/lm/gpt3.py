"""GPT-3 as Pax trains it (Brown et al. 2020, https://arxiv.org/abs/2005.14165).

Differences from `transformer_lm_spmd`: learned positions, biases in all layers,
no soft-caps, normal initialization, AdamW with a cosine schedule, and early
stopping at MLPerf's target loss.

Differences from Pax:

* Early stopping evaluates the split `validation`; Pax looked for the name of
  one data set. MLPerf's target is per SentencePiece token of C4, so it is set
  only with a `c4_folder`: bytes have a lower loss.
* The vocabulary is padded from 50,257 to 50,304, which meshes divide; Pax
  padded it at run time.
"""

import math
from typing import Any

import fiddle as fdl
from flax import linen as nn

from paxon.layers import embedding
from paxon.layers.positions import position_embedding
from paxon.learners.optimizers import adamw
from paxon.runner.settings import training
from paxon.tasks.lm import transformer_lm_spmd

# Batch size of MLPerf's reference run.
_MLPERF_BATCH = 1536
# Target of MLPerf, in nats per SentencePiece token of C4.
_MLPERF_LOG_PPLX = 2.69


class Gpt3(transformer_lm_spmd.TransformerLmSpmd):
  """Base class of the GPT-3 models in `c4` and `gpu`.

  Attributes:
    max_positions: Size of the position embedding; None is `length`.
    embedding_dropout: Dropout rate of embedded tokens; None disables it.
    target_log_pplx: Training ends when the validation loss, in nats per token,
      is at most this; None disables it. The default with a `c4_folder` is
      MLPerf's 2.69, else None.
  """

  length = 2048
  num_layers = 96
  embed_dim = 12_288
  # GPT-2's 50,257 tokens, padded to a multiple of 128.
  vocab_size = 50_304
  activation = nn.gelu
  attention_logit_cap = None
  logit_cap = None
  init_stddev = 0.006
  learning_rate = 6e-5
  warmup_steps = 265
  decay_steps = 108_600
  num_train_steps = 108_600
  weight_decay = 0.1
  max_grad_norm = 1.0
  checkpoint_every_steps = 100
  eval_every_steps = 100
  summary_every_steps = 10

  max_positions: int | None = 16_384
  embedding_dropout: float | None = None
  target_log_pplx: float | None

  @property
  def target_log_pplx(  # pyrefly: ignore[bad-override, redefinition]
    self,
  ) -> float | None:
    """MLPerf's target if the tokens are MLPerf's."""
    return _MLPERF_LOG_PPLX if getattr(self, "c4_folder", None) else None

  def norm(self) -> fdl.Config[Any]:
    """Returns a layer norm."""
    norm = super().norm()
    norm.epsilon = 1e-5
    return norm

  def embedding(self) -> fdl.Config[embedding.Embedding]:
    """Returns the token embedding, which is also the head."""
    return fdl.Config(
      embedding.Embedding,
      vocab_size=self.vocab_size,
      embed_dim=self.embed_dim,
      **self.initial("embedding_init"),
    )

  def position_embedding(self) -> fdl.Config[Any] | None:
    """Returns a learned position embedding."""
    positions = self.max_positions
    return fdl.Config(
      position_embedding.LearnedPositions,
      max_length=self.length if positions is None else positions,
      **self.initial("embedding_init"),
    )

  def attention(self) -> fdl.Config[Any]:
    """Returns attention with biases; Pax's has no scale per feature."""
    attention = super().attention()
    attention.logits.query_scale = None
    attention.projections.use_bias = True
    return attention

  def model(self) -> fdl.Config[Any]:
    """Returns the model."""
    model = super().model()
    if self.embedding_dropout is not None:
      model.embedding_dropout = fdl.Config(nn.Dropout, self.embedding_dropout)
    return model

  def schedule(self) -> fdl.Config[Any]:
    """Returns a cosine schedule that ends at a tenth of the peak."""
    return self.cosine_schedule()

  def optimizer(self) -> fdl.Config[Any]:
    """Returns AdamW without clipped updates."""
    return fdl.Config(
      adamw.AdamW,
      schedule=self.schedule(),
      b1=0.9,
      b2=0.95,
      epsilon=1e-8,
      weight_decay=self.weight_decay,
    )

  def early_stopping(self) -> fdl.Config[training.EarlyStopping] | None:
    """Returns the target, if it is set and there is a validation split."""
    return self.stop_at_log_pplx(self.target_log_pplx)

  def shrink(self) -> Any:
    """Returns a toy-sized version with `length` positions."""
    return super().shrink().replace(max_positions=None)


class MlPerfGpt3(Gpt3):
  """GPT-3 with MLPerf's learning rate for each batch size."""

  vocab_size = 51_200
  summary_every_steps = 1

  @property
  def learning_rate(self) -> float:  # pyrefly: ignore[bad-override]
    """2e-5, or 3e-5 for more than 3,584 sequences."""
    return 2e-5 if self.global_batch_size <= 3584 else 3e-5

  @property
  def warmup_steps(self) -> int:  # pyrefly: ignore[bad-override]
    """As many sequences as 265 steps of 1,536."""
    return math.ceil(265 * _MLPERF_BATCH / self.global_batch_size)

  @property
  def decay_steps(self) -> int:  # pyrefly: ignore[bad-override]
    """As many sequences as 108,600 steps of 1,536."""
    return math.ceil(108_600 * _MLPERF_BATCH / self.global_batch_size)

  @property
  def num_train_steps(self) -> int:  # pyrefly: ignore[bad-override]
    """`decay_steps`."""
    return self.decay_steps

"""GPT-3 as Pax trains it (Brown et al. 2020, https://arxiv.org/abs/2005.14165).

Learned positions, biases everywhere, no capped logits, normal initial weights,
AdamW with half a cosine, and an end when the loss on held-out text is as low as
MLPerf asks for. The rest is that of `transformer_lm_spmd`.

What differs from Pax:

* The evaluation that ends a training is of the split `validation`; Pax's looked
  for the name of one data set. MLPerf's target is of C4's SentencePiece tokens,
  so it is set only where a `c4_folder` is; a byte is easier to predict.
* Where Pax has 50,257 rows of the table, which divide by no mesh and were
  padded at run time, these have 50,304.
"""

import math
from typing import Any

import fiddle as fdl
from flax import linen as nn

from paxon.layers import embedding, layer_norm, position_embedding
from paxon.learners import adamw
from paxon.runner.settings import training
from paxon.tasks.lm import transformer_lm_spmd

# What MLPerf's reference run was tuned at.
_MLPERF_BATCH = 1536
# Its target, in nats a SentencePiece token of C4.
_MLPERF_LOG_PPLX = 2.69


class Gpt3(transformer_lm_spmd.TransformerLmSpmd):
  """The base of the GPT-3s of `c4`, and of `gpu`.

  Attributes:
    max_positions: Rows of the table of positions; None is one per token of a
      row.
    embedding_dropout: Share of features of embedded tokens that is dropped;
      None is no dropout.
    target_log_pplx: The training ends when the mean loss of held-out text, in
      nats a token, is no more than this; None is never. By default MLPerf's
      2.69 with a `c4_folder`, else None.
  """

  length = 2048
  num_layers = 96
  embed_dim = 12_288
  # GPT-2's 50,257 tokens, and rows up to a multiple of 128.
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
    """MLPerf's target, where tokens are those that it is of."""
    return _MLPERF_LOG_PPLX if getattr(self, "c4_folder", None) else None

  def norm(self) -> fdl.Config[Any]:
    """Returns a layer norm."""
    return fdl.Config(layer_norm.LayerNorm, epsilon=1e-5)

  def embedding(self) -> fdl.Config[embedding.Embedding]:
    """Returns the table of tokens, which is the head too."""
    return fdl.Config(
      embedding.Embedding,
      vocab_size=self.vocab_size,
      embed_dim=self.embed_dim,
      **self.initial("embedding_init"),
    )

  def position_embedding(self) -> fdl.Config[Any] | None:
    """Returns a table of positions."""
    positions = self.max_positions
    return fdl.Config(
      position_embedding.LearnedPositions,
      max_length=self.length if positions is None else positions,
      **self.initial("embedding_init"),
    )

  def attention(self) -> fdl.Config[Any]:
    """Returns attention with biases."""
    attention = super().attention()
    attention.projections.use_bias = True
    return attention

  def model(self) -> fdl.Config[Any]:
    """Returns the model."""
    model = super().model()
    if self.embedding_dropout is not None:
      model.embedding_dropout = fdl.Config(nn.Dropout, self.embedding_dropout)
    return model

  def schedule(self) -> fdl.Config[Any]:
    """Returns the learning rate: half a cosine, down to a tenth."""
    return self.cosine_schedule()

  def optimizer(self) -> fdl.Config[Any]:
    """Returns AdamW, whose updates are not clipped."""
    return fdl.Config(
      adamw.AdamW,
      schedule=self.schedule(),
      b1=0.9,
      b2=0.95,
      epsilon=1e-8,
      weight_decay=self.weight_decay,
    )

  def early_stopping(self) -> fdl.Config[training.EarlyStopping] | None:
    """Returns the target, if there is one and text to compare it with."""
    target = self.target_log_pplx
    if target is None or "validation" not in self.datasets():
      return None
    return fdl.Config(
      training.EarlyStopping,
      metric="validation/log_pplx",
      patience=None,
      target=target,
    )

  def shrink(self) -> Any:
    """Returns a toy; its few positions are those of its rows."""
    return super().shrink().replace(max_positions=None)


class MlPerfGpt3(Gpt3):
  """GPT-3 with the learning rate that MLPerf prescribes for each batch."""

  vocab_size = 51_200
  summary_every_steps = 1

  @property
  def learning_rate(self) -> float:  # pyrefly: ignore[bad-override]
    """2e-5, or 3e-5 for more than 3,584 rows."""
    return 2e-5 if self.global_batch_size <= 3584 else 3e-5

  @property
  def warmup_steps(self) -> int:  # pyrefly: ignore[bad-override]
    """As many rows as 265 steps of 1,536."""
    return math.ceil(265 * _MLPERF_BATCH / self.global_batch_size)

  @property
  def decay_steps(self) -> int:  # pyrefly: ignore[bad-override]
    """As many rows as 108,600 steps of 1,536."""
    return math.ceil(108_600 * _MLPERF_BATCH / self.global_batch_size)

  @property
  def num_train_steps(self) -> int:  # pyrefly: ignore[bad-override]
    """Until the learning rate has decayed."""
    return self.decay_steps

"""BERT as in Pax: `transformer_lm_spmd` with bidirectional attention.

Tokens are masked at random in each step (Devlin et al. 2018,
https://arxiv.org/abs/1810.04805). As in Pax, there are no token types and no
next-sentence prediction.
"""

from typing import Any

import fiddle as fdl

from paxon.layers import remat
from paxon.layers.attention import mask as attention_mask
from paxon.layers.losses import softmax_loss
from paxon.layers.models import masked_lm, random_masking
from paxon.tasks.lm import transformer_lm_spmd

# With Adafactor; training ends with the decay, as in `transformer_lm_spmd`.
_STEPS_OF_DECAY = 100_000
# In WordPiece's vocabulary.
_MASK = 103


class MaskedTransformerLm(transformer_lm_spmd.TransformerLmSpmd):
  """Base class of `params.bert`.

  Attributes:
    mask_id: Id of the mask token.
    masked_share: Share of tokens to mask and predict.
    label_smoothing: Probability spread evenly over the vocabulary.
  """

  length = 512
  dtype = "float32"
  remat_policy = remat.save_projections

  mask_id: int = _MASK
  masked_share: float = 0.15
  label_smoothing: float = 0.0

  def attention(self) -> fdl.Config[Any]:
    """Returns bidirectional attention."""
    attention = super().attention()
    attention.mask = fdl.Config(attention_mask.MaskRules, causal=False)
    return attention

  def model(self) -> fdl.Config[Any]:
    """Returns the model."""
    decoder = super().model()
    return fdl.Config(
      masked_lm.MaskedLm,
      embedding=decoder.embedding,
      stack=decoder.stack,
      final_norm=decoder.final_norm,
      position_embedding=decoder.position_embedding,
      logit_cap=self.logit_cap,
      masking=fdl.Config(
        random_masking.RandomMasking,
        mask_id=self.mask_id,
        vocab_size=self.vocab_size,
        rate=self.masked_share,
      ),
      token_loss=fdl.Config(
        softmax_loss.SoftmaxLoss,
        chunk_length=self.loss_chunk_length,
        label_smoothing=self.label_smoothing,
      ),
    )


class AdafactorMaskedLm(MaskedTransformerLm):
  """`MaskedTransformerLm` with Pax's Adafactor and its shorter decay.

  The learning rate reaches a tenth of its peak after 100,000 steps instead of
  300,000.
  """

  learning_rate = 2.5e-4
  decay_steps = _STEPS_OF_DECAY
  num_train_steps = _STEPS_OF_DECAY

  def optimizer(self) -> fdl.Config[Any]:
    """Returns Pax's Adafactor."""
    return self.adafactor()

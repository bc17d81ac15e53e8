"""BERT with its masked language modeling head, and without.

Devlin et al. 2018, https://arxiv.org/abs/1810.04805. `BertModel`, such as a
sentence encoder, has no head: the model is a `masked_lm.TextEncoder`, whose
hidden states `classifier.pool_mean` makes an embedding of. Weights of the
pooler and of next sentence prediction, which files may have, are not used; an
import keeps them for the export.
"""

from collections.abc import Callable
import dataclasses
import re
from typing import Any

from paxon.layers import (
  block,
  embedding,
  linear,
  position_embedding,
  unembedding,
)
from paxon.layers.models import masked_lm
from paxon.layers.models.hugging_face import family, mapping, towers
from paxon.sharding import axes

_ENCODER = "BertModel"
_EMBEDDINGS = """
  word_embeddings.weight        params/embedding/table           V D -> V D
  position_embeddings.weight    params/position_embedding/table  P D -> P D
  token_type_embeddings.weight  params/type_embedding/table      C D -> C D
  LayerNorm                     params/embedding_norm            norm
"""
# Inputs and outputs of `dense` have the same width; the pattern needs two names
# for it.
_TRANSFORM = """
  transform.dense      params/transform/dense/kernel  E D -> D E + bias
  transform.LayerNorm  params/transform/norm          norm
"""
_TIED_HEAD = """
  bias                          params/embedding/bias            V -> V
"""
_UNTIED_HEAD = """
  decoder  params/head/kernel  V D -> D V + bias
"""
_LAYER = """
  attention.self.query        attention/query    (N H) D -> D N H + bias
  attention.self.key          attention/key      (N H) D -> D N H + bias
  attention.self.value        attention/value    (N H) D -> D N H + bias
  attention.output.dense      attention/out      D (N H) -> N H D + bias
  attention.output.LayerNorm  attention_norm     norm
  intermediate.dense          feed_forward/up    F D -> D F + bias
  output.dense                feed_forward/down  D F -> F D + bias
  output.LayerNorm            feed_forward_norm  norm
"""
# Fields of a pooler that old files describe.
_INERT = """
  directionality pooler_fc_size pooler_num_attention_heads pooler_num_fc_layers
  pooler_size_per_head pooler_type
  """


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Bert(towers.Tower):
  """Hyperparameters of a BERT; `sizes` are those of `mapping.Names`."""

  tied: bool
  has_head: bool

  def model(self, make: Callable[..., Any]) -> Any:
    """Returns the model, built by `make(cls, **fields)`."""
    if not self.has_head:
      return make(masked_lm.TextEncoder, **self._encoder(make))
    D = self.sizes["D"]
    head = None
    if not self.tied:
      head = make(
        unembedding.Unembedding, vocab_size=self.sizes["V"], use_bias=True
      )
    return make(
      masked_lm.MaskedLm,
      **self._encoder(make),
      head=head,
      transform=make(
        masked_lm.HeadTransform,
        dense=make(
          linear.Linear,
          output_dim=D,
          activation=self.activation,
          # The output is replicated over `tensor`, like the residual stream.
          kernel_axes=(axes.EMBED, None),
        ),
        norm=self.norm(make),
      ),
    )

  def _encoder(self, make: Callable[..., Any]) -> dict[str, Any]:
    """Returns the fields of `masked_lm.TextEncoder`."""
    D = self.sizes["D"]
    return {
      "embedding": make(
        embedding.Embedding,
        vocab_size=self.sizes["V"],
        embed_dim=D,
        use_bias=self.has_head and self.tied,
      ),
      "stack": self.stack(make),
      "position_embedding": make(
        position_embedding.LearnedPositions, max_length=self.sizes["P"]
      ),
      "type_embedding": make(
        embedding.Embedding, vocab_size=self.sizes["C"], embed_dim=D
      ),
      "embedding_norm": self.norm(make),
    }

  def names(self) -> mapping.Names:
    """Returns the names of the weights."""
    head = "cls.predictions."
    # Files without a head leave the prefix out.
    root = "bert." if self.has_head else ""
    ignored = rf"{re.escape(root)}embeddings\.position_ids"
    kept = [
      # Of next sentence prediction.
      rf"{re.escape(root)}pooler\.dense\.(weight|bias)",
      r"cls\.seq_relationship\.(weight|bias)",
    ]
    tied, last = {}, ""
    if not self.has_head:
      pass
    elif self.tied:
      last = _TRANSFORM + _TIED_HEAD
      tied = {
        f"{head}decoder.weight": "bert.embeddings.word_embeddings.weight",
        f"{head}decoder.bias": f"{head}bias",
      }
    else:
      last = _TRANSFORM + _UNTIED_HEAD
      # The bias of the tied head.
      kept.append(r"cls\.predictions\.bias")
    return mapping.Names(
      sizes=self.sizes,
      rules=(
        *mapping.parse_rules(_EMBEDDINGS, at=f"{root}embeddings."),
        *mapping.parse_rules(last, at=head),
      ),
      stacks=(
        mapping.StackRules(
          stack="params/stack",
          num_layers=self.num_layers,
          rules=mapping.parse_rules(_LAYER, at=f"{root}encoder.layer.{{}}."),
        ),
      ),
      tied=tied,
      ignored=(ignored,),
      kept=tuple(kept),
      former={
        "LayerNorm.gamma": "LayerNorm.weight",
        "LayerNorm.beta": "LayerNorm.bias",
      },
    )


def _read(fields: family.Fields) -> _Bert:
  fields.one_of("is_decoder", False, {False: False})
  fields.one_of("position_embedding_type", "absolute", {"absolute": None})
  found = towers.read(fields, layer_norm_eps=1e-12)
  found["sizes"] |= {
    "V": fields.size("vocab_size"),
    "E": found["sizes"]["D"],
    "P": fields.size("max_position_embeddings", 512),
    "C": fields.size("type_vocab_size", 2),
  }
  return _Bert(
    block_class=block.PostNormBlock,
    tied=fields.flag("tie_word_embeddings", True),
    has_head=fields.architecture != _ENCODER,
    **found,
  )


FAMILY = family.Family(
  model_type="bert",
  architecture="BertForMaskedLM",
  # Of pretraining, the second head, next sentence prediction, is ignored.
  other_architectures=("BertForPreTraining", _ENCODER),
  read=_read,
  inert=tuple(_INERT.split()),
)

"""BERT with its masked language modeling head, with a classifier, and without.

Devlin et al. 2018, https://arxiv.org/abs/1810.04805. `BertModel`, such as a
sentence encoder, has no head: the model is a `masked_lm.TextEncoder`, whose
hidden states `sentence_encoder` makes an embedding of. The model of
`BertForSequenceClassification` is a `classifier.Classifier` of the pooled first
token. Other models do not use the weights of the pooler and of next sentence
prediction, which files may have; an import keeps them for the export.
"""

from collections.abc import Callable, Mapping
import dataclasses
import re
from typing import Any

import jax.numpy as jnp

from paxon.layers import embedding, linear, unembedding
from paxon.layers.models import classifier, masked_lm
from paxon.layers.models.hugging_face import (
  family,
  mapping,
)
from paxon.layers.models.hugging_face.media import towers
from paxon.layers.positions import position_embedding
from paxon.layers.stacks import block
from paxon.sharding import axes

ENCODER = "BertModel"
CLASSIFIER = "BertForSequenceClassification"
MASKED = "BertForMaskedLM"
_EMBEDDINGS = """
  word_embeddings.weight        embedding/table           V D -> V D
  position_embeddings.weight    position_embedding/table  P D -> P D
  token_type_embeddings.weight  type_embedding/table      C D -> C D
  LayerNorm                     embedding_norm            norm
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
# Widths are those of `_TRANSFORM`; L is the number of labels.
_POOLER = """
  pooler.dense  params/pooler/kernel  E D -> D E + bias
"""
_CLASSIFIER = """
  classifier  params/head/kernel  L D -> D L + bias
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
  architecture: str

  def model(self, make: Callable[..., Any]) -> Any:
    """Returns the model, built by `make(cls, **fields)`."""
    if self.architecture == CLASSIFIER:
      return self._classifier(make)
    if not self._has_masked_head:
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

  @property
  def _has_masked_head(self) -> bool:
    return self.architecture not in (ENCODER, CLASSIFIER)

  def _classifier(self, make: Callable[..., Any]) -> Any:
    pooler, head = (
      make(
        linear.Linear,
        output_dim=self.sizes[width],
        activation=activation,
        # As that of the transform of the masked head.
        kernel_axes=(axes.EMBED, None),
      )
      for width, activation in (("D", jnp.tanh), ("L", None))
    )
    return make(
      classifier.Classifier,
      encoder=make(masked_lm.TextEncoder, **self._encoder(make)),
      pooling=classifier.pool_first,
      pooler=pooler,
      head=head,
      input_keys=("inputs", "positions", "segment_ids", "type_ids"),
    )

  def _encoder(self, make: Callable[..., Any]) -> dict[str, Any]:
    """Returns the fields of `masked_lm.TextEncoder`."""
    D = self.sizes["D"]
    return {
      "embedding": make(
        embedding.Embedding,
        vocab_size=self.sizes["V"],
        embed_dim=D,
        use_bias=self._has_masked_head and self.tied,
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
    is_classifier = self.architecture == CLASSIFIER
    # Files without a head leave the prefix out.
    root = "" if self.architecture == ENCODER else "bert."
    to = "params/encoder/" if is_classifier else "params/"
    ignored = rf"{re.escape(root)}embeddings\.position_ids"
    kept, tied, last = [], {}, ()
    if is_classifier:
      last = (
        *mapping.parse_rules(_POOLER, at=root),
        *mapping.parse_rules(_CLASSIFIER),
      )
    else:
      # Tensors of next sentence prediction.
      kept = [
        rf"{re.escape(root)}pooler\.dense\.(weight|bias)",
        r"cls\.seq_relationship\.(weight|bias)",
      ]
    if self._has_masked_head and self.tied:
      last = mapping.parse_rules(_TRANSFORM + _TIED_HEAD, at=head)
      tied = {
        f"{head}decoder.weight": "bert.embeddings.word_embeddings.weight",
        f"{head}decoder.bias": f"{head}bias",
      }
    elif self._has_masked_head:
      last = mapping.parse_rules(_TRANSFORM + _UNTIED_HEAD, at=head)
      # The bias of the tied head.
      kept.append(r"cls\.predictions\.bias")
    return mapping.Names(
      sizes=self.sizes,
      rules=(
        *mapping.parse_rules(_EMBEDDINGS, at=f"{root}embeddings.", to=to),
        *last,
      ),
      stacks=(
        mapping.StackRules(
          stack=f"{to}stack",
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
  fields.map_value("is_decoder", False, {False: False})
  fields.map_value("position_embedding_type", "absolute", {"absolute": None})
  found = towers.read(fields, layer_norm_eps=1e-12)
  found["sizes"] |= {
    "V": fields.size("vocab_size"),
    "E": found["sizes"]["D"],
    "P": fields.size("max_position_embeddings", 512),
    "C": fields.size("type_vocab_size", 2),
  }
  if fields.architecture == CLASSIFIER:
    found["sizes"]["L"] = len(read_labels(fields.get))
  return _Bert(
    block_class=block.PostNormBlock,
    tied=fields.flag("tie_word_embeddings", True),
    architecture=fields.architecture,
    **found,
  )


def read_labels(get: Callable[..., Any]) -> tuple[str, ...]:
  """Returns the names of the labels in a `config.json`, by id.

  Args:
    get: Returns the value of a field, or a default.

  Raises:
    UnsupportedConfigError: `id2label` does not name each id from 0 on.
  """
  names = get("id2label", None)
  if names is None:
    names = {i: f"LABEL_{i}" for i in range(get("num_labels", None) or 2)}
  ids = [str(i) for i in range(len(names))]
  if sorted(map(str, names)) != sorted(ids) or not names:
    raise family.UnsupportedConfigError(
      "config.json: id2label must name each id from 0 on, got"
      f" {str(names)[:200]}."
    )
  by_id = {str(i): str(name) for i, name in names.items()}
  return tuple(by_id[i] for i in ids)


def _make_example(config: Mapping[str, Any]) -> tuple[Any, ...]:
  ids = jnp.zeros((1, 2), jnp.int32)
  if CLASSIFIER not in (config.get("architectures") or ()):
    return ids, ids, ids
  keys = ("inputs", "positions", "segment_ids", "type_ids")
  return (dict.fromkeys(keys, ids),)


FAMILY = family.Family(
  model_type="bert",
  architecture=MASKED,
  # Of pretraining, the second head, next sentence prediction, is ignored.
  other_architectures=("BertForPreTraining", ENCODER, CLASSIFIER),
  read=_read,
  example=_make_example,
  inert=tuple(_INERT.split()),
)

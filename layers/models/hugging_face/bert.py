"""BERT with the head that predicts hidden tokens.

Devlin et al. 2018, https://arxiv.org/abs/1810.04805. Files of models that were
trained with a second task, to tell the next sentence, have its weights too;
they are left out.
"""

from collections.abc import Callable, Mapping
import dataclasses
from typing import Any

from paxon.layers import (
  block,
  embedding,
  feed_forward,
  layer_norm,
  linear,
  position_embedding,
  stack,
  unembedding,
)
from paxon.layers.attention import grouped_query
from paxon.layers.models import head_transform, masked_lm
from paxon.layers.models.hugging_face import (
  activations,
  config_fields,
  family,
)
from paxon.sharding import axes

# Of training, and of a pooler that old files describe.
_INERT = (
  "attention_probs_dropout_prob",
  "directionality",
  "hidden_dropout_prob",
  "pooler_fc_size",
  "pooler_num_attention_heads",
  "pooler_num_fc_layers",
  "pooler_size_per_head",
  "pooler_type",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Bert:
  """What a file says; `sizes` are those of the patterns of names."""

  sizes: Mapping[str, int]
  num_layers: int
  epsilon: float
  activation: activations.Activation
  tied: bool

  def model(self, make: Callable[..., Any]) -> Any:
    """Returns the model, or what `make` makes of it."""
    D = self.sizes["D"]
    head = None
    if not self.tied:
      head = make(
        unembedding.Unembedding, vocab_size=self.sizes["V"], use_bias=True
      )
    return make(
      masked_lm.MaskedLm,
      embedding=make(
        embedding.Embedding,
        vocab_size=self.sizes["V"],
        embed_dim=D,
        use_bias=self.tied,
      ),
      stack=make(
        stack.Stack, blocks=[_block(self, make)], num_layers=self.num_layers
      ),
      position_embedding=make(
        position_embedding.LearnedPositions, max_length=self.sizes["P"]
      ),
      type_embedding=make(
        embedding.Embedding, vocab_size=self.sizes["C"], embed_dim=D
      ),
      embedding_norm=_norm(self, make),
      head=head,
      transform=make(
        head_transform.HeadTransform,
        dense=make(
          linear.Linear,
          output_dim=D,
          activation=self.activation,
          # The result is whole on each device, as the residual stream is.
          kernel_axes=(axes.EMBED, None),
        ),
        norm=_norm(self, make),
      ),
    )

  def names(self) -> family.Names:
    """Returns the names of the weights."""
    head, word = "cls.predictions", "bert.embeddings.word_embeddings.weight"
    ignored = [
      r"bert\.embeddings\.position_ids",
      # Of the task that is not served.
      r"bert\.pooler\.dense\.(weight|bias)",
      r"cls\.seq_relationship\.(weight|bias)",
    ]
    tied = {}
    if self.tied:
      last = [family.rule(f"{head}.bias", "params/embedding/bias", "V -> V")]
      tied = {
        f"{head}.decoder.weight": word,
        f"{head}.decoder.bias": f"{head}.bias",
      }
    else:
      last = [
        family.rule(
          f"{head}.decoder.weight", "params/head/kernel", "V D -> D V"
        ),
        family.rule(f"{head}.decoder.bias", "params/head/bias", "V -> V"),
      ]
      # It is that of the tied head, and of no use here.
      ignored.append(r"cls\.predictions\.bias")
    return family.Names(
      sizes=self.sizes,
      rules=(
        family.rule(word, "params/embedding/table", "V D -> V D"),
        family.rule(
          "bert.embeddings.position_embeddings.weight",
          "params/position_embedding/table",
          "P D -> P D",
        ),
        family.rule(
          "bert.embeddings.token_type_embeddings.weight",
          "params/type_embedding/table",
          "C D -> C D",
        ),
        *_norm_rules("bert.embeddings.LayerNorm", "params/embedding_norm"),
        *_dense_rules(f"{head}.transform.dense", "params/transform/dense"),
        *_norm_rules(f"{head}.transform.LayerNorm", "params/transform/norm"),
        *last,
      ),
      stacks=(
        family.StackRules(
          stack="params/stack", num_layers=self.num_layers, rules=_layer_rules()
        ),
      ),
      tied=tied,
      ignored=tuple(ignored),
      former={
        "LayerNorm.gamma": "LayerNorm.weight",
        "LayerNorm.beta": "LayerNorm.bias",
      },
    )


def _read(config: Mapping[str, Any]) -> _Bert:
  fields = config_fields.Fields(
    config, architecture=FAMILY.architecture, inert=_INERT
  )
  fields.one_of("is_decoder", False, {False: False})
  fields.one_of("position_embedding_type", "absolute", {"absolute": None})
  embed_dim = fields.size("hidden_size", 768)
  num_heads = fields.size("num_attention_heads", 12)
  if embed_dim % num_heads:
    fields.refuse(
      "num_attention_heads", f"a divisor of hidden_size ({embed_dim})"
    )
  result = _Bert(
    sizes={
      "V": fields.size("vocab_size"),
      "D": embed_dim,
      "E": embed_dim,
      "F": fields.size("intermediate_size", 3072),
      "N": num_heads,
      "H": embed_dim // num_heads,
      "P": fields.size("max_position_embeddings", 512),
      "C": fields.size("type_vocab_size", 2),
    },
    num_layers=fields.size("num_hidden_layers", 12),
    epsilon=fields.number("layer_norm_eps", 1e-12),
    activation=fields.one_of("hidden_act", "gelu", activations.SERVED),
    tied=fields.flag("tie_word_embeddings", True),
  )
  fields.check_all_read()
  return result


def _norm(bert: _Bert, make: Callable[..., Any]) -> Any:
  return make(layer_norm.LayerNorm, epsilon=bert.epsilon)


def _block(bert: _Bert, make: Callable[..., Any]) -> Any:
  return make(
    block.PostNormBlock,
    attention=make(
      grouped_query.GroupedQueryAttention,
      num_heads=bert.sizes["N"],
      num_kv_heads=bert.sizes["N"],
      head_dim=bert.sizes["H"],
      causal=False,
      use_bias=True,
    ),
    attention_norm=_norm(bert, make),
    feed_forward=make(
      feed_forward.FeedForward,
      mlp_dim=bert.sizes["F"],
      activation=bert.activation,
    ),
    feed_forward_norm=_norm(bert, make),
  )


def _norm_rules(theirs: str, ours: str) -> tuple[family.Rule, ...]:
  return (
    family.rule(f"{theirs}.weight", f"{ours}/scale", "D -> D"),
    family.rule(f"{theirs}.bias", f"{ours}/bias", "D -> D"),
  )


def _dense_rules(theirs: str, ours: str) -> tuple[family.Rule, ...]:
  # Inputs and outputs have one width, so the pattern needs two names for it.
  return (
    family.rule(f"{theirs}.weight", f"{ours}/kernel", "E D -> D E"),
    family.rule(f"{theirs}.bias", f"{ours}/bias", "E -> E"),
  )


def _layer_rules() -> tuple[family.Rule, ...]:
  at = "bert.encoder.layer.{}"
  rules = []
  for name in ("query", "key", "value"):
    theirs, ours = f"{at}.attention.self.{name}", f"attention/{name}"
    rules += [
      family.rule(f"{theirs}.weight", ours, "(N H) D -> D N H"),
      family.rule(f"{theirs}.bias", f"{ours}_bias", "(N H) -> N H"),
    ]
  places = {
    "attention.output.dense": ("attention/out", "D (N H) -> N H D", "D"),
    "intermediate.dense": ("feed_forward/up", "F D -> D F", "F"),
    "output.dense": ("feed_forward/down", "D F -> F D", "D"),
  }
  for theirs, (ours, pattern, width) in places.items():
    rules += [
      family.rule(f"{at}.{theirs}.weight", ours, pattern),
      family.rule(f"{at}.{theirs}.bias", f"{ours}_bias", f"{width} -> {width}"),
    ]
  return (
    *rules,
    *_norm_rules(f"{at}.attention.output.LayerNorm", "attention_norm"),
    *_norm_rules(f"{at}.output.LayerNorm", "feed_forward_norm"),
  )


FAMILY = family.Family(
  model_type="bert",
  architecture="BertForMaskedLM",
  read=_read,
)

"""GPT-NeoX and Pythia (Black et al. 2022, https://arxiv.org/abs/2204.06745).

Layer norms, partial rotary positions, biases, a plain feed-forward layer, and
an untied head. Attention and feed-forward are parallel, each with its norm, or
sequential. The fused tensor has query, key and value of each head in turn.
"""

from collections.abc import Callable
import dataclasses
from typing import Any

from paxon.layers import (
  activations,
  block,
  embedding,
  feed_forward,
  layer_norm,
  stack,
  unembedding,
)
from paxon.layers.attention import grouped_query, projections
from paxon.layers.models import decoder_lm
from paxon.layers.models.hugging_face import (
  family,
  mapping,
  rope,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _GptNeox:
  """Hyperparameters of a GPT-NeoX."""

  vocab_size: int
  embed_dim: int
  mlp_dim: int
  num_heads: int
  num_layers: int
  rope: rope.Rope
  activation: activations.Activation
  epsilon: float
  tied: bool
  attention_bias: bool
  is_parallel: bool

  @property
  def head_dim(self) -> int:
    """Width of a head."""
    return self.embed_dim // self.num_heads

  def model(self, make: Callable[..., Any]) -> Any:
    """Returns the model, built by `make(cls, **fields)`."""

    def norm() -> Any:
      return make(layer_norm.LayerNorm, epsilon=self.epsilon)

    attention = make(
      grouped_query.GroupedQueryAttention,
      num_heads=self.num_heads,
      num_kv_heads=self.num_heads,
      head_dim=self.head_dim,
      rotary=self.rope.build(make),
      projections=make(
        projections.CombinedProjections, use_bias=self.attention_bias
      ),
    )
    mlp = make(
      feed_forward.FeedForward, mlp_dim=self.mlp_dim, activation=self.activation
    )
    if self.is_parallel:
      layer = make(
        block.ParallelBlock,
        norm=norm(),
        attention=attention,
        feed_forward=mlp,
        feed_forward_norm=norm(),
      )
    else:
      layer = make(
        block.TransformerBlock,
        attention_norm=norm(),
        attention=attention,
        feed_forward_norm=norm(),
        feed_forward=mlp,
      )
    head = None
    if not self.tied:
      head = make(unembedding.Unembedding, vocab_size=self.vocab_size)
    return make(
      decoder_lm.DecoderLm,
      embedding=make(
        embedding.Embedding,
        vocab_size=self.vocab_size,
        embed_dim=self.embed_dim,
      ),
      stack=make(stack.Stack, blocks=[layer], num_layers=self.num_layers),
      final_norm=norm(),
      head=head,
    )

  def names(self) -> mapping.Names:
    """Returns the names of the weights."""
    head = mapping.rule("embed_out.weight", "params/head/kernel", "V D -> D V")
    table = "gpt_neox.embed_in.weight"
    return mapping.Names(
      sizes={
        "V": self.vocab_size,
        "D": self.embed_dim,
        "F": self.mlp_dim,
        "N": self.num_heads,
        "H": self.head_dim,
        "C": 3,
      },
      rules=(
        mapping.rule(table, "params/embedding/table", "V D -> V D"),
        *mapping.norm_rules("gpt_neox.final_layer_norm", "params/final_norm"),
        *(() if self.tied else (head,)),
      ),
      stacks=(
        mapping.StackRules(
          stack="params/stack",
          num_layers=self.num_layers,
          rules=_layer_rules("gpt_neox.layers.{}.", self),
        ),
      ),
      tied={"embed_out.weight": table} if self.tied else {},
      # Masks and frequencies in old files.
      ignored=(
        r"gpt_neox\.layers\.\d+\.attention\.(bias|masked_bias)",
        r"gpt_neox\.layers\.\d+\.attention\.rotary_emb\.inv_freq",
      ),
      prefix="gpt_neox.",
    )


def _read(fields: family.Fields) -> _GptNeox:
  embed_dim = fields.size("hidden_size", 6144)
  num_heads = fields.size("num_attention_heads", 64)
  if embed_dim % num_heads:
    fields.reject(
      "num_attention_heads", f"a divisor of hidden_size ({embed_dim})"
    )
  return _GptNeox(
    vocab_size=fields.size("vocab_size", 50_432),
    embed_dim=embed_dim,
    mlp_dim=fields.size("intermediate_size", 24_576),
    num_heads=num_heads,
    num_layers=fields.size("num_hidden_layers", 44),
    rope=rope.read(
      fields,
      head_dim=embed_dim // num_heads,
      max_length=fields.size("max_position_embeddings", 2048),
      partial=0.25,
      theta_field="rotary_emb_base",
      partial_field="rotary_pct",
    ),
    activation=fields.activation("hidden_act", "gelu"),
    epsilon=fields.number("layer_norm_eps", 1e-5),
    tied=fields.flag("tie_word_embeddings", False),
    attention_bias=fields.flag("attention_bias", True),
    is_parallel=fields.flag("use_parallel_residual", True),
  )


def _layer_rules(at: str, model: _GptNeox) -> tuple[mapping.Rule, ...]:
  attention, mlp = f"{at}attention", f"{at}mlp"
  biases = (
    mapping.rule(
      f"{attention}.query_key_value.bias",
      "attention/qkv_bias",
      "(N C H) -> C N H",
    ),
    mapping.rule(f"{attention}.dense.bias", "attention/out_bias", "D -> D"),
  )
  return (
    *mapping.norm_rules(
      f"{at}input_layernorm",
      "norm" if model.is_parallel else "attention_norm",
    ),
    *mapping.norm_rules(f"{at}post_attention_layernorm", "feed_forward_norm"),
    mapping.rule(
      f"{attention}.query_key_value.weight",
      "attention/qkv",
      "(N C H) D -> D C N H",
    ),
    mapping.rule(
      f"{attention}.dense.weight", "attention/out", "D (N H) -> N H D"
    ),
    *(biases if model.attention_bias else ()),
    mapping.rule(
      f"{mlp}.dense_h_to_4h.weight", "feed_forward/up", "F D -> D F"
    ),
    mapping.rule(f"{mlp}.dense_h_to_4h.bias", "feed_forward/up_bias", "F -> F"),
    mapping.rule(
      f"{mlp}.dense_4h_to_h.weight", "feed_forward/down", "D F -> F D"
    ),
    mapping.rule(
      f"{mlp}.dense_4h_to_h.bias", "feed_forward/down_bias", "D -> D"
    ),
  )


FAMILY = family.Family(
  model_type="gpt_neox",
  architecture="GPTNeoXForCausalLM",
  read=_read,
  inert=("is_decoder",),
)

"""GPT-NeoX and Pythia (Black et al. 2022, https://arxiv.org/abs/2204.06745).

Layer norms, partial rotary positions, biases, a plain feed-forward layer, and
an untied head. Attention and feed-forward are parallel, each with its norm, or
sequential. The fused tensor has query, key and value of each head in turn.
"""

from collections.abc import Callable, Mapping
import dataclasses
from typing import Any

from paxon.layers import activations, feed_forward
from paxon.layers.attention import grouped_query, projections
from paxon.layers.models.hugging_face import family, mapping, rope
from paxon.layers.norms import layer_norm
from paxon.layers.stacks import block

_MODEL = """
  gpt_neox.embed_in.weight   params/embedding/table  V D -> V D
  gpt_neox.final_layer_norm  params/final_norm       norm
"""
_HEAD = """
  embed_out.weight           params/head/kernel      V D -> D V
"""
_LAYER = """
  post_attention_layernorm          feed_forward_norm  norm
  attention.query_key_value.weight  attention/qkv      (N C H) D -> D C N H
  attention.dense.weight            attention/out      D (N H) -> N H D
  mlp.dense_h_to_4h                 feed_forward/up    F D -> D F + bias
  mlp.dense_4h_to_h                 feed_forward/down  D F -> F D + bias
"""
_PARALLEL = """
  input_layernorm                   norm                    norm
"""
_SEQUENTIAL = """
  input_layernorm                   attention_norm          norm
"""
_BIAS = """
  attention.query_key_value.bias    attention/qkv_bias      (N C H) -> C N H
  attention.dense.bias              attention/out_bias      D -> D
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _GptNeox:
  """Hyperparameters of a GPT-NeoX; `sizes` are those of `mapping.Names`."""

  sizes: Mapping[str, int]
  num_layers: int
  rope: rope.Rope
  activation: activations.Activation
  epsilon: float
  tied: bool
  attention_bias: bool
  is_parallel: bool

  def model(self, make: Callable[..., Any]) -> Any:
    """Returns the model, built by `make(cls, **fields)`."""

    def norm() -> Any:
      return make(layer_norm.LayerNorm, epsilon=self.epsilon)

    attention = make(
      grouped_query.GroupedQueryAttention,
      num_heads=self.sizes["N"],
      num_kv_heads=self.sizes["N"],
      head_dim=self.sizes["H"],
      rotary=self.rope.build(make),
      projections=make(
        projections.CombinedProjections, use_bias=self.attention_bias
      ),
    )
    mlp = make(
      feed_forward.FeedForward,
      mlp_dim=self.sizes["F"],
      activation=self.activation,
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
    return family.make_decoder(
      make,
      vocab_size=self.sizes["V"],
      embed_dim=self.sizes["D"],
      final_norm=norm(),
      tied=self.tied,
      stacks=[([layer], self.num_layers)],
    )

  def names(self) -> mapping.Names:
    """Returns the names of the weights."""
    layer = _LAYER + (_PARALLEL if self.is_parallel else _SEQUENTIAL)
    layer += _BIAS if self.attention_bias else ""
    table = "gpt_neox.embed_in.weight"
    return mapping.Names(
      sizes=self.sizes,
      rules=mapping.parse_rules(_MODEL + ("" if self.tied else _HEAD)),
      stacks=(
        mapping.StackRules(
          stack="params/stack",
          num_layers=self.num_layers,
          rules=mapping.parse_rules(layer, at="gpt_neox.layers.{}."),
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
    sizes={
      "V": fields.size("vocab_size", 50_432),
      "D": embed_dim,
      "F": fields.size("intermediate_size", 24_576),
      "N": num_heads,
      "H": embed_dim // num_heads,
      "C": 3,
    },
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


FAMILY = family.Family(
  model_type="gpt_neox",
  architecture="GPTNeoXForCausalLM",
  read=_read,
  inert=("is_decoder",),
)

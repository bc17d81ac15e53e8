"""GPT-2 (Radford et al. 2019).

Layer norms and learned positions, biases everywhere, one kernel for queries,
keys and values, a plain feed-forward layer, and a tied head. Unlike elsewhere,
kernels have inputs first.
"""

from collections.abc import Callable, Mapping
import dataclasses
from typing import Any

from paxon.layers import activations, feed_forward
from paxon.layers.attention import grouped_query, kernels, projections
from paxon.layers.models.hugging_face import family, mapping
from paxon.layers.norms import layer_norm
from paxon.layers.positions import position_embedding
from paxon.layers.stacks import block

_MODEL = """
  transformer.wte.weight  params/embedding/table           V D -> V D
  transformer.wpe.weight  params/position_embedding/table  P D -> P D
  transformer.ln_f        params/final_norm                norm
"""
_LAYER = """
  ln_1                attention_norm          norm
  attn.c_attn.weight  attention/qkv           D (C N H) -> D C N H
  attn.c_attn.bias    attention/qkv_bias      (C N H) -> C N H
  attn.c_proj.weight  attention/out           (N H) D -> N H D
  attn.c_proj.bias    attention/out_bias      D -> D
  ln_2                feed_forward_norm       norm
  mlp.c_fc.weight     feed_forward/up         D F -> D F
  mlp.c_fc.bias       feed_forward/up_bias    F -> F
  mlp.c_proj.weight   feed_forward/down       F D -> F D
  mlp.c_proj.bias     feed_forward/down_bias  D -> D
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Gpt2:
  """Hyperparameters of a GPT-2; `sizes` are those of `mapping.Names`."""

  sizes: Mapping[str, int]
  num_layers: int
  activation: activations.Activation
  epsilon: float
  tied: bool
  logit_scales: tuple[float | None, ...]

  def model(self, make: Callable[..., Any]) -> Any:
    """Returns the model, built by `make(cls, **fields)`."""

    def norm() -> Any:
      return make(layer_norm.LayerNorm, epsilon=self.epsilon)

    blocks = [
      make(
        block.TransformerBlock,
        attention_norm=norm(),
        attention=make(
          grouped_query.GroupedQueryAttention,
          num_heads=self.sizes["N"],
          num_kv_heads=self.sizes["N"],
          head_dim=self.sizes["H"],
          projections=make(projections.CombinedProjections, use_bias=True),
          logits=make(kernels.Logits, scale=scale),
        ),
        feed_forward_norm=norm(),
        feed_forward=make(
          feed_forward.FeedForward,
          mlp_dim=self.sizes["F"],
          activation=self.activation,
        ),
      )
      for scale in mapping.find_period(self.logit_scales)
    ]
    return family.make_decoder(
      make,
      vocab_size=self.sizes["V"],
      embed_dim=self.sizes["D"],
      final_norm=norm(),
      tied=self.tied,
      stacks=[(blocks, self.num_layers)],
      position_embedding=make(
        position_embedding.LearnedPositions, max_length=self.sizes["P"]
      ),
    )

  def names(self) -> mapping.Names:
    """Returns the names of the weights."""
    return mapping.Names(
      sizes=self.sizes,
      rules=mapping.parse_rules(_MODEL + ("" if self.tied else family.HEAD)),
      stacks=(
        mapping.StackRules(
          stack="params/stack",
          num_layers=self.num_layers,
          period=len(mapping.find_period(self.logit_scales)),
          rules=mapping.parse_rules(_LAYER, at="transformer.h.{}."),
        ),
      ),
      tied={"lm_head.weight": "transformer.wte.weight"} if self.tied else {},
      # Masks in old files.
      ignored=(r"transformer\.h\.\d+\.attn\.(bias|masked_bias)",),
      prefix="transformer.",
      transposed=(r".*\.c_(attn|fc|proj)\.weight",),
    )


def _read(fields: family.Fields) -> _Gpt2:
  embed_dim = fields.size("n_embd", 768)
  num_heads = fields.size("n_head", 12)
  num_layers = fields.size("n_layer", 12)
  if embed_dim % num_heads:
    fields.reject("n_head", f"a divisor of n_embd ({embed_dim})")
  is_scaled = fields.flag("scale_attn_weights", True)
  scale = None if is_scaled else 1.0
  scales = (scale,) * num_layers
  if fields.flag("scale_attn_by_inverse_layer_idx", False):
    first = (embed_dim // num_heads) ** -0.5 if is_scaled else 1.0
    scales = tuple(first / (layer + 1) for layer in range(num_layers))
  return _Gpt2(
    sizes={
      "V": fields.size("vocab_size", 50_257),
      "D": embed_dim,
      "F": fields.optional_size("n_inner") or 4 * embed_dim,
      "N": num_heads,
      "H": embed_dim // num_heads,
      "P": fields.size("n_positions", 1024),
      "C": 3,
    },
    num_layers=num_layers,
    activation=fields.activation("activation_function", "gelu_new"),
    epsilon=fields.number("layer_norm_epsilon", 1e-5),
    tied=fields.flag("tie_word_embeddings", True),
    logit_scales=scales,
  )


FAMILY = family.Family(
  model_type="gpt2",
  architecture="GPT2LMHeadModel",
  read=_read,
  aliases={
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
  },
  # Number of positions under another name, and special tokens of the first GPT.
  inert=("n_ctx", "n_special", "predict_special_tokens"),
)

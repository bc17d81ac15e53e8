"""Decoders with gated feed-forward layers: Llama, Mistral, Qwen, Phi-3, Gemma.

Root-mean-square norms, rotary positions, no bias in the feed-forward layers.
Families read their `config.json` into a `GatedDecoder`, which makes the model
and the names of its weights.
"""

from collections.abc import Callable
import dataclasses
from typing import Any

from paxon.layers import (
  activations,
  block,
  embedding,
  feed_forward,
  rms_norm,
  stack,
  unembedding,
)
from paxon.layers.attention import (
  grouped_query,
  head_norm,
  kernels,
  projections,
)
from paxon.layers.attention import mask as attention_mask
from paxon.layers.models import decoder_lm
from paxon.layers.models.hugging_face import (
  family,
  mapping,
  rope,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatedDecoder:
  """Hyperparameters of a gated decoder.

  Attributes:
    vocab_size: Number of ids.
    embed_dim: Width of the model.
    mlp_dim: Width of the feed-forward layers.
    num_heads: Number of query heads.
    num_kv_heads: Number of key/value heads.
    head_dim: Width of a head.
    windows: Sliding window of each layer; `None` is full attention.
    rope: Rotary positions.
    activation: Activation of the gate.
    epsilon: Epsilon of all norms.
    tied: Whether the head shares the embedding table.
    qkv_bias: Whether queries, keys and values have biases.
    output_bias: Whether the output of attention has one.
    has_head_norm: Whether queries and keys are normalized.
    is_fused: Whether files fuse queries, keys and values in one tensor, and the
      gate with the up projection.
    norm_offset: Offset of the stored scale of norms.
    input_scale: Factor on embedded tokens.
    logit_scale: Factor on attention logits; `None` is `head_dim ** -0.5`.
    attention_cap: Soft cap of attention logits.
    logit_cap: Soft cap of the head's logits.
    local_rope: Rotary positions of layers with a window; `None` is `rope`.
    has_post_norms: Whether the outputs of attention and feed-forward layers are
      normalized.
  """

  vocab_size: int
  embed_dim: int
  mlp_dim: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  windows: tuple[int | None, ...]
  rope: rope.Rope
  activation: activations.Activation
  epsilon: float
  tied: bool
  qkv_bias: bool = False
  output_bias: bool = False
  has_head_norm: bool = False
  is_fused: bool = False
  norm_offset: float = 0.0
  input_scale: float = 1.0
  logit_scale: float | None = None
  attention_cap: float | None = None
  logit_cap: float | None = None
  local_rope: rope.Rope | None = None
  has_post_norms: bool = False

  def model(self, make: Callable[..., Any]) -> Any:
    """Returns a `DecoderLm`, built by `make(cls, **fields)`."""
    blocks = [
      self._block(make, window) for window in mapping.find_period(self.windows)
    ]
    head = None
    if not self.tied:
      head = make(unembedding.Unembedding, vocab_size=self.vocab_size)
    return make(
      decoder_lm.DecoderLm,
      embedding=make(
        embedding.Embedding,
        vocab_size=self.vocab_size,
        embed_dim=self.embed_dim,
        input_scale=self.input_scale,
      ),
      stack=make(stack.Stack, blocks=blocks, num_layers=len(self.windows)),
      final_norm=self._norm(make, rms_norm.RmsNorm),
      head=head,
      logit_cap=self.logit_cap,
    )

  def _norm(self, make: Callable[..., Any], cls: type) -> Any:
    return make(cls, epsilon=self.epsilon, scale_offset=self.norm_offset)

  def _block(self, make: Callable[..., Any], window: int | None) -> Any:
    def norm() -> Any:
      return self._norm(make, rms_norm.RmsNorm)

    kind, post_norms = block.TransformerBlock, {}
    if self.has_post_norms:
      kind = block.SandwichBlock
      names = "post_attention_norm", "post_feed_forward_norm"
      post_norms = {name: norm() for name in names}
    return make(
      kind,
      attention_norm=norm(),
      attention=self._attention(make, window),
      feed_forward_norm=norm(),
      feed_forward=make(
        feed_forward.GatedFeedForward,
        mlp_dim=self.mlp_dim,
        activation=self.activation,
      ),
      **post_norms,
    )

  def _attention(self, make: Callable[..., Any], window: int | None) -> Any:
    norms = None
    if self.has_head_norm:
      norms = make(
        head_norm.QueryKeyNorm,
        query_norm=self._norm(make, head_norm.HeadNorm),
        key_norm=self._norm(make, head_norm.HeadNorm),
      )
    is_local = window is not None and self.local_rope is not None
    positions = self.local_rope if is_local else self.rope
    return make(
      grouped_query.GroupedQueryAttention,
      num_heads=self.num_heads,
      num_kv_heads=self.num_kv_heads,
      head_dim=self.head_dim,
      rotary=positions.build(make),
      mask=make(attention_mask.MaskRules, window=window),
      projections=make(
        projections.SeparateProjections,
        use_bias=self.qkv_bias,
        output_bias=self.output_bias,
      ),
      head_norm=norms,
      logits=make(
        kernels.Logits, scale=self.logit_scale, cap=self.attention_cap
      ),
    )

  def names(self) -> mapping.Names:
    """Returns the names of the weights."""
    head = mapping.rule("lm_head.weight", "params/head/kernel", "V D -> D V")
    return mapping.Names(
      sizes={
        "V": self.vocab_size,
        "D": self.embed_dim,
        "F": self.mlp_dim,
        "N": self.num_heads,
        "K": self.num_kv_heads,
        "H": self.head_dim,
      },
      rules=(
        mapping.rule(
          "model.embed_tokens.weight", "params/embedding/table", "V D -> V D"
        ),
        mapping.rule("model.norm.weight", "params/final_norm/scale", "D -> D"),
        *(() if self.tied else (head,)),
      ),
      stacks=(
        mapping.StackRules(
          stack="params/stack",
          num_layers=len(self.windows),
          period=len(mapping.find_period(self.windows)),
          rules=self._layer_rules(),
        ),
      ),
      tied={"lm_head.weight": "model.embed_tokens.weight"} if self.tied else {},
      ignored=(
        r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",
        r"model\.rotary_emb\.inv_freq",
      ),
      prefix="model.",
    )

  def _layer_rules(self) -> tuple[mapping.Rule, ...]:
    at = "model.layers.{}."
    attention, mlp = f"{at}self_attn.", f"{at}mlp."
    rules = [
      *self._norm_rules(at),
      mapping.rule(
        f"{attention}o_proj.weight", "attention/out", "D (N H) -> N H D"
      ),
      mapping.rule(f"{mlp}down_proj.weight", "feed_forward/down", "D F -> F D"),
    ]
    heads = (
      ("query", "(N H) D -> D N H"),
      ("key", "(K H) D -> D K H"),
      ("value", "(K H) D -> D K H"),
    )
    gates = ("gate", "F D -> D F"), ("up", "F D -> D F")
    if self.is_fused:
      rules += [
        mapping.fused_rule(
          f"{attention}qkv_proj.weight",
          *((f"attention/{name}", pattern) for name, pattern in heads),
        ),
        mapping.fused_rule(
          f"{mlp}gate_up_proj.weight",
          *((f"feed_forward/{name}", pattern) for name, pattern in gates),
        ),
      ]
      return tuple(rules)
    for name, pattern in heads:
      tensor = f"{attention}{name[0]}_proj"
      rules.append(
        mapping.rule(f"{tensor}.weight", f"attention/{name}", pattern)
      )
      if self.qkv_bias:
        flat = "(N H) -> N H" if name == "query" else "(K H) -> K H"
        rules.append(
          mapping.rule(f"{tensor}.bias", f"attention/{name}_bias", flat)
        )
    if self.output_bias:
      rules.append(
        mapping.rule(f"{attention}o_proj.bias", "attention/out_bias", "D -> D")
      )
    rules += [
      mapping.rule(f"{mlp}{name}_proj.weight", f"feed_forward/{name}", pattern)
      for name, pattern in gates
    ]
    if self.has_head_norm:
      rules += [
        mapping.rule(
          f"{attention}{name[0]}_norm.weight",
          f"attention/{name}_norm/scale",
          "H -> H",
        )
        for name in ("query", "key")
      ]
    return tuple(rules)

  def _norm_rules(self, at: str) -> list[mapping.Rule]:
    norms = {
      "input_layernorm": "attention_norm",
      "post_attention_layernorm": "feed_forward_norm",
    }
    if self.has_post_norms:
      norms |= {
        "post_attention_layernorm": "post_attention_norm",
        "pre_feedforward_layernorm": "feed_forward_norm",
        "post_feedforward_layernorm": "post_feed_forward_norm",
      }
    return [
      mapping.rule(f"{at}{tensor}.weight", f"{leaf}/scale", "D -> D")
      for tensor, leaf in norms.items()
    ]


def read_heads(
  fields: family.Fields, *, kv_heads: int | None, head_dim: int | None
) -> dict[str, Any]:
  """Returns the sizes of attention, as fields of `GatedDecoder`.

  Args:
    fields: Fields of the file.
    kv_heads: Default of `num_key_value_heads`; `None` is `num_attention_heads`.
    head_dim: Default of `head_dim`; `None` divides `hidden_size`.

  Raises:
    UnsupportedConfigError: The sizes do not divide.
  """
  embed_dim = fields.size("hidden_size")
  num_heads = fields.size("num_attention_heads")
  num_kv_heads = fields.optional_size("num_key_value_heads", kv_heads)
  width = fields.optional_size("head_dim", head_dim)
  if num_heads % (num_kv_heads or num_heads):
    fields.reject(
      "num_key_value_heads", f"a divisor of num_attention_heads ({num_heads})"
    )
  if width is None and embed_dim % num_heads:
    fields.reject(
      "num_attention_heads", f"a divisor of hidden_size ({embed_dim})"
    )
  return {
    "embed_dim": embed_dim,
    "num_heads": num_heads,
    "num_kv_heads": num_kv_heads or num_heads,
    "head_dim": width or embed_dim // num_heads,
  }

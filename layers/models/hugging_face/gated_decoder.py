"""Decoders with gated feed-forward layers: Llama, Mistral, Qwen, Phi-3, Gemma.

Root-mean-square norms before each part, rotary positions, no bias in the
feed-forward layers. Families read their own `config.json` into a
`GatedDecoder`, which makes the module and the table of names.
"""

from collections.abc import Callable
import dataclasses
from typing import Any

from paxon.layers import (
  block,
  embedding,
  feed_forward,
  rms_norm,
  stack,
  unembedding,
)
from paxon.layers.attention import grouped_query, head_norm
from paxon.layers.models import decoder_lm
from paxon.layers.models.hugging_face import (
  activations,
  config_fields,
  family,
  patterns,
  rope,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatedDecoder:
  """A decoder of this kind.

  Attributes:
    vocab_size: Number of ids.
    embed_dim: Width of the model.
    mlp_dim: Width of the feed-forward layers.
    num_heads: Number of query heads.
    num_kv_heads: Number of key/value heads.
    head_dim: Width of a head.
    windows: How many positions each layer sees, `None` for all.
    rope: Rotary positions.
    activation: Of the gate.
    epsilon: Of all norms.
    tied: Whether the head is the embedding.
    qkv_bias: Whether queries, keys and values have biases.
    output_bias: Whether the output of attention has one.
    has_head_norm: Whether queries and keys are normalized.
    is_fused: Whether files hold queries, keys and values in one tensor, and the
      gate with what it gates.
    norm_offset: What norms add to their stored factor.
    input_scale: Factor of embedded tokens.
    logit_scale: Factor of the logits of attention; `None` is
      `head_dim ** -0.5`.
    attention_cap: Bends the logits of attention; `None` does not.
    logit_cap: Bends the logits of the head.
    local_rope: Rotary positions of layers with a window; `None` is `rope`.
    has_post_norms: Whether the output of each part is normalized too.
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
    """Returns a `DecoderLm`, or what `make` makes of it.

    Args:
      make: Called with a class and its fields.
    """
    blocks = [
      self._block(make, window) for window in patterns.one_period(self.windows)
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
    norms = {}
    if self.has_head_norm:
      norms = {
        name: self._norm(make, head_norm.HeadNorm)
        for name in ("query_norm", "key_norm")
      }
    is_local = window is not None and self.local_rope is not None
    positions = self.local_rope if is_local else self.rope
    return make(
      grouped_query.GroupedQueryAttention,
      num_heads=self.num_heads,
      num_kv_heads=self.num_kv_heads,
      head_dim=self.head_dim,
      rotary=positions.build(make),
      window=window,
      use_bias=self.qkv_bias,
      output_bias=self.output_bias,
      logit_scale=self.logit_scale,
      logit_cap=self.attention_cap,
      **norms,
    )

  def names(self) -> family.Names:
    """Returns the table of names."""
    head = family.rule("lm_head.weight", "params/head/kernel", "V D -> D V")
    return family.Names(
      sizes={
        "V": self.vocab_size,
        "D": self.embed_dim,
        "F": self.mlp_dim,
        "N": self.num_heads,
        "K": self.num_kv_heads,
        "H": self.head_dim,
      },
      rules=(
        family.rule(
          "model.embed_tokens.weight", "params/embedding/table", "V D -> V D"
        ),
        family.rule("model.norm.weight", "params/final_norm/scale", "D -> D"),
        *(() if self.tied else (head,)),
      ),
      stacks=(
        family.StackRules(
          stack="params/stack",
          num_layers=len(self.windows),
          period=len(patterns.one_period(self.windows)),
          rules=self._layer(),
        ),
      ),
      tied={"lm_head.weight": "model.embed_tokens.weight"} if self.tied else {},
      ignored=(
        r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",
        r"model\.rotary_emb\.inv_freq",
      ),
      prefix="model.",
    )

  def _layer(self) -> tuple[family.Rule, ...]:
    at = "model.layers.{}."
    attention, mlp = f"{at}self_attn.", f"{at}mlp."
    rules = [
      *self._norm_rules(at),
      family.rule(
        f"{attention}o_proj.weight", "attention/out", "D (N H) -> N H D"
      ),
      family.rule(f"{mlp}down_proj.weight", "feed_forward/down", "D F -> F D"),
    ]
    heads = (
      ("query", "(N H) D -> D N H"),
      ("key", "(K H) D -> D K H"),
      ("value", "(K H) D -> D K H"),
    )
    gates = ("gate", "F D -> D F"), ("up", "F D -> D F")
    if self.is_fused:
      rules += [
        family.fused(
          f"{attention}qkv_proj.weight",
          *((f"attention/{name}", pattern) for name, pattern in heads),
        ),
        family.fused(
          f"{mlp}gate_up_proj.weight",
          *((f"feed_forward/{name}", pattern) for name, pattern in gates),
        ),
      ]
      return tuple(rules)
    for name, pattern in heads:
      theirs = f"{attention}{name[0]}_proj"
      rules.append(
        family.rule(f"{theirs}.weight", f"attention/{name}", pattern)
      )
      if self.qkv_bias:
        flat = "(N H) -> N H" if name == "query" else "(K H) -> K H"
        rules.append(
          family.rule(f"{theirs}.bias", f"attention/{name}_bias", flat)
        )
    if self.output_bias:
      rules.append(
        family.rule(f"{attention}o_proj.bias", "attention/out_bias", "D -> D")
      )
    rules += [
      family.rule(f"{mlp}{name}_proj.weight", f"feed_forward/{name}", pattern)
      for name, pattern in gates
    ]
    if self.has_head_norm:
      rules += [
        family.rule(
          f"{attention}{name[0]}_norm.weight",
          f"attention/{name}_norm/scale",
          "H -> H",
        )
        for name in ("query", "key")
      ]
    return tuple(rules)

  def _norm_rules(self, at: str) -> list[family.Rule]:
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
      family.rule(f"{at}{theirs}.weight", f"{ours}/scale", "D -> D")
      for theirs, ours in norms.items()
    ]


def heads(
  fields: config_fields.Fields, *, kv_heads: int | None, head_dim: int | None
) -> dict[str, Any]:
  """Returns the sizes of attention, as fields of `GatedDecoder`.

  Args:
    fields: Of the file, which gives `hidden_size` too.
    kv_heads: `num_key_value_heads` by default; `None` is one for each head.
    head_dim: By default; `None` divides the width of the model.

  Raises:
    UnservedConfigError: They do not divide.
  """
  embed_dim = fields.size("hidden_size")
  num_heads = fields.size("num_attention_heads")
  num_kv_heads = fields.optional_size("num_key_value_heads", kv_heads)
  width = fields.optional_size("head_dim", head_dim)
  if num_heads % (num_kv_heads or num_heads):
    fields.refuse(
      "num_key_value_heads", f"a divisor of num_attention_heads ({num_heads})"
    )
  if width is None and embed_dim % num_heads:
    fields.refuse(
      "num_attention_heads", f"a divisor of hidden_size ({embed_dim})"
    )
  return {
    "embed_dim": embed_dim,
    "num_heads": num_heads,
    "num_kv_heads": num_kv_heads or num_heads,
    "head_dim": width or embed_dim // num_heads,
  }

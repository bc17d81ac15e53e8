"""Grouped-query attention in Hugging Face decoders: the layer and its tensors.

The layers of a model differ in windows and rotary positions only.

Letters: D model width, N heads, K key/value heads, H head width, G gate width.
"""

from collections.abc import Callable
import dataclasses
from typing import Any

from paxon.layers.attention import (
  grouped_query,
  head_norm,
  kernels,
  projections,
)
from paxon.layers.attention import mask as attention_mask
from paxon.layers.models.hugging_face import family, mapping, rope
from paxon.sharding import axes

_OUT = """
  self_attn.o_proj.weight  attention/out  D (N H) -> N H D
"""
_QUERY = """
  self_attn.q_proj.weight  attention/query  (N H) D -> D N H
"""
_KEY_VALUE = """
  self_attn.k_proj.weight  attention/key    (K H) D -> D K H
  self_attn.v_proj.weight  attention/value  (K H) D -> D K H
"""
_QUERY_BIAS = """
  self_attn.q_proj.bias  attention/query_bias  (N H) -> N H
"""
_KEY_VALUE_BIAS = """
  self_attn.k_proj.bias  attention/key_bias    (K H) -> K H
  self_attn.v_proj.bias  attention/value_bias  (K H) -> K H
"""
_OUTPUT_BIAS = """
  self_attn.o_proj.bias  attention/out_bias  D -> D
"""
_SINKS = """
  self_attn.sinks  attention/sinks/sinks  N -> N
"""
_WIDTH_NORM = """
  self_attn.q_norm.weight  attention/query_norm/scale  (N H) -> N H
  self_attn.k_norm.weight  attention/key_norm/scale    (K H) -> K H
"""
_HEAD_NORM = """
  self_attn.q_norm.weight  attention/query_norm/scale  H -> H
  self_attn.k_norm.weight  attention/key_norm/scale    H -> H
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attention:
  """Attention with queries in groups.

  Attributes:
    num_heads: Heads of queries.
    num_kv_heads: Heads of keys and values.
    head_dim: Width of a head.
    qkv_bias: Whether queries, keys and values have biases.
    output_bias: Whether the output has one.
    has_head_norm: Whether queries and keys of each head are normalized.
    has_width_norm: Whether those of all heads together are.
    qkv_limit: Clips queries, keys and values.
    has_sinks: Whether there is a learned sink for each head.
    has_output_gate: Whether heads are multiplied by the sigmoid of a gate,
      whose kernel files have with that of queries.
    logit_scale: Factor on logits; `None` is `head_dim ** -0.5`.
    logit_cap: Soft cap of logits.
    is_fused: Whether files fuse queries, keys and values in one tensor.
  """

  num_heads: int
  num_kv_heads: int
  head_dim: int
  qkv_bias: bool = False
  output_bias: bool = False
  has_head_norm: bool = False
  has_width_norm: bool = False
  qkv_limit: float | None = None
  has_sinks: bool = False
  has_output_gate: bool = False
  logit_scale: float | None = None
  logit_cap: float | None = None
  is_fused: bool = False

  def model(
    self,
    make: Callable[..., Any],
    *,
    window: int | None,
    positions: rope.Rope,
    norm: Callable[[type], Any],
    epsilon: float,
  ) -> Any:
    """Returns a `GroupedQueryAttention`, built by `make(cls, **fields)`.

    Args:
      make: Makes a module.
      window: Sliding window; `None` is full attention.
      positions: Rotary positions.
      norm: Makes a norm of a class.
      epsilon: Epsilon of norms of all heads together.
    """
    norms = None
    if self.has_head_norm:
      norms = make(
        head_norm.QueryKeyNorm,
        query_norm=norm(head_norm.HeadNorm),
        key_norm=norm(head_norm.HeadNorm),
      )
    if self.has_width_norm:
      norms = make(
        head_norm.QueryKeyNorm,
        query_norm=make(head_norm.AllHeadsNorm, epsilon=epsilon),
        key_norm=make(
          head_norm.AllHeadsNorm, epsilon=epsilon, axis=axes.KV_HEADS
        ),
      )
    return make(
      grouped_query.GroupedQueryAttention,
      num_heads=self.num_heads,
      num_kv_heads=self.num_kv_heads,
      head_dim=self.head_dim,
      rotary=positions.build(make),
      mask=make(attention_mask.MaskRules, window=window),
      projections=make(
        projections.GatedProjections
        if self.has_output_gate
        else projections.SeparateProjections,
        use_bias=self.qkv_bias,
        output_bias=self.output_bias,
      ),
      head_norm=norms,
      limit=self.qkv_limit,
      logits=make(
        kernels.Logits,
        scale=self.logit_scale,
        cap=self.logit_cap,
        sinks=make(kernels.LearnedSinks) if self.has_sinks else None,
      ),
    )

  def sizes(self) -> dict[str, int]:
    """Returns the sizes of dimensions in the rules."""
    sizes = {"N": self.num_heads, "K": self.num_kv_heads, "H": self.head_dim}
    return sizes | ({"G": self.head_dim} if self.has_output_gate else {})

  def rules(self, at: str, layers: tuple[int, ...]) -> tuple[mapping.Rule, ...]:
    """Returns the rules of these layers, whose tensors have a prefix."""
    table = _OUT
    table += _HEAD_NORM if self.has_head_norm else ""
    table += _WIDTH_NORM if self.has_width_norm else ""
    table += _SINKS if self.has_sinks else ""
    table += _OUTPUT_BIAS if self.output_bias else ""
    attention: tuple[mapping.Rule, ...] = ()
    if self.is_fused:
      attention = (
        mapping.fused_rule(
          f"{at}self_attn.qkv_proj.weight",
          ("attention/query", "(N H) D -> D N H"),
          ("attention/key", "(K H) D -> D K H"),
          ("attention/value", "(K H) D -> D K H"),
        ),
      )
    else:
      table += _KEY_VALUE + (_KEY_VALUE_BIAS if self.qkv_bias else "")
    if self.has_output_gate:
      ends = [("weight", "", " D -> D")]
      ends += [("bias", "_bias", " ->")] if self.qkv_bias else []
      attention = tuple(
        mapping.fused_rule(
          f"{at}self_attn.q_proj.{tensor}",
          (f"attention/query{end}", f"(N H+G){pattern} N H"),
          (f"attention/gate{end}", f"(N H+G){pattern} N G"),
          layers=layers,
        )
        for tensor, end, pattern in ends
      )
    elif not attention:
      table += _QUERY + (_QUERY_BIAS if self.qkv_bias else "")
    return (*mapping.parse_rules(table, at=at, layers=layers), *attention)


def read_heads(
  fields: family.Fields, *, kv_heads: int | None, head_dim: int | None
) -> dict[str, Any]:
  """Returns the numbers and the width of heads, as fields of `Attention`.

  `kv_heads` is the default of `num_key_value_heads`, by default all heads;
  `head_dim` that of `head_dim`, by default a share of `hidden_size`.

  Raises:
    UnsupportedConfigError: The sizes do not divide.
  """
  embed_dim = fields.size("hidden_size")
  num_heads = fields.size("num_attention_heads")
  num_kv_heads = fields.optional_size("num_key_value_heads", kv_heads)
  width = fields.optional_size("head_dim") or head_dim
  if num_heads % (num_kv_heads or num_heads):
    fields.reject(
      "num_key_value_heads", f"a divisor of num_attention_heads ({num_heads})"
    )
  if width is None and embed_dim % num_heads:
    fields.reject(
      "num_attention_heads", f"a divisor of hidden_size ({embed_dim})"
    )
  return {
    "num_heads": num_heads,
    "num_kv_heads": num_kv_heads or num_heads,
    "head_dim": width or embed_dim // num_heads,
  }

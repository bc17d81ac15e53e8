"""Grouped-query attention in Hugging Face decoders: the layer and its tensors.

The layers of a model differ in windows and rotary positions only.

Letters: D model width, N heads, K key/value heads, H head width, G gate width.
"""

from collections.abc import Callable, Mapping
import dataclasses
from typing import Any

from paxon.layers.attention import (
  grouped_query,
  head_norm,
  kernels,
  position_bias,
  projections,
)
from paxon.layers.attention import mask as attention_mask
from paxon.layers.models.hugging_face import (
  block_layers,
  family,
  mapping,
  rope,
)
from paxon.layers.norms import layer_norm
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
_HEAD_NORM_BIAS = """
  self_attn.q_norm.bias  attention/query_norm/bias  H -> H
  self_attn.k_norm.bias  attention/key_norm/bias    H -> H
"""
_HEADS_NORM = """
  self_attn.q_norm.weight  attention/query_norm/scale  N H -> N H
  self_attn.k_norm.weight  attention/key_norm/scale    K H -> K H
"""
_HEAD_NORMS = {
  "": "",
  "shared": _HEAD_NORM,
  "separate": _HEADS_NORM,
  "width": _WIDTH_NORM,
}
# Rows of a tensor of queries, keys and values: those of all heads one after the
# other, of each head, or of each group of queries with its key and value; and
# the heads of the variables.
_FUSED: Mapping[str, tuple[tuple[str, str], ...]] = {
  "rows": (("(N H)", "N H"), ("(K H)", "K H"), ("(K H)", "K H")),
  "heads": tuple(("(N H+A+B)", f"N {x}") for x in "HAB"),
  "groups": (
    ("(K R*H+A+B)", "(K R) H"),
    ("(K R*H+A+B)", "K A"),
    ("(K R*H+A+B)", "K B"),
  ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attention:
  """Attention with queries in groups.

  Attributes:
    num_heads: Heads of queries.
    num_kv_heads: Heads of keys and values.
    head_dim: Width of a head.
    qkv_bias: Whether queries, keys and values have biases.
    output_bias: Whether the output has one.
    head_norm: How queries and keys are normalized: `shared` is each head with
      one scale for all, `separate` each head with its scale, `width` all heads
      together; empty is not at all.
    norm_after_rotary: Whether they are normalized after rotary positions.
    qkv_limit: Clips queries, keys and values.
    has_sinks: Whether there is a learned sink for each head.
    has_output_gate: Whether heads are multiplied by the sigmoid of a gate,
      whose kernel files have with that of queries.
    logit_scale: Factor on logits; `None` is `head_dim ** -0.5`.
    logit_cap: Soft cap of logits.
    fused: Order of the rows where files have queries, keys and values in one
      tensor: `rows` of all heads, of each of the `heads` or `groups`.
    has_alibi: Whether logits fall with the distance.
  """

  num_heads: int
  num_kv_heads: int
  head_dim: int
  qkv_bias: bool = False
  output_bias: bool = False
  head_norm: str = ""
  norm_after_rotary: bool = False
  qkv_limit: float | None = None
  has_sinks: bool = False
  has_output_gate: bool = False
  logit_scale: float | None = None
  logit_cap: float | None = None
  fused: str = ""
  has_alibi: bool = False

  def model(
    self,
    make: Callable[..., Any],
    *,
    window: int | None,
    positions: rope.Rope | None,
    norm: block_layers.Norm,
  ) -> Any:
    """Returns a `GroupedQueryAttention`, built by `make(cls, **fields)`.

    Args:
      make: Makes a module.
      window: Sliding window; `None` is full attention.
      positions: Rotary positions; `None` is none.
      norm: The norms of the model.
    """
    return make(
      grouped_query.GroupedQueryAttention,
      num_heads=self.num_heads,
      num_kv_heads=self.num_kv_heads,
      head_dim=self.head_dim,
      rotary=None if positions is None else positions.build(make),
      mask=make(attention_mask.MaskRules, window=window),
      projections=make(
        projections.GatedProjections
        if self.has_output_gate
        else projections.SeparateProjections,
        use_bias=self.qkv_bias,
        output_bias=self.output_bias,
      ),
      head_norm=self._make_head_norm(make, norm),
      limit=self.qkv_limit,
      logits=make(
        kernels.Logits,
        scale=self.logit_scale,
        cap=self.logit_cap,
        sinks=make(kernels.LearnedSinks) if self.has_sinks else None,
        **(
          {"position_bias": make(position_bias.Alibi)} if self.has_alibi else {}
        ),
      ),
    )

  def _make_head_norm(
    self, make: Callable[..., Any], norm: block_layers.Norm
  ) -> Any:
    """Returns the norms of queries and keys, or `None`."""
    if not self.head_norm:
      return None
    cls, each = head_norm.HeadNorm, {"epsilon": norm.epsilon}
    of_keys: dict[str, Any] = {}
    if self.head_norm == "width":
      cls, of_keys = head_norm.AllHeadsNorm, {"axis": axes.KV_HEADS}
    elif self.head_norm == "separate":
      cls, of_keys = head_norm.SeparateNorm, {"axis": axes.KV_HEADS}
      each["subtracts_mean"] = norm.subtracts_mean
    elif norm.subtracts_mean:
      cls = layer_norm.LayerNorm
      each |= {"use_bias": norm.has_bias, "axis": axes.HEAD_DIM}
    else:
      each["scale_offset"] = norm.offset
      if not norm.has_scale:
        each["use_scale"] = False
    order = {"after_rotary": True} if self.norm_after_rotary else {}
    return make(
      head_norm.QueryKeyNorm,
      query_norm=make(cls, **each),
      key_norm=make(cls, **each, **of_keys),
      **order,
    )

  def sizes(self) -> dict[str, int]:
    """Returns the sizes of dimensions in the rules."""
    sizes = {"N": self.num_heads, "K": self.num_kv_heads, "H": self.head_dim}
    if self.fused:
      sizes |= {
        "A": self.head_dim,
        "B": self.head_dim,
        "R": self.num_heads // self.num_kv_heads,
      }
    return sizes | ({"G": self.head_dim} if self.has_output_gate else {})

  def rules(
    self, at: str, layers: tuple[int, ...], norm: block_layers.Norm
  ) -> tuple[mapping.Rule, ...]:
    """Returns the rules of these layers, whose tensors have a prefix."""
    table = _OUT + (_OUTPUT_BIAS if self.output_bias else "")
    table += _SINKS if self.has_sinks else ""
    if norm.has_scale:
      table += _HEAD_NORMS[self.head_norm]
    if self.head_norm == "shared" and norm.has_bias:
      table += _HEAD_NORM_BIAS
    ends = [("weight", "", "D"), *[("bias", "_bias", "")] * self.qkv_bias]
    fused: list[mapping.Rule] = []
    if self.fused:
      fused += [
        mapping.fused_rule(
          f"{at}self_attn.qkv_proj.{tensor}",
          *(
            (f"attention/{each}{end}", f"{rows} {D} -> {D} {heads}")
            for each, (rows, heads) in zip(
              ("query", "key", "value"), _FUSED[self.fused], strict=True
            )
          ),
          layers=layers,
        )
        for tensor, end, D in ends
      ]
    else:
      table += _KEY_VALUE + (_KEY_VALUE_BIAS if self.qkv_bias else "")
    if self.has_output_gate:
      fused += [
        mapping.fused_rule(
          f"{at}self_attn.q_proj.{tensor}",
          (f"attention/query{end}", f"(N H+G) {D} -> {D} N H"),
          (f"attention/gate{end}", f"(N H+G) {D} -> {D} N G"),
          layers=layers,
        )
        for tensor, end, D in ends
      ]
    elif not self.fused:
      table += _QUERY + (_QUERY_BIAS if self.qkv_bias else "")
    return (*mapping.parse_rules(table, at=at, layers=layers), *fused)


def read_heads(
  fields: family.Fields,
  *,
  kv_heads: int | None,
  head_dim: int | None,
  has_kv_heads: bool = True,
) -> dict[str, Any]:
  """Returns the numbers and the width of heads, as fields of `Attention`.

  `kv_heads` is the default of `num_key_value_heads`, by default all heads, as
  for families without that field (`has_kv_heads` False); `head_dim` is that of
  `head_dim`, by default a share of `hidden_size`.

  Raises:
    UnsupportedConfigError: The sizes do not divide.
  """
  embed_dim = fields.size("hidden_size")
  num_heads = fields.size("num_attention_heads")
  num_kv_heads = None
  if has_kv_heads:
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

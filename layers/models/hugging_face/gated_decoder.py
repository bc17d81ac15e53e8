"""Decoders with gated feed-forward layers: Llama, Mistral, Qwen, Phi-3, Gemma.

Root-mean-square norms and rotary positions; layers of Qwen3-Next may have a
gated delta net in place of attention.
Families read their `config.json` into a `GatedDecoder`, which makes the model
and the names of its weights; their `sizes` are those of `mapping.Names`.
"""

from collections.abc import Callable, Iterator, Sequence
import dataclasses
from typing import Any, NamedTuple

from paxon.layers import activations, feed_forward
from paxon.layers.attention import (
  grouped_query,
  head_norm,
  kernels,
  projections,
)
from paxon.layers.attention import mask as attention_mask
from paxon.layers.models.hugging_face import (
  delta_layers,
  expert_layers,
  family,
  latent_layers,
  mapping,
  rope,
)
from paxon.layers.norms import rms_norm
from paxon.layers.stacks import block, stack
from paxon.sharding import axes

_MODEL = """
  model.embed_tokens.weight  params/embedding/table   V D -> V D
  model.norm.weight          params/final_norm/scale  D -> D
"""
_LAYER = """
  input_layernorm.weight  attention_norm/scale  D -> D
"""
_OUT = """
  self_attn.o_proj.weight  attention/out  D (N H) -> N H D
"""
_NORM = """
  post_attention_layernorm.weight  feed_forward_norm/scale  D -> D
"""
_POST_NORMS = """
  post_attention_layernorm.weight    post_attention_norm/scale     D -> D
  pre_feedforward_layernorm.weight   feed_forward_norm/scale       D -> D
  post_feedforward_layernorm.weight  post_feed_forward_norm/scale  D -> D
"""
_QUERY = """
  self_attn.q_proj.weight  attention/query  (N H) D -> D N H
"""
_KEY_VALUE = """
  self_attn.k_proj.weight  attention/key    (K H) D -> D K H
  self_attn.v_proj.weight  attention/value  (K H) D -> D K H
"""
_DOWN = """
  mlp.down_proj.weight  feed_forward/down  D F -> F D
"""
_GATE_UP = """
  mlp.gate_proj.weight  feed_forward/gate  F D -> D F
  mlp.up_proj.weight    feed_forward/up    F D -> D F
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
_MLP_BIAS = """
  mlp.gate_proj.bias  feed_forward/gate_bias  F -> F
  mlp.up_proj.bias    feed_forward/up_bias    F -> F
  mlp.down_proj.bias  feed_forward/down_bias  D -> D
"""
_SINKS = """
  self_attn.sinks  attention/sinks/sinks  N -> N
"""
_WIDTH_NORM = """
  self_attn.q_norm.weight  attention/query_norm/scale  (N H) -> N H
  self_attn.k_norm.weight  attention/key_norm/scale    (K H) -> K H
"""
_FURTHER = """
  enorm.weight             {at}/embedding_norm/scale  D -> D
  hnorm.weight             {at}/hidden_norm/scale     D -> D
  eh_proj.weight           {at}/projection/kernel     D X -> X D
  shared_head.norm.weight  {at}/final_norm/scale      D -> D
"""
# Of the last part of DeepSeek-V3's training.
_FURTHER_WEIGHT = 0.1
_HEAD_NORM = """
  self_attn.q_norm.weight  attention/query_norm/scale  H -> H
  self_attn.k_norm.weight  attention/key_norm/scale    H -> H
"""


class _Layer(NamedTuple):
  """Properties in which the layers of a model differ.

  Attributes:
    window: Sliding window of its attention; `None` is full attention.
    is_mixture: Whether it has a mixture of experts.
    is_delta: Whether it has a gated delta net in place of attention.
  """

  window: int | None
  is_mixture: bool
  is_delta: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatedDecoder:
  """Hyperparameters of a gated decoder.

  Attributes, besides sizes:
    windows: Sliding window of each layer; `None` is full attention.
    rope: Rotary positions.
    activation: Activation of the gate.
    epsilon: Epsilon of all norms.
    tied: Whether the head shares the embedding table.
    qkv_bias: Whether queries, keys and values have biases.
    output_bias: Whether the output of attention has one.
    mlp_bias: Whether the feed-forward layers have biases.
    has_head_norm: Whether queries and keys of each head are normalized.
    has_width_norm: Whether those of all heads together are.
    qkv_limit: Clips queries, keys and values.
    has_sinks: Whether attention has a learned sink for each head.
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
    experts: The mixture of experts in place of feed-forward layers; `None` is
      none.
    dense_layers: Layers that have a feed-forward layer beside mixtures.
    latent: Latent attention instead of grouped queries; `head_dim` is the width
      of values then. `None` is none.
    delta: Gated delta nets in place of attention in some layers; `None` is
      none.
    has_output_gate: Whether heads of attention are multiplied by the sigmoid of
      a gate, whose kernel files have with that of queries.
    num_nextn_predict_layers: Further layers in files: modules of `multi_token`.
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
  mlp_bias: bool = False
  has_head_norm: bool = False
  has_width_norm: bool = False
  qkv_limit: float | None = None
  has_sinks: bool = False
  is_fused: bool = False
  norm_offset: float = 0.0
  input_scale: float = 1.0
  logit_scale: float | None = None
  attention_cap: float | None = None
  logit_cap: float | None = None
  local_rope: rope.Rope | None = None
  has_post_norms: bool = False
  experts: expert_layers.Experts | None = None
  dense_layers: tuple[int, ...] = ()
  latent: latent_layers.Latent | None = None
  delta: delta_layers.Delta | None = None
  has_output_gate: bool = False
  num_nextn_predict_layers: int = 0

  @property
  def _layers(self) -> tuple[_Layer, ...]:
    delta = () if self.delta is None else self.delta.layers
    return tuple(
      _Layer(
        window=window,
        is_mixture=self.experts is not None and i not in self.dense_layers,
        is_delta=i in delta,
      )
      for i, window in enumerate(self.windows)
    )

  @property
  def _stacks(self) -> tuple[tuple[_Layer, ...], ...]:
    """The layers of each stack: dense ones that come first are separate.

    Only if fewer blocks are compiled then: these have no common pattern.
    """
    layers, first = self._layers, len(self.dense_layers)
    parts = layers[:first], layers[first:]
    if self.dense_layers != tuple(range(first)) or not all(parts):
      return (layers,)
    blocks = [len(mapping.find_period(each)) for each in (*parts, layers)]
    return parts if blocks[0] + blocks[1] < blocks[2] else (layers,)

  def model(self, make: Callable[..., Any]) -> Any:
    """Returns a `DecoderLm`, built by `make(cls, **fields)`."""
    further = {}
    if self.num_nextn_predict_layers:
      # Other models do not load it.
      from paxon.layers.models import multi_token

      further["multi_token"] = multi_token.compose(
        make,
        embed_dim=self.embed_dim,
        norm=lambda: self._norm(make, rms_norm.RmsNorm),
        stack=lambda: make(
          stack.Stack,
          blocks=[self._block(make, self._layers[-1])],
          num_layers=1,
        ),
        num_depths=self.num_nextn_predict_layers,
        weight=_FURTHER_WEIGHT,
      )
    return family.make_decoder(
      make,
      vocab_size=self.vocab_size,
      embed_dim=self.embed_dim,
      input_scale=self.input_scale,
      stacks=[
        (
          [self._block(make, each) for each in mapping.find_period(layers)],
          len(layers),
        )
        for layers in self._stacks
      ],
      final_norm=self._norm(make, rms_norm.RmsNorm),
      tied=self.tied,
      logit_cap=self.logit_cap,
      **further,
    )

  def _norm(self, make: Callable[..., Any], cls: type) -> Any:
    return make(cls, epsilon=self.epsilon, scale_offset=self.norm_offset)

  def _block(self, make: Callable[..., Any], layer: _Layer) -> Any:
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
      attention=self._attention(make, layer),
      feed_forward_norm=norm(),
      feed_forward=self._feed_forward(make, layer.is_mixture),
      **post_norms,
    )

  def _feed_forward(self, make: Callable[..., Any], is_mixture: bool) -> Any:
    if is_mixture:
      assert self.experts is not None
      return self.experts.model(make, activation=self.activation)
    return make(
      feed_forward.GatedFeedForward,
      mlp_dim=self.mlp_dim,
      activation=self.activation,
      use_bias=self.mlp_bias,
    )

  def _attention(self, make: Callable[..., Any], layer: _Layer) -> Any:
    if layer.is_delta:
      assert self.delta is not None
      return self.delta.model(
        make, activation=self.activation, epsilon=self.epsilon
      )
    if self.latent is not None:
      return self.latent.model(
        make, num_heads=self.num_heads, positions=self.rope
      )
    norms = None
    if self.has_head_norm:
      norms = make(
        head_norm.QueryKeyNorm,
        query_norm=self._norm(make, head_norm.HeadNorm),
        key_norm=self._norm(make, head_norm.HeadNorm),
      )
    if self.has_width_norm:
      norms = make(
        head_norm.QueryKeyNorm,
        query_norm=make(head_norm.AllHeadsNorm, epsilon=self.epsilon),
        key_norm=make(
          head_norm.AllHeadsNorm, epsilon=self.epsilon, axis=axes.KV_HEADS
        ),
      )
    is_local = layer.window is not None and self.local_rope is not None
    positions = self.local_rope if is_local else self.rope
    return make(
      grouped_query.GroupedQueryAttention,
      num_heads=self.num_heads,
      num_kv_heads=self.num_kv_heads,
      head_dim=self.head_dim,
      rotary=positions.build(make),
      mask=make(attention_mask.MaskRules, window=layer.window),
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
        cap=self.attention_cap,
        sinks=make(kernels.LearnedSinks) if self.has_sinks else None,
      ),
    )

  def names(self) -> mapping.Names:
    """Returns the names of the weights."""
    head = "" if self.tied else family.HEAD
    return mapping.Names(
      sizes={
        "V": self.vocab_size,
        "D": self.embed_dim,
        "F": self.mlp_dim,
        "N": self.num_heads,
        "K": self.num_kv_heads,
        "H": self.head_dim,
        **(self.experts.sizes() if self.experts else {}),
        **(self.latent.sizes() if self.latent else {}),
        **(self.delta.sizes() if self.delta else {}),
        **({"G": self.head_dim} if self.has_output_gate else {}),
        **({"X": 2 * self.embed_dim} if self.num_nextn_predict_layers else {}),
      },
      rules=(
        *mapping.parse_rules(_MODEL + head),
        *(
          each
          for i in range(self.num_nextn_predict_layers)
          for each in mapping.parse_rules(
            _FURTHER.format(at=f"params/multi_token/depths_{i}"),
            at=f"model.layers.{len(self.windows) + i}.",
          )
        ),
      ),
      stacks=(
        *(
          mapping.StackRules(
            stack=name,
            num_layers=len(layers),
            period=len(mapping.find_period(layers)),
            rules=self._layer_rules(layers),
            first=first,
          )
          for name, first, layers in self._named_stacks()
        ),
        *(
          mapping.StackRules(
            stack=f"params/multi_token/depths_{i}/stack",
            num_layers=1,
            rules=self._layer_rules(self._layers[-1:]),
            first=len(self.windows) + i,
          )
          for i in range(self.num_nextn_predict_layers)
        ),
      ),
      tied=self._find_tied(),
      ignored=(
        r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",
        r"model\.rotary_emb\.inv_freq",
        # Prediction of further tokens in Qwen3-Next, which transformers leaves
        # out, too.
        *((r"(model\.)?mtp\..*",) if self.delta else ()),
      ),
      prefix="model.",
    )

  def _named_stacks(
    self,
  ) -> Iterator[tuple[str, int, tuple[_Layer, ...]]]:
    """Yields name, number of the first layer, and layers of each stack."""
    first = 0
    for i, layers in enumerate(self._stacks):
      name = "params/stack"
      yield (
        name if len(self._stacks) == 1 else f"{name}/stacks_{i}",
        first,
        layers,
      )
      first += len(layers)

  def _find_tied(self) -> dict[str, str]:
    """Returns the tensors that are copies of the embedding or the head."""
    table = "model.embed_tokens.weight"
    head = table if self.tied else "lm_head.weight"
    tied = {"lm_head.weight": table} if self.tied else {}
    for i in range(self.num_nextn_predict_layers):
      at = f"model.layers.{len(self.windows) + i}"
      tied[f"{at}.embed_tokens.weight"] = table
      tied[f"{at}.shared_head.head.weight"] = head
    return tied

  def _layer_rules(self, layers: Sequence[_Layer]) -> tuple[mapping.Rule, ...]:
    at = "model.layers.{}."
    table = _LAYER + (_POST_NORMS if self.has_post_norms else _NORM)
    delta = tuple(i for i, layer in enumerate(layers) if layer.is_delta)
    return (
      *mapping.parse_rules(table, at=at),
      *(self.delta.rules(at, delta) if self.delta else ()),
      *self._attention_rules(
        at, tuple(i for i in range(len(layers)) if i not in delta)
      ),
      *self._feed_forward_rules(at, layers),
    )

  def _attention_rules(
    self, at: str, layers: tuple[int, ...]
  ) -> tuple[mapping.Rule, ...]:
    table = _OUT
    table += _HEAD_NORM if self.has_head_norm else ""
    table += _WIDTH_NORM if self.has_width_norm else ""
    table += _SINKS if self.has_sinks else ""
    table += _OUTPUT_BIAS if self.output_bias else ""
    attention: tuple[mapping.Rule, ...] = ()
    if self.latent is not None:
      attention = self.latent.rules(at)
    elif self.is_fused:
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

  def _feed_forward_rules(
    self, at: str, layers: Sequence[_Layer]
  ) -> tuple[mapping.Rule, ...]:
    dense = tuple(i for i, layer in enumerate(layers) if not layer.is_mixture)
    mixtures = tuple(i for i in range(len(layers)) if i not in dense)
    table, rules = _DOWN, []
    if self.is_fused:
      rules.append(
        mapping.fused_rule(
          f"{at}mlp.gate_up_proj.weight",
          ("feed_forward/gate", "F D -> D F"),
          ("feed_forward/up", "F D -> D F"),
          layers=dense,
        )
      )
    else:
      table += _GATE_UP + (_MLP_BIAS if self.mlp_bias else "")
    rules += mapping.parse_rules(table, at=at, layers=dense)
    if self.experts is not None:
      rules += self.experts.rules(at, mixtures)
    return tuple(rules)


def read_heads(
  fields: family.Fields, *, kv_heads: int | None, head_dim: int | None
) -> dict[str, Any]:
  """Returns the sizes of attention, as fields of `GatedDecoder`.

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
    "embed_dim": embed_dim,
    "num_heads": num_heads,
    "num_kv_heads": num_kv_heads or num_heads,
    "head_dim": width or embed_dim // num_heads,
  }

"""Norms, feed-forward layers and the forms of blocks in Hugging Face decoders.

Letters: D model width, F width of the feed-forward layer.
"""

from collections.abc import Callable, Mapping
import dataclasses
from typing import Any

from paxon.layers import activations, feed_forward
from paxon.layers.models.hugging_face import mapping
from paxon.layers.norms import layer_norm, rms_norm
from paxon.layers.stacks import block

_DOWN = """
  mlp.down_proj.weight  feed_forward/down  D F -> F D
"""
_UP = """
  mlp.up_proj.weight  feed_forward/up  F D -> D F
"""
_GATE = """
  mlp.gate_proj.weight  feed_forward/gate  F D -> D F
"""
_BIAS = """
  mlp.up_proj.bias    feed_forward/up_bias    F -> F
  mlp.down_proj.bias  feed_forward/down_bias  D -> D
"""
_GATE_BIAS = """
  mlp.gate_proj.bias  feed_forward/gate_bias  F -> F
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Norm:
  """The norms of a model.

  Attributes:
    epsilon: Added to the mean square or the variance.
    subtracts_mean: Whether it is a layer norm instead of a root-mean-square
      norm.
    has_scale: Whether there is a learned scale.
    has_bias: Whether there is a learned bias, which needs `subtracts_mean`.
    offset: The stored scale is the scale minus this.
  """

  epsilon: float
  subtracts_mean: bool = False
  has_scale: bool = True
  has_bias: bool = False
  offset: float = 0.0

  def model(self, make: Callable[..., Any]) -> Any:
    """Returns the norm of tokens, built by `make(cls, **fields)`."""
    fields: dict[str, Any] = {
      "epsilon": self.epsilon,
      "scale_offset": self.offset,
    }
    if not self.has_scale:
      fields["use_scale"] = False
    if not self.subtracts_mean:
      return make(rms_norm.RmsNorm, **fields)
    return make(layer_norm.LayerNorm, use_bias=self.has_bias, **fields)

  def table(self, tensor: str, leaf: str) -> str:
    """Returns the lines of a norm for `mapping.parse_rules`."""
    lines = f"{tensor}.weight {leaf}/scale D -> D\n" * self.has_scale
    return lines + f"{tensor}.bias {leaf}/bias D -> D\n" * self.has_bias


@dataclasses.dataclass(frozen=True)
class Form:
  """Where a block has its norms.

  Attributes:
    block: Class of `stacks.block`.
    norms: Names of norms in files, by fields of the class.
  """

  block: Callable[..., Any]
  norms: Mapping[str, str]


PRE_NORM = Form(
  block.TransformerBlock,
  {
    "attention_norm": "input_layernorm",
    "feed_forward_norm": "post_attention_layernorm",
  },
)
# Of OLMo 2: only what is added to the residual stream is normalized.
POST_NORM = Form(
  block.SandwichBlock,
  {
    "post_attention_norm": "post_attention_layernorm",
    "post_feed_forward_norm": "post_feedforward_layernorm",
  },
)
# Of Gemma 2.
SANDWICH = Form(
  block.SandwichBlock,
  {
    "attention_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "feed_forward_norm": "pre_feedforward_layernorm",
    "post_feed_forward_norm": "post_feedforward_layernorm",
  },
)
# Attention and feed-forward of one normalized input.
PARALLEL = Form(block.ParallelBlock, {"norm": "input_layernorm"})
# Each with its norm.
PARALLEL_NORMS = Form(
  block.ParallelBlock,
  {"norm": "input_layernorm", "feed_forward_norm": "post_attention_layernorm"},
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FeedForward:
  """A feed-forward layer.

  Attributes:
    mlp_dim: Width of the hidden activation.
    activation: Its activation, of the gate if there is one.
    is_gated: Whether there is a gate.
    use_bias: Whether there are biases.
    is_fused: Whether files fuse the gate with the up projection.
  """

  mlp_dim: int
  activation: activations.Activation
  is_gated: bool = True
  use_bias: bool = False
  is_fused: bool = False

  def model(self, make: Callable[..., Any]) -> Any:
    """Returns the layer, built by `make(cls, **fields)`."""
    return make(
      feed_forward.GatedFeedForward
      if self.is_gated
      else feed_forward.FeedForward,
      mlp_dim=self.mlp_dim,
      activation=self.activation,
      use_bias=self.use_bias,
    )

  def rules(self, at: str, layers: tuple[int, ...]) -> tuple[mapping.Rule, ...]:
    """Returns the rules of these layers, whose tensors have a prefix."""
    table = _DOWN + ("" if self.is_fused else _UP)
    table += _GATE if self.is_gated and not self.is_fused else ""
    if self.use_bias:
      table += _BIAS + (_GATE_BIAS if self.is_gated else "")
    rules = mapping.parse_rules(table, at=at, layers=layers)
    if not self.is_fused:
      return rules
    fused = mapping.fused_rule(
      f"{at}mlp.gate_up_proj.weight",
      ("feed_forward/gate", "F D -> D F"),
      ("feed_forward/up", "F D -> D F"),
      layers=layers,
    )
    return fused, *rules

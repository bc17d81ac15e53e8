"""Gated delta nets in Hugging Face decoders: the layer and its tensors."""

from collections.abc import Callable
import dataclasses
from typing import Any

from paxon.layers import activations
from paxon.layers.models.hugging_face import family, mapping
from paxon.layers.recurrent import gated_delta_net, gated_norm

# A is the number of heads of keys and queries, and B (or C) that of values for
# each of them; Q and L are the widths of queries and keys, P and Z those of
# values and gates, and W the width of the convolution.
_TABLE = """
  linear_attn.dt_bias          attention/step_offset  (A B) -> (A B)
  linear_attn.A_log            attention/log_rate     (A B) -> (A B)
  linear_attn.norm.weight      attention/norm/scale   P -> P
  linear_attn.out_proj.weight  attention/out          D (A B P) -> (A B) P D
"""
_HEADS = "(A Q+L+B*P+B*Z) D -> D"
_STEPS = "(A B+C) D -> D"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Delta:
  """Gated delta nets of Qwen3-Next.

  Attributes:
    num_heads: Heads of values.
    num_key_heads: Heads of keys and queries.
    key_dim: Width of keys and queries.
    value_dim: Width of values.
    conv_width: Width of the convolutions.
    layers: Numbers of the layers that have one instead of attention.
  """

  num_heads: int
  num_key_heads: int
  key_dim: int
  value_dim: int
  conv_width: int
  layers: tuple[int, ...]

  def model(
    self,
    make: Callable[..., Any],
    *,
    activation: activations.Activation,
    epsilon: float,
  ) -> Any:
    """Returns a `GatedDeltaNet`, built by `make(cls, **fields)`."""
    return make(
      gated_delta_net.GatedDeltaNet,
      num_heads=self.num_heads,
      key_dim=self.key_dim,
      value_dim=self.value_dim,
      num_key_heads=self.num_key_heads,
      conv_width=self.conv_width,
      activation=activation,
      norm=make(
        gated_norm.GatedRmsNorm,
        num_groups=None,
        gate_first=False,
        share_scale=True,
        epsilon=epsilon,
      ),
    )

  def sizes(self) -> dict[str, int]:
    """Returns the sizes of dimensions in the rules."""
    group = self.num_heads // self.num_key_heads
    return {
      "A": self.num_key_heads,
      "B": group,
      "C": group,
      "Q": self.key_dim,
      "L": self.key_dim,
      "P": self.value_dim,
      "Z": self.value_dim,
      "W": self.conv_width,
    }

  def rules(self, at: str, layers: tuple[int, ...]) -> tuple[mapping.Rule, ...]:
    """Returns the rules of these layers, whose tensors have a prefix."""
    return (
      *mapping.parse_rules(_TABLE, at=at, layers=layers),
      mapping.fused_rule(
        f"{at}linear_attn.in_proj_qkvz.weight",
        ("attention/query", f"{_HEADS} A Q"),
        ("attention/key", f"{_HEADS} A L"),
        ("attention/value", f"{_HEADS} (A B) P"),
        ("attention/gate", f"{_HEADS} (A B) Z"),
        layers=layers,
      ),
      mapping.fused_rule(
        f"{at}linear_attn.in_proj_ba.weight",
        ("attention/rate", f"{_STEPS} (A B)"),
        ("attention/step", f"{_STEPS} (A C)"),
        layers=layers,
      ),
      mapping.fused_rule(
        f"{at}linear_attn.conv1d.weight",
        ("attention/query_conv/kernel", "(A Q) (1:0) W -> W A Q"),
        ("attention/key_conv/kernel", "(A L) (1:0) W -> W A L"),
        ("attention/value_conv/kernel", "(A B P) (1:0) W -> W (A B) P"),
        layers=layers,
      ),
    )


def read(fields: family.Fields) -> Delta:
  """Returns the delta nets of a `config.json`.

  Raises:
    UnsupportedConfigError: Heads do not divide, or `layer_types` does not have
      a valid entry for each layer.
  """
  num_heads = fields.size("linear_num_value_heads", 32)
  num_key_heads = fields.size("linear_num_key_heads", 16)
  if num_heads % num_key_heads:
    fields.reject(
      "linear_num_key_heads", f"a divisor of the {num_heads} heads of values"
    )
  return Delta(
    num_heads=num_heads,
    num_key_heads=num_key_heads,
    key_dim=fields.size("linear_key_head_dim", 128),
    value_dim=fields.size("linear_value_head_dim", 128),
    conv_width=fields.size("linear_conv_kernel_dim", 4),
    layers=_read_layers(fields),
  )


def _read_layers(fields: family.Fields) -> tuple[int, ...]:
  """Returns the layers that have a delta net.

  `layer_types` takes precedence over `full_attention_interval`.
  """
  num_layers = fields.size("num_hidden_layers", 48)
  interval = fields.size("full_attention_interval", 4)
  kinds = fields.get("layer_types", None)
  if kinds is None:
    return tuple(i for i in range(num_layers) if (i + 1) % interval)
  if not isinstance(kinds, list) or len(kinds) != num_layers:
    fields.reject("layer_types", f"a list of {num_layers} types")
  if not set(kinds) <= {"linear_attention", "full_attention"}:
    fields.reject("layer_types", "'linear_attention' or 'full_attention'")
  return tuple(i for i, kind in enumerate(kinds) if kind == "linear_attention")

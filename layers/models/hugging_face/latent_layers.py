"""Latent attention in Hugging Face decoders: the layer and its tensors."""

from collections.abc import Callable
import dataclasses
from typing import Any

from paxon.layers.attention import latent
from paxon.layers.models.hugging_face import family, mapping, rope
from paxon.layers.norms import rms_norm

# The reference code does not pass the model's epsilon to these norms.
_EPSILON = 1e-6
_OUT = """
  self_attn.o_proj.weight  attention/out  D (N H) -> N H D
"""
# Q is the width of queries, P that of their part without positions, C that of
# latents with the rotated key.
_LATENTS = """
  self_attn.kv_a_proj_with_mqa.weight  attention/latent/kernel      C D -> D C
  self_attn.kv_a_layernorm.weight      attention/latent_norm/scale  R -> R
"""
_QUERY = """
  self_attn.q_proj.weight  attention/query  (N Q) D -> D N Q
"""
_QUERY_LATENT = """
  self_attn.q_a_proj.weight       attention/query_latent/kernel      U D -> D U
  self_attn.q_a_layernorm.weight  attention/query_latent_norm/scale  U -> U
  self_attn.q_b_proj.weight       attention/query    (N Q) U -> U N Q
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Latent:
  """Latent attention of DeepSeek-V2 and V3.

  Attributes:
    num_heads: Number of heads.
    latent_dim: Width of the latent of keys and values.
    query_latent_dim: Width of the latent of queries; `None` is none.
    plain_dim: Width of the part of a head without positions.
    rope_dim: Width of the rotated part.
    value_dim: Width of the values of a head.
  """

  num_heads: int
  latent_dim: int
  query_latent_dim: int | None
  plain_dim: int
  rope_dim: int
  value_dim: int

  def model(self, make: Callable[..., Any], *, positions: rope.Rope) -> Any:
    """Returns a `LatentAttention`, built by `make(cls, **fields)`."""
    width = self.plain_dim + self.rope_dim

    def norm() -> Any:
      return make(rms_norm.RmsNorm, epsilon=_EPSILON)

    return make(
      latent.LatentAttention,
      num_heads=self.num_heads,
      head_dim=self.plain_dim,
      rope_dim=self.rope_dim,
      value_dim=self.value_dim,
      latent_dim=self.latent_dim,
      rotary=positions.build(make),
      query_latent_dim=self.query_latent_dim,
      latent_norm=norm(),
      query_latent_norm=None if self.query_latent_dim is None else norm(),
      logit_scale=positions.logit_factor * width**-0.5,
    )

  def sizes(self) -> dict[str, int]:
    """Returns the sizes of dimensions in the rules."""
    sizes = {
      "N": self.num_heads,
      "K": self.num_heads,
      "H": self.value_dim,
      "C": self.latent_dim + self.rope_dim,
      "P": self.plain_dim,
      "Q": self.plain_dim + self.rope_dim,
      "R": self.latent_dim,
    }
    if self.query_latent_dim is not None:
      sizes["U"] = self.query_latent_dim
    return sizes

  def rules(
    self, at: str, layers: tuple[int, ...], norm: Any
  ) -> tuple[mapping.Rule, ...]:
    """Returns the rules of these layers, whose tensors have a prefix."""
    del norm  # Latents have root-mean-square norms.
    query = _QUERY if self.query_latent_dim is None else _QUERY_LATENT
    return (
      *mapping.parse_rules(_OUT, at=at, layers=layers),
      *mapping.parse_rules(_LATENTS + query, at=at),
      mapping.fused_rule(
        f"{at}self_attn.kv_b_proj.weight",
        ("attention/key", "(N P+H) R -> R N P"),
        ("attention/value", "(N P+H) R -> R N H"),
      ),
    )


def read(
  fields: family.Fields,
  *,
  query_latent_dim: int = 1536,
  plain_dim: int = 128,
  value_dim: int = 128,
) -> Latent:
  """Returns the latent attention of a `config.json`; arguments are defaults."""
  return Latent(
    num_heads=fields.size("num_attention_heads"),
    latent_dim=fields.size("kv_lora_rank", 512),
    query_latent_dim=fields.optional_size("q_lora_rank", query_latent_dim),
    plain_dim=fields.size("qk_nope_head_dim", plain_dim),
    rope_dim=fields.size("qk_rope_head_dim", 64),
    value_dim=fields.size("v_head_dim", value_dim),
  )

"""Mamba-2 (Dao and Gu 2024, https://arxiv.org/abs/2405.21060).

Files have one projection of gate, values, keys, queries and steps, and one
convolution of values, keys and queries; see `layers.recurrent.mamba2`.
"""

from collections.abc import Callable, Mapping
import dataclasses
import math
from typing import Any

from paxon.layers import activations
from paxon.layers.models.hugging_face import family, mapping
from paxon.layers.norms import rms_norm
from paxon.layers.recurrent import gated_norm, mamba2
from paxon.layers.stacks import block

_MODEL = """
  backbone.embeddings.weight  params/embedding/table   V D -> V D
  backbone.norm_f.weight      params/final_norm/scale  D -> D
"""
_LAYER = """
  norm.weight            norm/scale         D -> D
  mixer.dt_bias          mixer/step_offset  N -> N
  mixer.A_log            mixer/log_rate     N -> N
  mixer.D                mixer/skip         N -> N
  mixer.norm.weight      mixer/norm/scale   (N P) -> N P
  mixer.out_proj.weight  mixer/out          D (N P) -> N P D
"""
# Slices of the projection and of the convolution, in the order of rows.
_HEADS = {
  "gate": ("N", "P"),
  "value": ("N", "P"),
  "key": ("G", "S"),
  "query": ("G", "S"),
  "step": ("N",),
}
_CONVOLVED = ("value", "key", "query")
# Fields of initial values; the dtype of the residual stream, which here is that
# of the model; and options of the first code, which the class ignores.
_INERT = """
  norm_before_gate rescale_prenorm_residual residual_in_fp32 time_step_floor
  time_step_init_scheme time_step_max time_step_min time_step_rank
  time_step_scale
  """


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Mamba2:
  """Hyperparameters of a Mamba-2; `sizes` are those of `mapping.Names`."""

  sizes: Mapping[str, int]
  num_layers: int
  activation: activations.Activation
  epsilon: float
  tied: bool
  use_bias: bool
  use_conv_bias: bool
  chunk_length: int
  step_limits: tuple[float, float]

  def model(self, make: Callable[..., Any]) -> Any:
    """Returns the model, built by `make(cls, **fields)`."""

    def norm() -> Any:
      return make(rms_norm.RmsNorm, epsilon=self.epsilon)

    mixer = make(
      mamba2.Mamba2,
      num_heads=self.sizes["N"],
      head_dim=self.sizes["P"],
      state_dim=self.sizes["S"],
      num_groups=self.sizes["G"],
      conv_width=self.sizes["W"],
      chunk_length=self.chunk_length,
      activation=self.activation,
      norm=make(
        gated_norm.GatedRmsNorm,
        num_groups=self.sizes["G"],
        epsilon=self.epsilon,
      ),
      step_limits=self.step_limits,
      use_bias=self.use_bias,
      use_conv_bias=self.use_conv_bias,
    )
    return family.make_decoder(
      make,
      vocab_size=self.sizes["V"],
      embed_dim=self.sizes["D"],
      final_norm=norm(),
      tied=self.tied,
      stacks=[
        ([make(block.MixerBlock, norm=norm(), mixer=mixer)], self.num_layers)
      ],
    )

  def names(self) -> mapping.Names:
    """Returns the names of the weights."""
    at = "backbone.layers.{}."
    rules = [*mapping.parse_rules(_LAYER, at=at)]

    def fuse(tensor: str, leaf: str, names: Any, before: str = "") -> None:
      slices = []
      for name in names:
        dims = " ".join(_HEADS[name])
        inputs, outputs = before.split("->") if before else ("", "")
        pattern = f"({dims}) {inputs} -> {outputs} {dims}"
        slices.append((f"mixer/{leaf.format(name)}", pattern))
      rules.append(mapping.fused_rule(f"{at}mixer.{tensor}", *slices))

    fuse("in_proj.weight", "{}", _HEADS, "D -> D")
    fuse("conv1d.weight", "{}_conv/kernel", _CONVOLVED, "(1:0) W -> W")
    if self.use_conv_bias:
      fuse("conv1d.bias", "{}_conv/bias", _CONVOLVED)
    if self.use_bias:
      fuse("in_proj.bias", "{}_bias", _HEADS)
      out = f"{at}mixer.out_proj.bias"
      rules.append(mapping.rule(out, "mixer/out_bias", "D -> D"))
    table = "backbone.embeddings.weight"
    return mapping.Names(
      sizes=self.sizes,
      rules=mapping.parse_rules(_MODEL + ("" if self.tied else family.HEAD)),
      stacks=(
        mapping.StackRules(
          stack="params/stack", num_layers=self.num_layers, rules=tuple(rules)
        ),
      ),
      tied={"lm_head.weight": table} if self.tied else {},
      prefix="backbone.",
      former={"embedding.weight": "embeddings.weight"},
    )


def _read(fields: family.Fields) -> _Mamba2:
  embed_dim = fields.size("hidden_size", 4096)
  num_heads, head_dim = (
    fields.size("num_heads", 128),
    fields.size("head_dim", 64),
  )
  expand = fields.number("expand", 2)
  if expand * embed_dim != num_heads * head_dim:
    fields.reject(
      "expand",
      "num_heads * head_dim / hidden_size"
      f" ({num_heads * head_dim / embed_dim:g})",
    )
  # Written by the first code; transformers computes it.
  inner = num_heads * head_dim
  if fields.value("intermediate_size", inner) != inner:
    fields.reject("intermediate_size", f"num_heads * head_dim ({inner})")
  groups = fields.size("n_groups", 8)
  if num_heads % groups:
    fields.reject("n_groups", f"a divisor of num_heads ({num_heads})")
  return _Mamba2(
    sizes={
      "V": fields.size("vocab_size", 32_768),
      "D": embed_dim,
      "N": num_heads,
      "P": head_dim,
      "S": fields.size("state_size", 128),
      "G": groups,
      "W": fields.size("conv_kernel", 4),
    },
    num_layers=fields.size("num_hidden_layers", 64),
    activation=fields.activation("hidden_act", "silu"),
    epsilon=fields.number("layer_norm_epsilon", 1e-5),
    tied=fields.flag("tie_word_embeddings", False),
    use_bias=fields.flag("use_bias", False),
    use_conv_bias=fields.flag("use_conv_bias", True),
    chunk_length=fields.size("chunk_size", 256),
    step_limits=_read_limits(fields),
  )


def _read_limits(fields: family.Fields) -> tuple[float, float]:
  """Returns the interval of steps; files write infinity in several ways."""
  name = "time_step_limit"
  limits = fields.value(name, (0.0, math.inf))
  if not isinstance(limits, list | tuple) or len(limits) != 2:
    fields.reject(name, "a pair of numbers")
  found: list[float] = []
  for each in limits:
    value: Any = each.get("__float__") if isinstance(each, dict) else each
    try:
      found.append(float(value))
    except (TypeError, ValueError):
      fields.reject(name, "a pair of numbers")
  low, high = found
  if not 0 <= low < high:
    fields.reject(name, "a pair of numbers (low, high) with 0 <= low < high")
  return low, high


FAMILY = family.Family(
  model_type="mamba2",
  architecture="Mamba2ForCausalLM",
  read=_read,
  inert=tuple(_INERT.split()),
  neutral={"rms_norm": (True,)},
)

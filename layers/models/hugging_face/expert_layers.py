"""Mixtures of experts in Hugging Face decoders: the layer and its tensors.

Files have one tensor for each expert; a layer here has stacks of all experts.
The dispatch is dropless, as in transformers.
"""

from collections.abc import Callable, Mapping
import dataclasses
from typing import Any

import jax

from paxon.layers import activations, feed_forward
from paxon.layers.models.hugging_face import family, mapping
from paxon.sharding import axes

# Names of the router and the experts by their prefix in files.
_ROUTER = """
  {at}.gate.weight  feed_forward/router/logits/kernel  E D -> D E
"""
_EXPERTS = """
  {at}.experts.{{expert}}.{gate}.weight  feed_forward/experts/gate  M D -> D M
  {at}.experts.{{expert}}.{up}.weight    feed_forward/experts/up    M D -> D M
  {at}.experts.{{expert}}.{down}.weight  feed_forward/experts/down  D M -> M D
"""
_CLAMPED = """
  mlp.router.weight            feed_forward/router/logits/kernel  E D -> D E
  mlp.router.bias              feed_forward/router/logits/bias    E -> E
  mlp.experts.down_proj        feed_forward/experts/down       E M D -> E M D
  mlp.experts.down_proj_bias   feed_forward/experts/down_bias  E D -> E D
"""
_SHARED = """
  {shared}.gate_proj.weight  feed_forward/shared/gate  S D -> D S
  {shared}.up_proj.weight    feed_forward/shared/up    S D -> D S
  {shared}.down_proj.weight  feed_forward/shared/down  D S -> S D
"""
_SHARED_GATE = """
  {shared}_gate.weight  feed_forward/shared_gate/kernel  O D -> D O
"""
_SELECTION_BIAS = """
  {at}.gate.e_score_correction_bias  feed_forward/router/selection_bias  {bias}
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experts:
  """A mixture of experts in place of the feed-forward layer.

  Attributes:
    num_experts: Number of experts.
    num_chosen: Experts of a token.
    mlp_dim: Width of the hidden activation of an expert.
    normalize: Whether the weights of a token are divided by their sum.
    balance_weight: Factor of the auxiliary loss in training; 0 has none.
    balance: Its form: `pooled` as in transformers, or DeepSeek's, of a
      `sequence` or of the `batch`.
    epsilon: Added to the sum.
    scale: Factor of the weights.
    groups: Fields of `routers.ExpertGroups`; `None` does not limit choices.
    is_sigmoid: Whether scores are sigmoids of logits instead of a softmax.
    has_selection_bias: Whether a bias selects experts, which is no part of
      their weights and stays as it is in training.
    selection_bias: The pattern of its tensor; `O` is one.
    shared_dim: Width of an expert for all tokens; `None` is none.
    has_shared_gate: Whether each token has a factor in (0, 1) of it.
    shared_at: Prefix of the names of its tensors.
    clamp: Arguments of `experts.ClampedSwiglu`, instead of the activation.
      Router and experts have biases then, and files have stacks in which gate
      and up projection are interleaved, as in gpt-oss; `None` is neither.
    at: Prefix of the names of tensors in a layer.
    tensors: Names of gate, up and down projection in files.
  """

  num_experts: int
  num_chosen: int
  mlp_dim: int
  normalize: bool
  balance_weight: float
  balance: str = "pooled"
  epsilon: float = 0.0
  scale: float = 1.0
  groups: Mapping[str, int] | None = None
  is_sigmoid: bool = False
  has_selection_bias: bool = False
  selection_bias: str = "E -> E"
  shared_dim: int | None = None
  has_shared_gate: bool = True
  shared_at: str = "mlp.shared_expert"
  clamp: Mapping[str, float] | None = None
  at: str = "mlp"
  tensors: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")

  def model(
    self,
    make: Callable[..., Any],
    *,
    activation: activations.Activation,
  ) -> Any:
    """Returns a `MixtureOfExperts`, built by `make(cls, **fields)`."""
    # Dense models do not load mixtures.
    from paxon.layers.moe import experts, mixture

    combine = None
    if self.clamp is not None:
      combine = experts.ClampedSwiglu(**self.clamp)
    return make(
      mixture.MixtureOfExperts,
      num_experts=self.num_experts,
      router=self._make_router(make),
      experts=make(
        experts.GatedExperts,
        mlp_dim=self.mlp_dim,
        activation=activation,
        combine=combine,
        use_bias=self.clamp is not None,
      ),
      losses=self._make_losses(),
      **self._make_shared(make, activation),
    )

  def _make_router(self, make: Callable[..., Any]) -> Any:
    from paxon.layers.moe import balance, routers

    groups = None
    if self.groups is not None:
      groups = make(routers.ExpertGroups, **self.groups)
    return make(
      routers.TopK,
      k=self.num_chosen,
      score=jax.nn.sigmoid if self.is_sigmoid else jax.nn.softmax,
      normalize=self.normalize,
      epsilon=self.epsilon,
      scale=self.scale,
      groups=groups,
      bias=make(balance.FixedBias) if self.has_selection_bias else None,
      logits=make(routers.Logits, use_bias=self.clamp is not None),
    )

  def _make_losses(self) -> tuple[Any, ...]:
    from paxon.layers.moe import balance

    if not self.balance_weight:
      return ()
    forms = {
      "pooled": balance.pooled,
      "sequence": balance.deepseek,
      "batch": balance.switch,
    }
    return (forms[self.balance](self.balance_weight),)

  def _make_shared(
    self, make: Callable[..., Any], activation: activations.Activation
  ) -> dict[str, Any]:
    """Returns the shared expert and its gate, as fields of the mixture."""
    from paxon.layers import linear

    if self.shared_dim is None:
      return {}
    shared = {
      "shared": make(
        feed_forward.GatedFeedForward,
        mlp_dim=self.shared_dim,
        activation=activation,
      )
    }
    if self.has_shared_gate:
      shared["shared_gate"] = make(
        linear.Linear,
        output_dim=1,
        use_bias=False,
        kernel_axes=(axes.EMBED, None),
      )
    return shared

  def sizes(self) -> dict[str, int]:
    """Returns the sizes of dimensions in the rules."""
    sizes = {"E": self.num_experts, "M": self.mlp_dim}
    if self.shared_dim is not None:
      # One output, the gate of the shared expert.
      sizes |= {"S": self.shared_dim, "O": 1}
    return sizes

  def rules(
    self, prefix: str, layers: tuple[int, ...]
  ) -> tuple[mapping.Rule, ...]:
    """Returns the rules of these layers, whose tensors have a prefix."""
    if self.clamp is not None:
      return (
        *mapping.parse_rules(_CLAMPED, at=prefix, layers=layers),
        *(
          mapping.fused_rule(
            f"{prefix}mlp.experts.gate_up_proj{end}",
            (f"feed_forward/experts/gate{end}", f"{left} (M 2:0) -> {left} M"),
            (f"feed_forward/experts/up{end}", f"{left} (M 2:1) -> {left} M"),
            layers=layers,
          )
          for end, left in (("", "E D"), ("_bias", "E"))
        ),
      )
    gate, up, down = self.tensors
    table = _ROUTER + _EXPERTS
    table += _SELECTION_BIAS if self.has_selection_bias else ""
    if self.shared_dim is not None:
      table += _SHARED + (_SHARED_GATE if self.has_shared_gate else "")
    table = table.format(
      at=self.at,
      shared=self.shared_at,
      gate=gate,
      up=up,
      down=down,
      bias=self.selection_bias,
    )
    return mapping.parse_rules(table, at=prefix, layers=layers)


def read_router(
  fields: family.Fields,
  *,
  experts_field: str,
  num_experts: int,
  num_chosen: int,
  balance_weight: float,
) -> dict[str, Any]:
  """Returns the fields of `Experts` that all families have.

  `experts_field` has the number of experts; the others are defaults.

  Raises:
    UnsupportedConfigError: A token chooses more experts than there are.
  """
  # transformers accepts and writes either name.
  names = [
    each for each in ("num_local_experts", "num_experts") if fields.has(each)
  ]
  if len(names) > 1 and fields.get(names[0]) != fields.get(names[1]):
    fields.reject(names[0], f"the value of {names[1]}")
  total = fields.size((names or [experts_field])[0], num_experts)
  chosen = fields.size("num_experts_per_tok", num_chosen)
  if chosen > total:
    fields.reject(
      "num_experts_per_tok", f"at most the number of experts ({total})"
    )
  weight = fields.value("router_aux_loss_coef", balance_weight)
  if weight != 0 or isinstance(weight, bool):
    weight = fields.number("router_aux_loss_coef", balance_weight)
  # transformers adds the loss only then.
  is_balanced = fields.flag("output_router_logits", False)
  return {
    "num_experts": total,
    "num_chosen": chosen,
    "balance_weight": float(weight) if is_balanced else 0.0,
  }

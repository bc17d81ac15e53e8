"""Regularization around any optimizer, and noise on the parameters.

With gradients g (after clipping), an optimizer and its learning rate r:

  g <- g + l1 sign(p) + l2 p                       regularized variables
  p <- p + optimizer(g) - r ewc weight (p - p0)    p0: before the first update

L1 and L2 are terms l1 |p| and l2 p^2 / 2 of the loss, which moments see, unlike
decoupled weight decay. Elastic weight consolidation (EWC, Kirkpatrick et al.
2017, https://arxiv.org/abs/1612.00796) is the term ewc weight (p - p0)^2 / 2;
as in Pax its gradient bypasses the optimizer. Pax's `ewc_regularizer_weight` w
is `ewc` w / 2, because Pax halves the gradient.

Variational noise (Graves 2011, NeurIPS) is normal noise that is added to
parameters for the loss and its gradients, not to their stored values.
"""

from collections.abc import Mapping
import dataclasses
import re
from typing import Any, NamedTuple
import zlib

import jax
import jax.numpy as jnp
import optax

from paxon.learners import variable_groups
from paxon.learners.optimizers import optimizer as optimizer_lib
from paxon.learners.optimizers import optimizer_by_path
from paxon.sharding import checks


@dataclasses.dataclass(frozen=True, kw_only=True)
class Regularized(optimizer_lib.OptimizerWrapper):
  """An optimizer with L1 or L2 regularization and EWC.

  Attributes:
    optimizer: Optimizer, such as `adamw.AdamW`; without weight decay if there
      is L1 or L2 regularization.
    l1: Factor of the L1 norm in the loss.
    l2: Factor of half the squared L2 norm in the loss.
    ewc: Factor of half the squared distance to the initial parameters.
    ewc_weights: Weights of variables in EWC, such as a Fisher information, by
      pattern. The first pattern that matches the whole logical name applies;
      variables without a match have weight 1.
  """

  optimizer: optimizer_lib.Optimizer
  l1: float = 0.0
  l2: float = 0.0
  ewc: float = 0.0
  ewc_weights: Mapping[str, float] = dataclasses.field(default_factory=dict)

  def __post_init__(self) -> None:
    checks.check_non_negative(self, "l1", "l2", "ewc")
    if self.l1 and self.l2:
      raise ValueError(
        f"Regularized.l1 and l2 must not both be set, got {self.l1} and"
        f" {self.l2}."
      )
    if (self.l1 or self.l2) and _decays(self.optimizer):
      raise ValueError(
        "Regularized.l1 and l2 need an optimizer with weight_decay 0, got"
        f" {type(self.optimizer).__name__} with weight decay."
      )
    for pattern, weight in self.ewc_weights.items():
      checks.check_pattern("Regularized.ewc_weights", pattern)
      if not weight >= 0:
        raise ValueError(
          "Regularized.ewc_weights must not be negative, got"
          f" {weight} for {pattern!r}."
        )

  def transform(
    self, specs: variable_groups.Specs | None = None
  ) -> optax.GradientTransformation:
    """Returns the update rule; `specs` None regularizes all variables."""
    inner = self.optimizer.transform(specs)
    penalized = (
      self._with_penalty(inner, specs) if self.l1 or self.l2 else inner
    )
    return self._with_anchor(penalized, specs) if self.ewc else penalized

  def _with_penalty(
    self,
    inner: optax.GradientTransformation,
    specs: variable_groups.Specs | None,
  ) -> optax.GradientTransformation:
    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
      regularized = optimizer_lib.find_regularized(specs)
      if regularized is None:
        regularized = jax.tree.map(lambda _: True, updates)
      updates = jax.tree.map(
        lambda g, p, is_regularized: (
          g + self.l1 * jnp.sign(p) + self.l2 * p if is_regularized else g
        ),
        updates,
        params,
        regularized,
      )
      return inner.update(updates, state, params)

    return optax.GradientTransformation(inner.init, update)

  def _with_anchor(
    self,
    inner: optax.GradientTransformation,
    specs: variable_groups.Specs | None,
  ) -> optax.GradientTransformation:
    def init(params: Any) -> AnchorState:
      return AnchorState(
        count=jnp.zeros((), jnp.int32),
        # Copies, because a step donates both buffers.
        anchor=jax.tree.map(
          lambda p: jnp.array(p, jnp.float32, copy=True), params
        ),
        inner=inner.init(params),
      )

    def update(
      updates: Any, state: Any, params: Any = None
    ) -> tuple[Any, AnchorState]:
      rate = jnp.asarray(self.schedule(state.count), jnp.float32)
      # The parameters may have been replaced after the initial state was made.
      anchor = jax.tree.map(
        lambda a, p: jnp.where(state.count == 0, p, a), state.anchor, params
      )
      updates, inner_state = inner.update(updates, state.inner, params)
      updates = jax.tree.map(
        lambda u, p, a, weight: u - rate * (self.ewc * weight) * (p - a),
        updates,
        params,
        anchor,
        self._weights(updates, specs),
      )
      count = optax.safe_increment(state.count)
      return updates, AnchorState(count, anchor, inner_state)

    return optax.GradientTransformation(init, update)

  def _weights(self, tree: Any, specs: variable_groups.Specs | None) -> Any:
    """Returns the weight in EWC of each variable."""
    if specs is None:
      if self.ewc_weights:
        raise ValueError(
          "Regularized.ewc_weights needs the specs of the variables, because"
          " patterns match their names."
        )
      return jax.tree.map(lambda _: 1.0, tree)
    names = [spec.name for spec in jax.tree.leaves(specs)]
    for pattern in self.ewc_weights:
      _check_match("Regularized.ewc_weights", pattern, names)
    return jax.tree.map(
      lambda spec: next(
        (
          weight
          for pattern, weight in self.ewc_weights.items()
          if re.fullmatch(pattern, spec.name)
        ),
        1.0,
      ),
      specs,
    )


class AnchorState(NamedTuple):
  """The state of EWC around that of the optimizer.

  Attributes:
    count: int32 scalar, the number of updates.
    anchor: float32 parameters before the first update.
    inner: State of the optimizer.
  """

  count: Any
  anchor: Any
  inner: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class VariationalNoise:
  """Normal noise on parameters in the train loss.

  Attributes:
    scale: Standard deviation of the noise.
    variables: Regular expression that must match the whole logical name.
    start_step: First step with noise.
  """

  scale: float
  variables: str = ".*"
  start_step: int = 0

  def __post_init__(self) -> None:
    checks.check_positive(self, "scale")
    checks.check_non_negative(self, "start_step")
    checks.check_pattern("VariationalNoise.variables", self.variables)

  def add(
    self,
    params: variable_groups.Tree,
    *,
    specs: variable_groups.Specs,
    step: jax.Array,
    key: jax.Array,
  ) -> variable_groups.Tree:
    """Returns the parameters with noise, in their dtypes.

    `specs` are those of the parameters; each has its own key by its name.
    """
    names = [spec.name for spec in jax.tree.leaves(specs)]
    _check_match("VariationalNoise.variables", self.variables, names)
    scale = jnp.where(step >= self.start_step, jnp.float32(self.scale), 0.0)

    def add(param: jax.Array, spec: Any) -> jax.Array:
      if not re.fullmatch(self.variables, spec.name):
        return param
      own = jax.random.fold_in(key, zlib.crc32(spec.name.encode()))
      noise = scale * jax.random.normal(own, param.shape, jnp.float32)
      return (param.astype(jnp.float32) + noise).astype(param.dtype)

    return variable_groups.map_paths(add, params, specs)


def _decays(optimizer: optimizer_lib.Optimizer) -> bool:
  if isinstance(optimizer, optimizer_by_path.OptimizerByPath):
    return any(_decays(rule.optimizer) for rule in optimizer.rules)
  if isinstance(optimizer, optimizer_lib.OptimizerWrapper):
    return _decays(optimizer.optimizer)
  return isinstance(optimizer, optimizer_lib.Decays) and bool(
    optimizer.weight_decay
  )


def _check_match(field: str, pattern: str, names: list[str]) -> None:
  if not any(re.fullmatch(pattern, name) for name in names):
    raise ValueError(
      f"{field}: {pattern!r} matches no optimized variable; it must match a"
      f" whole name{f', such as {names[0]!r}' if names else ''}."
    )

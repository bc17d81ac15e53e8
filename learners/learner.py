"""The learner: gradient clipping, an optimizer, and options of the update."""

from collections.abc import Callable, Mapping
import dataclasses
import re
from typing import Any, Final, Protocol, TypeAlias, runtime_checkable

import jax
from jax.typing import ArrayLike
import optax

from paxon.learners import (
  parameter_average,
  skipping,
  variable_clipping,
  variable_groups,
)
from paxon.learners import privacy as privacy_lib
from paxon.learners.optimizers import optimizer as optimizer_lib
from paxon.learners.optimizers import optimizer_by_path, regularization
from paxon.sharding import checks

Optimizer: TypeAlias = optimizer_lib.Optimizer

THREEFRY: Final = "threefry2x32"
# Implementations of random keys in JAX.
GENERATORS: Final = (THREEFRY, "rbg", "unsafe_rbg")


# Types of `loss_function` and `gradients`, which experiments need not load.
_Weighted: TypeAlias = tuple[jax.Array, jax.Array]
_LossFn: TypeAlias = Callable[..., Any]
_GradientFn: TypeAlias = Callable[..., Any]

# A factor of a loss, or its value by step.
Factor: TypeAlias = float | Callable[[ArrayLike], ArrayLike]


@runtime_checkable
class LossAggregator(Protocol):
  """Combines the losses of a model into the minimized one."""

  def aggregate(
    self, losses: Mapping[str, _Weighted], *, step: ArrayLike
  ) -> _Weighted:
    """Returns the minimized loss, (sum, weight), both scalars.

    Args:
      losses: The model's scalar metrics and its `loss`, each (sum, weight), of
        one microbatch.
      step: Number of completed steps, int32; may be traced.
    """
    ...


Losses: TypeAlias = Mapping[str, Factor] | LossAggregator


@runtime_checkable
class GradientRule(Protocol):
  """Replaces the gradients of a learner, such as `SharpnessAware`."""

  def make_gradient_fn(
    self,
    loss_fn: _LossFn,
    *,
    make_default: Callable[[_LossFn], _GradientFn],
    specs: variable_groups.Specs,
  ) -> _GradientFn:
    """Returns `(variables, batch, rngs) -> Gradients` (`gradients`).

    Args:
      loss_fn: The loss of the learner, with `Learner.losses`.
      make_default: Returns the gradients of any loss function of the same
        arguments, with the learner's microbatches and metrics.
      specs: A `VariableSpec` for each variable.
    """
    ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Learner:
  """Turns gradients into updates.

  Gradients are clipped per variable, then by their global norm, and then passed
  to the optimizer.

  Attributes:
    optimizer: Optimizer, such as `adamw.AdamW`.
    max_grad_norm: Largest global norm of the gradients of all optimized
      variables; `None` disables the clipping.
    max_variable_grad_norm: Largest norm of the gradient of one variable of one
      layer; `None` disables the clipping.
    num_microbatches: Number of sequential microbatches per batch. More save
      memory and do not change the gradient.
    decayed_variables: Regular expression of the logical names of the variables
      to which weight decay applies, such as `.*` for all; the whole name must
      match. `None` is `VariableSpec.regularized`: matrices, not biases, scales
      of norms or tables of position biases.
    skip: Condition for skipping an update; `None` skips none.
    average: Average of the parameters for evaluation; `None` keeps none.
    noise: Noise on the parameters in the train loss; `None` adds none.
    random_generator: Generator of the random keys of the loss, such as those of
      dropout: `threefry2x32`, or the faster `rbg` or `unsafe_rbg` of the
      hardware, whose numbers differ between platforms and meshes.
    measure_noise: Whether to report `gradient_noise_scale`, the number of
      sequences of a batch at which noise and gradient are equally large; much
      larger batches save few steps. Requires several microbatches, whose
      gradients are compared with that of the batch.
    privacy: Differential privacy of the gradients; `None` is none.
    losses: Factors of the metrics of the model whose weighted sum is minimized,
      by name, such as `{"loss": 1.0, "auxiliary": 0.1}`; `loss` is the model's
      own. A factor may be a schedule of the step. For other combinations, a
      `LossAggregator`. `None` minimizes the model's loss.
    gradient_rule: Computes the gradients in another way, such as
      `gradients.SharpnessAware`; `None` differentiates the loss.
    after_update: Change of the parameters after an update, such as
      `qk_clip.QkClip`; `None` changes none.
    count_tokens: Whether to count the tokens of all updates in the train state
      and to report them as the metric `tokens_trained`.
    offload_state: Keeps optimizer state in host memory between updates. An
      update copies it to the devices and back, which takes time; where
      activations need the most memory it takes none of theirs.
  """

  optimizer: Optimizer
  max_grad_norm: float | None = None
  max_variable_grad_norm: float | None = None
  num_microbatches: int = 1
  decayed_variables: str | None = None
  skip: skipping.SkipUpdates | None = None
  average: parameter_average.ParameterAverage | None = None
  noise: regularization.VariationalNoise | None = None
  random_generator: str = THREEFRY
  measure_noise: bool = False
  privacy: privacy_lib.Privacy | None = None
  losses: Losses | None = None
  gradient_rule: GradientRule | None = None
  after_update: optimizer_lib.AfterUpdate | None = None
  count_tokens: bool = False
  offload_state: bool = False

  def __post_init__(self) -> None:
    checks.check_positive(
      self, "max_grad_norm", "max_variable_grad_norm", "num_microbatches"
    )
    if self.random_generator not in GENERATORS:
      raise ValueError(
        f"Learner.random_generator must be one of {', '.join(GENERATORS)}, got"
        f" {self.random_generator!r}."
      )
    if self.measure_noise and self.num_microbatches < 2:
      raise ValueError(
        "Learner.measure_noise compares microbatches, so num_microbatches must"
        f" be at least 2, got {self.num_microbatches}."
      )
    if self.measure_noise and self.privacy is not None:
      raise ValueError(
        "Learner.measure_noise uses gradients without noise; unset it or"
        " Learner.privacy."
      )
    if self.gradient_rule is not None and self.privacy is not None:
      raise ValueError(
        "Learner.privacy clips the gradients of single examples, which"
        " Learner.gradient_rule replaces; set only one of them."
      )
    self._check_losses()
    checks.check_pattern("Learner.decayed_variables", self.decayed_variables)

  def _check_losses(self) -> None:
    losses = self.losses
    if losses is None or isinstance(losses, LossAggregator):
      return
    if not isinstance(losses, Mapping):
      raise ValueError(
        "Learner.losses must be factors by name or have a method `aggregate`,"
        f" got {type(losses).__name__}."
      )
    if not any(losses.values()):
      raise ValueError(
        "Learner.losses must have a factor that is not zero, got"
        f" {dict(losses)}."
      )

  def transform(
    self, specs: variable_groups.Specs
  ) -> optax.GradientTransformationExtraArgs:
    """Returns clipping and the optimizer as one optax transformation.

    `specs` are those of all variables of a model; the transformation applies to
    the optimized ones, as `variable_groups.select` returns them.
    """
    optimized = variable_groups.select(
      specs, variable_groups.Group.OPTIMIZED, specs=specs
    )
    if self.decayed_variables is not None:
      optimized = _with_decay(optimized, self.decayed_variables)
    inner = optax.with_extra_args_support(self.optimizer.transform(optimized))
    if self.max_grad_norm is None and self.max_variable_grad_norm is None:
      return inner

    # Not `optax.chain`, which would add a level to the state: clipping has no
    # state, and turning it on or off must not change names in checkpoints.
    def update(
      updates: optax.Updates,
      state: optax.OptState,
      params: optax.Params | None = None,
      **extra: Any,
    ) -> tuple[optax.Updates, optax.OptState]:
      if self.max_variable_grad_norm is not None:
        updates = variable_clipping.clip_by_norm(
          updates, max_norm=self.max_variable_grad_norm, specs=optimized
        )
      if self.max_grad_norm is not None:
        updates = variable_clipping.clip_by_global_norm(
          updates, max_norm=self.max_grad_norm
        )
      return inner.update(updates, state, params, **extra)

    return optax.GradientTransformationExtraArgs(inner.init, update)

  def learning_rate(self, step: ArrayLike) -> jax.Array:
    """Returns the learning rate of the update made at `step`, float32."""
    return jax.numpy.asarray(self.optimizer.schedule(step), jax.numpy.float32)

  def learning_rates(self, step: ArrayLike) -> dict[str, jax.Array]:
    """Returns the learning rates at `step` by metric name, float32.

    `OptimizerByPath` adds a `learning_rate/<name>` for each of its rules.
    """
    rates = {"learning_rate": self.learning_rate(step)}
    if isinstance(self.optimizer, optimizer_by_path.OptimizerByPath):
      for name, schedule in self.optimizer.schedules.items():
        rates[f"learning_rate/{name}"] = jax.numpy.asarray(
          schedule(step), jax.numpy.float32
        )
    return rates


def _with_decay(
  specs: variable_groups.Specs, pattern: str
) -> variable_groups.Specs:
  """Returns the specs, with decay for the names that match."""
  decayed = variable_groups.map_paths(
    lambda spec: dataclasses.replace(
      spec, regularized=re.fullmatch(pattern, spec.name) is not None
    ),
    specs,
  )
  leaves = jax.tree.leaves(decayed)
  if leaves and not any(spec.regularized for spec in leaves):
    raise ValueError(
      f"Learner.decayed_variables: {pattern!r} matches no variable, such as"
      f" {leaves[0].name!r}; set weight_decay=0 to decay none."
    )
  return decayed

"""Sophia: momentum divided by an estimate of the Hessian's diagonal, clipped.

  m <- b1 m + (1 - b1) g
  u = clip(m / (1 - b1^t) / max(gamma h, epsilon), threshold)
  every `hessian_every` updates, from the first:
    h <- b2 h + (1 - b2) v (H v)        v: random signs
  p <- p - rate (u + weight_decay p)

(Liu et al. 2023, https://arxiv.org/abs/2305.14342, Sophia-H with Hutchinson's
estimator.) The rule is `optax.contrib.sophia`, which differs from the
paper's algorithm 3: m is debiased, and h is updated after u. The first u is
therefore a sign.

An estimate differentiates the loss twice, so it needs a model whose kernels
have second derivatives. It uses the first microbatch, which bounds its memory.
The train step passes it as `hessian`, a function without arguments.
"""

from collections.abc import Callable
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax import contrib

from paxon.learners import optimizer_state, variable_groups
from paxon.learners.optimizers import optimizer
from paxon.sharding import checks


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sophia:
  """The Sophia-H optimizer.

  It must be the learner's optimizer itself: optimizers around another one do
  not pass `hessian`.

  Attributes:
    schedule: Maps a step to a learning rate.
    b1: Decay of the mean of gradients.
    b2: Decay of the mean of estimates.
    gamma: Scale of h; larger values clip fewer elements.
    epsilon: Smallest divisor.
    threshold: Largest absolute element of u.
    hessian_every: Number of updates between estimates.
    weight_decay: Fraction of a parameter that is subtracted at rate 1.
  """

  schedule: optax.Schedule
  b1: float = 0.965
  b2: float = 0.99
  gamma: float = 0.01
  epsilon: float = 1e-8
  threshold: float = 1.0
  hessian_every: int = 10
  weight_decay: float = 0.0

  def __post_init__(self) -> None:
    checks.check_decay(self, "b1", "b2")
    checks.check_positive(
      self, "gamma", "epsilon", "threshold", "hessian_every"
    )
    checks.check_non_negative(self, "weight_decay")

  def transform(
    self, specs: variable_groups.Specs | None = None
  ) -> optax.GradientTransformationExtraArgs:
    """Returns the update rule, whose update takes `hessian`.

    `specs` None decays all variables.
    """
    regularized = optimizer.find_regularized(specs)
    return optimizer.with_standard_promotion(
      contrib.sophia(
        self.schedule,
        b1=self.b1,
        b2=self.b2,
        eps=self.epsilon,
        weight_decay=self.weight_decay,
        weight_decay_mask=regularized,
        gamma=self.gamma,
        clip_threshold=self.threshold,
        update_interval=self.hessian_every,
        hessian_diagonal_fn=optax.GradientTransformationExtraArgs(
          lambda params: optax.EmptyState(), _call_hessian
        ),
      )
    )

  def estimate_hessian(
    self,
    loss_fn: Callable[[Any], jax.Array],
    params: Any,
    *,
    key: jax.Array,
  ) -> Any:
    """Returns v (H v), whose mean over v is the Hessian's diagonal.

    Args:
      loss_fn: Maps parameters to a scalar.
      params: Tree of arrays.
      key: Random key of the signs v.

    Returns:
      float32 arrays with the paths and shapes of the parameters.
    """
    leaves, treedef = jax.tree.flatten(params)
    signs = treedef.unflatten(
      [
        jax.random.rademacher(jax.random.fold_in(key, i), x.shape, x.dtype)
        for i, x in enumerate(leaves)
      ]
    )
    _, tangents = jax.jvp(jax.grad(loss_fn), (params,), (signs,))
    return jax.tree.map(
      jnp.multiply,
      optimizer_state.as_float32(signs),
      optimizer_state.as_float32(tangents),
    )


def _call_hessian(
  updates: Any,
  state: Any,
  params: Any = None,
  *,
  hessian: Callable[[], Any] | None = None,
  **extra: Any,
) -> tuple[Any, Any]:
  del updates, params, extra
  if hessian is None:
    raise ValueError(
      "Sophia needs the Hessian of the loss, which the train step passes only"
      " to Learner.optimizer itself; do not put Sophia into another optimizer."
    )
  return hessian(), state

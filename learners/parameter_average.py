"""An exponential moving average of the parameters, for evaluation.

  a_t = decay a_{t-1} + (1 - decay) p_t        p_t: after the t-th update

starts with a_0 = p_0. With debiasing (Kingma & Ba 2015,
https://arxiv.org/abs/1412.6980, section 3) it starts with a_0 = 0, and
evaluation uses a_t / (1 - decay^t): a weighted mean of p_1 ... p_t without p_0.
With a warmup, the decay of the t-th update is min(decay, (1 + t) / (10 + t)),
so that early averages follow the parameters.

With `before_update`, as in Pax, p_t are the parameters before the t-th update,
and the warmup counts from 0: min(decay, t / (9 + t)). The values are those of
the other order, one update later.

The average is float32 for any dtype of the parameters. Skipped updates do not
count.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from paxon.learners import variable_groups
from paxon.sharding import checks


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class AverageState:
  """The running average.

  Attributes:
    count: int32 scalar, the number of averaged updates.
    average: float32 arrays with the paths of the optimized variables.
  """

  count: Any
  average: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParameterAverage:
  """An exponential moving average of the optimized parameters.

  Attributes:
    decay: Decay per update; the average covers about 1 / (1 - decay) updates.
    debias: Whether to exclude the initial parameters from the average.
    warmup: Whether the decay of the first updates is smaller.
    before_update: Whether the parameters before each update are averaged, as in
      Pax, instead of those after it.
  """

  decay: float
  debias: bool = False
  warmup: bool = False
  before_update: bool = False

  def __post_init__(self) -> None:
    checks.check_interval(self, "(0, 1)", "decay")
    if self.debias and self.warmup:
      raise ValueError(
        "ParameterAverage.debias and warmup must not both be set: debiasing"
        " assumes a constant decay."
      )

  def initial(self, params: variable_groups.Tree) -> AverageState:
    """Returns the average before the first update."""
    if self.debias:
      average = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
    else:
      # A copy, because a step donates both buffers.
      average = jax.tree.map(
        lambda p: jnp.array(p, jnp.float32, copy=True), params
      )
    return AverageState(count=jnp.zeros((), jnp.int32), average=average)

  def update(
    self, state: AverageState, params: variable_groups.Tree
  ) -> AverageState:
    """Returns the average that includes `params`.

    These are the parameters after the update, or before it with
    `before_update`.
    """
    # Not decay * a + (1 - decay) * p: for a decay near one, the two factors
    # rounded to float32 do not add up to one, which would scale the average.
    share: Any = 1 - self.decay
    if self.warmup:
      # 1 - (1 + t) / (10 + t), for the update with number t from 1, or from 0.
      first = 0 if self.before_update else 1
      number = (state.count + first).astype(jnp.float32)
      share = jnp.maximum(share, 9 / (10 + number))
    average = jax.tree.map(
      lambda a, p: a + share * (p.astype(jnp.float32) - a),
      state.average,
      params,
    )
    return AverageState(count=state.count + 1, average=average)

  def values(
    self, state: AverageState, params: variable_groups.Tree
  ) -> variable_groups.Tree:
    """Returns the values for evaluation, in the dtypes of the parameters.

    These are the parameters before the first update.
    """
    if not self.debias:
      return jax.tree.map(lambda a, p: a.astype(p.dtype), state.average, params)
    count = state.count.astype(jnp.float32)
    # 1 - decay^count; expm1, because decay^count may be close to one.
    share = -jnp.expm1(count * math.log(self.decay))
    none = state.count == 0
    share = jnp.where(none, jnp.ones_like(share), share)
    return jax.tree.map(
      lambda a, p: jnp.where(none, p, (a / share).astype(p.dtype)),
      state.average,
      params,
    )

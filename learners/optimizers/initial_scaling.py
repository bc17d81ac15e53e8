"""Updates scaled by the standard deviation of initial values.

`InitialScaled` multiplies the update of a variable by the standard deviation
with which its initializer draws the value of a layer, so that one learning rate
is the relative change of all of them; those of vectors and scalars are not
scaled (`scale_update_by_var_norm` of Pax). The deviation is that of the
configuration, not of the values drawn, so it is the same in a run that resumes.
"""

import dataclasses
from typing import Protocol, runtime_checkable

import jax
import optax

from paxon.learners import variable_groups
from paxon.learners.optimizers import optimizer as optimizer_lib
from paxon.sharding import variables


@runtime_checkable
class HasDeviation(Protocol):
  """An initializer with a known deviation, see `layers.initializers`."""

  def deviation(self, shape: tuple[int, ...]) -> float:
    """Returns the standard deviation before any truncation."""
    ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class InitialScaled(optimizer_lib.OptimizerWrapper):
  """An optimizer with updates in units of the initial deviation.

  Attributes:
    optimizer: The optimizer. Its weight decay is scaled, too.
  """

  optimizer: optimizer_lib.Optimizer

  def factor(self, spec: variables.VariableSpec) -> float:
    """Returns the factor of the updates of a variable.

    Raises:
      ValueError: The deviation of its initial value is zero or not known.
    """
    shape = spec.layer_shape
    if len(shape) <= 1:
      return 1.0
    found = 0.0
    if isinstance(spec.initializer, HasDeviation):
      found = spec.initializer.deviation(shape)
    if found <= 0:
      raise ValueError(
        f"InitialScaled: {spec.name} has the initializer {spec.initializer!r},"
        " whose standard deviation is zero or not known; use one of"
        " layers.initializers, such as Normal, Uniform or FanScaled."
      )
    return found

  def transform(
    self, specs: variable_groups.Specs | None = None
  ) -> optax.GradientTransformation:
    """Returns the update rule.

    Raises:
      ValueError: `specs` is `None`, or see `factor`.
    """
    if specs is None:
      raise ValueError(
        "InitialScaled.transform requires the specs of variables."
      )
    factors = jax.tree.map(self.factor, specs)
    return optimizer_lib.append_stateless(
      self.optimizer.transform(specs),
      lambda updates, _: jax.tree.map(lambda u, f: u * f, updates, factors),
    )

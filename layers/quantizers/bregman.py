"""Bregman PCA: principal components under the divergence of an activation.

Collins et al. 2001, https://papers.nips.cc/paper/2078. A vector x, which is the
output of an activation f, is approximated by

  f(mean + coefficients @ components)

where the coefficients minimize the Bregman divergence of f, whose gradient for
an input z is f(z) - x: the squared error for the identity, the cross entropy
for the softmax. The mean (of inputs of f) is a moving average, and each step of
training moves the components along the gradient of the mean divergence.

As in Praxis, gradients have the length sqrt(size), and coefficients begin at
zero in each call. Here each vector has its own length, so that its coefficients
do not depend on the others in its batch, or on padding.

Einsum letters: B batch, T length, D features, K components.
"""

import dataclasses
from typing import Any, Protocol, runtime_checkable

from flax import linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from paxon.layers import summaries
from paxon.layers.norms import batch_norm
from paxon.layers.quantizers import codes
from paxon.sharding import axes, checks, variables

# Least norm of a gradient, and least probability in a logarithm.
_TINY = 1e-6


@runtime_checkable
class Link(Protocol):
  """An activation f, and the potential F whose gradient it is."""

  def activate(self, z: jax.Array) -> jax.Array:
    """Returns f(z)."""
    ...

  def invert(self, x: jax.Array) -> jax.Array:
    """Returns a z with f(z) = x."""
    ...

  def diverge(self, z: jax.Array, x: jax.Array) -> jax.Array:
    """Returns F(z) - F(z') - x (z - z') with f(z') = x, for each vector."""
    ...


@dataclasses.dataclass(frozen=True)
class Identity:
  """f(z) = z, whose divergence is half the squared distance."""

  def activate(self, z: jax.Array) -> jax.Array:
    """Returns `z`."""
    return z

  def invert(self, x: jax.Array) -> jax.Array:
    """Returns `x`."""
    return x

  def diverge(self, z: jax.Array, x: jax.Array) -> jax.Array:
    """Returns half the squared distance."""
    return 0.5 * jnp.sum(jnp.square(z - x), axis=-1)


@dataclasses.dataclass(frozen=True)
class LeakyRelu:
  """f(z) = max(z, slope z).

  Attributes:
    negative_slope: The slope, in (0, 1].
  """

  negative_slope: float

  def __post_init__(self) -> None:
    checks.check_interval(self, "(0, 1]", "negative_slope")

  def activate(self, z: jax.Array) -> jax.Array:
    """Returns f(z)."""
    return jnp.where(z >= 0, z, self.negative_slope * z)

  def invert(self, x: jax.Array) -> jax.Array:
    """Returns the z with f(z) = x."""
    return jnp.where(x >= 0, x, x / self.negative_slope)

  def diverge(self, z: jax.Array, x: jax.Array) -> jax.Array:
    """Returns the divergence; F(z) is z f(z) / 2."""
    other = self.invert(x)
    potential = 0.5 * (z * self.activate(z) - other * x)
    return jnp.sum(potential - x * (z - other), axis=-1)


@dataclasses.dataclass(frozen=True)
class Softmax:
  """The softmax, whose divergence is the relative entropy to x."""

  def activate(self, z: jax.Array) -> jax.Array:
    """Returns the softmax of the last axis."""
    return jax.nn.softmax(z, axis=-1)

  def invert(self, x: jax.Array) -> jax.Array:
    """Returns logits of distributions, with a mean of zero."""
    logits = jnp.log(jnp.maximum(x, _TINY))
    return logits - jnp.mean(logits, axis=-1, keepdims=True)

  def diverge(self, z: jax.Array, x: jax.Array) -> jax.Array:
    """Returns the relative entropy."""
    own = jnp.sum(x * (jnp.log(jnp.maximum(x, _TINY)) - z), axis=-1)
    return jax.scipy.special.logsumexp(z, axis=-1) + own


class BregmanPca(nn.Module):
  """Coefficients of vectors; training also updates the components.

  No gradients flow: the variables are in `batch_stats`, and an optimizer does
  not see them. Training reports the summary `divergence`, its mean.

  Attributes:
    num_components: Number of components, K.
    end_step: Step of training from which mean and components stay as they are.
    start_step: Step at which their updates begin.
    link: The activation whose outputs the vectors are.
    mean_decay: Decay of the average of the mean.
    coefficient_rate: Step size of the coefficients, which decays to zero.
    coefficient_decay: Decay of the average of their gradients.
    coefficient_steps: Number of steps in each call.
    component_rate: Step size of the components.
    component_decay: Decay of the average of their gradients.
    decay_component_rate: Whether `component_rate` decays to zero at `end_step`.
  """

  num_components: int
  end_step: int
  start_step: int = 0
  link: Link = Identity()
  mean_decay: float = 0.99
  coefficient_rate: float = 0.01
  coefficient_decay: float = 0.9
  coefficient_steps: int = 20
  component_rate: float = 0.01
  component_decay: float = 0.9
  decay_component_rate: bool = False

  def __post_init__(self) -> None:
    super().__post_init__()
    checks.check_size(self, "num_components", "coefficient_steps")
    checks.check_positive(self, "coefficient_rate", "component_rate")
    for name in ("mean_decay", "coefficient_decay", "component_decay"):
      checks.check_interval(self, "[0, 1)", name)
    if not 0 <= self.start_step < self.end_step:
      raise ValueError(
        "BregmanPca needs 0 <= start_step < end_step, got"
        f" {self.start_step} and {self.end_step}."
      )

  @nn.compact
  def __call__(
    self,
    x: Float[Array, "batch length features"],
    mask: Bool[Array, "batch length"] | None = None,
    *,
    deterministic: bool = True,
  ) -> Float[Array, "batch length components"]:
    """Returns the coefficients, zero where masked, without gradients.

    Args:
      x: Vectors; may be NaN where they are masked.
      mask: True for real positions; `None` is all.
      deterministic: False (training) updates the variables.
    """
    x = jax.lax.stop_gradient(codes.clear(x, mask))
    kept = jnp.ones(x.shape[:2], bool) if mask is None else mask
    step, mean, components, momentum = self._variables(x.shape[-1])
    can_update = self.is_mutable_collection(batch_norm.COLLECTION)
    is_training = can_update and not (deterministic or self.is_initializing())
    count = jnp.maximum(jnp.sum(kept), 1).astype(x.dtype)
    center = mean.value.astype(x.dtype)
    basis = components.value.astype(x.dtype)
    rate, is_active = self._find_rate(step.value)
    if is_training:
      average = self.link.invert(jnp.sum(x, axis=(0, 1)) / count)
      decay = jnp.where(is_active & jnp.any(kept), self.mean_decay, 1.0)
      center = decay * center + (1 - decay) * average
    solved = jnp.where(kept[..., None], self._solve(x, basis, center), 0)
    if is_training:
      error = self._errors(solved, basis, center, x)
      error = jnp.where(kept[..., None], error, 0)
      gradient = jnp.einsum("BTK,BTD->KD", solved, error) / count
      gradient = _scale(gradient, (0, 1))
      new = 1 - self.component_decay
      momentum.value = self.component_decay * momentum.value + jnp.where(
        is_active, new * gradient, 0
      ).astype(jnp.float32)
      moved = rate * self.component_rate * momentum.value
      components.value = components.value - moved
      mean.value = center.astype(jnp.float32)
      step.value = step.value + 1
    inputs = jnp.einsum("BTK,KD->BTD", solved, basis) + center[None, None]
    diverged = jnp.where(kept, self.link.diverge(inputs, x), 0)
    summaries.summarize(self, "divergence", jnp.sum(diverged) / count)
    return solved

  @nn.compact
  def reconstruct(
    self, coefficients: Float[Array, "batch length components"], features: int
  ) -> Float[Array, "batch length features"]:
    """Returns the approximated vectors."""
    _, mean, components, _ = self._variables(features)
    inputs = jnp.einsum("BTK,KD->BTD", coefficients, components.value)
    return self.link.activate(inputs + mean.value[None, None])

  def _variables(self, features: int) -> tuple[Any, Any, Any, Any]:
    """Returns step, mean [D], components [K,D] and their momentum."""
    zeros = nn.initializers.zeros
    shape = (self.num_components, features)
    names = (None, axes.EMBED)
    kinds = (
      ("step", zeros, (), (), jnp.int32),
      ("mean", zeros, names[1:], shape[1:], jnp.float32),
      ("components", nn.initializers.xavier_uniform(), names, shape, None),
      ("momentum", zeros, names, shape, None),
    )
    made = [
      self.variable(
        batch_norm.COLLECTION,
        name,
        variables.make_boxed_init(
          init, axis_names, shape=size, dtype=dtype or jnp.float32
        ),
      )
      for name, init, axis_names, size, dtype in kinds
    ]
    return made[0], made[1], made[2], made[3]

  @nn.nowrap
  def _errors(
    self, solved: jax.Array, basis: jax.Array, center: jax.Array, x: jax.Array
  ) -> jax.Array:
    """Returns the gradient of the divergence for the input of the link."""
    inputs = jnp.einsum("BTK,KD->BTD", solved, basis) + center[None, None]
    return self.link.activate(inputs) - x

  @nn.nowrap
  def _solve(
    self, x: jax.Array, basis: jax.Array, center: jax.Array
  ) -> jax.Array:
    """Returns the coefficients [B,T,K] after some steps from zero."""

    def move(
      t: jax.Array, carry: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
      solved, average = carry
      error = self._errors(solved, basis, center, x)
      gradient = _scale(jnp.einsum("BTD,KD->BTK", error, basis), (2,))
      decay = self.coefficient_decay
      average = decay * average + (1 - decay) * gradient
      left = 1 - t.astype(x.dtype) / self.coefficient_steps
      return solved - left * self.coefficient_rate * average, average

    zeros = jnp.zeros((*x.shape[:2], self.num_components), x.dtype)
    return jax.lax.fori_loop(0, self.coefficient_steps, move, (zeros, zeros))[0]

  @nn.nowrap
  def _find_rate(self, step: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the factor of the components' rate, and if there are updates."""
    is_active = (step >= self.start_step) & (step < self.end_step)
    rate = jnp.ones((), jnp.float32)
    if self.decay_component_rate:
      done = (step - self.start_step).astype(jnp.float32)
      rate = jnp.maximum(1 - done / (self.end_step - self.start_step), 0)
    return jnp.where(is_active, rate, 0), is_active


def _scale(x: jax.Array, over: tuple[int, ...]) -> jax.Array:
  """Returns gradients whose mean square over these axes is one."""
  norm = jnp.sqrt(jnp.sum(x * x, axis=over, keepdims=True))
  size = 1
  for axis in over:
    size *= x.shape[axis]
  return x / jnp.maximum(norm, _TINY) * size**0.5

"""A layer and an optimizer of Paxon, in a training loop of our own."""

import einops
from flax import linen as nn
import jax
import jax.numpy as jnp
import optax

from lab import runfiles
from paxon.layers import feed_forward
from paxon.learners.optimizers import adamw

NUM_STEPS = 200


class Curve(nn.Module):
  """A curve through points, bent by one layer of Paxon."""

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    """Returns the height at each `x`, both [batch, length]."""
    hidden = nn.Dense(8)(einops.rearrange(x, "b t -> b t 1"))
    hidden = feed_forward.GatedFeedForward(mlp_dim=32)(hidden)
    return nn.Dense(1)(hidden)[..., 0]


def main() -> None:
  """Fits a sine, and asserts that the loss falls."""
  x = jnp.linspace(-3.0, 3.0, 64)[None]
  model = Curve()
  params = nn.unbox(model.init(jax.random.key(0), x))
  optimizer = adamw.AdamW(schedule=lambda step: 1e-2).transform()
  state = optimizer.init(params)

  def loss_fn(params):
    return jnp.mean((model.apply(params, x) - jnp.sin(x)) ** 2)

  @jax.jit
  def step(params, state):
    loss, gradients = jax.value_and_grad(loss_fn)(params)
    updates, state = optimizer.update(gradients, state, params)
    return optax.apply_updates(params, updates), state, loss

  losses = []
  for _ in range(NUM_STEPS):
    params, state, loss = step(params, state)
    losses.append(float(loss))
  print(f"loss: {losses[0]:.4f} -> {losses[-1]:.6f}")
  assert losses[-1] < 0.01 * losses[0], losses

  runfiles.assert_no_tensorflow()
  found = runfiles.packages()
  assert found == {"layers", "learners", "quantization", "sharding"}, found
  # What only the runner needs stays behind.
  assert "fiddle" not in runfiles.wheels()


if __name__ == "__main__":
  main()

"""Tests of updates scaled by the deviation of initial values."""

import dataclasses

import jax
import numpy as np
import pytest

from paxon.learners import schedules, testing
from paxon.learners.optimizers import initial_scaling, sgd

RATE = 0.5


def _scaled():
  return initial_scaling.InitialScaled(
    optimizer=sgd.Sgd(schedule=schedules.Constant(value=RATE))
  )


@dataclasses.dataclass(frozen=True)
class _Normal:
  scale: float

  def __call__(self, key, shape, dtype):
    return self.scale * jax.random.normal(key, shape, dtype)

  def deviation(self, shape):
    return self.scale / len(shape)


def test_the_factor_is_the_deviation_of_a_layer():
  fields = {"axes": ("layers", None, None), "stacked": (("layers", 1),)}
  spec = testing.spec("params/w", (4, 6, 5), initializer=_Normal(0.5), **fields)
  assert _scaled().factor(spec) == 0.25


def test_updates_are_scaled_but_for_vectors():
  specs = {
    "params": {
      "w": testing.spec("params/w", (3, 2), initializer=_Normal(0.2)),
      # Of a stack: a vector in each layer.
      "b": testing.spec(
        "params/b",
        (3, 2),
        axes=("layers", None),
        stacked=(("layers", 1),),
        initializer=_Normal(0.0),
      ),
    }
  }
  transform = _scaled().transform(specs)
  random = np.random.default_rng(0)
  params = jax.tree.map(
    lambda spec: jax.device_put(np.float32(random.normal(size=spec.shape))),
    specs,
  )
  state = transform.init(params)
  for _ in range(3):
    gradients = jax.tree.map(
      lambda x: jax.device_put(np.float32(random.normal(size=x.shape))), params
    )
    updates, state = transform.update(gradients, state, params)
    for name, factor in (("w", 0.1), ("b", 1.0)):
      np.testing.assert_allclose(
        updates["params"][name],
        -RATE * factor * np.asarray(gradients["params"][name], np.float64),
        rtol=1e-6,
      )


@pytest.mark.parametrize(
  "initializer",
  [None, _Normal(0.0), jax.nn.initializers.normal(0.1)],
)
def test_a_deviation_that_is_not_known_is_an_error(initializer):
  spec = testing.spec("params/w", (3, 2), initializer=initializer)
  with pytest.raises(
    ValueError, match=r"params/w has the initializer .*Normal"
  ):
    _scaled().transform({"params": {"w": spec}})
  with pytest.raises(ValueError, match="requires the specs"):
    _scaled().transform()

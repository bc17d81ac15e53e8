"""Tests for updates without an optimizer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.learners import testing, variable_updates
from paxon.sharding import axes, variables

OVERWRITE = variables.UpdateRule.OVERWRITE_WITH_GRADIENT
REPLACE = variables.UpdateRule.REPLACE


def _overwrite(old, gradient, names):
  spec = testing.spec("fp8/x", np.shape(old), axes=names, update=OVERWRITE)
  result = variable_updates.overwrite(
    {"fp8": {"x": jax.device_put(np.float32(old))}},
    {"fp8": {"x": jax.device_put(np.float32(gradient))}},
    specs={"fp8": {"x": spec}, "params": {"y": testing.spec("params/y", ())}},
  )
  return np.asarray(result["fp8"]["x"]).tolist()


def test_the_gradient_is_the_next_value():
  assert _overwrite(2.0, 0.5, ()) == 0.5


def test_a_scale_with_zero_gradient_keeps_its_value():
  assert _overwrite(2.0, 0.0, ()) == 2.0


def test_layers_are_updated_separately():
  assert _overwrite([1.0, 2.0, 3.0], [0.0, 5.0, 0.0], (axes.LAYERS,)) == [
    1.0,
    5.0,
    3.0,
  ]


def test_an_idle_expert_keeps_its_history():
  old = [[[1.0, 1.0], [2.0, 2.0]]]
  new = [[[0.0, 0.0], [0.0, 7.0]]]
  names = (axes.LAYERS, axes.EXPERTS, None)
  assert _overwrite(old, new, names) == [[[1.0, 1.0], [0.0, 7.0]]]


def test_a_history_with_nonzero_gradient_may_contain_zeros():
  assert _overwrite([3.0, 2.0], [0.0, 7.0], (None,)) == [0.0, 7.0]


SPECS = {
  "stats": {
    "mean": testing.spec("stats/mean", (), update=REPLACE),
    "count": testing.spec("stats/count", (), update=REPLACE),
  },
  "params": {"w": testing.spec("params/w", (), trainable=False)},
}
OLD = {
  "stats": {"mean": jnp.float32(1), "count": jnp.float32(2)},
  "params": {"w": jnp.float32(3)},
}


def test_replace_uses_the_values_of_the_forward_pass():
  new = {"stats": {"mean": jnp.float32(9)}}
  result = variable_updates.replace(OLD, new, specs=SPECS)
  assert result == {
    "stats": {"mean": 9.0, "count": 2.0},
    "params": {"w": 3.0},
  }


def test_replace_accepts_boxed_values():
  new = {"stats": {"mean": variables.Variable(jnp.float32(9), ())}}
  result = variable_updates.replace(OLD, new, specs=SPECS)
  assert result["stats"]["mean"] == 9.0


@pytest.mark.parametrize(
  ("new", "message"),
  [
    ({"params": {"w": 1}}, r"params/w, which has the update rule optimizer"),
    ({"sown": {"x": 1}}, r"sown/x, which is not one of the model's variables"),
  ],
)
def test_replace_rejects_other_variables(new, message):
  with pytest.raises(ValueError, match=message):
    variable_updates.replace(OLD, new, specs=SPECS)

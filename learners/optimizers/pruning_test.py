"""Tests for pruning, against its definitions in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from paxon.learners import optimizer_state, schedules, testing
from paxon.learners.optimizers import pruning, sgd

RATE = 0.1
SPECS = {
  "params": {
    "kernel": testing.spec(
      "params/kernel", (2, 8, 3), stacked=(("layers", 1),), regularized=True
    ),
    "bias": testing.spec("params/bias", (4,)),
  }
}
KERNEL = pruning.PruningRule(pattern=".*/kernel", structure=pruning.Weights())
PAIRS = pruning.PruningRule(pattern=".*/kernel", structure=pruning.Groups())


def _random(seed):
  random = np.random.default_rng(seed)
  return jax.tree.map(
    lambda s: jnp.asarray(random.normal(size=s.shape), jnp.float32), SPECS
  )


def _optimizer():
  return sgd.Sgd(schedule=schedules.Constant(value=RATE), momentum=0.9)


def _smallest_pruned(x, share):
  """The mask of each layer [2, 8, 3] without that share of its weights."""
  flat = np.abs(x).reshape(len(x), -1)
  count = int(np.round(share * flat.shape[1]))
  mask = np.ones(flat.shape, bool)
  for layer, order in zip(mask, np.argsort(flat, 1), strict=True):
    layer[order[:count]] = False
  return mask.reshape(x.shape)


def _two_of_four(x):
  """The mask of the two largest of each four inputs."""
  mask = np.zeros(x.shape, bool)
  for layer in range(2):
    for group in range(2):
      for output in range(3):
        rows = np.arange(4 * group, 4 * group + 4)
        kept = rows[np.argsort(np.abs(x[layer, rows, output]))[2:]]
        mask[layer, kept, output] = True
  return mask


def _run(pruned, params, steps):
  """Yields the parameters after each update, and the state."""
  transform = pruned.transform(SPECS)
  state = transform.init(params)
  update = jax.jit(transform.update)
  for t in range(steps):
    updates, state = update(_random(100 + t), state, params)
    params = optax.apply_updates(params, updates)
    yield params, state


@pytest.mark.parametrize("initial", [0.1, 0.0])
def test_gradual_pruning_is_that_of_its_definition(initial):
  pruned = pruning.Pruned(
    optimizer=_optimizer(),
    rules=(KERNEL,),
    first_step=2,
    last_step=8,
    every_steps=3,
    initial_sparsity=initial,
    sparsity=0.7,
  )
  params = _random(0)
  w = np.asarray(params["params"]["kernel"], "f8")
  bias = np.asarray(params["params"]["bias"], "f8")
  mask, moment, bias_moment = np.ones(w.shape, bool), 0.0, 0.0
  shares = {}
  for t, (made, state) in enumerate(_run(pruned, params, 12)):
    g = jax.tree.map(lambda x: np.asarray(x, "f8"), _random(100 + t))["params"]
    moment = 0.9 * moment + g["kernel"] * mask
    bias_moment = 0.9 * bias_moment + g["bias"]
    w = (w - RATE * moment) * mask
    bias -= RATE * bias_moment
    if t in (2, 5, 8):
      share = 0.7 + (initial - 0.7) * (1 - (t - 2) / 6) ** 3
      mask = _smallest_pruned(w, share)
      shares[t] = 1 - mask.mean()
    w *= mask
    got = made["params"]
    np.testing.assert_allclose(got["kernel"], w, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(state.masks["params"]["kernel"], mask)
    np.testing.assert_allclose(got["bias"], bias, rtol=1e-5, atol=1e-6)
    assert np.all(np.asarray(got["kernel"])[~mask] == 0)
  assert shares[8] > shares[5] > shares[2]
  assert shares[8] == pytest.approx(0.7, abs=0.03)


def test_straight_through_is_that_of_its_definition():
  decay = 0.05
  pruned = pruning.Pruned(
    optimizer=_optimizer(), rules=(PAIRS,), straight_through=decay
  )
  params = _random(1)
  dense = np.asarray(params["params"]["kernel"], "f8")
  mask, moment, seen = np.ones(dense.shape, bool), 0.0, set()
  for t, (made, state) in enumerate(_run(pruned, params, 12)):
    g = np.asarray(_random(100 + t)["params"]["kernel"], "f8")
    moment = 0.9 * moment + g + decay * (1 - mask) * dense
    dense = dense - RATE * moment
    mask = _two_of_four(dense)
    kernel = made["params"]["kernel"]
    np.testing.assert_allclose(kernel, mask * dense, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(
      state.dense["params"]["kernel"], dense, rtol=1e-5, atol=1e-5
    )
    assert np.all(np.asarray(kernel)[~mask] == 0)
    seen.add(mask.tobytes())
  # Pruned weights may come back.
  assert len(seen) > 3


def test_pruned_weights_of_a_fixed_mask_stay_zero():
  pruned = pruning.Pruned(
    optimizer=_optimizer(), rules=(PAIRS,), first_step=1, last_step=1
  )
  params = _random(2)
  runs = list(_run(pruned, params, 6))
  assert np.all(np.asarray(runs[0][0]["params"]["kernel"]) != 0)
  masks = [np.asarray(made["params"]["kernel"]) != 0 for made, _ in runs[1:]]
  for mask in masks:
    np.testing.assert_array_equal(mask, masks[0])
    assert mask.mean() == 0.5


def test_channels_with_the_smallest_norms_are_pruned():
  x = np.float32(np.random.default_rng(3).normal(size=(6, 5)))
  mask = pruning.Channels(axis=1).mask(jnp.asarray(x), jnp.float32(0.4))
  order = np.argsort(np.linalg.norm(x.astype("f8"), axis=0))
  expected = np.ones((6, 5), bool)
  expected[:, order[:2]] = False
  np.testing.assert_array_equal(mask, expected)


def test_equal_weights_are_pruned_to_the_share():
  """Such as the zeros with which a projection begins."""
  zeros = jnp.zeros((4, 5))
  mask = pruning.Weights().mask(zeros, jnp.float32(0.3))
  assert int(mask.sum()) == 14
  mask = pruning.Groups(keep=1, of=4).mask(zeros, jnp.float32(0.3))
  assert int(mask.sum()) == 5


def test_bfloat16_weights_become_zero():
  pruned = pruning.Pruned(optimizer=_optimizer(), rules=(PAIRS,))
  params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), _random(4))
  transform = pruned.transform(SPECS)
  updates, state = transform.update(
    _random(5), optimizer_state.initial(transform, params), params
  )
  made = jax.tree.map(
    lambda p, u: (p.astype(jnp.float32) + u).astype(p.dtype), params, updates
  )
  mask = np.asarray(state.masks["params"]["kernel"])
  assert np.all((np.asarray(made["params"]["kernel"]) != 0) == mask)


def test_masks_are_sharded_as_their_parameters():
  pruned = pruning.Pruned(
    optimizer=_optimizer(), rules=(PAIRS,), straight_through=2e-4
  )
  found = optimizer_state.specs(pruned.transform(SPECS), SPECS)
  kernel = SPECS["params"]["kernel"]
  assert found.masks["params"]["kernel"].axes == kernel.axes
  assert found.masks["params"]["kernel"].dtype == bool
  assert found.dense["params"]["kernel"].axes == kernel.axes
  assert list(found.masks["params"]) == ["kernel"]


def _pruned(**fields):
  return pruning.Pruned(
    **{"optimizer": _optimizer(), "rules": (PAIRS,), **fields}
  )


def _rule(pattern, structure):
  return (pruning.PruningRule(pattern=pattern, structure=structure),)


@pytest.mark.parametrize(
  ("make", "message"),
  [
    (lambda: pruning.Groups(keep=4, of=4), r"got keep=4, of=4"),
    (lambda: _pruned(rules=()), r"rules must not be empty"),
    (lambda: _pruned(sparsity=1.0), r"sparsity < 1, got 0\.0 and 1\.0"),
    (lambda: _pruned(first_step=5, last_step=4), r"must not be before first_s"),
    (lambda: _pruned(every_steps=0), r"every_steps"),
    (lambda: _pruned().transform(), r"need the specs"),
    (
      lambda: _pruned(rules=_rule("(", pruning.Weights())),
      r"must be a regular expression",
    ),
    (
      lambda: _pruned(rules=_rule("w", pruning.Weights())).transform(SPECS),
      r"'w' matches no variable .*, such as 'params/",
    ),
    (
      lambda: _pruned(rules=_rule(".*", pruning.Groups(of=5))).transform(SPECS),
      r"Groups\.of \(5\) must divide dimension 0 of params/\w+, which has size",
    ),
    (
      lambda: _pruned(
        rules=_rule(".*/bias", pruning.Channels(axis=1))
      ).transform(SPECS),
      r"Channels\.axis \(1\) must be a dimension of params/bias",
    ),
  ],
)
def test_rejects(make, message):
  with pytest.raises(ValueError, match=message):
    make()

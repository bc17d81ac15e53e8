"""Tests of Pax's routers, against their definition in float64 numpy."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers.moe import (
  balance,
  dispatch,
  pax_routers,
  routers,
  routing,
  testing,
)

B, T, D, E = 2, 8, 5, 4
_SEGMENTS = np.array([[1, 1, 1, 2, 2, 2, 2, 0], [1, 1, 0, 0, 0, 0, 0, 0]])


def _x():
  return jax.random.normal(jax.random.key(0), (B, T, D))


def _route(router, x=None, *, params=None, rng=None, num_experts=E):
  x = _x() if x is None else x
  segments = jnp.asarray(_SEGMENTS)
  args = (x, segments != 0, segments)
  if params is None:
    init = functools.partial(router.init, num_experts=num_experts)
    params = jax.jit(init)(jax.random.key(1), *args)

  @jax.jit
  def run(params, *args):
    return router.apply(
      params,
      *args,
      num_experts=num_experts,
      deterministic=rng is None,
      rngs={} if rng is None else {"routing": rng},
    )

  return run(params, *args), params


def _scores(params, x=None, path=("logits",)):
  x = _x() if x is None else x
  node = params["params"]
  for name in path:
    node = node[name]
  kernel = node["kernel"]
  kernel = np.asarray(getattr(kernel, "value", kernel), np.float64)
  return testing.softmax(np.asarray(x, np.float64) @ kernel)


def _dense(result):
  """Returns the weight of each expert, [B,T,E]."""
  dense = np.zeros((B, T, E + 1))
  ids, weights = np.asarray(result.ids), np.asarray(result.weights)
  for b, t, j in np.ndindex(ids.shape):
    dense[b, t, ids[b, t, j]] += weights[b, t, j]
  assert not dense[..., E].any()
  return dense[..., :E]


def test_top_two():
  result, params = _route(pax_routers.TopTwo())
  scores, ids = _scores(params), np.asarray(result.ids)
  expected = np.zeros((B, T, E))
  for b, t in np.argwhere(_SEGMENTS != 0):
    p = scores[b, t].copy()
    first = p.argmax()
    rest = p.copy()
    rest[first] = 0
    second = rest.argmax()
    expected[b, t, first] = p[first] / (p[first] + p[second] + 1e-9)
    expected[b, t, second] = p[second] / (p[first] + p[second] + 1e-9)
    assert list(ids[b, t]) == [first, second]
  np.testing.assert_allclose(_dense(result), expected, rtol=1e-5)


def test_top_two_of_equal_and_of_saturated_scores():
  router = pax_routers.TopTwo()
  params = {"params": {"logits": {"kernel": jnp.zeros((D, E))}}}
  result, _ = _route(router, params=params)
  np.testing.assert_array_equal(result.ids[0, 0], [0, 1])
  params["params"]["logits"]["kernel"] = jnp.zeros((D, E)).at[:, 0].set(1e4)
  result, _ = _route(router, jnp.ones((B, T, D)), params=params)
  # All others underflow, so the second is expert 0 again, with weight 0.
  np.testing.assert_array_equal(result.ids[0, 0], [0, 0])
  np.testing.assert_allclose(result.weights[0, 0], [1, 0])


def _draw(router, params, x):
  apply = functools.partial(router.apply, num_experts=4, deterministic=False)
  mask, rngs = jnp.ones(x.shape[:2], jnp.bool_), {"routing": jax.random.key(0)}
  return jax.jit(apply)(params, x, mask, rngs=rngs)


def test_sampled_second_expert():
  router = pax_routers.TopTwo(second=pax_routers.SecondExpert.SAMPLING)
  params = {
    "params": {"logits": {"kernel": jnp.log(jnp.array([[4.0, 3, 2, 1]]))}}
  }
  x = jnp.ones((1, 4000, 1))
  ids = _draw(router, params, x).ids
  assert (np.asarray(ids[..., 0]) == 0).all()
  shares = np.bincount(np.asarray(ids[0, :, 1]), minlength=4) / 4000
  np.testing.assert_allclose(shares, [0, 3 / 6, 2 / 6, 1 / 6], atol=0.03)


def test_random_second_expert():
  router = pax_routers.TopTwo(second=pax_routers.SecondExpert.RANDOM)
  params = {
    "params": {"logits": {"kernel": jnp.log(jnp.array([[8.0, 1, 0.5, 0.5]]))}}
  }
  result = _draw(router, params, jnp.ones((1, 4000, 1)))
  kept = np.asarray(result.ids[0, :, 1]) == 1
  # GShard: with probability 2 g_2, which is 2 / 9.
  np.testing.assert_allclose(kept.mean(), 2 / 9, atol=0.03)
  weight = np.asarray(result.weights[0, :, 1])
  assert (weight[~kept] == 0).all()
  np.testing.assert_allclose(weight[kept], 1 / 9, rtol=1e-5)


@pytest.mark.parametrize("floor_first", [True, False])
def test_expert_choice(floor_first):
  groups = routing.TokenGroups(num_groups=2)
  router = pax_routers.ExpertChoice(
    factor=1.9, groups=groups, floor_first=floor_first
  )
  result, params = _route(router)
  scores = _scores(params)
  # int(8 // 4 * 1.9) = 3; int(8 * 1.9 / 4) = 3, rounded up to 4.
  size = 3 if floor_first else 4
  expected = np.zeros((B, T, E))
  for b, e in np.ndindex(B, E):
    p = scores[b, :, e] * (1 if floor_first else _SEGMENTS[b] != 0)
    # Ascending and stable: the last of equals is the largest.
    for t in np.argsort(p, kind="stable")[-size:]:
      expected[b, t, e] = scores[b, t, e] * (_SEGMENTS[b, t] != 0)
  np.testing.assert_allclose(_dense(result), expected, rtol=1e-5)


def test_expert_choice_of_equal_tokens_takes_the_last():
  router = pax_routers.ExpertChoice(factor=1.0, floor_first=True)
  params = {"params": {"logits": {"kernel": jnp.zeros((D, E))}}}
  segments = jnp.ones((1, T), jnp.bool_)
  apply = jax.jit(functools.partial(router.apply, num_experts=E))
  ids = apply(params, _x()[:1], segments).ids
  assert (np.asarray(ids)[0, :-2] == E).all()
  np.testing.assert_array_equal(ids[0, -2:], [list(range(E))] * 2)


def test_dense_top_two():
  result, params = _route(pax_routers.DenseTopTwo())
  scores = _scores(params) * (_SEGMENTS != 0)[..., None]
  second = np.sort(scores, -1)[..., -2:-1]
  expected = np.where(scores >= second, scores, 0)
  expected /= expected.sum(-1, keepdims=True) + 1e-12
  np.testing.assert_allclose(_dense(result), expected, rtol=1e-5)


def test_dense_top_two_keeps_three_if_two_tie():
  params = {
    "params": {"logits": {"kernel": jnp.log(jnp.array([[4.0, 4, 2, 1]]))}}
  }
  result = pax_routers.DenseTopTwo().apply(
    params, jnp.ones((1, 1, 1)), jnp.ones((1, 1), jnp.bool_), num_experts=4
  )
  np.testing.assert_allclose(
    result.weights[0, 0], [0.4, 0.4, 0.2, 0], rtol=1e-5
  )


def test_sentences_are_routed_by_their_mean():
  router = pax_routers.BySentence(router=routers.TopK(k=2))
  result, params = _route(router)
  x = np.asarray(_x(), np.float64)
  means = np.zeros_like(x)
  for b, t in np.argwhere(_SEGMENTS != 0):
    means[b, t] = x[b][_SEGMENTS[b] == _SEGMENTS[b, t]].mean(0)
  scores = _scores(params, means, ("router", "logits"))
  best = np.argsort(-scores, -1)[..., :2]
  kept = _SEGMENTS != 0
  np.testing.assert_array_equal(np.asarray(result.ids)[kept], best[kept])
  assert (np.asarray(result.ids)[~kept] == E).all()


def test_group_limited_choice():
  groups = routers.ExpertGroups(num_groups=4, num_chosen=2, num_summed=2)
  scores = np.random.default_rng(0).normal(size=(3, 5, 12))
  limited = np.asarray(groups.limit(jnp.asarray(scores, jnp.float32), 3))
  for at in np.ndindex(3, 5):
    by_group = scores[at].reshape(4, 3)
    value = np.sort(by_group, -1)[:, -2:].sum(-1)
    chosen = np.argsort(-value)[:2]
    finite = np.isfinite(limited[at].reshape(4, 3))
    assert sorted(chosen) == list(np.flatnonzero(finite.all(-1)))
    assert finite.any(-1).sum() == 2


def test_bias_of_selection():
  """Bias selects, does not weigh, and moves by the sign of the load."""
  rate = 0.5
  router = routers.TopK(
    k=1, normalize=False, bias=balance.SelectionBias(rate=rate)
  )
  x, segments = _x(), jnp.asarray(_SEGMENTS)
  args = (x, segments != 0)
  init = jax.jit(functools.partial(router.init, num_experts=E))
  variables = init(jax.random.key(1), *args)
  apply = jax.jit(
    functools.partial(router.apply, num_experts=E, mutable=["balance"])
  )
  scores, bias = _scores(variables), np.zeros(E)
  state = jax.tree.map(lambda v: v, variables)
  for _ in range(3):
    ids = (scores + bias).argmax(-1)
    result, new = apply(state, *args)
    kept = _SEGMENTS != 0
    np.testing.assert_array_equal(np.asarray(result.ids)[kept, 0], ids[kept])
    np.testing.assert_allclose(
      np.asarray(result.weights)[kept, 0],
      np.take_along_axis(scores, ids[..., None], -1)[kept, 0],
      rtol=1e-5,
    )
    counts = np.bincount(ids[kept], minlength=E)
    bias += rate * np.sign(counts.mean() - counts)
    state = {**variables, **new}
  # Evaluation uses the updated bias and changes nothing.
  ids = (scores + bias).argmax(-1)
  result = router.apply(state, *args, num_experts=E)
  np.testing.assert_array_equal(np.asarray(result.ids)[kept, 0], ids[kept])


def test_averages_over_layers_are_of_the_whole_batch():
  for fields in (
    {"scope": balance.Scope.SEQUENCE},
    {"groups": routing.TokenGroups()},
  ):
    with pytest.raises(ValueError, match="across_layers averages over the"):
      balance.LoadBalance(weight=1.0, across_layers=True, **fields)


def test_load_balance_forms():
  result, params = _route(routers.TopK(k=2))
  p, kept = _scores(params), _SEGMENTS != 0
  ids = np.asarray(result.ids)
  first = np.eye(E + 1)[ids[..., 0]][..., :E]
  both = np.eye(E + 1)[ids][..., :E].sum(-2)
  tokens = kept.sum()
  f, mean = both[kept].sum(0) / tokens, p[kept].mean(0)
  forms = {
    balance.switch(1.0): E * (f / 2 * mean).sum(),
    balance.LoadBalance(weight=1.0, per_choice=False): E * (f * mean).sum(),
    balance.gshard(0.5, groups=routing.TokenGroups(num_groups=2)): 0.5
    * E
    * np.mean(
      [
        (first[b].sum(0) / T * (p[b] * kept[b][:, None]).sum(0) / T).sum()
        for b in range(B)
      ]
    ),
    balance.deepseek(1.0): E
    * np.mean(
      [
        (both[b].sum(0) / 2 / kept[b].sum() * p[b][kept[b]].mean(0)).sum()
        for b in range(B)
      ]
    ),
  }
  for loss, expected in forms.items():
    np.testing.assert_allclose(jax.jit(loss)(result), expected, rtol=1e-5)
  # A batch of a size that the mesh does not divide ends with padding.
  padded = jax.tree.map(
    lambda x: jnp.pad(x, ((0, 3), *[(0, 0)] * (x.ndim - 1))), result
  )
  none = jnp.full_like(result.ids[:1], E).repeat(3, axis=0)
  ids = jnp.concatenate([result.ids, none])
  padded = dataclasses.replace(padded, ids=ids)
  for loss in balance.switch(1.0), balance.deepseek(1.0):
    np.testing.assert_allclose(loss(padded), forms[loss], rtol=1e-5)
  logits = np.asarray(result.logits, np.float64)[kept]
  np.testing.assert_allclose(
    jax.jit(balance.ZLoss(weight=2.0))(result),
    2 * np.mean(np.log(np.exp(logits).sum(-1)) ** 2),
    rtol=1e-5,
  )


@pytest.mark.parametrize(
  "router",
  [
    pax_routers.DenseTopTwo(),
    pax_routers.ExpertChoice(factor=1.5, floor_first=True),
  ],
)
def test_load_balance_of_routers_with_any_number_of_choices(router):
  result, params = _route(router)
  p, kept = _scores(params), _SEGMENTS != 0
  chosen = _dense(result) > 0
  # The first choice is the chosen expert with the highest probability.
  best = np.where(chosen, p, -1).argmax(-1)
  first = np.eye(E)[best] * chosen.any(-1, keepdims=True)
  tokens, mean = kept.sum(), p[kept].mean(0)
  shares = chosen[kept].sum(0) / max(chosen[kept].sum(), tokens)
  np.testing.assert_allclose(
    jax.jit(balance.switch(1.0))(result), E * (shares * mean).sum(), rtol=1e-5
  )
  expected = E * (first[kept].sum(0) * p[kept].sum(0)).sum() / (B * T) ** 2
  actual = jax.jit(balance.gshard(1.0))(result)
  # A token without an expert has no first choice.
  expected /= max(first[kept].sum() / tokens, 1)
  np.testing.assert_allclose(actual, expected, rtol=1e-5)


@pytest.mark.parametrize(
  ("router", "weigh"),
  [
    pytest.param(
      routers.TopK(k=2),
      lambda z: _normalized(testing.softmax(z), 2),
      id="softmax",
    ),
    pytest.param(
      routers.TopK(k=2, score=jax.nn.sigmoid, epsilon=1e-20, scale=2.5),
      lambda z: 2.5 * _normalized(1 / (1 + np.exp(-z)), 2),
      id="sigmoid",
    ),
    pytest.param(
      routers.TopK(k=3, normalize=False),
      lambda z: _top(testing.softmax(z), 3),
      id="not normalized",
    ),
    pytest.param(
      pax_routers.TopTwo(),
      lambda z: _normalized(testing.softmax(z), 2),
      id="top two",
    ),
    pytest.param(
      pax_routers.DenseTopTwo(),
      lambda z: _normalized(testing.softmax(z), 2),
      id="dense top two",
    ),
    pytest.param(
      routers.TopK(k=2, logits=routers.Logits(cap=0.5)),
      lambda z: _normalized(testing.softmax(0.5 * np.tanh(z / 0.5)), 2),
      id="capped",
    ),
  ],
)
def test_gradients_match_finite_differences(router, weigh):
  """Of the kernel, through the weights; choices are constant."""
  x = np.asarray(_x(), np.float64)
  factor = np.random.default_rng(2).normal(size=(B, T, E))
  kept = (_SEGMENTS != 0)[..., None]
  args = jnp.asarray(x, jnp.float32), jnp.asarray(_SEGMENTS != 0)
  init = jax.jit(functools.partial(router.init, num_experts=E))
  params = init(jax.random.key(1), *args)

  def loss(params):
    result = router.apply(params, *args, num_experts=E)
    dense = routing.one_hot(result.ids, E) * result.weights[..., None]
    return jnp.sum(dense.sum(-2) * jnp.asarray(factor, jnp.float32))

  gradient = jax.tree.leaves(jax.jit(jax.grad(loss))(params))[0]
  kernel = np.asarray(jax.tree.leaves(params)[0], np.float64)

  def value(kernel):
    return np.sum(weigh(x @ kernel) * factor * kept)

  expected = np.zeros_like(kernel)
  for at in np.ndindex(kernel.shape):
    step = np.zeros_like(kernel)
    step[at] = 1e-6
    expected[at] = (value(kernel + step) - value(kernel - step)) / 2e-6
  np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-5)


def _top(scores, k):
  order = np.argsort(-scores, -1, kind="stable")[..., :k]
  return np.where(np.eye(E)[order].sum(-2) > 0, scores, 0)


def _normalized(scores, k):
  top = _top(scores, k)
  return top / top.sum(-1, keepdims=True)


def test_jitter_is_uniform_in_training_and_absent_in_evaluation():
  router = routers.TopK(k=2, logits=routers.Logits(jitter=0.1))
  x = jnp.ones((1, 2000, 1))
  mask = jnp.ones((1, 2000), jnp.bool_)
  params = {"params": {"logits": {"kernel": jnp.ones((1, E))}}}

  def logits(rngs=None):
    apply = functools.partial(
      router.apply, num_experts=E, deterministic=rngs is None
    )
    found = jax.jit(apply)(params, x, mask, rngs=rngs)
    return np.asarray(found.logits)[0, :, 0]

  noisy = np.sort(logits({"routing": jax.random.key(0)}))
  assert noisy[0] >= 0.9
  assert noisy[-1] <= 1.1
  # Kolmogorov-Smirnov, at a significance of about 1e-4.
  quantiles = (noisy - 0.9) / 0.2
  steps = np.arange(2000) / 2000
  assert np.abs(quantiles - steps).max() < 2.2 / np.sqrt(2000)
  np.testing.assert_array_equal(logits(), 1)


def test_means_of_long_sentences_are_float32():
  T = 1024
  x = np.random.default_rng(0).normal(size=(1, T, D)) + 1
  x = np.asarray(jnp.asarray(x, jnp.bfloat16), np.float64)
  router = pax_routers.BySentence(router=routers.TopK(k=1))
  args = jnp.asarray(x, jnp.bfloat16), jnp.ones((1, T), jnp.bool_)
  init = jax.jit(functools.partial(router.init, num_experts=E))
  params = init(jax.random.key(1), *args)
  apply = jax.jit(functools.partial(router.apply, num_experts=E))
  result = apply(params, *args)
  kernel = np.asarray(jax.tree.leaves(params)[0], np.float64)
  np.testing.assert_allclose(
    result.logits[0, 0], x[0].mean(0) @ kernel, rtol=1e-5, atol=1e-6
  )


@pytest.mark.parametrize(
  ("build", "message"),
  [
    (
      lambda: _route(routers.TopK(k=5)),
      r"TopK\.k \(5\) must not be above num_experts \(4\)",
    ),
    (
      lambda: _route(pax_routers.TopTwo(), num_experts=1),
      r"TopTwo needs at least 2 experts",
    ),
    (
      lambda: _route(pax_routers.ExpertChoice(factor=9.0)),
      r"ExpertChoice\.factor \(9\.0\) gives each of 4 experts a capacity of 36",
    ),
    (
      lambda: routers.ExpertGroups(num_groups=2, num_chosen=3),
      r"num_chosen \(3\) must not be above num_groups \(2\)",
    ),
    (
      lambda: dispatch.Capacity(minimum=0),
      r"minimum must be positive, got 0",
    ),
    (
      lambda: routing.TokenGroups(num_groups=3).count(16),
      r"cuts 16 tokens into 3 groups",
    ),
    (
      lambda: balance.switch(-1.0),
      r"LoadBalance\.weight must not be negative, got -1\.0",
    ),
  ],
)
def test_errors(build, message):
  with pytest.raises(ValueError, match=message):
    build()

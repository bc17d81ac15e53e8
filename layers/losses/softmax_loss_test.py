"""Tests for the chunked loss: numbers, gradients, memory, errors."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from paxon.layers import precision, testing
from paxon.layers.losses import cross_entropy, softmax_loss

BATCH, LENGTH, EMBED, VOCAB = 2, 7, 5, 11
TARGETS = np.random.default_rng(2).integers(0, VOCAB, (BATCH, LENGTH))
TARGETS = testing.array(TARGETS, jnp.int32)
WEIGHTS = testing.array([[1, 1, 0, 0.5, 1, 1, 1], [1, 0, 0, 0, 2, 1, 0]])
WEIGHTS = WEIGHTS.astype(jnp.float32)


def _loss(**fields):
  return softmax_loss.SoftmaxLoss(**fields)


def _head(variables, x):
  kernel = variables["params"]["kernel"].astype(x.dtype)
  return jnp.einsum(
    "BTD,DV->BTV",
    x,
    kernel,
    preferred_element_type=precision.at_least_float32(x.dtype),
  )


def _kernel(scale=1.0):
  return {"params": {"kernel": scale * testing.normal(EMBED, VOCAB, seed=3)}}


def _x(dtype=jnp.float32):
  return testing.normal(BATCH, LENGTH, EMBED, dtype=dtype)


def _outputs(loss, variables, x, weights=WEIGHTS, targets=TARGETS):
  return loss(_head, variables, x, targets=targets, weights=weights)


@functools.partial(jax.jit, static_argnums=0)
def _gradients(loss, variables, x, weights=WEIGHTS, targets=TARGETS):
  """Returns the outputs, and gradients by kernel, x and weights."""

  def total(variables, x, weights):
    output = _outputs(loss, variables, x, weights, targets)
    return output.loss, output

  gradient = jax.value_and_grad(total, argnums=(0, 1, 2), has_aux=True)
  (_, output), bars = gradient(variables, x, weights)
  return output, (bars[0]["params"]["kernel"], *bars[1:])


def _oracle(loss, variables, x, weights=WEIGHTS, targets=TARGETS):
  """The definition and its derivatives in float64, one token at a time."""
  kernel = np.asarray(variables["params"]["kernel"], np.float64)
  x, weights = np.asarray(x, np.float64), np.asarray(weights, np.float64)
  total, nlls = 0.0, np.zeros(weights.shape)
  bars = [np.zeros(a.shape) for a in (kernel, x, weights)]
  for at in np.ndindex(weights.shape):
    logits = x[at] @ kernel
    log_z = logits.max() + np.log(np.exp(logits - logits.max()).sum())
    if loss.smooth_others_only:
      wanted = np.full(len(logits), loss.label_smoothing / (len(logits) - 1))
      wanted[int(targets[at])] = 1 - loss.label_smoothing
    else:
      wanted = np.full(len(logits), loss.label_smoothing / len(logits))
      wanted[int(targets[at])] += 1 - loss.label_smoothing
    token = log_z - wanted @ logits + loss.z_loss_weight * log_z**2
    nlls[at] = log_z - logits[int(targets[at])]
    share = np.exp(logits - log_z)
    bar = share - wanted + 2 * loss.z_loss_weight * log_z * share
    total += weights[at] * token
    bars[0] += weights[at] * np.outer(x[at], bar)
    bars[1][at] = weights[at] * kernel @ bar
    bars[2][at] = token
  return total, nlls, bars


OPTIONS = [
  pytest.param({}, id="plain"),
  pytest.param({"label_smoothing": 0.2}, id="smoothing"),
  pytest.param(
    {"label_smoothing": 0.2, "smooth_others_only": True}, id="of others"
  ),
  pytest.param({"z_loss_weight": 0.03}, id="z loss"),
  pytest.param({"label_smoothing": 0.1, "z_loss_weight": 0.01}, id="both"),
]


@pytest.mark.nightly(keep=7)
@pytest.mark.parametrize("fields", OPTIONS)
@pytest.mark.parametrize("chunk_length", [None, 1, 3])
def test_matches_numpy(fields, chunk_length):
  loss = _loss(chunk_length=chunk_length, **fields)
  total, nlls, bars = _oracle(loss, _kernel(), _x())
  output, actual = _gradients(loss, _kernel(), _x())
  np.testing.assert_allclose(output.loss, total, rtol=1e-6)
  np.testing.assert_allclose(output.token_nll, nlls, rtol=1e-5, atol=1e-6)
  for bar, expected in zip(actual, bars, strict=True):
    np.testing.assert_allclose(bar, expected, rtol=1e-5, atol=1e-5)
  assert not np.any(actual[1][WEIGHTS == 0])


@pytest.mark.parametrize("chunk_length", [2, 4, 7, 512])
def test_chunks_change_nothing(chunk_length):
  fields = {"label_smoothing": 0.1, "z_loss_weight": 0.01}
  whole = _gradients(_loss(chunk_length=None, **fields), _kernel(), _x())
  parts = _gradients(
    _loss(chunk_length=chunk_length, **fields), _kernel(), _x()
  )
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6),
    parts,
    whole,
  )


def test_a_chunk_is_no_longer_than_asked():
  lengths = []

  def head(variables, x):
    lengths.append(x.shape[1])
    return _head(variables, x)

  for chunk_length in (1, 3, 4, 6, 7, 8, None):
    loss = _loss(chunk_length=chunk_length)
    call = functools.partial(loss, head, targets=TARGETS, weights=WEIGHTS)
    jax.eval_shape(call, _kernel(), _x())
  # Of nearly equal chunks, so that little is padded.
  assert lengths == [1, 3, 4, 4, 7, 7, 7]


def test_evaluation_is_the_same_without_a_gradient():
  loss = _loss(chunk_length=3, z_loss_weight=0.1)
  trained, _ = _gradients(loss, _kernel(), _x())
  evaluated = jax.jit(_outputs, static_argnums=0)(loss, _kernel(), _x())
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6),
    trained,
    evaluated,
  )


def test_gradients_match_finite_differences():
  loss = _loss(label_smoothing=0.1, z_loss_weight=0.05, chunk_length=3)

  def total(values):
    output = _outputs(loss, values[0], values[1], values[2])
    return jnp.sin(output.loss)

  testing.assert_gradients_match(
    total, (_kernel(), _x(), WEIGHTS), has_rule=True
  )


def test_matches_optax():
  smoothing = 0.15
  output, _ = _gradients(_loss(label_smoothing=smoothing), _kernel(), _x())

  @jax.jit
  def by_optax(kernel, x):
    logits = _head(kernel, x)
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, TARGETS)
    labels = jax.nn.one_hot(TARGETS, VOCAB)
    smooth = optax.softmax_cross_entropy(
      logits, optax.smooth_labels(labels, smoothing)
    )
    return nll, smooth

  nll, smooth = by_optax(_kernel(), _x())
  np.testing.assert_allclose(output.token_nll, nll, rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(output.loss, np.sum(smooth * WEIGHTS), rtol=1e-5)


def test_z_loss_is_the_weighted_square_of_the_log_normalizer():
  output, _ = _gradients(_loss(z_loss_weight=1e-2), _kernel(), _x())
  log_z = jax.nn.logsumexp(_head(_kernel(), _x()), axis=-1)
  np.testing.assert_allclose(output.token_z_loss, 1e-2 * log_z**2, rtol=1e-5)
  off, _ = _gradients(_loss(), _kernel(), _x())
  assert not np.any(off.token_z_loss)


@pytest.mark.parametrize("chunk_length", [None, 3])
def test_huge_logits_keep_exact_gradients(chunk_length):
  loss = _loss(chunk_length=chunk_length)
  variables = _kernel(1e4)
  total, nlls, bars = _oracle(loss, variables, _x())
  output, actual = _gradients(loss, variables, _x())
  np.testing.assert_allclose(output.loss, total, rtol=1e-5)
  # An error of one rounding of a logit, which is of size 1e4.
  np.testing.assert_allclose(output.token_nll, nlls, rtol=1e-5, atol=1e-2)
  for bar, expected in zip(actual[:2], bars[:2], strict=True):
    size = np.abs(expected).max()
    np.testing.assert_allclose(bar, expected, atol=1e-2 * size)


def test_hits_are_those_of_argmax():
  output, _ = _gradients(_loss(chunk_length=2), _kernel(), _x())
  best = jnp.argmax(_head(_kernel(), _x()), axis=-1)
  np.testing.assert_array_equal(output.token_hits, best == TARGETS)


def test_bfloat16_states_lose_no_more_than_their_rounding():
  loss = _loss(chunk_length=2)
  x = _x(jnp.bfloat16)
  output, (kernel_bar, x_bar, _) = _gradients(loss, _kernel(), x)
  rounded = jax.tree.map(lambda k: k.astype(jnp.bfloat16), _kernel())
  total, _, bars = _oracle(loss, rounded, x)
  assert output.loss.dtype == kernel_bar.dtype == jnp.float32
  assert x_bar.dtype == jnp.bfloat16
  np.testing.assert_allclose(output.loss, total, rtol=1e-5)
  np.testing.assert_allclose(kernel_bar, bars[0], rtol=2e-2, atol=2e-2)
  x_bar = x_bar.astype(jnp.float32)
  np.testing.assert_allclose(x_bar, bars[1], rtol=2e-2, atol=2e-2)


def test_gradients_of_many_chunks_are_added_in_float32():
  """256 + 1 is 256 in bfloat16: the ones would be lost."""
  x = jnp.ones((1, 64, 1), jnp.bfloat16).at[0, 0].set(512.0)
  variables = {"params": {"kernel": jnp.zeros((1, 2), jnp.bfloat16)}}
  targets = jnp.zeros((1, 64), jnp.int32)
  ones = jnp.ones((1, 64))
  _, (kernel_bar, *_) = _gradients(
    _loss(chunk_length=1), variables, x, ones, targets
  )
  # Half of the sum of x: 256 and 63 halves, rounded once.
  np.testing.assert_array_equal(
    kernel_bar.astype(jnp.float32), [[-288.0, 288.0]]
  )


def test_targets_outside_of_the_vocabulary_give_nan():
  targets = TARGETS.at[0, 1].set(VOCAB).at[1, 2].set(-1)
  output, _ = _gradients(
    _loss(chunk_length=3), _kernel(), _x(), targets=targets
  )
  assert np.isnan(output.loss)
  bad = np.argwhere(np.isnan(output.token_nll)).tolist()
  assert bad == [[0, 1], [1, 2]]


def test_inside_of_remat_and_scan():
  loss = _loss(chunk_length=3)

  def total(variables, x):
    output = _outputs(loss, variables, x)
    return output.loss, output.token_nll

  def twice(variables, x):
    def body(carry, _):
      value, nll = jax.checkpoint(total)(variables, x)
      return carry + value, nll

    return jax.lax.scan(body, jnp.zeros(()), None, length=2)

  expected, actual = (
    jax.jit(jax.grad(fn, argnums=(0, 1), has_aux=True))(_kernel(), _x())[0]
    for fn in (total, twice)
  )
  jax.tree.map(
    lambda a, e: np.testing.assert_allclose(a, 2 * e, rtol=1e-5, atol=1e-6),
    actual,
    expected,
  )


def _sizes(jaxpr):
  """Yields the sizes of all float arrays of a program, loops included."""
  for eqn in jaxpr.eqns:
    for var in eqn.outvars:
      if jnp.issubdtype(var.aval.dtype, jnp.floating):
        yield var.aval.size
    for inner in jax.tree.leaves(
      list(eqn.params.values()), is_leaf=lambda p: hasattr(p, "eqns")
    ):
      inner = getattr(inner, "jaxpr", inner)
      if hasattr(inner, "eqns"):
        yield from _sizes(inner)


def _largest(fn, *args):
  return max(_sizes(jax.make_jaxpr(fn)(*args).jaxpr))


def _big():
  """Sizes at which the logits outweigh all else."""
  shape = jax.ShapeDtypeStruct
  x = shape((2, 64, 16), jnp.float32)
  variables = {"params": {"kernel": shape((16, 1024), jnp.float32)}}
  token = shape((2, 64), jnp.float32), shape((2, 64), jnp.int32)
  return variables, x, *token


@pytest.mark.parametrize("wrap", [lambda f: f, jax.checkpoint])
def test_no_array_is_as_large_as_all_logits(wrap):
  def gradient(loss):
    def total(variables, x, weights, targets):
      return wrap(lambda *a: _outputs(loss, a[0], a[1], weights, targets).loss)(
        variables, x
      )

    return jax.grad(total, argnums=(0, 1))

  everything = 2 * 64 * 1024
  # The kernel is the next largest.
  largest = _largest(gradient(_loss(chunk_length=8)), *_big())
  assert largest == everything // 8
  whole = _largest(gradient(_loss(chunk_length=None)), *_big())
  assert whole == everything


def test_chunks_need_less_memory():
  def temporary(loss):
    compiled = _gradients.lower(loss, *_big()).compile()
    return compiled.memory_analysis().temp_size_in_bytes

  whole = temporary(_loss(chunk_length=None))
  assert whole > 4 * 2 * 64 * 1024
  assert temporary(_loss(chunk_length=8)) < whole / 2


def _products(fn, *args):
  return str(jax.make_jaxpr(fn)(*args)).count("dot_general")


def test_products_with_the_head_are_those_of_the_gradient():
  """None is computed twice, and none is for what has no gradient."""
  loss = _loss(chunk_length=3)
  forward = functools.partial(_outputs, loss)
  assert _products(forward, _kernel(), _x()) == 1
  total = lambda *args: forward(*args).loss  # noqa: E731
  both = jax.grad(total, argnums=(0, 1))
  assert _products(both, _kernel(), _x()) == 3
  frozen = jax.grad(total, argnums=1)
  assert _products(frozen, _kernel(), _x()) == 2


def test_evaluation_may_report_no_smoothing():
  smooth = _loss(label_smoothing=0.2, z_loss_weight=0.1)
  assert smooth.to_evaluation() is smooth
  plain = _loss(
    label_smoothing=0.2, z_loss_weight=0.1, smooth_in_evaluation=False
  ).to_evaluation()
  expected, _, _ = _oracle(_loss(z_loss_weight=0.1), _kernel(), _x())
  output = jax.jit(_outputs, static_argnums=0)(plain, _kernel(), _x())
  np.testing.assert_allclose(output.loss, expected, rtol=1e-6)


def test_equal_losses_are_equal():
  assert _loss() == _loss()
  assert hash(_loss()) == hash(_loss())


def test_only_the_loss_is_differentiable():
  def total(x):
    return jnp.sum(_outputs(_loss(), _kernel(), x).token_nll)

  with pytest.raises(ValueError, match="token_nll was differentiated; only"):
    jax.eval_shape(jax.grad(total), _x())


def test_rejects_gradients_that_are_no_sums():
  variables = {**_kernel(), "fp8": {"scale": jnp.ones(())}}

  def head(variables, x):
    return variables["fp8"]["scale"] * _head(variables, x)

  def total(variables):
    return _loss()(head, variables, _x(), targets=TARGETS, weights=WEIGHTS).loss

  with pytest.raises(ValueError, match=r"\['fp8'\]\['scale'\] has a gradient"):
    jax.eval_shape(jax.grad(total), variables)
  others = lambda p: total({**variables, "params": p})  # noqa: E731
  gradient = jax.jit(jax.grad(others))(_kernel()["params"])
  assert np.all(np.isfinite(gradient["kernel"]))


@pytest.mark.parametrize(
  ("field", "value", "required"),
  [
    ("label_smoothing", 1.0, r"must be in \[0, 1\)"),
    ("label_smoothing", float("nan"), r"must be in \[0, 1\)"),
    ("z_loss_weight", -1e-4, "must not be negative"),
    ("z_loss_weight", float("nan"), "must not be negative"),
    ("chunk_length", 0, "must be positive"),
  ],
)
def test_rejects_bad_fields(field, value, required):
  with pytest.raises(
    ValueError, match=f"SoftmaxLoss.{field} {required}, got {value}"
  ):
    _loss(**{field: value})


def test_matches_the_terms_of_all_logits():
  terms = jax.jit(
    lambda kernel, x: cross_entropy.softmax_terms(_head(kernel, x), TARGETS)
  )(_kernel(), _x())
  output, _ = _gradients(_loss(chunk_length=3), _kernel(), _x())
  np.testing.assert_allclose(output.token_nll, terms.nll, rtol=1e-6, atol=1e-6)

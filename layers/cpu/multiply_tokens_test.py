"""Tests for matmuls of tokens with a kernel: values, gradients, collectives."""

import collections
import re

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers import feed_forward, testing
from paxon.layers.cpu import forms
from paxon.sharding import axes, layout, logical, mesh, target

# Equation, shapes of tokens and kernel, number of contracted axes.
CASES = {
  "one axis": ("BTD,DF->BTF", (2, 3, 4), (4, 5), 1),
  "heads": ("BTD,DNH->BTNH", (2, 3, 4), (4, 2, 5), 1),
  "from heads": ("BTNH,NHD->BTD", (2, 3, 2, 4), (2, 4, 5), 2),
  "any rank": ("...D,DF->...F", (2, 3, 2, 4), (4, 5), 1),
  "one vector": ("...D,DF->...F", (4,), (4, 5), 1),
  "no tokens": ("...D,DF->...F", (0, 3, 4), (4, 5), 1),
}


def _outcome(equation, x, kernel):
  """The output, and the gradients of the sum of its sines."""

  def loss(x, kernel):
    y = forms.multiply_tokens(jnp.einsum, "kernel", equation, x, kernel)
    return jnp.sum(jnp.sin(y.astype(jnp.float32))), y

  step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
  (_, y), gradients = step(x, kernel)
  return y, *gradients


def _expected(x, kernel, summed):
  """The same in float64, from the definition."""
  size = int(np.prod(kernel.shape[:summed]))
  tokens = np.asarray(x, np.float64).reshape(-1, size)
  weights = np.asarray(kernel, np.float64).reshape(size, -1)
  y = tokens @ weights
  shape = (*x.shape[: x.ndim - summed], *kernel.shape[summed:])
  return (
    y.reshape(shape),
    (np.cos(y) @ weights.T).reshape(x.shape),
    (tokens.T @ np.cos(y)).reshape(kernel.shape),
  )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_match_numpy(case, dtype):
  equation, *shapes, summed = CASES[case]
  x, kernel = (
    testing.normal(*s, seed=i, dtype=dtype) for i, s in enumerate(shapes)
  )
  expected = _expected(x, kernel, summed)
  # Rounded once, to 8 bits; gradients also begin with a rounded cosine.
  close = {"rtol": 1e-5, "atol": 1e-6}
  if dtype == "bfloat16":
    close = {"rtol": 2**-7, "atol": 0.05}
  for a, e in zip(_outcome(equation, x, kernel), expected, strict=True):
    assert a.dtype == dtype
    np.testing.assert_allclose(np.asarray(a, np.float64), e, **close)


@pytest.mark.parametrize("num_tokens", [255, 256, 257, 300])
@pytest.mark.parametrize(("size", "width"), [(3, 5), (1, 4), (4, 1), (1, 1)])
def test_gradients_of_many_bfloat16_tokens_match_numpy(num_tokens, size, width):
  # A matmul for which XLA:CPU has no kernel is an error when it runs.
  x = testing.normal(1, num_tokens, size, dtype=jnp.bfloat16)
  kernel = testing.normal(size, width, seed=1, dtype=jnp.bfloat16)
  expected = _expected(x, kernel, 1)
  found = _outcome("BTD,DF->BTF", x, kernel)
  for a, e in zip(found, expected, strict=True):
    scale = np.max(np.abs(e))
    error = np.max(np.abs(np.asarray(a, np.float64) - e))
    assert error < 0.02 * scale


def test_bfloat16_is_multiplied_into_float32():
  x, kernel = (testing.normal(4, 4, dtype=jnp.bfloat16) for _ in range(2))
  closed = jax.make_jaxpr(lambda *a: _outcome("...D,DF->...F", *a))(x, kernel)
  found = testing.dots(closed)
  assert len(found) == 3
  assert {d.result for d in found} == {jnp.dtype("float32")}
  assert {t for d in found for t in d.operands} == {jnp.dtype("bfloat16")}


def test_other_platforms_and_other_einsums_get_the_equation(monkeypatch):
  x, kernel = testing.normal(2, 3, 4), testing.normal(4, 5)
  calls = []

  def einsum(equation, *operands):
    calls.append(equation)
    return jnp.einsum(equation, *operands)

  def ranks():
    closed = jax.make_jaxpr(
      lambda *a: forms.multiply_tokens(jnp.einsum, "up", "BTD,DF->BTF", *a)
    )(x, kernel)
    (dot,) = (e for e in closed.jaxpr.eqns if e.primitive.name == "dot_general")
    return [v.aval.ndim for v in dot.invars]

  forms.multiply_tokens(einsum, "up", "BTD,DF->BTF", x, kernel)
  assert calls == ["BTD,DF->BTF"]
  assert ranks() == [2, 2]
  monkeypatch.setattr(target, "is_cpu", lambda: False)
  assert sorted(ranks()) == [2, 3]


def _program(where):
  """The lowered gradient of a feed-forward layer, and its arguments."""
  layer = feed_forward.FeedForward(mlp_dim=32, activation=nn.gelu)
  x = testing.normal(8, 16, 16)
  values = testing.random_values(layer, x)

  def loss(values, x):
    x = logical.constrain(x, (axes.BATCH, axes.LENGTH, axes.ACTIVATION_EMBED))
    return jnp.mean(jnp.sin(layer.apply(values, x)))

  shardings = where.shardings(testing.specs(layer, x))
  jitted = where.jit(
    jax.value_and_grad(loss),
    in_shardings=(shardings, where.batch_sharding(3)),
    out_shardings=(None, shardings),
  )
  expected = jax.jit(jax.value_and_grad(loss))(values, x)
  return jitted.lower(values, x), (values, x), expected


def _collectives(compiled):
  """The operations between devices, and how many numbers they send."""
  found = re.findall(
    r"= (\S.*) (all-gather|all-to-all|reduce-scatter|collective-permute|"
    r"all-reduce|ragged-all-to-all)(?:-start)?\(",
    compiled.as_text(),
  )
  return collections.Counter(
    (
      op,
      sum(
        np.prod([int(n) for n in d.split(",") if n])
        for d in re.findall(r"\[([\d,]*)\]", shape)
      ),
    )
    for shape, op in found
  )


@pytest.mark.parametrize(
  ("text", "joined"),
  [
    ("data=8", True),
    ("fsdp=4,tensor=2", True),
    ("fsdp=2,tensor=4", True),
    ("fsdp=2,sequence=4", False),
  ],
)
def test_joining_tokens_sends_nothing_more(text, joined, monkeypatch):
  where = layout.Layout(mesh.make_mesh(mesh.MeshSpec.parse(text)))
  lowered, args, expected = _program(where)
  compiled = lowered.compile()
  actual = compiled(*testing.place(args, compiled.input_shardings[0]))
  jax.tree.map(
    lambda a, e: np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-6),
    actual,
    expected,
  )
  monkeypatch.setattr(target, "is_cpu", lambda: False)
  apart = _program(where)[0]
  assert _collectives(compiled) == _collectives(apart.compile())
  assert (lowered.as_text() != apart.as_text()) is joined

"""Tests for low-rank adapters, against their definition in float64."""

from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.quantization import lora, matmuls
from paxon.sharding import variables

# Equation, shapes of both operands, batch, input and output letters.
CASES = [
  ("BTD,DNH->BTNH", (2, 3, 8), (8, 2, 5), ("", "D", "NH")),
  ("BTNH,NHD->BTD", (2, 3, 2, 5), (2, 5, 8), ("", "NH", "D")),
  ("...D,DF->...F", (2, 3, 8), (8, 6), ("", "D", "F")),
  ("ECD,EDF->ECF", (3, 4, 8), (3, 8, 6), ("E", "D", "F")),
]


class Layer(nn.Module):
  """A matmul with a kernel."""

  equation: str
  shape: tuple[int, ...]
  einsum: Any = jnp.einsum

  @nn.compact
  def __call__(self, x):
    kernel = self.param("up", nn.initializers.normal(0.3), self.shape)
    return matmuls.call(self.einsum, "up", self.equation, x, kernel)


def _values(layer, x, *, seed=0):
  """Returns variables with a random adapter."""
  values = variables.unbox(jax.jit(layer.init)(jax.random.key(seed), x))
  random = np.random.default_rng(seed)
  adapter = values["params"]["einsum"]["up"]
  for name, value in adapter.items():
    noise = random.normal(0, 0.1, value.shape)
    adapter[name] = jnp.asarray(noise, jnp.float32)
  return values


def _define(case, x, values, adapter):
  """Returns the adapted output by definition, float64."""
  equation, _, _, (batch, inner, outer) = case
  params = values["params"]
  exact = {
    k: np.asarray(v, np.float64) for k, v in params["einsum"]["up"].items()
  }
  kernel = np.asarray(params["up"], np.float64)
  kind = adapter.kind
  rank = adapter.rank
  scale = adapter.alpha / (rank**0.5 if kind is lora.Kind.RSLORA else rank)
  change = np.einsum(
    f"{batch}{inner}R,{batch}R{outer}->{batch}{inner}{outer}",
    exact[lora.A],
    exact[lora.B],
  )
  whole = kernel + scale * change
  if kind is lora.Kind.DORA:
    axes = tuple(range(len(batch), len(batch) + len(inner)))

    def norm(w):
      return np.sqrt(np.sum(w**2, axis=axes, keepdims=True))

    m = norm(kernel) + np.expand_dims(exact[lora.MAGNITUDE], axes)
    whole = whole * m / norm(whole)
  return np.einsum(equation, np.asarray(x, np.float64), whole), whole


@pytest.mark.nightly(keep=5)
@pytest.mark.parametrize("kind", list(lora.Kind))
@pytest.mark.parametrize("case", CASES, ids=lambda c: c[0])
def test_outputs_and_merged_kernels_are_those_of_the_definition(kind, case):
  equation, x_shape, shape, _ = case
  adapter = lora.Lora(rank=2, alpha=3.0, kind=kind)
  layer = Layer(equation, shape, lora.LoraEinsum(adapter))
  x = jax.random.normal(jax.random.key(1), x_shape)
  values = _values(layer, x)
  expected, whole = _define(case, x, values, adapter)
  np.testing.assert_allclose(
    jax.jit(layer.apply)(values, x), expected, rtol=2e-5, atol=2e-6
  )
  of_one = values["params"]["einsum"]["up"]
  merged = lora.merge(
    values["params"]["up"],
    of_one[lora.A],
    of_one[lora.B],
    of_one.get(lora.MAGNITUDE),
    lora=adapter,
  )
  np.testing.assert_allclose(merged, whole, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", list(lora.Kind))
def test_initial_outputs_are_those_of_the_base(kind):
  equation, x_shape, shape, _ = CASES[0]
  base = Layer(equation, shape)
  layer = base.clone(einsum=lora.LoraEinsum(lora.Lora(rank=2, kind=kind)))
  x = jax.random.normal(jax.random.key(1), x_shape)
  values = variables.unbox(jax.jit(layer.init)(jax.random.key(0), x))
  kernel = {"params": {"up": values["params"]["up"]}}
  np.testing.assert_array_equal(
    jax.jit(layer.apply)(values, x), jax.jit(base.apply)(kernel, x)
  )
  a = values["params"]["einsum"]["up"][lora.A]
  # U(-1, 1) / sqrt(8) of 16 values.
  assert 0.2 < np.max(np.abs(a)) <= 8**-0.5


def test_norms_of_dora_have_no_gradient():
  equation, x_shape, shape, _ = CASES[2]
  adapter = lora.Lora(rank=2, kind=lora.Kind.DORA)
  layer = Layer(equation, shape, lora.LoraEinsum(adapter))
  x = jax.random.normal(jax.random.key(1), x_shape)
  values = _values(layer, x)
  found = jax.jit(jax.grad(lambda v: jnp.sum(layer.apply(v, x) ** 2)))(values)
  kernel, of_one = values["params"]["up"], values["params"]["einsum"]["up"]
  names = (lora.A, lora.B, lora.MAGNITUDE)
  a, b, delta = (of_one[name] for name in names)
  norm = jnp.linalg.norm(kernel + a @ b, axis=0)
  m = jnp.linalg.norm(kernel, axis=0) + delta

  def defined(a, b, m):
    return jnp.sum((x @ ((kernel + a @ b) * (m / norm)[None, :])) ** 2)

  expected = jax.jit(jax.grad(defined, argnums=(0, 1, 2)))(a, b, m)
  for name, each in zip(
    (lora.A, lora.B, lora.MAGNITUDE), expected, strict=True
  ):
    np.testing.assert_allclose(
      found["params"]["einsum"]["up"][name], each, rtol=2e-4, atol=2e-5
    )


def test_only_named_matmuls_have_adapters():
  equation, x_shape, shape, _ = CASES[0]
  einsum = lora.LoraEinsum(lora.Lora(rank=2), matmuls=("down",))
  layer = Layer(equation, shape, einsum)
  values = layer.init(jax.random.key(0), jnp.ones(x_shape))
  assert set(values["params"]) == {"up"}


@pytest.mark.parametrize(
  ("make", "error"),
  [
    (lambda: lora.Lora(rank=0), "Lora.rank must be positive, got 0"),
    (lambda: lora.Lora(rank=2, alpha=-1.0), "Lora.alpha must be positive"),
    (lambda: lora.LoraRule("feed_forwards", None), "did you mean"),
    (lambda: lora.LoraRule("head", None, ()), "LoraRule.matmuls must name"),
  ],
)
def test_invalid_adapters(make, error):
  with pytest.raises(ValueError, match=error):
    make()

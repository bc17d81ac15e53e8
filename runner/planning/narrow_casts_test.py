"""Tests that values cast to fp8 and back are rounded, compiled for an H200.

XLA drops such casts for GPUs (`xla_allow_excess_precision`), not for CPUs.
"""

import jax
import jax.numpy as jnp
import pytest

from paxon.quantization import number_formats, quantized_einsum, recipes
from paxon.runner.plan import testing, topology
from paxon.sharding import mesh

_ROUNDING = "round-nearest-even("


def _compiled(monkeypatch, function, *shapes):
  """The program of a function of bfloat16 arrays."""
  to = testing.target("h200:1x1")
  for name, value in topology.environment(to).items():
    monkeypatch.setenv(name, value)
  where = mesh.make_mesh(mesh.MeshSpec(), devices=topology.devices(to))
  whole = jax.sharding.NamedSharding(where, jax.sharding.PartitionSpec())
  args = [
    jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=whole)
    for shape in shapes
  ]
  with jax.set_mesh(where):
    traced = jax.jit(function).trace(*args)
  return topology.compile_for(to, traced, where).as_text()


def test_a_cast_alone_is_dropped(monkeypatch):
  # If it is kept some day, `saturating_cast` need not round.
  def there_and_back(x):
    return x.astype(jnp.float8_e4m3fn).astype(jnp.bfloat16)

  assert "f8e4m3" not in _compiled(monkeypatch, there_and_back, (64, 64))


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2", "fp4_e2m1"])
def test_a_saturating_cast_is_rounded(monkeypatch, name):
  def there_and_back(x):
    narrow = number_formats.saturating_cast(
      x.astype(jnp.float32), number_formats.FORMATS[name]
    )
    return narrow.astype(jnp.bfloat16)

  assert _ROUNDING in _compiled(monkeypatch, there_and_back, (64, 64))


def test_operands_with_tiles_are_rounded(monkeypatch):
  def multiply(x, kernel):
    return quantized_einsum.quantized_einsum(
      "BD,DF->BF", x, kernel, recipe=recipes.find_recipe("fp8_block")
    )

  text = _compiled(monkeypatch, multiply, (256, 512), (512, 384))
  # Operands of the matmul are bfloat16.
  assert "$f8" not in text
  assert text.count(_ROUNDING) >= 2

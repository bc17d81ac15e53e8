"""Tests for what collectives move, on programs of this machine's compiler."""

import functools

import jax
import jax.numpy as jnp
import pytest

from paxon.runner.plan import testing
from paxon.runner.plan.program_text import (
  collectives,
  dataflow,
  hlo,
  movements,
)

_MESH = {"fsdp": 4, "tensor": 2}
_LAYERS, _ROWS, _WIDTH, _HIDDEN = 3, 256, 64, 128

_Data = dataflow.Data


def _layer(x, kernels, *, constraint=None):
  up, down = kernels
  with jax.named_scope("mlp"):
    hidden = jnp.tanh(x @ up)
    out = jnp.tanh(hidden @ down)
  if constraint is not None:
    out = jax.lax.with_sharding_constraint(out, constraint) * 2
  return x + out, None


def _loss(weights, batch, *, constraint=None, is_looped=True):
  layer = functools.partial(_layer, constraint=constraint)
  x = batch["rows"]
  if is_looped:
    x, _ = jax.lax.scan(layer, x, weights)
  else:
    for i in range(_LAYERS):
      x, _ = layer(x, jax.tree.map(lambda w, i=i: w[i], weights))
  return jnp.sum(x)


def _movements(**options):
  mesh = jax.make_mesh(
    tuple(_MESH.values()),
    tuple(_MESH),
    axis_types=(jax.sharding.AxisType.Auto,) * 2,
  )

  def array(shape, spec):
    sharding = jax.NamedSharding(mesh, spec)
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)

  weights = (
    array((_LAYERS, _WIDTH, _HIDDEN), jax.P(None, "fsdp", "tensor")),
    array((_LAYERS, _HIDDEN, _WIDTH), jax.P(None, "tensor", "fsdp")),
  )
  batch = {"rows": array((_ROWS, _WIDTH), jax.P("fsdp"))}
  step = jax.jit(
    jax.grad(functools.partial(_loss, **options)),
    out_shardings=jax.tree.map(lambda a: a.sharding, weights),
  )
  with jax.set_mesh(mesh):
    program = hlo.parse(step.lower(weights, batch).compile().as_text())
  found = movements.find(program, collectives.find(program, mesh=_MESH))
  assert found is not None
  return found


def _sums(found):
  """Executions by data, kind, axes and whether they are in a loop."""
  sums: dict = {}
  for m in found:
    key = m.data, m.collective.kind, m.collective.axes, m.is_in_loop
    sums[key] = sums.get(key, 0) + m.collective.count
  return sums


def _bytes(found, data):
  return sum(m.total_bytes for m in found if m.data is data)


def test_a_loop_of_layers():
  found = _movements()
  sums = _sums(found)
  # Both kernels in both passes; this compiler scatters no gradient.
  assert sums[_Data.WEIGHTS, "all-gather", ("fsdp",), True] == 4 * _LAYERS
  assert (_Data.GRADIENTS, "all-reduce", ("fsdp",), True) in sums
  # What tensor parallelism sums, and nothing else, crosses between devices.
  activations = {key[1:] for key in sums if key[0] is _Data.ACTIVATIONS}
  assert activations == {("all-reduce", ("tensor",), True)}
  size = _LAYERS * _WIDTH * _HIDDEN // 2 * 4
  assert _bytes(found, _Data.WEIGHTS) == 2 * 2 * size
  assert _bytes(found, _Data.GRADIENTS) == 2 * size
  assert {m.part for m in found} == {"mlp"}


def test_without_a_loop():
  found = _movements(is_looped=False)
  assert not any(m.is_in_loop for m in found)
  assert {m.data for m in found} == set(_Data)
  size = _LAYERS * _WIDTH * _HIDDEN // 2 * 4
  assert _bytes(found, _Data.GRADIENTS) == 2 * size


def test_activations_that_leave_their_device():
  # Rows over no axis, features over the one that had the rows.
  found = _movements(constraint=jax.P(None, "fsdp"))
  odd = [
    m
    for m in found
    if m.data is _Data.ACTIVATIONS and "fsdp" in m.collective.axes
  ]
  assert odd
  assert all(m.is_in_loop for m in odd)
  assert movements.largest_part(odd) == "mlp"


@pytest.mark.parametrize(
  ("file", "mesh", "dcn"),
  [
    ("h200_1x8.txt", {"fsdp": 8}, []),
    ("v5e_2x4.txt", {"fsdp": 4, "tensor": 2}, []),
    ("v4_2_slices.txt", {"data": 2, "fsdp": 4}, ["data"]),
  ],
)
def test_absent_hardware(file, mesh, dcn):
  program = hlo.parse(testing.read_text(file))
  communication = collectives.find(program, mesh=mesh, dcn=dcn)
  found = movements.find(program, communication)
  by_kind = {(m.collective.kind, m.data) for m in found}
  assert by_kind >= {
    ("all-gather", _Data.WEIGHTS),
    ("reduce-scatter", _Data.GRADIENTS),
  }
  assert _Data.ACTIVATIONS not in {data for _, data in by_kind}
  between = {m.data for m in found if m.collective.between_slices}
  assert between <= {_Data.GRADIENTS, _Data.WEIGHTS}


def test_a_text_that_does_not_name_the_batch():
  program = hlo.parse(
    "HloModule m\n\nENTRY %m (p: f32[8]) -> f32[8] {\n"
    "  ROOT %p = f32[8]{0} parameter(0)\n}\n"
  )
  assert movements.find(program, collectives.find(program, mesh={})) is None

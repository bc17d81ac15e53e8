"""Tests of the specs that propagation finds."""

import jax
import jax.numpy as jnp
import pytest

from paxon.runner.plan.memory import propagation, testing

_SIZES = testing.mesh(fsdp=2, tensor=2)


def _spec(fn, *arguments, specs):
  found = testing.graph(fn, *arguments, specs=specs, sizes=_SIZES)
  (out,) = found.outputs
  assert out is not None
  return out.spec


def test_a_product_keeps_rows_and_columns():
  spec = _spec(
    lambda x, w: x @ w,
    testing.array(8, 4),
    testing.array(4, 6),
    specs={0: jax.P("fsdp"), 1: jax.P("fsdp", "tensor")},
  )
  # The weight is gathered over the axis that splits the rows.
  assert spec == (("fsdp",), ("tensor",))


def test_no_axis_splits_twice():
  spec = _spec(
    lambda x, scale: x * scale[None],
    testing.array(8, 4),
    testing.array(4),
    specs={0: jax.P("fsdp"), 1: jax.P("fsdp")},
  )
  assert spec == (("fsdp",), ())


@pytest.mark.parametrize(
  ("fn", "expected"),
  [
    pytest.param(lambda x: x.T, ((), ("fsdp",)), id="transpose"),
    pytest.param(lambda x: x.sum(1), (("fsdp",),), id="reduce"),
    pytest.param(lambda x: x.sum(0), ((),), id="reduce away"),
    pytest.param(lambda x: x.reshape(8, 2, 2), (("fsdp",), (), ()), id="split"),
    pytest.param(lambda x: x.reshape(32), (("fsdp",),), id="merge"),
    pytest.param(lambda x: x[:, None], (("fsdp",), (), ()), id="insert"),
    pytest.param(
      lambda x: jnp.broadcast_to(x, (3, 8, 4)),
      ((), ("fsdp",), ()),
      id="broadcast",
    ),
  ],
)
def test_shapes_change_and_the_split_dimension_stays(fn, expected):
  assert _spec(fn, testing.array(8, 4), specs={0: jax.P("fsdp")}) == expected


def test_a_loop_gives_its_stack_what_its_body_has():
  def fn(x, w):
    return jax.lax.scan(lambda x, w: (x @ w, x), x, w)[1]

  spec = _spec(
    fn,
    testing.array(8, 4),
    testing.array(3, 4, 4),
    specs={0: jax.P("fsdp")},
  )
  assert spec == ((), ("fsdp",), ())


def test_results_decide_where_nothing_else_does():
  found = testing.graph(
    lambda x, w: (x.T @ x) * w,
    testing.array(8, 4),
    testing.array(4, 4),
    specs={0: jax.P("fsdp"), 1: jax.P("fsdp", "tensor")},
    sizes=_SIZES,
  )
  product = next(n for n in found.nodes if n.op == "dot_general")
  # The sum over rows is scattered, as the gradient of a split weight is.
  assert product.outputs[0].spec == (("fsdp",), ("tensor",))


def test_a_dimension_that_does_not_divide_stays_whole():
  spec = propagation.reshaped((("fsdp",), ()), (8, 3), (3, 8), _SIZES)
  assert spec == ((), ())


def test_the_result_decides_which_dimension_gets_a_disputed_axis():
  found = testing.graph(
    lambda x, y, w: (x.T @ y) * w,
    testing.array(8, 4),
    testing.array(8, 6),
    testing.array(4, 6),
    specs={
      0: jax.P("fsdp", "tensor"),
      1: jax.P("fsdp", "tensor"),
      2: jax.P("tensor", "fsdp"),
    },
    sizes=_SIZES,
  )
  product = next(n for n in found.nodes if n.op == "dot_general")
  assert product.outputs[0].spec == (("tensor",), ("fsdp",))

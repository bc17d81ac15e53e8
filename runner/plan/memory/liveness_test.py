"""Tests of the simulation on programs whose memory is counted by hand."""

import jax
import jax.numpy as jnp

from paxon.runner.plan.memory import layouts, liveness, testing

N = 64
MATRIX = testing.FLOAT * N * N
_MATRIX = testing.array(N, N)


def _peak(fn, *arguments, specs=None, sizes=None):
  sizes = testing.mesh() if sizes is None else sizes
  found = testing.graph(fn, *arguments, specs=specs, sizes=sizes)
  layouts.with_copies(found)
  given = frozenset(found.inputs)
  return liveness.peak(found, sizes, given=given, is_hiding=True).total


def test_a_chain_of_products_holds_two():
  def fn(x, w):
    return x @ w @ w @ w @ w

  assert _peak(fn, _MATRIX, _MATRIX) == 2 * MATRIX


def test_elementwise_operations_need_nothing_of_their_own():
  def fn(x, w):
    return jnp.sin(jnp.exp(x @ w) * 2.0) + 1.0

  # The product, whose place the result takes.
  assert _peak(fn, _MATRIX, _MATRIX) == MATRIX


def test_what_is_read_later_is_held():
  def fn(x, w):
    first = x @ w
    return first @ w @ w + first

  assert _peak(fn, _MATRIX, _MATRIX) == 3 * MATRIX


def test_a_loop_holds_its_stack_and_its_carry():
  layers = 5

  def fn(x, w):
    return jax.lax.scan(lambda x, w: (jnp.sin(x @ w), x), x, w)

  found = _peak(fn, _MATRIX, testing.array(layers, N, N))
  # The stack, the carry, and inside a slice of the weights and the product.
  assert found == (layers + 3) * MATRIX


def test_a_split_weight_is_gathered_for_its_product():
  sizes = testing.mesh(fsdp=4)
  rows = testing.array(4 * N, N)

  def fn(x, w):
    return jnp.sum(x @ w)

  specs = {0: jax.P("fsdp"), 1: jax.P("fsdp")}
  split = _peak(fn, rows, _MATRIX, specs=specs, sizes=sizes)
  # A device's rows of the product, and the whole weight.
  assert split == 2 * MATRIX


def test_a_sum_over_devices_is_whole_before_it_is_scattered():
  sizes = testing.mesh(fsdp=4)
  rows = testing.array(4 * N, N)

  def fn(x, y, w):
    return jnp.sum((x.T @ y) * w)

  specs = {0: jax.P("fsdp"), 1: jax.P("fsdp"), 2: jax.P("fsdp")}
  found = _peak(fn, rows, rows, _MATRIX, specs=specs, sizes=sizes)
  assert MATRIX + MATRIX // 4 <= found <= 1.1 * (MATRIX + MATRIX // 4)


def test_accumulated_sums_are_updated_in_place():
  def fn(x, w):
    def body(total, w):
      return total + x @ w, None

    return jax.lax.scan(body, jnp.zeros((N, N)), w)[0]

  found = _peak(fn, _MATRIX, testing.array(5, N, N))
  # The sum; inside, a slice of the weights and the product.
  assert found == 3 * MATRIX


def test_of_branches_the_dearest_counts():
  def fn(which, x, w):
    return jax.lax.cond(which, lambda: x @ w @ w @ w, lambda: x)

  found = _peak(fn, testing.array(dtype=jnp.bool_), _MATRIX, _MATRIX)
  # The result and two products; the index of the branch.
  assert found == 3 * MATRIX + 4

"""Tests of where dimensions in another order cost a copy."""

import jax
import jax.numpy as jnp

from paxon.runner.plan.memory import layouts, testing


def _copies(graph):
  found = [n.inputs[0].shape for n in graph.nodes if n.op == layouts.COPY]
  for node in graph.nodes:
    for body in node.bodies:
      found += _copies(body)
  return found


def _of(fn, *arguments):
  graph = testing.graph(fn, *arguments)
  layouts.with_copies(graph)
  return _copies(graph)


_QUERY = testing.array(2, 8, 4, 16)


def test_a_transposed_product_of_matrices_is_free():
  def fn(x, w, y):
    return (x @ w).T + y

  x = testing.array(8, 4)
  assert _of(fn, x, testing.array(4, 6), testing.array(6, 8)) == []


def test_heads_behind_positions_are_copied_for_attention():
  def fn(query, key):
    return jnp.einsum("BTNH,BSNH->BNTS", query, key)

  # Batch and heads must come first.
  assert _of(fn, _QUERY, _QUERY) == [_QUERY.shape, _QUERY.shape]


def test_two_orders_in_one_sum_are_a_copy():
  def fn(x, y):
    first = jnp.einsum("BTH,BSH->BTS", x, y)
    second = jnp.einsum("BTH,BSH->BTS", y, x)
    return jnp.sin(first) + jnp.swapaxes(second, 1, 2)

  x = testing.array(2, 8, 16)
  assert _of(fn, x, x) == [(2, 8, 8)]


def test_the_same_order_is_none():
  def fn(x, y):
    first = jnp.einsum("BTH,BSH->BTS", x, y)
    return jnp.sin(first) + jnp.einsum("BTH,BSH->BTS", y, x)

  x = testing.array(2, 8, 16)
  assert _of(fn, x, x) == []


def test_a_stack_that_is_read_in_another_order_is_copied_whole():
  def fn(x, w):
    def forward(x, w):
      scores = jnp.einsum("BTH,BSH->BTS", x, x)
      return x * w, jnp.swapaxes(scores, 1, 2)

    def backward(x, scores):
      again = jnp.einsum("BTH,BSH->BTS", x, x)
      return x, jnp.sum(again * scores)

    x, stack = jax.lax.scan(forward, x, w)
    return jax.lax.scan(backward, x, stack)

  found = _of(fn, testing.array(2, 8, 16), testing.array(3, 2, 8, 16))
  assert found == [(3, 2, 8, 8)]

"""Tests of graphs: calls, loops, and what nothing needs."""

import jax
import jax.numpy as jnp

from paxon.runner.plan.memory import graph as graphs
from paxon.runner.plan.memory import testing


def _ops(graph):
  return [node.op for node in graph.nodes]


def test_calls_are_inlined():
  inner = jax.jit(jax.checkpoint(jnp.sin))
  found = testing.graph(lambda x: inner(x) * 2.0, testing.array(4))
  assert _ops(found) == ["sin", "mul"]


def test_what_nothing_needs_is_left_out():
  def fn(x):
    unused = jnp.exp(x)
    del unused
    return jnp.sin(x)

  assert _ops(testing.graph(fn, testing.array(4))) == ["sin"]


def test_a_loop_keeps_the_stacks_that_are_read_only():
  def body(x, w):
    return x @ w, (jnp.exp(x), jnp.sin(x))

  def fn(x, w):
    x, (kept, unread) = jax.lax.scan(body, x, w)
    del unread
    return x, kept

  found = testing.graph(fn, testing.array(4, 4), testing.array(3, 4, 4))
  (loop,) = found.nodes
  assert [v is not None for v in loop.outputs] == [True, True, False]
  assert _ops(loop.bodies[0]) == ["dot_general", "exp"]


def test_a_carry_that_is_not_returned_stays_if_the_loop_needs_it():
  def body(carry, _):
    count, x = carry
    return (count + 1.0, x + count), None

  def fn(x):
    return jax.lax.scan(body, (jnp.float32(0), x), length=3)[0][1]

  (loop,) = [
    n for n in testing.graph(fn, testing.array(4)).nodes if n.op == "scan"
  ]
  assert _ops(loop.bodies[0]).count("add") == 2
  assert loop.bodies[0].outputs[0] is not None


def test_equal_conversions_are_one():
  def fn(x):
    return x.astype(jnp.bfloat16) @ x.astype(jnp.bfloat16).T

  found = testing.graph(fn, testing.array(4, 4))
  assert _ops(found).count("convert_element_type") == 1


def test_a_device_has_its_part():
  sizes = testing.mesh(fsdp=4, tensor=2)
  found = testing.graph(
    jnp.sin,
    testing.array(8, 6),
    specs={0: jax.P("fsdp", "tensor")},
    sizes=sizes,
  )
  (x,) = found.inputs
  assert graphs.device_bytes(x, sizes) == 2 * 3 * testing.FLOAT

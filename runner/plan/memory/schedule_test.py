"""Tests of the order of execution."""

import jax
import jax.numpy as jnp

from paxon.runner.plan.memory import schedule, testing


def _body(fn, *arguments):
  (loop,) = [n for n in testing.graph(fn, *arguments).nodes if n.op == "scan"]
  ordered = schedule.critical_first(loop.bodies[0], loop.params["num_carry"])
  return loop.bodies[0], ordered


def _backward(x, w):
  def body(g, w):
    # The gradient of the weight stands first in the program.
    weight = g.T @ g
    return jnp.sin(g) @ w, (weight, jnp.exp(g))

  return jax.lax.scan(body, x, w)


def test_gradients_of_weights_wait_for_the_end_of_the_body():
  before, after = _body(_backward, testing.array(8, 4), testing.array(3, 4, 4))
  assert before.nodes[-1].op != "dot_general"
  assert after.nodes[-1].op == "dot_general"
  assert after.nodes[-1].outputs[0] is before.outputs[1]


def test_all_operations_stay_each_behind_what_it_needs():
  before, after = _body(_backward, testing.array(8, 4), testing.array(3, 4, 4))
  assert set(after.nodes) == set(before.nodes)
  assert len(after.nodes) == len(before.nodes)
  seen = set()
  for node in after.nodes:
    for value in node.inputs:
      assert value is None or value.node is None or value.node in seen
    seen.add(node)


def test_elementwise_results_are_written_at_once():
  _, after = _body(_backward, testing.array(8, 4), testing.array(3, 4, 4))
  ops = [node.op for node in after.nodes]
  assert ops.index("exp") < ops.index("dot_general")


def test_outside_what_a_loop_needs_comes_first():
  def fn(x, w):
    late = x.T @ x
    x, _ = jax.lax.scan(lambda x, w: (x @ w, None), x, w)
    return x, late

  found = testing.graph(fn, testing.array(8, 4), testing.array(3, 4, 4))
  assert found.nodes[-1].op == "scan"
  after = schedule.critical_first(found, 0)
  assert after.nodes[-1].op == "dot_general"

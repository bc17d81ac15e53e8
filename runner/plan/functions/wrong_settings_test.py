"""Errors of plans of functions name the setting, its value and the remedy."""

import jax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
import pytest

from paxon.runner import user_error
from paxon.runner.plan import child_process
from paxon.runner.plan.functions import function_plan, testing


def _make_mesh(**sizes):
  return jax.make_mesh(
    tuple(sizes.values()),
    tuple(sizes),
    axis_types=(AxisType.Auto,) * len(sizes),
  )


def _prints(weights, batch):
  out = batch @ weights[0]
  jax.debug.print("{}", out.sum())
  return out


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({}, r"mesh: h200:1x8 has 8 devices; give the size of each axis"),
    ({"mesh": {"data": 4}}, r"mesh: data=4 has 4 devices, but .* has 8; give"),
    (
      {"mesh": {"a": 3, "b": -1}},
      r"mesh: b=-1 has no size, because the other sizes, 3 devices together",
    ),
    ({"mesh": {"dcn.": 8}}, r"mesh: 'dcn\.' must be the name of an axis"),
    (
      {"mesh": {"data": 8}, "in_shardings": (P(), P("data", "data"))},
      r"batch with the shape \(32, 64\) cannot be sharded",
    ),
    ({"mesh": {"data": 8}, "donate": True}, r"donate: True is not an argum"),
    ({"mesh": {"data": 0}}, r"mesh: the size of 'data' must be a positive"),
    ({"mesh": {"data": -1, "x": -1}}, r"only one size may be -1, but data and"),
    (
      {"mesh": {"data": 8}, "in_shardings": (P("fsdp"), P())},
      r"weights\[0\] with the shape \(64, 64\) cannot be sharded by .*'fsdp'",
    ),
    (
      {"mesh": {"data": 8}, "in_shardings": (P(), P(None, None, "data"))},
      r"batch with the shape \(32, 64\) cannot be sharded",
    ),
    (
      {"mesh": {"data": 8}, "in_shardings": (P(), P(), P())},
      r"in_shardings must be a prefix .*\(weights, batch\)",
    ),
    (
      {"mesh": {"data": 8}, "in_shardings": ("data", P())},
      r"in_shardings: 'data' must be a PartitionSpec",
    ),
    (
      {"mesh": {"data": 8}, "donate": 2},
      r"donate: 2 is not an argument; .*",
    ),
    ({"mesh": {"data": 8}, "donate": "x"}, r"donate: 'x' is not an argument"),
  ],
)
def test_wrong_settings_are_errors_of_the_user(options, message):
  with pytest.raises(user_error.UserError, match=message):
    testing.trace(
      testing.step, testing.WEIGHTS, testing.BATCH, target="h200:1x8", **options
    )


def test_what_cannot_be_compiled_without_a_device_is_named():
  mesh = {"data": 8}
  with pytest.raises(user_error.UserError, match=r"host .jax\.debug\.print"):
    testing.trace(
      _prints, testing.WEIGHTS, testing.BATCH, target="h200:1x8", mesh=mesh
    )
  with pytest.raises(user_error.UserError, match="contain no arrays"):
    testing.trace(lambda x: x, 3.0, target="h200:1x8", mesh=mesh)
  inner = NamedSharding(_make_mesh(data=8), P("data"))

  def constrain(batch):
    return jax.lax.with_sharding_constraint(batch, inner)

  for target, mesh in (("h200:2x8", {"data": 16}), ("h200:1x1", None)):
    with pytest.raises(user_error.UserError, match="has a mesh of 8 devices"):
      testing.trace(constrain, testing.BATCH, target=target, mesh=mesh)


@pytest.mark.parametrize(
  ("options", "message"),
  [
    (
      {"target": "cpu:8", "mesh": {"a": 4, "dcn.b": 2}},
      r"mesh: a=4, b=2 \(dcn.b between .* cannot be laid out on cpu:8",
    ),
    ({"target": "mi300x:1x8", "mesh": {"a": 8}}, None),
  ],
)
def test_wrong_keywords_are_errors_of_the_user(options, message):
  if message is None:
    plan = function_plan.plan(
      testing.step, testing.WEIGHTS, testing.BATCH, **options
    )
    assert "can be compiled on a machine with mi300x dev" in plan.notes[0]
    return
  with pytest.raises(user_error.UserError, match=message):
    function_plan.plan(testing.step, testing.WEIGHTS, testing.BATCH, **options)


def test_errors_of_the_compiling_process_are_those_of_the_user():
  with pytest.raises(user_error.UserError, match="xla_no_such_option"):
    function_plan.plan(
      testing.step,
      testing.WEIGHTS,
      testing.BATCH,
      target="cpu:1",
      compiler_options={"xla_no_such_option": True},
    )
  assert child_process.count_parallel() >= 1

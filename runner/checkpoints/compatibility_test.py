"""Tests for the check of a checkpoint against a model."""

import json

import jax.numpy as jnp
import pytest

from paxon.runner.checkpoints import compatibility
from paxon.sharding import variables


def _spec(name, shape=(2, 3), dtype=jnp.float32):
  return variables.VariableSpec(
    name=name,
    shape=shape,
    dtype=jnp.dtype(dtype),
    axes=("embed", "mlp")[: len(shape)],
  )


def _check(stored, wanted, version=compatibility.FORMAT_VERSION):
  # Through JSON, as in a checkpoint.
  described = json.loads(json.dumps(compatibility.describe(stored)))
  compatibility.check(
    described, specs=wanted, version=version, where="The checkpoint x/7"
  )


def test_equal_specs_fit():
  _check([_spec("params/a")], {"other": (_spec("params/a"),)})


def test_whole_collections_may_be_left_out():
  _check([_spec("params/a"), _spec("opt_state/mu/a")], [_spec("params/a")])


@pytest.mark.parametrize(
  ("stored", "wanted", "message"),
  [
    pytest.param(
      [_spec("params/a")],
      [_spec("params/a", (2, 4))],
      r"x/7 does not match the configuration: params/a has shape \(2, 3\) in"
      r" the checkpoint and \(2, 4\) in the configuration \(axes \('embed',",
      id="shape",
    ),
    pytest.param(
      [_spec("params/a")],
      [_spec("params/a", dtype=jnp.bfloat16)],
      r"params/a has dtype float32 in the checkpoint and bfloat16 in the conf",
      id="dtype",
    ),
    pytest.param(
      [_spec("params/block/kernel")],
      [_spec("params/block/kernels")],
      r"params/block/kernels \(2, 3\) is not in the checkpoint \(which has"
      r" params/block/kernel\)",
      id="missing",
    ),
    pytest.param(
      [_spec("params/a"), _spec("params/b")],
      [_spec("params/a")],
      r"params/b is in the checkpoint and not in the configuration",
      id="unused",
    ),
    pytest.param(
      [],
      [_spec(f"params/{i}") for i in range(9)],
      r"params/4 .*; and 4 more\.",
      id="many",
    ),
  ],
)
def test_names_what_does_not_fit(stored, wanted, message):
  with pytest.raises(compatibility.CheckpointMismatchError, match=message):
    _check(stored, wanted)


def test_rejects_another_format():
  with pytest.raises(
    compatibility.CheckpointMismatchError,
    match=r"x/7 has format version 3; this program reads versions 1 to 2",
  ):
    _check([], [], version=3)

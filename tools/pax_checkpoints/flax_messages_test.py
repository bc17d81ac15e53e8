"""Tests of the reader of FLAX checkpoints."""

import re

from etils import epath
from flax import serialization
import jax
import ml_dtypes
import numpy as np
import optax
import pytest

from paxon.runner import user_error
from paxon.tools.pax_checkpoints import flax_messages, testing


def test_names_of_nodes_of_all_kinds():
  adam = optax.ScaleByAdamState(1, {"a.b": 2}, testing.NestedMap(w=3))
  node = testing.TrainState(
    step=0,
    mdl_vars=testing.NestedMap(params=testing.NestedMap(b=1, a=2)),
    opt_states=[(adam, None, optax.MaskedNode(), (), [4])],
  )
  names = flax_messages.parse_names(str(jax.tree.structure(node)))
  assert names == [
    "step",
    "mdl_vars.params.a",
    "mdl_vars.params.b",
    "opt_states.0.0.count",
    "opt_states.0.0.mu.a.b",
    "opt_states.0.0.nu.w",
    "opt_states.0.4.0",
  ]


def test_reads_chunks_scalars_and_bfloat16(tmp_path, monkeypatch):
  large = np.arange(1000, dtype=np.float32).reshape(10, 100)
  small = np.arange(6).astype(ml_dtypes.bfloat16).reshape(2, 3)
  state = testing.make_state({"large": large, "small": small}, step=3)
  leaves, structure = jax.tree.flatten(state)
  leaves[0] = np.uint32(3)
  content = {"flattened_state": leaves, "str_pytree_state": str(structure)}
  monkeypatch.setattr(serialization, "MAX_CHUNK_SIZE", 512)
  path = epath.Path(tmp_path / "checkpoint_3")
  path.write_bytes(serialization.to_bytes(content))
  assert b"__msgpack_chunked_array__" in path.read_bytes()
  found = {leaf.name: leaf for leaf in flax_messages.list_leaves(path)}
  for name, value in {"large": large, "small": small}.items():
    leaf = found[f"mdl_vars.params.{name}"]
    assert (leaf.shape, leaf.dtype) == (value.shape, value.dtype)
    np.testing.assert_array_equal(leaf.read(), value)
  assert found["step"].read() == 3


@pytest.mark.parametrize(
  ("change", "message"),
  [
    pytest.param(lambda x: x[: len(x) // 2], "damaged", id="cut"),
    pytest.param(lambda x: b"no msgpack", "no checkpoint of Pax", id="other"),
    pytest.param(
      lambda x: x.replace(b"PyTreeDef(", b"PyTreeABC("), "begins", id="names"
    ),
  ],
)
def test_rejects_damaged_files(change, message, tmp_path):
  state = testing.make_state({"a": np.ones(3)})
  path = testing.write(tmp_path, state, kind="FLAX") / "state" / "checkpoint"
  path.write_bytes(change(path.read_bytes()))
  with pytest.raises(user_error.UserError, match=re.compile(message, re.S)):
    flax_messages.list_leaves(epath.Path(path))

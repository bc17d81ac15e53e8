"""Tests for the sharding lint."""

import re
import time

import jax.numpy as jnp
import pytest

from paxon.sharding import axes, lint, rules, variables


def _spec(name, shape, names):
  return variables.VariableSpec(
    name=name, shape=shape, dtype=jnp.dtype("float32"), axes=names
  )


def _mesh(**sizes):
  return dict.fromkeys(axes.MESH_AXES, 1) | sizes


_KERNEL = _spec("params/up", (64, 256), (axes.EMBED, axes.MLP))
_BATCH = {"inputs": (32, 128), "weights": (32, 128)}


def _check(*specs, mesh, batch=None, **options):
  return lint.check(
    list(specs) or [_KERNEL], batch=batch or _BATCH, mesh=mesh, **options
  )


@pytest.mark.parametrize(
  "mesh",
  [
    _mesh(),
    _mesh(data=2, fsdp=4, tensor=2),
    _mesh(fsdp=32),
    _mesh(sequence=4, tensor=8),
    _mesh(data=4, expert=2),
  ],
  ids=str,
)
def test_finds_nothing_in_a_good_layout(mesh):
  assert _check(mesh=mesh) == []


def test_dimensions_that_do_not_divide():
  (finding,) = _check(mesh=_mesh(fsdp=32, tensor=3))
  assert not finding.is_error
  assert finding.rule is lint.Rule.PADDED
  assert finding.padding == pytest.approx(2 / 258)
  assert finding.message == (
    "params/up: axis 'mlp' of size 256 is computed as 258, because it does not"
    " divide by tensor=3: 0.78 % of its work is padding, and its 0.0625 MiB"
    " move between the devices of tensor before it is used, as its gradient"
    " does after it; mlp_dim=258 avoids both"
  )


def test_an_indivisible_vocabulary_is_padded():
  table = _spec("params/table", (50_257, 64), (axes.VOCAB, axes.EMBED))
  (finding,) = _check(table, mesh=_mesh(fsdp=2, tensor=4))
  assert "axis 'vocab' of size 50257 is computed as 50260" in finding.message
  assert "its 12.3 MiB move" in finding.message
  larger = _spec("params/table", (50_260, 64), (axes.VOCAB, axes.EMBED))
  assert _check(larger, mesh=_mesh(fsdp=2, tensor=4)) == []
  assert _check(table, mesh=_mesh(fsdp=8)) == []
  # Only its storage: activations of this width are not split.
  assert _check(table, mesh=_mesh(fsdp=64), batch={"inputs": (64, 8)}) == []


@pytest.mark.parametrize(
  ("axis", "field"),
  [(axes.HEADS, "num_heads"), (axes.KV_HEADS, "num_kv_heads")],
)
def test_heads_are_padded(axis, field):
  spec = _spec("params/attention/key", (64, 6, 16), (axes.EMBED, axis, None))
  (finding,) = _check(spec, mesh=_mesh(tensor=4))
  assert not finding.is_error
  assert re.search(
    rf"attention/key: axis '{axis}' of size 6 is computed as 8, .*: 25 % of"
    rf" its work is padding, .*; {field}=8 avoids both",
    finding.message,
  )


@pytest.mark.parametrize(
  ("axis", "field", "mesh"),
  [
    (axes.EXPERTS, "num_experts", {"expert": 4}),
    (axes.STAGES, "the size of 'stages'", {"stage": 4, "data": 8}),
    # Half of the devices would do.
    (axes.HEADS, "num_heads", {"tensor": 16}),
  ],
)
def test_what_padding_cannot_help(axis, field, mesh):
  spec = _spec("params/moe/up", (6, 64, 16), (axis, axes.EMBED, None))
  finding, *_ = _check(spec, mesh=_mesh(**mesh))
  assert finding.is_error
  assert re.search(
    rf"moe/up: axis '{axis}' of size 6 .* make {field} a multiple of \d+,"
    r" such as \d+",
    finding.message,
  )


def test_what_no_size_of_a_variable_divides_is_on_every_device():
  spec = _spec("params/up", (8192, 32768), (axes.EMBED, axes.MLP))
  mesh = _mesh(fsdp=24, tensor=4)
  (finding,) = _check(spec, mesh=mesh, batch={"inputs": (48, 8)})
  assert finding.rule is lint.Rule.STORED_WHOLE
  assert not finding.is_error
  assert finding.message.startswith(
    "params/up: none of its sizes (8192, 32768) divides by fsdp=24, so 0.25 GiB"
    " of it are on every device"
  )


def test_a_batch_that_does_not_cover_the_mesh():
  findings = _check(mesh=_mesh(data=8, fsdp=8), batch={"inputs": (32, 128)})
  (finding,) = findings
  assert finding.is_error
  assert "batch/inputs: axis 'batch' of size 32" in finding.message
  assert "data=8, fsdp=8" in finding.message
  assert "global_batch_size a multiple of 64, such as 64" in finding.message


def test_lengths_that_do_not_divide_by_the_sequence_axis():
  (finding,) = _check(mesh=_mesh(sequence=3))
  assert "'length' of size 128 does not divide by sequence=3" in finding.message
  # The other array of the batch has the same problem.
  assert finding.message.endswith("(and 1 more variable like it)")


def test_an_axis_used_twice():
  square = _spec("params/square", (64, 128), (axes.EMBED, axes.EMBED))
  (finding,) = _check(square, mesh=_mesh(fsdp=4))
  assert finding.rule is lint.Rule.AXIS_USED_TWICE
  assert not finding.is_error
  assert "params/square: the mesh axis 'fsdp' is asked for twice" in (
    finding.message
  )
  assert "'embed' of size 64, which gets it" in finding.message
  assert "'embed' of size 128, which is not split" in finding.message


def test_an_axis_twice_in_one_rule():
  wrong = ((axes.BATCH, ("data", "data")), *rules.DEFAULT_RULES[1:])
  (finding,) = _check(mesh=_mesh(data=2), rules=wrong)
  assert finding.is_error
  assert finding.message == (
    "the rule of 'batch' names the mesh axis 'data' 2 times; name it once"
  )


def test_a_rule_for_an_axis_that_no_mesh_has():
  wrong = ((axes.BATCH, "replica"), *rules.DEFAULT_RULES[1:])
  (finding,) = _check(mesh=_mesh(), rules=wrong)
  assert finding.rule is lint.Rule.UNKNOWN_AXIS
  assert "names the mesh axis 'replica', but the mesh has" in finding.message


def test_large_tensors_left_replicated():
  large = _spec("params/table", (1 << 20, 64), (None, None))
  (finding,) = _check(large, mesh=_mesh(fsdp=8))
  assert not finding.is_error
  assert "params/table: 0.25 GiB of shape (1048576, 64)" in finding.message
  assert "though the mesh has fsdp=8" in finding.message
  # Data parallelism replicates by intent, and small tensors do no harm.
  assert _check(large, mesh=_mesh(data=8)) == []
  assert _check(large, mesh=_mesh(fsdp=8), large_bytes=1 << 30) == []


def test_a_mesh_axis_that_splits_no_work():
  weights_only = ((axes.BATCH, "data"), *rules.DEFAULT_RULES[1:])
  (finding,) = _check(mesh=_mesh(data=2, fsdp=4), rules=weights_only)
  assert finding.rule is lint.Rule.WORK_NOT_SHARED
  assert "fsdp=4 splits neither the batch" in finding.message
  assert "add 'fsdp' to the rule of 'batch'" in finding.message


def test_stages_of_a_model_that_has_none():
  (finding,) = _check(mesh=_mesh(stage=2))
  assert "the mesh axis stage=2 splits neither the batch" in finding.message
  staged = _spec("params/up", (2, 64, 256), (axes.STAGES, axes.EMBED, axes.MLP))
  assert _check(staged, mesh=_mesh(stage=2)) == []
  # What a pipeline changes: whole layers, or their width with repeats.
  stack = _spec("params/up", (2, 64, 256), (axes.LAYERS, axes.EMBED, axes.MLP))
  for axis in (axes.LAYERS, axes.EMBED):
    staged_rules = rules.replace(rules.DEFAULT_RULES, {axis: "stage"})
    assert _check(stack, mesh=_mesh(stage=2), rules=staged_rules) == []


def test_groups_variables_and_puts_errors_first():
  specs = [
    _spec(f"params/{i}", (6, 1 << 20, 16), (axes.EXPERTS, axes.EMBED, None))
    for i in range(3)
  ]
  large = _spec("params/table", (1 << 20, 64), (None, None))
  warning_first = [large, *specs]
  findings = _check(*warning_first, mesh=_mesh(expert=4))
  assert [finding.is_error for finding in findings] == [True, False]
  assert findings[0].message.startswith("params/0: axis 'experts' of size 6")
  assert findings[0].message.endswith("(and 2 more variables like it)")


def test_is_fast_for_the_largest():
  specs = [
    _spec(f"params/{i}/up", (16384, 65536), (axes.EMBED, axes.MLP))
    for i in range(2000)
  ]
  begin = time.process_time()
  assert _check(*specs, mesh=_mesh(data=2, fsdp=32, tensor=32)) != []
  assert time.process_time() - begin < 10

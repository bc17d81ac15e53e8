"""Tests for all that is read from a compiled training step."""

import math

import pytest

from paxon.runner.plan import testing
from paxon.runner.plan.program_text import hlo, reading

_FLOPS = 3 * testing.LAYERS * 2 * testing.ROWS * testing.WIDTH**2


def _read(file, mesh, *, dcn=(), platform="tpu", traced=_FLOPS):
  return reading.read(
    hlo.parse(testing.stored(file)),
    mesh=mesh,
    dcn=dcn,
    batch_axes=("data", "fsdp"),
    platform=platform,
    traced={"": traced},
  )


@pytest.mark.parametrize(
  ("file", "mesh", "dcn", "platform"),
  [
    ("h200_1x8.txt", {"data": 1, "fsdp": 8}, (), "cuda"),
    ("v4_2_slices.txt", {"data": 2, "fsdp": 4}, ("data",), "tpu"),
  ],
)
def test_the_program_does_what_was_traced(file, mesh, dcn, platform):
  found = _read(file, mesh, dcn=dcn, platform=platform)
  assert found.compiled_flops == _FLOPS
  assert found.hbm_bytes > 0
  # Weights and gradients move, activations do not.
  assert found.communication.collectives
  assert found.resharding == ()
  assert found.notes == ()
  assert not any("FLOPs" in text for text in found.warnings)


def test_devices_that_do_the_same_work():
  # The program does not use the tensor axis.
  found = _read("v5e_2x4.txt", {"data": 1, "fsdp": 4, "tensor": 2})
  assert found.compiled_flops == 2 * _FLOPS
  (text,) = (text for text in found.warnings if "FLOPs" in text)
  assert "does 2.00 of the FLOPs that were traced" in text
  assert "devices do the same work" in text


_TEXT = """HloModule m

%sum (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %s = f32[] add(%a, %b)
}}

%body (t: (s32[], f32[64,64])) -> (s32[], f32[64,64]) {{
  %t = (s32[], f32[64,64]{{1,0}}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %x = f32[64,64]{{1,0}} get-tuple-element(%t), index=1
  %one = s32[] constant(1)
  %j = s32[] add(%i, %one)
  %y = f32[64,64]{{1,0}} {product}
  %z = f32[64,64]{{1,0}} all-reduce(%y), channel_id=1, \
replica_groups=[2,4]<=[4,2]T(1,0), to_apply=%sum, \
metadata={{op_name="jit(f)/Lm/mlp/dot_general"}}
  ROOT %r = (s32[], f32[64,64]{{1,0}}) tuple(%j, %z)
}}

%condition (t: (s32[], f32[64,64])) -> pred[] {{
  %t = (s32[], f32[64,64]{{1,0}}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %n = s32[] constant(7)
  ROOT %l = pred[] compare(%i, %n), direction=LT
}}

ENTRY %main (x: f32[64,64]) -> f32[64,64] {{
  %x = f32[64,64]{{1,0}} parameter(0){batch}
  %o = s32[] constant(0)
  %t = (s32[], f32[64,64]{{1,0}}) tuple(%o, %x)
  %w = (s32[], f32[64,64]{{1,0}}) while(%t), condition=%condition, body=%body
  ROOT %g = f32[64,64]{{1,0}} get-tuple-element(%w), index=1
}}
"""
_DOT = "dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
_BATCH = ", metadata={op_name=\"batch['inputs']\"}"


def _read_text(*, product=_DOT, batch=_BATCH):
  mesh = {"fsdp": 4, "tensor": 2}
  return reading.read(
    hlo.parse(_TEXT.format(product=product, batch=batch)),
    mesh=mesh,
    dcn=(),
    batch_axes=("fsdp",),
    platform="cuda",
    traced={"": math.prod(mesh.values()) * 7 * 2 * 64**3},
  )


def test_activations_in_a_loop():
  found = _read_text()
  (one,) = found.resharding
  assert (one.kind, one.axes, one.module) == ("all-reduce", ("fsdp",), "Lm/mlp")
  assert (one.count, one.payload_bytes) == (7, 7 * 64 * 64 * 4)
  assert (found.notes, found.warnings) == ((), ())


def test_a_kernel_whose_flops_are_not_known():
  found = _read_text(product='custom-call(%x), custom_call_target="mine"')
  assert found.compiled_flops is None
  (note,) = found.notes
  assert note.startswith("The FLOPs of mine are not known")


def test_a_batch_that_has_no_name():
  found = _read_text(batch="")
  assert found.resharding == ()
  (note,) = found.notes
  assert "no parameter of the program is named as the batch" in note


def test_nothing():
  assert reading.NOTHING.communication.collectives == ()
  assert reading.NOTHING.compiled_flops is None

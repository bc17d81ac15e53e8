"""Tests for bytes moved to and from memory."""

import jax
import jax.numpy as jnp
import pytest

from paxon.runner.plan.program_text import costs, hlo, traffic

_ROW = 64 * 4


def _compiled(function, *shapes):
  args = [
    jax.ShapeDtypeStruct(shape, jnp.float32)
    if isinstance(shape, tuple)
    else shape
    for shape in shapes
  ]
  return jax.jit(function).lower(*args).compile()


_INDEX = jax.ShapeDtypeStruct((), jnp.int32)


@pytest.mark.parametrize(
  ("function", "shapes"),
  [
    pytest.param(lambda x, y: jnp.tanh(x @ y) + 1, [(64, 32), (32, 128)],
                 id="matmul"),
    pytest.param(lambda x: jnp.sum(jnp.sin(x) * x, axis=0), [(512, 64)],
                 id="reduction"),
    pytest.param(lambda x: jnp.sin(x[3:5]) + x[:1], [(512, 64)], id="slices"),
    pytest.param(
      lambda x, i: jax.lax.dynamic_slice_in_dim(x, i, 2) * 2,
      [(512, 64), _INDEX], id="dynamic slice",
    ),
    pytest.param(
      lambda x, i: jax.lax.dynamic_update_slice(x, jnp.sin(x[:2]), (i, 0)),
      [(512, 64), _INDEX],
      id="update",
    ),
    pytest.param(lambda x: jnp.concatenate([x, jnp.sin(x)]), [(512, 64)],
                 id="concatenation"),
  ],
)  # fmt: skip
def test_is_what_the_compiler_counts(function, shapes):
  compiled = _compiled(function, *shapes)
  found = costs.read(hlo.parse(compiled.as_text())).hbm_bytes
  assert found == compiled.cost_analysis()["bytes accessed"]


def test_of_a_table_the_rows_that_are_looked_up():
  # The compiler counts the whole table here.
  text = _compiled(
    lambda x, i: x[i] * 2, (512, 64), jax.ShapeDtypeStruct((5,), jnp.int32)
  ).as_text()
  assert costs.read(hlo.parse(text)).hbm_bytes == 5 * 4 + 2 * 5 * _ROW


def test_a_loop_reads_its_layer():
  def loop(x, weights):
    return jax.lax.scan(lambda y, w: (jnp.tanh(y @ w), None), x, weights)[0]

  text = _compiled(loop, (16, 64), (10, 64, 64)).as_text()
  program = hlo.parse(text)
  found = costs.read(program).hbm_bytes
  # Ten times a kernel and activations, not ten times ten kernels.
  once = 10 * 64 * _ROW
  assert once < found < 5 * once


_TEXT = """HloModule m

%inner (p0: f32[512,64], p1: f32[2,64], p2: s32[]) -> f32[512,64] {{
  %p0 = f32[512,64]{{1,0{space}}} parameter(0)
  %p1 = f32[2,64]{{1,0}} parameter(1)
  %p2 = s32[] parameter(2)
  %z = s32[] constant(0)
  %b = f32[512,64]{{1,0{space}}} bitcast(%p0)
{lines}
}}

ENTRY %main (p0: f32[512,64], p1: f32[2,64], p2: s32[]) -> f32[512,64] {{
  %p0 = f32[512,64]{{1,0{space}}} parameter(0)
  %p1 = f32[2,64]{{1,0}} parameter(1)
  %p2 = s32[] parameter(2)
  ROOT %f = {out} fusion(%p0, %p1, %p2), kind=kLoop, calls=%inner{more}
}}
"""
_WHOLE = "f32[512,64]{1,0}"
_CHIP = "f32[512,64]{1,0:T(8,128)S(3)}"
_UPDATE = "dynamic-update-slice(%b, %p1, %p2, %z)"


def _fusion(*lines, out=_WHOLE, space="", more=""):
  text = _TEXT.format(
    lines="\n".join(f"  {line}" for line in lines),
    out=out,
    space=space,
    more=more,
  )
  program = hlo.parse(text)
  return traffic.num_bytes(program.entry.root, program.entry, program)


@pytest.mark.parametrize(
  ("lines", "options", "expected"),
  [
    pytest.param([f"ROOT %u = {_WHOLE} {_UPDATE}"], {}, 4 + 2 * 2 * _ROW,
                 id="in place"),
    pytest.param(
      [f"%u = {_WHOLE} {_UPDATE}",
       f"%v = {_WHOLE} dynamic-update-slice(%u, %p1, %z, %z)",
       f"ROOT %w = {_WHOLE} bitcast(%v)"],
      {}, 4 + 3 * 2 * _ROW, id="two in place"),
    # What is not updated is read and written as well.
    pytest.param([f"%u = {_WHOLE} {_UPDATE}",
                  f"ROOT %n = {_WHOLE} negate(%u)"], {},
                 4 + (510 + 2 + 512) * _ROW, id="update inside"),
    pytest.param(
      ["%d = f32[2,64]{1,0} dynamic-slice(%b, %p2, %z),"
       " dynamic_slice_sizes={2,64}",
       "ROOT %n = f32[2,64]{1,0} add(%d, %p1)"],
      {"out": "f32[2,64]{1,0}"}, 4 + 3 * 2 * _ROW, id="slice"),
    # Elementwise work before the slice is done for the slice alone.
    pytest.param(
      [f"%e = {_WHOLE} exponential(%b)",
       "%d = f32[2,64]{1,0} slice(%e), slice={[0:2], [0:64]}",
       "ROOT %n = f32[2,64]{1,0} negate(%d)"],
      {"out": "f32[2,64]{1,0}"}, 2 * 2 * _ROW, id="slice of a result"),
    pytest.param([f"ROOT %n = {_WHOLE} negate(%b)"], {"space": "S(1)"},
                 512 * _ROW, id="operand on the chip"),
    pytest.param([f"ROOT %n = {_CHIP} negate(%b)"], {"out": _CHIP},
                 512 * _ROW, id="result on the chip"),
    # Handed on, neither read nor written.
    pytest.param([f"%n = {_WHOLE} negate(%b)",
                  f"ROOT %t = ({_WHOLE}, {_WHOLE}) tuple(%n, %p0)"],
                 {"out": f"({_WHOLE}, {_WHOLE})"}, 2 * 512 * _ROW, id="tuple"),
  ],
)  # fmt: skip
def test_fusions(lines, options, expected):
  assert _fusion(*lines, **options) == expected


_PART = (
  "%g = f32[512,64]{1,0} all-gather(%p1), channel_id=1, dimensions={0}",
  "ROOT %t = (f32[2,64]{1,0}, f32[512,64]{1,0}) tuple(%p1, %g)",
)


def test_of_the_parts_of_a_collective_one_counts():
  types = {"out": "(f32[2,64]{1,0}, f32[512,64]{1,0})"}
  assert _fusion(*_PART, **types) == (2 + 512) * _ROW
  later = ", output_to_operand_aliasing={{0}: (1, {}), {1}: (0, {})}"
  assert _fusion(*_PART, **types, more=later) == 0


_ENTRY = """HloModule m

ENTRY %main (p: f32[512,64], i: s32[]) -> f32[] {{
  %p = f32[512,64]{{1,0}} parameter(0)
  %q = f32[512,64]{{1,0:S(1)}} parameter(1)
  %h = f32[512,64]{{1,0:S(5)}} parameter(2)
  %i = s32[] parameter(3)
  %r = f32[2,64]{{1,0}} parameter(4)
  %n = s32[2,1]{{1,0}} parameter(5)
  ROOT %x = {line}
}}
"""
_ROWS = "f32[2,64]{1,0}"
_FAST = "f32[512,64]{1,0:S(1)}"


@pytest.mark.parametrize(
  ("line", "rows"),
  [
    (f"{_WHOLE} negate(%p)", 1024),
    (f"{_WHOLE} copy(%q)", 512),
    (f"{_WHOLE} add(%p, %p)", 1536),
    ("f32[2,64]{1,0} slice(%p), slice={[0:2], [0:64]}", 4),
    ("f32[2,64]{1,0} slice(%q), slice={[0:2], [0:64]}", 2),
    (f"{_WHOLE} dynamic-update-slice(%p, %r, %i, %i)", 4),
    (f"{_WHOLE} scatter(%p, %n, %r), to_apply=%main", 6 + 8 / _ROW),
    (f"({_FAST}, {_WHOLE}, u32[]) copy-start(%p)", 512),
    # To or from the host, one side is here.
    (f"({_WHOLE}, f32[512,64]{{1,0:S(5)}}, u32[]) copy-start(%h)", 512),
    (f"{_WHOLE} all-reduce(%p), to_apply=%main", 1024),
    (f"{_WHOLE} all-reduce-start(%p), to_apply=%main", 1024),
    (f"({_ROWS}, {_WHOLE}) all-gather-start(%r), dimensions={{0}}", 514),
    (f"{_WHOLE} all-gather-done(%p)", 0),
    (f"({_WHOLE}) tuple(%p)", 0),
    (f"{_WHOLE} while(%p), condition=%main, body=%main", 0),
    (f'{_WHOLE} custom-call(%p), custom_call_target="AllocateBuffer"', 0),
    (f'({_WHOLE}, s8[256]) custom-call(%p), custom_call_target="__cublas$gemm"',
     1024),
  ],
)  # fmt: skip
def test_instructions(line, rows):
  program = hlo.parse(_ENTRY.format(line=line))
  found = traffic.num_bytes(program.entry.root, program.entry, program)
  assert found == rows * _ROW


def test_a_fusion_of_another_stream_costs_what_it_does():
  # jax 0.11 runs the copies of a loop on a stream of GPUs for copies.
  text = _TEXT.format(
    lines=f"  ROOT %u = {_WHOLE} {_UPDATE}", out=_WHOLE, space="", more=""
  )
  operands = f"({_WHOLE}, f32[2,64]{{1,0}}, s32[])"
  started = text.replace(
    f"ROOT %f = {_WHOLE} fusion(",
    f"%s = ({operands}, {_WHOLE}, u32[]) fusion-start(",
  ).replace(
    "calls=%inner", f"calls=%inner\n  ROOT %f = {_WHOLE} fusion-done(%s)"
  )
  assert "fusion-start" in started
  for program in map(hlo.parse, (text, started)):
    found = costs.read(program)
    assert found.hbm_bytes == 4 + 2 * 2 * _ROW
    assert not found.notes

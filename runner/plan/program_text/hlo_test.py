"""Tests for the parser of HLO text."""

import jax
import jax.numpy as jnp
import pytest

from paxon.runner.plan.program_text import hlo


@pytest.mark.parametrize(
  ("text", "shape", "num_bytes", "space"),
  [
    ("f32[]", (), 4, 0),
    ("pred[3]{0}", (3,), 3, 0),
    ("bf16[2,16]{1,0}", (2, 16), 64, 0),
    # Tiles in a layout hold parentheses.
    ("bf16[4,64]{1,0:T(8,128)(2,1)S(1)}", (4, 64), 512, 1),
    ("f32[5]{0:T(128)S(5)}", (5,), 20, 5),
    ("u4[3]{0}", (3,), 2, 0),
    ("f8e4m3fn[8,8]{1,0}", (8, 8), 64, 0),
    ("token[]", (), 0, 0),
  ],
)
def test_reads_an_array_type(text, shape, num_bytes, space):
  found = hlo.parse_type(text)
  assert (found.shape, found.num_bytes) == (shape, num_bytes)
  assert found.memory_space == space


def test_reads_nested_tuples_with_comments():
  found = hlo.parse_type(
    "((f32[2]{0:T(128)}, bf16[4]{0}), /*index=1*/(s32[], f32[8]{0}))"
  )
  assert [e.num_bytes for e in found.elements] == [16, 36]
  assert found.num_bytes == 52
  assert found.elements[1].elements[1].shape == (8,)


_TEXT = """HloModule m, is_scheduled=true

%inner (p: f32[2]) -> f32[2] {
  %p = f32[2]{0} parameter(0)
  ROOT %n = f32[2]{0} negate(%p)
}

ENTRY %main.1 (a: f32[2], b: (s32[], f32[2])) -> f32[2] {
  %a = f32[2]{0:T(128)S(1)} parameter(0), sharding={devices=[2]<=[2]}
  %b = (s32[], /*index=1*/f32[2]{0}) parameter(1)
  %c = s32[] constant(-7)
  %e = f32[2]{0} get-tuple-element(%b), index=1
  ROOT %f = f32[2]{0} fusion(%a, /*index=1*/%e), kind=kLoop, calls=%inner, \
metadata={op_name="jit(f)/a, b=c/neg" stack_frame_id=3}, \
backend_config={"x":{"n":"1"}}
}
"""


def test_an_instruction_may_hold_line_breaks():
  """As the metadata of Pallas kernels does."""
  text = _TEXT.replace(
    'metadata={op_name="jit(f)',
    'x={k={\n"m":"{1}"\n}}, metadata={op_name="jit(g)',
  )
  (found,) = [
    i for i in hlo.parse(text).entry.instructions.values() if i.name == "f"
  ]
  assert found.op_name == "jit(g)/a, b=c/neg"
  assert found.get_called("calls") == ("inner",)
  assert found.attribute("x") == '{k={ "m":"{1}" }}'


def test_reads_a_program():
  program = hlo.parse(_TEXT)
  assert set(program.computations) == {"inner", "main.1"}
  assert program.entry.name == "main.1"
  assert list(program.entry.instructions) == ["a", "b", "c", "e", "f"]
  root = program.entry.root
  assert (root.name, root.opcode) == ("f", "fusion")
  assert root.operands == ("a", "e")
  assert root.get_called("calls") == ("inner",)
  assert root.attribute("kind") == "kLoop"
  assert root.attribute("backend_config") == '{"x":{"n":"1"}}'
  assert root.attribute("calls_not") is None
  # A comma or an equals sign in a name is no attribute.
  assert root.op_name == "jit(f)/a, b=c/neg"
  assert program.entry.instructions["c"].operands == ("-7",)
  assert program.entry.instructions["e"].attribute("index") == "1"


@pytest.mark.parametrize(
  ("text", "message"),
  [
    ("HloModule m\n", "no ENTRY computation"),
    ("ENTRY %m () -> f32[] {\n  oh dear\n}\n", "Not an instruction: '  oh"),
    ("ENTRY %m () -> f32[] {\n  %x = f32[2] {\n}\n", "in %?x|No opcode|match"),
    ("ENTRY %m () -> f32[] {\n}\n", "computation m is empty"),
  ],
)
def test_says_what_it_does_not_understand(text, message):
  with pytest.raises(hlo.ParseError, match=message):
    hlo.parse(text)


def test_reads_what_this_compiler_prints():
  def f(x):
    return jax.lax.fori_loop(0, 7, lambda _, y: jnp.tanh(y @ x), x)

  compiled = jax.jit(f).lower(jnp.ones((4, 4))).compile()
  program = hlo.parse(compiled.as_text())
  opcodes = {
    instruction.opcode
    for computation in program.computations.values()
    for instruction in computation.instructions.values()
  }
  assert "while" in opcodes
  assert program.entry.root.type.num_bytes == 64

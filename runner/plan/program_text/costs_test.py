"""Tests for the costs of compiled programs."""

import jax
import jax.numpy as jnp
import pytest

from paxon.runner.plan import testing
from paxon.runner.plan.program_text import costs, hlo


def _program(function, *shapes):
  args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
  return hlo.parse(jax.jit(function).lower(*args).compile().as_text())


def _loop(x, weights):
  def layer(y, w):
    with jax.named_scope("layer"):
      return jnp.tanh(y @ w), None

  return jax.lax.scan(layer, x, weights)[0]


def test_loops_are_multiplied():
  program = _program(_loop, (16, 64), (10, 64, 64))
  total = costs.read(program)
  assert total.flops == 10 * 2 * 16 * 64 * 64
  assert total.count_by_part() == {"layer": total.flops}
  assert total.count_by_dtypes("float32") == total.flops
  assert total.count_by_dtypes("bfloat16") == 0
  assert total.count_by_part("bfloat16") == {}
  assert (total.unknown, total.notes) == ((), ())


def test_multiplicities():
  program = _program(_loop, (16, 64), (10, 64, 64))
  (loop,) = (
    instruction
    for instruction in program.entry.instructions.values()
    if instruction.opcode == "while"
  )
  found = costs.read(program).runs
  (body,), (condition,) = loop.get_called("body"), loop.get_called("condition")
  assert found[program.entry.name] == 1
  # A loop asks once more than it runs.
  assert (found[body], found[condition]) == (10, 11)


def test_each_instruction_has_its_cost():
  program = _program(_loop, (16, 64), (10, 64, 64))
  found = costs.read(program).operations
  matmuls = [cost for cost in found.values() if cost.flops]
  assert [cost.kind for cost in matmuls] == ["matmul"]
  assert matmuls[0].flops == 2 * 16 * 64 * 64
  assert matmuls[0].dtype == "float32"
  assert matmuls[0].name.endswith("layer/dot_general")
  assert {cost.kind for cost in found.values()} >= {"none", "loop", "matmul"}
  # What a fusion does is the fusion's.
  fused = {
    name
    for computation in program.computations.values()
    for instruction in computation.instructions.values()
    if instruction.opcode == "fusion"
    for name in instruction.get_called("calls")
  }
  assert not fused & {computation for computation, _ in found}


@pytest.mark.parametrize(
  # Along the tensor axis of the second, devices do the same work.
  ("file", "parts_of_rows"),
  [("h200_1x8.txt", 8), ("v5e_2x4.txt", 4), ("v4_2_slices.txt", 8)],
)
def test_a_training_loop_on_absent_hardware(file, parts_of_rows):
  total = costs.read(hlo.parse(testing.read_text(file)))
  rows, width, layers = testing.ROWS, testing.WIDTH, testing.LAYERS
  # Forward, and backward for the kernels and for what they multiply.
  matmul = 2 * rows * width * width // parts_of_rows
  assert total.flops == 3 * layers * matmul
  assert total.count_by_dtypes("bfloat16") == total.flops
  assert not total.unknown
  # Each kernel once and each layer's rows both ways, if nothing stays on chip.
  once = layers * (2 * width**2 + 4 * rows * width // parts_of_rows)
  assert 0 < total.hbm_bytes < 20 * once
  assert file != "h200_1x8.txt" or total.hbm_bytes > once


_BRANCHES = """HloModule m

%dear (d: f32[64,64]) -> f32[64,64] {{
  %d = f32[64,64]{{1,0}} parameter(0)
  ROOT %p = f32[64,64]{{1,0}} dot(%d, %d), lhs_contracting_dims={{1}}, \
rhs_contracting_dims={{0}}, metadata={{op_name="jit(f)/expert/dot_general"}}
}}

%cheap (c: f32[64,64]) -> f32[64,64] {{
  %c = f32[64,64]{{1,0}} parameter(0)
  ROOT %n = f32[64,64]{{1,0}} negate(%c)
}}

ENTRY %main (i: s32[], x: f32[64,64]) -> f32[64,64] {{
  %i = s32[] parameter(0)
  %x = f32[64,64]{{1,0}} parameter(1)
  ROOT %r = f32[64,64]{{1,0}} conditional(%i, %x, %x), \
branch_computations={{{branches}}}, metadata={{op_name="jit(f)/router/cond"}}
}}
"""


@pytest.mark.parametrize("branches", ["%cheap, %dear", "%dear, %cheap"])
def test_of_a_conditional_the_dearest_branch(branches):
  program = hlo.parse(_BRANCHES.format(branches=branches))
  total = costs.read(program)
  assert total.flops == 2 * 64**3
  (note,) = total.notes
  assert note.startswith("The branches of a conditional in router cost differ")
  key = program.entry.name, "r"
  assert costs.read(program).branches == {key: "dear"}
  assert "cheap" not in costs.read(program).runs


def test_branches_that_cost_the_same_need_no_note():
  program = hlo.parse(_BRANCHES.format(branches="%dear, %dear"))
  assert costs.read(program).notes == ()


def test_a_compiled_conditional():
  def f(i, x):
    return jax.lax.cond(i > 0, lambda y: jnp.tanh(y @ y), lambda y: y, x)

  args = (
    jax.ShapeDtypeStruct((), jnp.int32),
    jax.ShapeDtypeStruct((64, 64), jnp.float32),
  )
  program = hlo.parse(jax.jit(f).lower(*args).compile().as_text())
  assert costs.read(program).flops == 2 * 64**3


@pytest.mark.parametrize(
  ("target", "kind"),
  [("mine", "kernel"), ("__cudnn$convForward", "convolution")],
)
def test_a_kernel_without_a_formula_is_said(target, kind):
  text = f"""HloModule m

ENTRY %main (x: f32[8]) -> f32[8] {{
  %x = f32[8]{{0}} parameter(0)
  ROOT %c = f32[8]{{0}} custom-call(%x), custom_call_target="{target}"
}}
"""
  program = hlo.parse(text)
  assert costs.read(program).unknown == (target,)
  cost = costs.read(program).operations["main", "c"]
  assert (cost.kind, cost.is_approximate, cost.flops) == (kind, True, 0)


_ATTENTION = """HloModule m

ENTRY %main (q: bf16[2,4,8,16], k: bf16[2,4,9,16]) -> bf16[2,4,8,9] {{
  %q = bf16[2,4,8,16]{{3,2,1,0}} parameter(0)
  %k = bf16[2,4,9,16]{{3,2,1,0}} parameter(1)
  ROOT %s = bf16[2,4,8,9]{{3,2,1,0}} dot(%q, %k), lhs_batch_dims={{0,1}}, \
rhs_batch_dims={{0,1}}, lhs_contracting_dims={{3}}, rhs_contracting_dims={{3}}\
, metadata={{op_name="jit(f)/{stack}/dot_general"}}
}}
"""


@pytest.mark.parametrize(
  ("stack", "kind"),
  [
    ("Lm/attention/BTKGH,BSKH->BKGTS", "attention"),
    ("Lm/mixer/BTKGH,BSKH->BKGTS", "attention"),
    ("Lm/self_attention", "attention"),
    # The gradient of a projection, as the compiler may write it.
    ("Lm/attention/BTD,DCNH->BTCNH", "matmul"),
    ("Lm/experts", "matmul"),
  ],
)
def test_matmuls_of_activations_are_attention(stack, kind):
  program = hlo.parse(_ATTENTION.format(stack=stack))
  cost = costs.read(program).operations["main", "s"]
  assert (cost.kind, cost.dtype) == (kind, "bfloat16")


_ONE_HEAD = """HloModule m

ENTRY %main (q: bf16[8,16], k: bf16[9,16]) -> bf16[8,9] {{
  %q = bf16[8,16]{{1,0}} parameter(0)
  %k = bf16[9,16]{{1,0}} parameter(1)
  ROOT %s = bf16[8,9]{{1,0}} dot(%q, %k), lhs_contracting_dims={{1}}, \
rhs_contracting_dims={{1}}, metadata={{op_name="jit(f)/{stack}/dot_general"}}
}}
"""


@pytest.mark.parametrize(
  ("stack", "kind"),
  [
    ("Lm/attention/BTKGH,BSKH->BKGTS", "attention"),
    ("Lm/self_attention", "matmul"),
  ],
)
def test_attention_of_one_sequence_and_head_has_no_batch(stack, kind):
  program = hlo.parse(_ONE_HEAD.format(stack=stack))
  assert costs.read(program).operations["main", "s"].kind == kind


_FOURIER = """HloModule m

ENTRY %main (p: f32[448,256], q: f32[256,256]) -> f32[448,256] {
  %p = f32[448,256] parameter(0)
  %q = f32[256,256] parameter(1)
  ROOT %c = f32[448,256] convolution(%p, %q), dim_labels=bf_io->bf,
    metadata={op_name="NAME"}
}
"""


@pytest.mark.parametrize(
  ("name", "counted"),
  [("jit(step)/jit(fft)", 0), ("jit(step)/fft", 0), ("jit(step)/dot", 1)],
)
def test_fourier_transforms_cost_time_but_are_no_matmuls(name, counted):
  text = _FOURIER.replace("NAME", name).replace("\n    ", " ")
  found = costs.read(hlo.parse(text))
  flops = 2 * 448 * 256 * 256
  assert found.operations["main", "c"].flops == flops
  assert found.flops == counted * flops


# A loop's matmuls by cuBLASLt, as JAX 0.11 compiles them for GPUs: one takes
# its operand from a stack, the other puts its result into one.
_SLICED = """HloModule m

%take (p0: bf16[4,64,32], p1: s32[], p2: bf16[32,48]) -> \
(bf16[64,48], s8[999]) {
  %p0 = bf16[4,64,32]{2,1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %zero = s32[] constant(0)
  %d = bf16[1,64,32]{2,1,0} dynamic-slice(%p0, %p1, %zero, %zero), \
dynamic_slice_sizes={1,64,32}
  %b = bf16[64,32]{1,0} bitcast(%d)
  %p2 = bf16[32,48]{1,0} parameter(2)
  ROOT %c = (bf16[64,48]{1,0}, s8[999]{0}) custom-call(%b, %p2), CALL/up/dot"}
}

%put (q0: bf16[64,48], q1: bf16[48,32], q2: bf16[4,64,32], q3: s32[]) -> \
(bf16[4,64,32], s8[999]) {
  %q0 = bf16[64,48]{1,0} parameter(0)
  %q1 = bf16[48,32]{1,0} parameter(1)
  %q2 = bf16[4,64,32]{2,1,0} parameter(2)
  %q3 = s32[] parameter(3)
  %zero = s32[] constant(0)
  %c = (bf16[64,32]{1,0}, s8[999]{0}) custom-call(%q0, %q1), CALL/down/dot"}
  %y = bf16[64,32]{1,0} get-tuple-element(%c), index=0
  %b = bf16[1,64,32]{2,1,0} bitcast(%y)
  %u = bf16[4,64,32]{2,1,0} dynamic-update-slice(%q2, %b, %q3, %zero, %zero)
  %w = s8[999]{0} get-tuple-element(%c), index=1
  ROOT %t = (bf16[4,64,32]{2,1,0}, s8[999]{0}) tuple(%u, %w)
}

ENTRY %main (x: bf16[4,64,32], i: s32[], k: bf16[32,48], l: bf16[48,32]) -> \
bf16[4,64,32] {
  %x = bf16[4,64,32]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  %k = bf16[32,48]{1,0} parameter(2)
  %l = bf16[48,32]{1,0} parameter(3)
  %f = (bf16[64,48]{1,0}, s8[999]{0}) fusion(%x, %i, %k), calls=%take, FUSION
  %h = bf16[64,48]{1,0} get-tuple-element(%f), index=0
  %g = (bf16[4,64,32]{2,1,0}, s8[999]{0}) fusion(%h, %l, %x, %i), calls=%put, \
FUSION
  ROOT %r = bf16[4,64,32]{2,1,0} get-tuple-element(%g), index=0
}
"""
_CALL = """custom_call_target="__cublas$lt$matmul", \
backend_config={"gemm_backend_config":{"dot_dimension_numbers":\
{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}, \
metadata={op_name="jit(step)/mlp"""
_FUSION = """kind=kCustom, backend_config={"fusion_backend_config":\
{"custom_fusion_config":{"name":"dynamic_slice_fusion","kernel_index":0},\
"kind":"__custom_fusion"}}"""


def test_a_kernel_inside_a_fusion_that_slices_is_counted():
  text = _SLICED.replace("CALL", _CALL).replace("FUSION", _FUSION)
  total = costs.read(hlo.parse(text))
  flops = 2 * 64 * 32 * 48
  assert total.counts == {
    ("mlp/up", "bfloat16"): flops,
    ("mlp/down", "bfloat16"): flops,
  }
  assert total.kernels == {"__cublas$lt$matmul": 2 * flops}
  assert total.unknown == ()
  # Rows of one slice, hidden rows, a matrix and the index; no scratch memory.
  num_bytes = 2 * (64 * 32 + 64 * 48 + 32 * 48) + 4
  for name in ("f", "g"):
    cost = total.operations["main", name]
    assert (cost.kind, cost.kernel) == ("matmul", "__cublas$lt$matmul")
    assert (cost.flops, cost.hbm_bytes) == (flops, num_bytes)


def test_a_kernel_without_a_formula_inside_a_fusion_is_said():
  call = _CALL.replace("__cublas$lt$matmul", "mine")
  text = _SLICED.replace("CALL", call).replace("FUSION", _FUSION)
  total = costs.read(hlo.parse(text))
  assert (total.flops, total.unknown) == (0, ("mine",))
  assert total.operations["main", "f"].kind == "kernel"

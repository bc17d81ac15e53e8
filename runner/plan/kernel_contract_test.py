"""Tests for which kernels a compiled step has, and which were expected."""

import pytest

from paxon.runner.plan import hardware, kernel_contract, result
from paxon.runner.plan.program_text import hlo
from paxon.runner.settings import expected_kernels

_CUDA, _TPU = hardware.Platform.CUDA, hardware.Platform.TPU
_FMHA = """custom_call_target="__cudnn$fmhaSoftmax{more}", \
metadata={{op_name="jit(step)/{stack}/attention/dot_product_attention_fwd"}}, \
backend_config={{"cudnn_fmha_backend_config": {{"intermediate_tensor_shape": \
{{"element_type": "BF16", "dimensions": ["2", "1", "8", "8"]}}}}}}"""

# A loop of three layers: the forward pass, and the backward pass with the
# forward pass once more.
_CUDA_TEXT = f"""HloModule m, is_scheduled=true

%matmul (x: bf16[8,8]) -> bf16[8,8] {{
  %x = bf16[8,8]{{1,0}} parameter(0)
  ROOT %d = bf16[8,8]{{1,0}} dot(%x, %x), lhs_contracting_dims={{1}}, \
rhs_contracting_dims={{0}}, metadata={{op_name="jit(step)/mlp/dot_general"}}
}}

%body (s: (s32[], bf16[2,8,1,8], bf16[8,8])) -> \
(s32[], bf16[2,8,1,8], bf16[8,8]) {{
  %s = (s32[], bf16[2,8,1,8], bf16[8,8]) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %q = bf16[2,8,1,8]{{3,2,1,0}} get-tuple-element(%s), index=1
  %w = bf16[8,8]{{1,0}} get-tuple-element(%s), index=2
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %f = (bf16[2,8,1,8], u8[0]) custom-call(%q, %q, %q), \
{_FMHA.format(more="", stack="jvp()/while/body")}
  %o = bf16[2,8,1,8]{{3,2,1,0}} get-tuple-element(%f), index=0
  %r = (bf16[2,8,1,8], u8[0]) custom-call(%o, %q, %q), \
{_FMHA.format(more="", stack="transpose(jvp())/rematted_computation")}
  %b = (bf16[2,8,1,8], u8[0]) custom-call(%q, %q, %q), \
{_FMHA.format(more="Backward", stack="transpose(jvp())")}
  %t = bf16[8,8]{{1,0}} fusion(%w), kind=kCustom, calls=%matmul, \
backend_config={{"fusion_backend_config":{{"kind":"__triton_gemm"}}}}
  ROOT %u = (s32[], bf16[2,8,1,8], bf16[8,8]) tuple(%next, %o, %t)
}}

%condition (c: (s32[], bf16[2,8,1,8], bf16[8,8])) -> pred[] {{
  %c = (s32[], bf16[2,8,1,8], bf16[8,8]) parameter(0)
  %j = s32[] get-tuple-element(%c), index=0
  %n = s32[] constant(3)
  ROOT %l = pred[] compare(%j, %n), direction=LT
}}

ENTRY %main (z: (s32[], bf16[2,8,1,8], bf16[8,8])) -> \
(s32[], bf16[2,8,1,8], bf16[8,8]) {{
  %z = (s32[], bf16[2,8,1,8], bf16[8,8]) parameter(0)
  %v = bf16[8,8]{{1,0}} get-tuple-element(%z), index=2
  %e = (f32[8,8], s8[0]) custom-call(%v, %v), \
custom_call_target="__cublas$lt$matmul$f8", \
metadata={{op_name="jit(step)/mlp/dot_general"}}
  ROOT %y = (s32[], bf16[2,8,1,8], bf16[8,8]) while(%z), \
condition=%condition, body=%body, \
backend_config={{"known_trip_count":{{"n":"3"}}}}
}}
"""

_TPU_TEXT = """HloModule m, is_scheduled=true

ENTRY %main (z: bf16[8,8]) -> bf16[8,8] {
  %z = bf16[8,8]{1,0} parameter(0)
  %a = bf16[8,8]{1,0} custom-call(%z), custom_call_target="tpu_custom_call", \
metadata={op_name="jit(step)/jvp()/attention/splash_mha_fwd"}
  %b = bf16[8,8]{1,0} custom-call(%a), custom_call_target="tpu_custom_call", \
metadata={op_name="jit(step)/transpose(jvp())/attention/splash_mha_dkv"}
  %c = bf16[8,8]{1,0} custom-call(%b), custom_call_target="tpu_custom_call", \
metadata={op_name="jit(step)/jvp()/mine/my_kernel"}
  ROOT %d = bf16[8,8]{1,0} dot(%c, %c), lhs_contracting_dims={1}, \
rhs_contracting_dims={0}, metadata={op_name="jit(step)/jvp()/mlp/dot_general"}
}
"""


def _found(text, *, is_tuned=False):
  choices = kernel_contract.choices(hlo.parse(text), is_tuned=is_tuned)
  return [(c.part, c.kernel, c.is_final, c.count) for c in choices]


def test_reads_the_kernels_of_a_gpu():
  assert _found(_CUDA_TEXT) == [
    ("attention forward", "cudnn", True, 6),
    ("attention backward", "cudnn", True, 3),
    ("matmuls", "triton", False, 3),
    ("matmuls", "cublas fp8", True, 1),
  ]


def test_what_ran_through_autotuning_is_decided():
  assert all(
    is_final for _, _, is_final, _ in _found(_CUDA_TEXT, is_tuned=True)
  )


def test_reads_the_kernels_of_a_tpu():
  assert _found(_TPU_TEXT) == [
    ("attention forward", "splash", True, 1),
    ("attention backward", "splash", True, 1),
    ("matmuls", "xla", True, 1),
    ("other", "pallas", True, 1),
  ]


def test_the_blocks_of_a_ring_are_told_from_plain_attention():
  text = """HloModule m, is_scheduled=true

ENTRY %main (z: bf16[2,8,8]) -> bf16[2,8,8] {
  %z = bf16[2,8,8]{2,1,0} parameter(0)
  %s = bf16[2,8,8]{2,1,0} dot(%z, %z), lhs_batch_dims={0}, \
rhs_batch_dims={0}, lhs_contracting_dims={2}, rhs_contracting_dims={1}, \
metadata={op_name="jit(f)/jvp()/attention/ring_attention/shard_map/while/body/\
BTKGH,BSKH->BKGTS/dot_general"}
  ROOT %d = bf16[2,8,8]{2,1,0} dot(%s, %z), lhs_batch_dims={0}, \
rhs_batch_dims={0}, lhs_contracting_dims={2}, rhs_contracting_dims={1}, \
metadata={op_name="jit(f)/transpose(jvp())/attention/ring_attention/while/\
BKGTS,BTKGH->BSKH/dot_general"}
}
"""
  assert _found(text) == [
    ("attention forward", "ring", True, 1),
    ("attention backward", "ring", True, 1),
  ]


def test_the_gradient_of_a_projection_is_no_attention():
  text = """HloModule m, is_scheduled=true

ENTRY %main (z: bf16[2,8,8]) -> bf16[2,8,8] {
  %z = bf16[2,8,8]{2,1,0} parameter(0)
  %s = bf16[2,8,8]{2,1,0} dot(%z, %z), lhs_batch_dims={0}, \
rhs_batch_dims={0}, lhs_contracting_dims={2}, rhs_contracting_dims={1}, \
metadata={op_name="jit(f)/jvp()/attention/BTKGH,BSKH->BKGTS/dot_general"}
  ROOT %p = bf16[2,8,8]{2,1,0} dot(%s, %z), lhs_batch_dims={0}, \
rhs_batch_dims={0}, lhs_contracting_dims={2}, rhs_contracting_dims={1}, \
metadata={op_name="jit(f)/transpose(jvp())/attention/BTNH,NHD->BTD/dot_general"}
}
"""
  assert _found(text) == [
    ("attention forward", "plain", True, 1),
    ("matmuls", "xla", True, 1),
  ]


def test_quantized_matmuls_count_in_two_parts():
  text = """HloModule m, is_scheduled=true

ENTRY %main (z: s8[8,8], f: f8e4m3fn[8,8], h: bf16[8,8]) -> bf16[8,8] {
  %z = s8[8,8]{1,0} parameter(0)
  %f = f8e4m3fn[8,8]{1,0} parameter(1)
  %h = bf16[8,8]{1,0} parameter(2)
  %a = (s32[8,8], s8[0]) custom-call(%z, %z), \
custom_call_target="__cublas$lt$matmul", \
metadata={op_name="jit(f)/jvp(mlp)/einsum/up/quantized_forward/dot_general"}, \
backend_config={"gemm_backend_config":{"dot_dimension_numbers":\
{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}
  %b = (bf16[8,8], s8[0]) custom-call(%f, %f), \
custom_call_target="__cublas$lt$matmul$f8", \
metadata={op_name="jit(f)/mlp/quantized_input_gradient/dot_general"}, \
backend_config={"gemm_backend_config":{"dot_dimension_numbers":\
{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}
  ROOT %c = bf16[8,8]{1,0} dot(%h, %h), lhs_contracting_dims={1}, \
rhs_contracting_dims={0}, metadata={op_name="jit(f)/head/dot_general"}
}
"""
  assert _found(text) == [
    ("matmuls", "cublas int8", True, 1),
    ("matmuls", "cublas fp8", True, 1),
    ("matmuls", "xla", True, 1),
    ("quantized matmuls", "cublas int8", True, 1),
    ("quantized matmuls", "cublas fp8", True, 1),
  ]


def test_a_kernel_inside_a_fusion_that_slices_is_that_kernel():
  text = """HloModule m, is_scheduled=true

%inner (p: bf16[2,8,8], i: s32[]) -> (bf16[8,8], s8[0]) {
  %p = bf16[2,8,8]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  %d = bf16[1,8,8]{2,1,0} dynamic-slice(%p, %i, %i, %i), \
dynamic_slice_sizes={1,8,8}
  %b = bf16[8,8]{1,0} bitcast(%d)
  ROOT %c = (bf16[8,8], s8[0]) custom-call(%b, %b), \
custom_call_target="__cublas$lt$matmul", \
metadata={op_name="jit(f)/head/dot_general"}, \
backend_config={"gemm_backend_config":{"dot_dimension_numbers":\
{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}
}

ENTRY %main (z: bf16[2,8,8], i: s32[]) -> (bf16[8,8], s8[0]) {
  %z = bf16[2,8,8]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  ROOT %f = (bf16[8,8], s8[0]) fusion(%z, %i), kind=kCustom, calls=%inner, \
backend_config={"fusion_backend_config":{"custom_fusion_config":\
{"name":"dynamic_slice_fusion"},"kind":"__custom_fusion"}}
}
"""
  assert _found(text) == [("matmuls", "cublas", False, 1)]


def _choice(part, kernel, *, is_final=True, dtype="bfloat16"):
  return result.KernelChoice(
    part=part, kernel=kernel, is_final=is_final, count=2, dtype=dtype
  )


def _problems(expected, *found, platform=_CUDA):
  contract = [
    expected_kernels.ExpectedKernel(part=expected[0], kernel=expected[1])
  ]
  return [
    words
    for _, words in kernel_contract.mismatches(
      contract, found, platform=platform
    )
  ]


_FORWARD, _MATMULS = "attention forward", "matmuls"
_QUANTIZED = "quantized matmuls"


@pytest.mark.parametrize(
  ("expected", "found"),
  [
    pytest.param(
      (_FORWARD, "cudnn"), [_choice(_FORWARD, "cudnn")], id="as expected"
    ),
    pytest.param(
      (_MATMULS, "cublas fp8"),
      [_choice(_MATMULS, "cublas fp8"), _choice(_MATMULS, "triton")],
      id="some matmuls are enough",
    ),
    pytest.param(
      (_MATMULS, "cublas"),
      [_choice(_MATMULS, "triton", is_final=False)],
      id="autotuning will tell",
    ),
    pytest.param(
      (_QUANTIZED, "cublas fp8"),
      [
        _choice(_QUANTIZED, "cublas fp8"),
        _choice(_QUANTIZED, "triton", is_final=False, dtype="float8_e4m3fn"),
      ],
      id="autotuning will tell of quantized matmuls",
    ),
    pytest.param(
      (_FORWARD, "splash"),
      [_choice(_FORWARD, "plain")],
      id="of another platform",
    ),
  ],
)
def test_what_is_not_decidedly_wrong_is_accepted(expected, found):
  assert _problems(expected, *found) == []


@pytest.mark.parametrize(
  ("expected", "found", "words"),
  [
    pytest.param((_FORWARD, "cudnn"), [], "none", id="nothing"),
    pytest.param(
      (_FORWARD, "cudnn"),
      [_choice(_FORWARD, "cudnn"), _choice(_FORWARD, "plain")],
      "2 of plain (matmuls, with all logits in memory)",
      id="one layer differs",
    ),
    pytest.param(
      (_MATMULS, "cublas fp8"),
      [_choice(_MATMULS, "triton", is_final=False)],
      "2 of triton (XLA's Triton fusions)",
      id="fp8 is no matter of autotuning",
    ),
    pytest.param(
      (_MATMULS, "cublas"),
      [_choice(_MATMULS, "triton")],
      "2 of triton (XLA's Triton fusions)",
      id="autotuning has told",
    ),
    pytest.param((_QUANTIZED, "cublas fp8"), [], "none", id="none quantized"),
    pytest.param(
      (_QUANTIZED, "cublas fp8"),
      [_choice(_QUANTIZED, "cublas fp8"), _choice(_QUANTIZED, "xla")],
      "2 of xla (XLA's own code)",
      id="one quantized matmul differs",
    ),
    pytest.param(
      (_QUANTIZED, "cublas fp8"),
      [_choice(_QUANTIZED, "cublas", is_final=False)],
      "2 of cublas (cuBLAS or cuBLASLt)",
      id="autotuning makes no fp8 of bfloat16",
    ),
  ],
)
def test_what_is_decidedly_wrong_is_named(expected, found, words):
  assert _problems(expected, *found) == [words]


def test_an_expectation_holds_on_the_platform_of_its_kernel():
  choice = _choice(_FORWARD, "plain")
  assert _problems((_FORWARD, "splash"), choice, platform=_TPU)
  assert not _problems((_FORWARD, "cudnn"), choice, platform=_TPU)
  assert _problems((_FORWARD, "pallas"), choice, platform=_TPU)

"""Tests for kernels of compiled programs."""

import pytest

from paxon.runner.plan.program_text import hlo, kernels

_B, _N, _T, _S, _H = 2, 4, 128, 256, 64

_TEXT = """HloModule m

%inner (p: f32[8]) -> f32[8] {{
  ROOT %p = f32[8]{{0}} parameter(0)
}}

ENTRY %main (q: bf16[{B},{T},{N},{H}], k: bf16[{B},{S},{N},{H}]) -> f32[8] {{
  %q = bf16[{B},{T},{N},{H}]{{3,2,1,0}} parameter(0)
  %k = bf16[{B},{S},{N},{H}]{{3,2,1,0}} parameter(1)
  ROOT %c = {type} {call}
}}
"""


def _call(call, type_="f32[8]{0}"):
  text = _TEXT.format(B=_B, N=_N, T=_T, S=_S, H=_H, type=type_, call=call)
  program = hlo.parse(text)
  operands = [
    program.entry.instructions[name].type
    for name in program.entry.root.operands
  ]
  return program.entry.root, operands


def _custom(target, config=""):
  return (
    f'custom-call(%q, %k), custom_call_target="{target}",'
    f" backend_config={{{config}}}"
  )


_SCORES = (
  '"cudnn_fmha_backend_config":{"intermediate_tensor_shape":{"element_type":'
  f'"BF16","dimensions":["{_B}","{_N}","{_T}","{_S}"],"layout":{{}}}}}}'
)
_MATMUL = 2 * _B * _N * _T * _S * _H


@pytest.mark.parametrize(
  ("target", "matmuls"),
  [
    ("__cudnn$fmhaSoftmax", 2),
    ("__cudnn$fmhaScaleBiasSoftmax", 2),
    ("__cudnn$fmhaSoftmaxBackward", 5),
  ],
)
def test_attention(target, matmuls):
  call, operands = _call(_custom(target, _SCORES))
  assert kernels.flops(call, operands) == matmuls * _MATMUL
  assert kernels.name(call) == target
  assert kernels.is_attention(target)
  assert kernels.is_attention_backward(target) == (matmuls == 5)


def test_attention_as_the_compiler_for_cuda_prints_it():
  config = (
    '"cudnn_fmha_backend_config": {"algorithm": {"algo_id": "0"}, "fmha_scale":'
    ' 0.125, "intermediate_tensor_shape": {"element_type": "BF16",'
    f' "dimensions": ["{_B}", "{_N}", "{_T}", "{_S}"], "tuple_shapes": []}},'
    ' "mask_type": "CAUSAL"}'
  )
  call, operands = _call(_custom("__cudnn$fmhaSoftmax", config))
  # All keys of all queries, as everywhere; the mask is not looked at.
  assert kernels.flops(call, operands) == 2 * _MATMUL


@pytest.mark.parametrize(
  ("mask", "window", "lengths", "share"),
  [
    # Of 8 x 8 pairs 36; with a window of 2 tokens 1 + 7 x 2.
    ("CAUSAL", 0, (8, 8), 36 / 64),
    ("PADDING_CAUSAL", 2, (8, 8), 15 / 64),
    # The decoder's tokens attend to the encoder's.
    ("PADDING", 0, (8, 16), 1.0),
    ("NO_MASK", 0, (8, 8), 1.0),
  ],
)
def test_pairs_that_cudnn_computes(mask, window, lengths, share):
  config = (
    '"cudnn_fmha_backend_config": {"intermediate_tensor_shape": {"element_type"'
    f': "BF16", "dimensions": ["2", "4", "{lengths[0]}", "{lengths[1]}"]}},'
    f' "mask_type": "{mask}", "sliding_window_length": {window}}}'
  )
  call, _ = _call(_custom("__cudnn$fmhaSoftmax", config))
  assert kernels.computed_share(call) == share
  call, _ = _call(_custom("__cudnn$fmhaSoftmax", _SCORES))
  assert kernels.computed_share(call) is None


_CONVOLUTION = """HloModule m

ENTRY %main (p: {left}, q: {right}) -> {out} {{
  %p = {left} parameter(0)
  %q = {right} parameter(1)
  ROOT %c = ({out}, u8[64]{{0}}) custom-call(%p, %q), window={{size=3x3
    stride=2x2 pad=1_1x1_1}}, dim_labels=b01f_o01i->b01f,
    custom_call_target="__cudnn$conv{name}"
}}
"""


@pytest.mark.parametrize(
  ("name", "order"),
  [
    ("Forward", "xky"),
    ("BiasActivationForward", "xky"),
    ("BackwardInput", "ykx"),
    ("BackwardFilter", "xyk"),
  ],
)
def test_convolutions_of_cudnn(name, order):
  shapes = {"x": "f32[2,7,9,4]", "k": "f32[6,3,3,4]", "y": "f32[2,4,5,6]"}
  left, right, out = (f"{shapes[key]}{{3,2,1,0}}" for key in order)
  text = _CONVOLUTION.format(left=left, right=right, out=out, name=name)
  text = text.replace("\n    ", " ")
  entry = hlo.parse(text).entry
  call = entry.instructions["c"]
  operands = [entry.instructions[o].type for o in call.operands]
  # Of three window positions, two meet an input at both ends.
  assert kernels.flops(call, operands) == 2 * 2 * 6 * 4 * (4 * 3 - 2) * (15 - 2)
  assert kernels.workspace(call) == 64


def test_a_gemm():
  call, operands = _call(
    _custom(
      "__cublas$lt$matmul$f8",
      '"gemm_backend_config":{"dot_dimension_numbers":'
      '{"lhs_contracting_dimensions":["3"],"rhs_contracting_dimensions":["3"]}}',
    ),
    "(bf16[256,512]{1,0}, s8[4096]{0})",
  )
  assert kernels.flops(call, operands) == 2 * 256 * 512 * _H
  # The second result is scratch memory.
  assert kernels.workspace(call) == 4096


def test_pallas_says_its_own_cost():
  config = (
    '"custom_call_config":{"body":"x","cost_estimate":'
    '{"flops":123,"transcendentals":4,"bytes_accessed":5}}'
  )
  assert kernels.flops(*_call(_custom("tpu_custom_call", config))) == 123
  assert kernels.flops(*_call(_custom("tpu_custom_call"))) is None


@pytest.mark.parametrize(
  ("phase", "results", "matmuls"),
  [("fwd", 5, 2), ("dq", 2, 3), ("dkv", 4, 4), ("dkv", 6, 5)],
)
def test_splash_attention_multiplies_queries_with_keys(phase, results, matmuls):
  result = f"({', '.join(['bf16[2,4,640,128]{3,2,1,0}'] * results)})"
  text = f"""HloModule m

ENTRY %m (t: s8[1,5,5], q: bf16[2,4,640,128]) -> {result} {{
  %t = s8[1,5,5]{{2,1,0}} parameter(0)
  %q = bf16[2,4,640,128]{{3,2,1,0}} parameter(1)
  %k = bf16[2,1,384,128]{{3,2,1,0}} parameter(2)
  ROOT %s = {result} custom-call(%t, %q, %k, %k), \
custom_call_target="tpu_custom_call", \
metadata={{op_name="jit(f)/shard_map/splash_mha_{phase}_segmented/pallas_call"}}
}}
"""
  program = hlo.parse(text)
  instructions = program.entry.instructions
  call = instructions["s"]
  operands = [instructions[name].type for name in call.operands]
  assert kernels.is_splash(call)
  expected = matmuls * 2 * (2 * 4 * 640 * 128) * 384
  assert kernels.flops(call, operands) == expected
  assert {t.dtype for t in kernels.factors(operands)} == {"bf16"}


def test_what_is_not_known_is_none():
  assert kernels.flops(*_call(_custom("__cudnn$fmhaSoftmax"))) is None
  assert kernels.flops(*_call(_custom("mine"))) is None
  assert kernels.flops(*_call(_custom("TopK"))) == 0


def test_what_computes_nothing_is_no_kernel():
  call, operands = _call(_custom("AllocateBuffer"))
  assert kernels.name(call) is None
  assert kernels.is_free(call)
  assert kernels.flops(call, operands) == 0


@pytest.mark.parametrize(
  ("config", "name"),
  [
    (
      '"fusion_backend_config":{"kind":"__triton_nested_gemm_fusion","a":1}',
      "__triton_nested_gemm_fusion",
    ),
    (
      '"fusion_backend_config":{"kind":"__custom_fusion",'
      '"custom_fusion_config":{"name":"cutlass_gemm","kernel_index":0}}',
      "cutlass_gemm",
    ),
    (
      '"fusion_backend_config":{"kind":"__custom_fusion",'
      '"custom_fusion_config":{"name":"dynamic_slice_fusion"}}',
      None,
    ),
    ("", None),
  ],
)
def test_fusions_of_a_named_kind(config, name):
  call, _ = _call(
    f"fusion(%q, %k), kind=kCustom, calls=%inner, backend_config={{{config}}}"
  )
  assert kernels.name(call) == name

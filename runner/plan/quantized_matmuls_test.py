"""Tests for what quantized matmuls run as, and for the reasons."""

import jax
from jax import lax
import jax.numpy as jnp
import pytest

from paxon.quantization import scopes
from paxon.runner.plan import flops, hardware, quantized_matmuls, result
from paxon.runner.plan.program_text import hlo

_E4M3 = jnp.float8_e4m3fn
_GEMM = """
  %{name} = (bf16[8,8], s8[0]) custom-call({operands}), \
custom_call_target="{target}", metadata={{op_name="{stack}/dot_general"}}, \
backend_config={{"gemm_backend_config":{{"dot_dimension_numbers":\
{{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}}}}"""


def _traced(*matmuls):
  """FLOPs of a step of matmuls (module, scope, dtype), 8 x 8 x 8 each."""

  def step(*operands):
    found = []
    for (module, scope, _), x in zip(matmuls, operands, strict=True):
      with jax.named_scope(module), jax.named_scope(scope):
        found.append(lax.dot(x, x, preferred_element_type=jnp.float32))
    return found

  shapes = [jax.ShapeDtypeStruct((8, 8), dtype) for _, _, dtype in matmuls]
  return flops.count(jax.jit(step).trace(*shapes).jaxpr)


def _program(*matmuls):
  """A compiled text of matmuls (name stack, kernel, operand)."""
  lines = [
    _GEMM.format(
      name=f"g{i}", operands=f"%{x}, %{x}", target=target, stack=stack
    )
    for i, (stack, target, x) in enumerate(matmuls)
  ]
  return hlo.parse(f"""HloModule m, is_scheduled=true

ENTRY %main (f: f8e4m3fn[8,8], h: bf16[8,8]) -> bf16[8,8] {{
  %f = f8e4m3fn[8,8]{{1,0}} parameter(0)
  %h = bf16[8,8]{{1,0}} parameter(1){"".join(lines)}
  ROOT %r = bf16[8,8]{{1,0}} get-tuple-element(%g0), index=0
}}
""")


def _of(traced, program=None, kind="h200"):
  return quantized_matmuls.find_quantized_matmuls(
    traced, program, kind=hardware.find_kind(kind), num_devices=1
  )


_UP = ("up", scopes.FORWARD, _E4M3)
_FP8, _BF16 = "__cublas$lt$matmul$f8", "__cublas$lt$matmul"


def test_what_no_recipe_covers_is_not_listed():
  assert not _of(_traced(("up", "some_scope", jnp.bfloat16)))


def test_a_matmul_is_found_in_both_programs():
  traced = _traced(_UP, ("up", scopes.WEIGHT_GRADIENT, _E4M3))
  program = _program(
    ("jit(f)/up/quantized_forward", _FP8, "f"),
    ("jit(f)/up/quantized_weight_gradient", _BF16, "h"),
  )
  forward, gradient = _of(traced, program)
  assert forward == result.QuantizedMatmul(
    module="up",
    role="forward",
    traced_dtype="float8_e4m3fn",
    dtype="float8_e4m3fn",
    kernel="cublas fp8",
    is_final=True,
    count=1,
    flops=2 * 8**3,
    is_quantized=True,
  )
  assert gradient.role == "weight gradient"
  assert (gradient.kernel, gradient.dtype) == ("cublas", "bfloat16")
  assert not gradient.is_quantized
  assert (
    gradient.reason
    == "the compiler for h200 multiplies float8_e4m3fn as bfloat16"
  )


def test_what_is_recomputed_is_apart():
  stack = "transpose(jvp(f))/rematted_computation/up/quantized_forward"
  traced = _traced(_UP)
  found = _of(traced, _program((f"jit(f)/{stack}", _FP8, "f")))
  # The text has it again, but never a first time.
  assert [p.role for p in found] == ["forward"]
  assert found[0].dtype == ""
  assert "no matmul of this name" in found[0].reason


def test_matmuls_that_the_compiler_joined_run_as_one():
  scope = scopes.FORWARD
  traced = _traced(
    *((f"attention/einsum/{name}", scope, _E4M3) for name in ("query", "key"))
  )
  stack = "jit(f)/attention/einsum/query/quantized_forward"
  # One has the FLOPs of both; then each has its own, and one is not there.
  both = _of(traced, _program((stack, _FP8, "f"), (stack, _FP8, "f")))
  assert {(p.kernel, p.dtype, p.reason) for p in both} == {
    ("cublas fp8", "float8_e4m3fn", "")
  }
  query, key = _of(traced, _program((stack, _FP8, "f")))
  assert query.is_quantized
  assert not key.is_quantized
  assert key.reason == "the compiled text has no matmul of this name"


@pytest.mark.parametrize(
  ("dtype", "kind", "runs_as", "reason"),
  [
    (_E4M3, "h200", "float8_e4m3fn", ""),
    (_E4M3, "b200", "float8_e4m3fn", ""),
    (_E4M3, "v7x", "float8_e4m3fn", ""),
    (_E4M3, "a100", "bfloat16", "a100 has no fp8 matmuls"),
    (_E4M3, "v4", "bfloat16", "v4 has no fp8 matmuls"),
    (_E4M3, "v6e", "bfloat16", "v6e has no fp8 matmuls"),
    (_E4M3, "cpu", "bfloat16", "cpu has no fp8 matmuls"),
    (jnp.int8, "v5e", "int8", ""),
    (jnp.int8, "v7x", "bfloat16", "v7x has no int8 matmuls"),
    (
      jnp.bfloat16,
      "h200",
      "bfloat16",
      "its operands are bfloat16 when they meet: the recipe leaves one of them"
      " in the layer's dtype, or its scales vary along what is summed",
    ),
  ],
)
def test_without_a_compiler_the_data_sheet_says(dtype, kind, runs_as, reason):
  (found,) = _of(_traced(("up", scopes.FORWARD, dtype)), kind=kind)
  assert (found.dtype, found.reason) == (runs_as, reason)
  assert found.is_quantized is not bool(reason)
  assert (found.kernel, found.count, found.is_final) == ("", 0, False)


def test_one_warning_a_reason():
  traced = _traced(
    _UP,
    ("down", scopes.FORWARD, _E4M3),
    ("gate", scopes.FORWARD, jnp.bfloat16),
  )
  first, second = quantized_matmuls.warnings(_of(traced, kind="v5e"))
  assert first == (
    "2 of 3 quantized matmuls run as bfloat16: up (forward) and 1 more,"
    " because v5e has no fp8 matmuls."
  )
  assert second.startswith("1 of 3 quantized matmuls run as bfloat16: gate")
  assert not list(quantized_matmuls.warnings(_of(_traced(_UP))))

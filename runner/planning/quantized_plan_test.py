"""Tests that compile a quantized experiment for GPUs that are not here."""

import pytest

from paxon.runner import user_error
from paxon.runner.configuration import overrides
from paxon.runner.hosts import warm_python
from paxon.runner.plan import testing
from paxon.runner.planning import child

_EXPERIMENT = "runner.planning.kernel_experiments.QuantizedLm"
_KERNELS = {
  *(f"attention/einsum/{name}" for name in ("query", "key", "value", "out")),
  *(f"feed_forward/einsum/{name}" for name in ("gate", "up", "down")),
}
_LAYER = "DecoderLm/stack/layers/blocks_0"
# Layers, width, heads x width of a head, width of the hidden activation.
_LAYERS, _EMBED, _HEADS, _MLP = 2, 64, 64, 128
_WEIGHTS = _LAYERS * _EMBED * (4 * _HEADS + 3 * _MLP)


@pytest.fixture(scope="module", autouse=True)
def _warm_python(tmp_path_factory):
  folder = tmp_path_factory.mktemp("python")
  with warm_python.install([child.__name__], folder):
    yield


def _plan(target, *, decode_steps=(), **knobs):
  return child.plan(
    _EXPERIMENT,
    [overrides.Override(name, value) for name, value in knobs.items()],
    testing.target(target),
    is_compiled=not target.startswith("v5e"),
    time_limit=600.0,
    decode_steps=decode_steps,
  )


def test_every_covered_product_is_an_fp8_gemm_and_gathers_move_one_byte():
  plan = _plan("h200:1x8", expects="cublas fp8")
  assert plan.compiled
  found = {(p.module, p.role): p for p in plan.quantized_matmuls}
  parts = {f"{_LAYER}/{name}" for name in _KERNELS}
  assert {part for part, _ in found} == parts
  for part in parts:
    # Full remat does all but the last product of a block again.
    again = [] if part.endswith("down") else ["forward again"]
    for product in ("forward", *again, "input gradient", "weight gradient"):
      entry = found[part, product]
      assert entry.kernel == "cublas fp8", entry
      assert entry.is_final
      # Inside of the loop of layers.
      assert entry.count == _LAYERS
      assert entry.is_quantized
      assert not entry.reason
  covered = [c for c in plan.kernel_choices if c.part == "quantized matmuls"]
  assert {c.kernel for c in covered} == {"cublas fp8"}
  assert sum(c.count for c in covered) == _LAYERS * len(found)
  # A matrix has three products, and all but `down` the forward one again.
  tokens, down = 8 * 16, _LAYERS * _EMBED * _MLP
  assert plan.flops.by_dtype["float8_e4m3fn"] + plan.flops.by_dtype[
    "float8_e5m2"
  ] == 2 * tokens * (4 * _WEIGHTS - down)
  (gathers,) = (c for c in plan.collectives if c.kind == "all-gather")
  # Forward and backward, one byte a weight.
  assert gathers.dtype_bytes["float8_e4m3fn"] == 2 * _WEIGHTS
  # The table of tokens, which is the head too, and norms are not covered.
  others = sum(gathers.dtype_bytes.values()) - 2 * _WEIGHTS
  assert others < _WEIGHTS
  assert plan.warnings == ()


def test_a_covered_product_that_is_no_fp8_gemm_is_refused_with_the_reason():
  with pytest.raises(
    user_error.UserError,
    match=r"Job\.expected_kernels: quantized matmuls is expected to be cublas"
    r" fp8, but the compiled step has \d+ of cublas \(cuBLAS or cuBLASLt\):"
    r" \S+/einsum/\w+ \(forward\): its operands are bfloat16 when they meet:"
    r" .*its scales vary along what is summed",
  ):
    _plan("h200:1x1", quantization="fp8_block", expects="cublas fp8")


def test_hardware_without_fp8_is_named():
  # Traced only: what its chips can do is known without a compiler.
  plan = _plan("v5e:2x4", expects="cublas fp8")
  assert not plan.compiled
  assert {p.traced_dtype for p in plan.quantized_matmuls} == {
    "float8_e4m3fn",
    "float8_e5m2",
  }
  for product in plan.quantized_matmuls:
    assert not product.is_quantized
    assert product.dtype == "bfloat16"
    assert product.reason == "v5e has no fp8 matmuls"
  (warning,) = plan.warnings
  assert warning.startswith("27 of 27 quantized matmuls run as bfloat16: ")


def test_a_decoding_step_reads_stored_weights():
  plan = _plan(
    "v5e:1x1",
    decode_steps=[(1, 32)],
    quantization="int8:serve",
    max_new_tokens="8",
  )
  # The training step is that of float parameters.
  assert plan.quantized_matmuls == ()
  rest = 264 * _EMBED + 2 * _LAYERS * _EMBED + _EMBED
  assert plan.memory.parameters == 4 * (_WEIGHTS + rest)
  (step,) = plan.decode_steps
  assert not step.note
  outputs = 3 * _HEADS + _EMBED + 2 * _MLP + _EMBED
  assert step.parameters == _WEIGHTS + 4 * (_LAYERS * outputs + rest)
  assert step.read == pytest.approx(step.parameters + step.cache, abs=64)

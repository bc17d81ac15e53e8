"""Tests for parts of a model from JAX's name stack."""

import pytest

from paxon.runner.plan.program_text import name_stack

_LAYER = "stack/while/body/closed_call/layers.body/blocks_0"


@pytest.mark.parametrize(
  ("stack", "part"),
  [
    ("", ""),
    ("jit(step)/reduce_sum", ""),
    (
      f"jit(step)/jvp(Lm.loss)/Lm._hidden/{_LAYER}/attention"
      "/attention._output/BTNH,NHD->BTD/dot_general",
      "Lm/stack/layers/blocks_0/attention",
    ),
    (
      f"jit(step)/transpose(jvp(Lm.loss))/Lm._hidden/{_LAYER}/checkpoint"
      "/rematted_computation/mlp/BTD,DF->BTF/dot_general",
      "Lm/stack/layers/blocks_0/mlp",
    ),
    (
      "jit(step)/jvp(Lm.loss)/vmap(vmap(transpose(jvp(Head.attend))))/x->y/dot",
      "Lm/Head",
    ),
    # What the compiler joined belongs to what its parts share.
    (
      f"jit(step)/jvp(Lm.loss)/Lm._hidden/{_LAYER}/(attention/a.b/dot:mlp/mul)",
      "Lm/stack/layers/blocks_0",
    ),
    (
      "jit(step)/(transpose(jvp(Lm.loss))/Lm.h/embed/jit(_take)/scatter-add"
      ":jvp(Lm.loss)/sum)",
      "Lm",
    ),
    ("jit(step)/(a/dot:b/mul)", ""),
    # Scopes of quantized matmuls are no parts.
    (
      f"jit(step)/jvp(Lm.loss)/{_LAYER}/mlp/einsum/up/quantized_forward"
      "/BTD,DF->BTF/dot_general",
      "Lm/stack/layers/blocks_0/mlp/einsum/up",
    ),
  ],
)
def test_part(stack, part):
  assert name_stack.part(stack) == part


def test_phases():
  backward = "jit(f)/transpose(jvp(Lm))/a/dot"
  assert name_stack.is_backward(backward)
  assert not name_stack.is_backward("jit(f)/jvp(Lm)/a/transpose")
  assert not name_stack.is_recomputed(backward)
  assert name_stack.is_recomputed("jit(f)/Lm/rematted_computation/dot")


@pytest.mark.parametrize(
  ("stack", "matmul"),
  [
    ("jit(f)/jvp(Lm)/einsum/up/quantized_forward/x->y/dot_general", "forward"),
    ("jit(f)/up/quantized_input_gradient/dot_general", "input gradient"),
    ("jit(f)/up/quantized_weight_gradient/dot_general", "weight gradient"),
    ("jit(f)/jvp(Lm)/einsum/up/dot_general", ""),
  ],
)
def test_quantized(stack, matmul):
  assert name_stack.find_quantized(stack) == matmul

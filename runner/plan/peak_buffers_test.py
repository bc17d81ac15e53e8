"""Tests for the names of the buffers at the peak of the memory."""

from paxon.runner.plan import peak_buffers, result
from paxon.runner.plan.program_text import buffer_assignment, hlo

_PROGRAM = """\
%more (c: (s32[], f32[3,4], f32[4])) -> pred[] {
  %c = (s32[], f32[3,4]{1,0}, f32[4]{0}) parameter(0)
  ROOT %l = pred[] constant(true)
}

%layer (d: (s32[], f32[3,4], f32[4])) -> (s32[], f32[3,4], f32[4]) {
  %d = (s32[], f32[3,4]{1,0}, f32[4]{0}) parameter(0)
  %n = s32[] get-tuple-element(%d), index=0
  %s = f32[3,4]{1,0} get-tuple-element(%d), index=1
  %x = f32[4]{0} get-tuple-element(%d), index=2
  %h = f32[4]{0} tanh(%x), metadata={op_name="jit(step)/jvp(Lm)/layers/mlp/tanh"}
  %u = f32[3,4]{1,0} fusion(%s, %h, %n), kind=kLoop, metadata={op_name="jit(step)/jvp(Lm)/layers/while/body/dynamic_update_slice"}
  ROOT %t = (s32[], f32[3,4]{1,0}, f32[4]{0}) tuple(%n, %u, %h)
}

ENTRY %main (p: (s32[], f32[3,4], f32[4])) -> f32[4] {
  %p = (s32[], f32[3,4]{1,0}, f32[4]{0}) parameter(0)
  %w = (s32[], f32[3,4]{1,0}, f32[4]{0}) while(%p), condition=%more, body=%layer
  %y = f32[3,4]{1,0} get-tuple-element(%w), index=1
  %z = f32[3,4]{0,1} copy(%y)
  %k = f32[2]{0} constant({1, 2})
  %g = f32[8]{0} all-gather(%k), dimensions={0}, metadata={op_name="jit(step)/jvp(Lm)/head/dot_general"}
  %o = f32[3,4]{1,0:S(5)} custom-call(), custom_call_target="AllocateBuffer"
  %m = f32[3,4]{1,0} copy(%o), metadata={op_name="jit(step)/transpose(jvp(Lm))/layers/copy"}
  %b = f32[4]{0} negate(%k), metadata={op_name="jit(step)/transpose(jvp(Lm))/head/neg"}
  %r = f32[4]{0} negate(%k), metadata={op_name="jit(step)/transpose(jvp(Lm))/rematted_computation/head/neg"}
  ROOT %e = f32[4]{0} negate(%k)
}
"""  # noqa: E501


def _describe(*values, peak=1000):
  buffers = buffer_assignment.Buffers(0, peak, tuple((v,) for v in values))
  return peak_buffers.describe(buffers, hlo.parse(_PROGRAM))


def _value(name, kind, size=100, index=()):
  return buffer_assignment.Value(name, index, kind, size)


def test_what_a_loop_stacks_is_saved_for_the_backward_pass():
  expected = result.Buffers(
    type="f32[3,4]",
    module="Lm/layers/mlp",
    reason="saved for the backward pass",
    count=1,
    num_bytes=100,
  )
  for name in ("w", "d"):
    assert _describe(_value(name, "f32[3,4]{1,0}", index=(1,))) == (expected,)
  # So is a copy of it in another layout.
  assert _describe(_value("z", "f32[3,4]{0,1}")) == (expected,)


def test_each_reason():
  reasons = {
    ("w", (2,)): "carried by a loop",
    ("g", ()): "gathered",
    ("m", ()): "copy of host memory",
    ("b", ()): "temporary of the backward pass",
    ("r", ()): "computed again in the backward pass",
    ("h", ()): "temporary of the forward pass",
    ("e", ()): "temporary",
    ("other", ()): "unknown",
  }
  for (name, index), reason in reasons.items():
    (found,) = _describe(_value(name, "f32[4]{0}", index=index))
    assert found.reason == reason, name


def test_equal_buffers_are_summed_and_small_ones_left_out():
  found = _describe(
    _value("g", "f32[8]{0}", 300),
    _value("b", "f32[4]{0}", 200),
    _value("b", "f32[4]{0}", 200),
    _value("e", "f32[4]{0}", 0),
    # Pointers.
    _value("w", "(s32[], f32[3,4]{1,0}, f32[4]{0})", 24),
  )
  assert [(b.type, b.module, b.count, b.num_bytes) for b in found] == [
    ("f32[4]", "Lm/head", 2, 400),
    ("f32[8]", "Lm/head", 1, 300),
  ]

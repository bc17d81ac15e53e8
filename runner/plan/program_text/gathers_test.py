"""Tests for gathers of weights."""

import pytest

from paxon.runner.plan.program_text import collectives, gathers, hlo

_TEXT = """HloModule m

%take (stack: f32[9,2,64], i: s32[]) -> f32[1,2,64] {{
  %stack = f32[9,2,64]{{2,1,0}} parameter(0)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  ROOT %d = f32[1,2,64]{{2,1,0}} dynamic-slice(%stack, %i, %zero, %zero), \
dynamic_slice_sizes={{1,2,64}}
}}

%take.1 (stack: f32[9,2,64], i: s32[]) -> f32[1,2,64] {{
  %stack = f32[9,2,64]{{2,1,0}} parameter(0)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  ROOT %d = f32[1,2,64]{{2,1,0}} dynamic-slice(%stack, %i, %zero, %zero), \
dynamic_slice_sizes={{1,2,64}}
}}

%other (stack: f32[9,2,64], i: s32[]) -> f32[1,2,64] {{
  %stack = f32[9,2,64]{{2,1,0}} parameter(0)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  ROOT %d = f32[1,2,64]{{2,1,0}} dynamic-slice(%stack, %next, %zero, %zero), \
dynamic_slice_sizes={{1,2,64}}
}}

ENTRY %main (t: (s32[], f32[9,2,64], f32[9,2,64])) -> f32[8,64] {{
  %t = (s32[], f32[9,2,64]{{2,1,0}}, f32[9,2,64]{{2,1,0}}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %w = f32[9,2,64]{{2,1,0}} get-tuple-element(%t), index=1
  %w.again = f32[9,2,64]{{2,1,0}} get-tuple-element(%t), index=1
  %v = f32[9,2,64]{{2,1,0}} get-tuple-element(%t), index=2
  %a = f32[1,2,64]{{2,1,0}} fusion(%w, %i), kind=kLoop, calls=%take
  %b = f32[1,2,64]{{2,1,0}} fusion({again}, %i), kind=kLoop, calls={how}
  %a.1 = bf16[1,2,64]{{2,1,0}} convert(%a)
  %b.1 = bf16[2,64]{{1,0}} bitcast(%b)
  %x = f32[8,64]{{1,0}} constant(0)
{lines}
}}
"""
_GROUPS = "replica_groups=[1,4]<=[4], dimensions={0}"
_TWO = (
  f"%g = bf16[4,2,64]{{2,1,0}} all-gather(%a.1), channel_id=1, {_GROUPS}",
  f"%h = bf16[8,64]{{1,0}} all-gather(%b.1), channel_id=2, {_GROUPS}",
)


def _found(*lines, again="%w", how="%take.1"):
  program = hlo.parse(
    _TEXT.format(
      lines="\n".join(f"  {line}" for line in lines), again=again, how=how
    )
  )
  return program, collectives.find(program, mesh={"fsdp": 4}).collectives


def test_the_same_layer_of_the_same_stack():
  program, (first, second) = _found(*_TWO, again="%w.again")
  find = gathers.Finder(program)
  assert find.sources(first) == find.sources(second)


@pytest.mark.parametrize(
  "options", [{"again": "%v"}, {"how": "%other"}], ids=["stack", "layer"]
)
def test_another_stack_or_layer(options):
  program, (first, second) = _found(*_TWO, **options)
  find = gathers.Finder(program)
  assert find.sources(first) != find.sources(second)


def test_forward_and_backward_gather_for_themselves():
  later = _TWO[1] + ', metadata={op_name="jit(f)/transpose(jvp(Lm))/dot"}'
  program, (first, second) = _found(_TWO[0], later)
  find = gathers.Finder(program)
  assert find.sources(first) != find.sources(second)


_LOOP = """HloModule m

%body (t: (s32[], f32[2,64], f32[2,64])) -> (s32[], f32[2,64], f32[2,64]) {{
  %t = (s32[], f32[2,64]{{1,0}}, f32[2,64]{{1,0}}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %w = f32[2,64]{{1,0}} get-tuple-element(%t), index=1
  %v = f32[2,64]{{1,0}} get-tuple-element(%t), index=2
  %one = s32[] constant(1)
  %j = s32[] add(%i, %one)
  %b = bf16[2,64]{{1,0}} convert({gathered})
  %g = bf16[8,64]{{1,0}} all-gather(%b), channel_id=1, {groups}
  %u = f32[2,64]{{1,0}} negate(%v)
  ROOT %r = (s32[], f32[2,64]{{1,0}}, f32[2,64]{{1,0}}) tuple(%j, %w, %u)
}}

%condition (t: (s32[], f32[2,64], f32[2,64])) -> pred[] {{
  %t = (s32[], f32[2,64]{{1,0}}, f32[2,64]{{1,0}}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %n = s32[] constant(8)
  ROOT %l = pred[] compare(%i, %n), direction=LT
}}

ENTRY %main (w: f32[2,64], v: f32[2,64]) -> f32[2,64] {{
  %w = f32[2,64]{{1,0}} parameter(0)
  %v = f32[2,64]{{1,0}} parameter(1)
  %o = s32[] constant(0)
  %t = (s32[], f32[2,64]{{1,0}}, f32[2,64]{{1,0}}) tuple(%o, %w, %v)
  %l = (s32[], f32[2,64]{{1,0}}, f32[2,64]{{1,0}}) while(%t), \
condition=%condition, body=%body
  ROOT %x = f32[2,64]{{1,0}} get-tuple-element(%l), index=2
}}
"""


@pytest.mark.parametrize(("gathered", "times"), [("%w", 8), ("%v", 1)])
def test_what_a_loop_leaves_as_it_is(gathered, times):
  text = _LOOP.format(gathered=gathered, groups=_GROUPS)
  program = hlo.parse(text)
  (found,) = collectives.find(program, mesh={"fsdp": 4}).collectives
  assert found.count == 8
  assert gathers.Finder(program).repetitions(found) == times

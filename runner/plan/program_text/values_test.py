"""Tests for the values of a program."""

import pytest

from paxon.runner.plan.program_text import hlo, values

_TEXT = """HloModule m

%inner (a: f32[2], b: f32[2]) -> (f32[2], f32[2]) {
  %a = f32[2]{0} parameter(0)
  %b = f32[2]{0} parameter(1)
  %s = f32[2]{0} add(%a, %b)
  ROOT %t = (f32[2]{0}, f32[2]{0}) tuple(%b, %s)
}

%body (c: (s32[], f32[2])) -> (s32[], f32[2]) {
  %c = (s32[], f32[2]{0}) parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  %x = f32[2]{0} get-tuple-element(%c), index=1
  %y = f32[2]{0} copy(%x)
  ROOT %r = (s32[], f32[2]{0}) tuple(%i, %y)
}

%condition (d: (s32[], f32[2])) -> pred[] {
  %d = (s32[], f32[2]{0}) parameter(0)
  ROOT %true = pred[] constant(true)
}

ENTRY %main (p: f32[2], q: f32[2]) -> f32[2] {
  %p = f32[2]{0} parameter(0)
  %q = f32[2]{0} parameter(1)
  %f = (f32[2]{0}, f32[2]{0}) fusion(%p, %q), kind=kLoop, calls=%inner
  %f.0 = f32[2]{0} get-tuple-element(%f), index=0
  %f.1 = f32[2]{0} get-tuple-element(%f), index=1
  %n = s32[] constant(0)
  %l = (s32[], f32[2]{0}) tuple(%n, %f.0)
  %w = (s32[], f32[2]{0}) while(%l), condition=%condition, body=%body
  ROOT %o = f32[2]{0} get-tuple-element(%w), index=1
}
"""


@pytest.mark.parametrize(
  ("value", "origin"),
  [
    # Out of a fusion, into which it came.
    (("main", "f.0", -1), ("main", "q", -1)),
    (("main", "f.1", -1), ("inner", "s", -1)),
    (("inner", "a", -1), ("main", "p", -1)),
    (("main", "l", 1), ("main", "q", -1)),
    # What a loop carries is no copy.
    (("main", "o", -1), ("main", "w", 1)),
    (("body", "r", 1), ("body", "c", 1)),
  ],
)
def test_what_a_value_is_a_copy_of(value, origin):
  assert values.Values(hlo.parse(_TEXT)).origin(value) == origin


def test_what_a_value_is_made_of():
  found = values.Values(hlo.parse(_TEXT))
  assert list(found.sources(("inner", "s", -1))) == [
    ("inner", "a", -1),
    ("inner", "b", -1),
  ]
  # Of a loop first what it begins with.
  assert list(found.sources(("main", "w", 1))) == [
    ("main", "l", 1),
    ("body", "r", 1),
  ]
  assert found.find("main", "w") == [("main", "w", 0), ("main", "w", 1)]
  assert found.find("main", "{0}") == []

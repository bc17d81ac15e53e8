"""Tests for trip counts."""

import jax
import jax.numpy as jnp
import pytest

from paxon.runner.plan.program_text import hlo, trip_counts

_PROGRAM = """HloModule m

%plus (p.0: s32[], p.1: s32[]) -> s32[] {{
  %p.0 = s32[] parameter(0)
  %p.1 = s32[] parameter(1)
  ROOT %sum = s32[] add(%p.0, %p.1)
}}

%less (q.0: s32[], q.1: s32[]) -> pred[] {{
  %q.0 = s32[] parameter(0)
  %q.1 = s32[] parameter(1)
  ROOT %lt = pred[] compare(%q.0, %q.1), direction=LT
}}

%body (b: (s32[], s32[], f32[2])) -> (s32[], s32[], f32[2]) {{
  %b = (s32[], s32[], f32[2]{{0}}) parameter(0)
  %b.0 = s32[] get-tuple-element(%b), index=0
  %b.1 = s32[] get-tuple-element(%b), index=1
  %b.2 = f32[2]{{0}} get-tuple-element(%b), index=2
  %one = s32[] constant({step})
  %next = {next}
  ROOT %t = (s32[], s32[], f32[2]{{0}}) tuple(%next, %b.1, %b.2)
}}

%condition (c: (s32[], s32[], f32[2])) -> pred[] {{
  %c = (s32[], s32[], f32[2]{{0}}) parameter(0)
  %c.0 = s32[] get-tuple-element(%c), index=0
  %c.1 = s32[] get-tuple-element(%c), index=1
  %bound = s32[] constant(12)
  ROOT %r = pred[] {test}
}}

ENTRY %main (x: f32[2], n: s32[]) -> (s32[], s32[], f32[2]) {{
  %x = f32[2]{{0}} parameter(0)
  %n = s32[] parameter(1)
  %start = s32[] constant({start})
  %start.2 = s32[] copy(%start)
  %twelve = s32[] constant(12)
  %init = (s32[], s32[], f32[2]{{0}}) tuple(%start.2, {carried}, %x)
  ROOT %w = (s32[], s32[], f32[2]{{0}}) while(%init), \
condition=%condition, body=%body{config}
}}
"""


def _trips(
  *,
  start=0,
  step=1,
  following="s32[] add(%b.0, %one)",
  test="compare(%c.0, %bound), direction=LT",
  carried="%twelve",
  config="",
):
  program = hlo.parse(
    _PROGRAM.format(
      start=start,
      step=step,
      next=following,
      test=test,
      carried=carried,
      config=config,
    )
  )
  return trip_counts.find_trip_count(program.entry.root, program.entry, program)


_DOWN = "compare(%c.0, %bound), direction=GT"


@pytest.mark.parametrize(
  ("options", "expected"),
  [
    ({}, 12),
    ({"start": 5}, 7),
    ({"start": 20}, 0),
    # Collective matmuls go two steps at once.
    ({"step": 2}, 6),
    ({"step": 5}, 3),
    ({"test": "compare(%c.0, %bound), direction=LE"}, 13),
    ({"test": "compare(%bound, %c.0), direction=GT"}, 12),
    ({"test": "compare(%c.0, %bound), direction=NE"}, 12),
    ({"start": 20, "step": -1, "test": _DOWN}, 8),
    ({"start": 20, "step": -2, "test": _DOWN.replace("GT", "GE")}, 5),
    ({"start": 20, "following": "s32[] subtract(%b.0, %one)",
      "test": _DOWN}, 8),
    # The bound in the tuple, and unchanged.
    ({"test": "compare(%c.0, %c.1), direction=LT"}, 12),
    # Both in fusions.
    ({"test": "fusion(%c.0, %bound), kind=kLoop, calls=%less"}, 12),
    ({"following": "s32[] fusion(%b.0, %one), kind=kLoop, calls=%plus"}, 12),
    ({"config": ', backend_config={"known_trip_count":{"n":"18"}}'}, 18),
  ],
  ids=str,
)  # fmt: skip
def test_counts(options, expected):
  assert _trips(**options) == expected


@pytest.mark.parametrize(
  "options",
  [
    # A bound that only the run knows.
    {"test": "compare(%c.0, %c.1), direction=LT", "carried": "%n"},
    {"following": "s32[] multiply(%b.0, %one)"},
    {"following": "s32[] add(%b.1, %one)"},
    {"test": "compare(%c.0, %bound), direction=EQ"},
    # Counts away from its bound.
    {"test": "compare(%c.0, %bound), direction=GT"},
    {"step": 5, "test": "compare(%c.0, %bound), direction=NE"},
  ],
  ids=str,
)
def test_does_not_guess(options):
  assert _trips(**options) is None


def test_counts_what_this_compiler_prints():
  def f(x):
    return jax.lax.scan(lambda y, _: (jnp.tanh(y @ x), None), x, length=9)[0]

  compiled = jax.jit(f).lower(jnp.ones((4, 4))).compile()
  program = hlo.parse(compiled.as_text())
  (found,) = (
    trip_counts.find_trip_count(instruction, computation, program)
    for computation in program.computations.values()
    for instruction in computation.instructions.values()
    if instruction.opcode == "while"
  )
  assert found == 9

"""Tests for the communication of compiled programs."""

import functools

import jax
import jax.numpy as jnp
import pytest

from paxon.runner.plan import testing
from paxon.runner.plan.program_text import collectives, hlo

_MESH = {"data": 1, "fsdp": 4, "tensor": 2}
_DEVICES = 8


def _sums(found):
  """(count, payload, wire) of all executions, by kind and axes."""
  sums: dict = {}
  for c in found.collectives:
    key = c.kind, c.axes
    old = sums.get(key, (0, 0, 0.0))
    new = c.count, c.count * c.payload_bytes, c.count * c.wire_bytes
    sums[key] = tuple(a + b for a, b in zip(old, new, strict=True))
  return sums


def _compile(function, *arrays, out):
  """Compiles for eight CPU devices; arrays are (shape, spec)."""
  mesh = jax.make_mesh(
    (1, 4, 2), tuple(_MESH), axis_types=(jax.sharding.AxisType.Auto,) * 3
  )
  args = [
    jax.ShapeDtypeStruct(
      shape, jnp.float32, sharding=jax.NamedSharding(mesh, spec)
    )
    for shape, spec in arrays
  ]
  jitted = jax.jit(function, out_shardings=jax.NamedSharding(mesh, out))
  with jax.set_mesh(mesh):
    text = jitted.lower(*args).compile().as_text()
  return _sums(collectives.find(hlo.parse(text), mesh=_MESH))


def test_gathering_a_sharded_array():
  found = _compile(lambda x: x, ((64, 32), jax.P("fsdp")), out=jax.P())
  size = 64 * 32 * 4
  assert found == {("all-gather", ("fsdp",)): (1, size, size * 3 / 4)}


def test_summing_over_an_axis():
  found = _compile(
    lambda x, y: x @ y,
    ((64, 32), jax.P(None, "tensor")),
    ((32, 16), jax.P("tensor")),
    out=jax.P(),
  )
  size = 64 * 16 * 4
  assert found == {("all-reduce", ("tensor",)): (1, size, size)}


def _ring_mesh():
  return jax.make_mesh(
    (4, 2), ("fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2
  )


def test_moving_shards_along_a_ring():
  mesh = _ring_mesh()
  shift = jax.shard_map(
    lambda x: jax.lax.ppermute(x, "fsdp", [(i, (i + 1) % 4) for i in range(4)]),
    mesh=mesh,
    in_specs=jax.P("fsdp"),
    out_specs=jax.P("fsdp"),
  )
  x = jax.ShapeDtypeStruct((64, 32), jnp.float32)
  text = jax.jit(shift).lower(x).compile().as_text()
  found = collectives.find(hlo.parse(text), mesh={"fsdp": 4, "tensor": 2})
  size = 16 * 32 * 4
  assert _sums(found) == {("collective-permute", ("fsdp",)): (1, size, size)}
  assert [c.group_size for c in found.collectives] == [4]


def test_scattering_and_exchanging():
  mesh = _ring_mesh()

  def body(x):
    part = jax.lax.psum_scatter(x, "tensor", tiled=True)
    return jax.lax.all_to_all(part, "fsdp", 0, 1, tiled=True)

  mapped = jax.shard_map(
    body, mesh=mesh, in_specs=jax.P("fsdp"), out_specs=jax.P("fsdp", "tensor"),
    check_vma=False,
  )  # fmt: skip
  x = jax.ShapeDtypeStruct((64, 32), jnp.float32)
  text = jax.jit(mapped).lower(x).compile().as_text()
  found = _sums(
    collectives.find(hlo.parse(text), mesh={"fsdp": 4, "tensor": 2})
  )
  mine = 16 * 32 * 4
  assert found == {
    ("reduce-scatter", ("tensor",)): (1, mine, mine / 2),
    ("all-to-all", ("fsdp",)): (1, mine / 2, mine / 2 * 3 / 4),
  }


def test_loops_multiply():
  def loop(x, weights):
    def layer(x, kernel):
      return jnp.tanh(x @ kernel), None

    return jax.lax.scan(layer, x, weights)[0]

  found = _compile(
    loop,
    ((64, 32), jax.P("fsdp")),
    ((5, 32, 32), jax.P(None, "fsdp")),
    out=jax.P("fsdp"),
  )
  size = 32 * 32 * 4
  assert found == {("all-gather", ("fsdp",)): (5, 5 * size, 5 * size * 3 / 4)}


@pytest.mark.parametrize(
  ("file", "mesh", "kernels"),
  [
    # A matmul forward, two backward, of each layer.
    (
      "h200_1x8.txt",
      {"data": 1, "fsdp": 8},
      {"__triton_nested_gemm_fusion": 3 * testing.LAYERS},
    ),
    ("v5e_2x4.txt", {"data": 1, "fsdp": 4, "tensor": 2}, {}),
  ],
)
def test_a_training_loop_on_absent_hardware(file, mesh, kernels):
  found = collectives.find(hlo.parse(testing.read_text(file)), mesh=mesh)
  layers, size = testing.LAYERS, testing.WIDTH**2 * 2
  part = (mesh["fsdp"] - 1) / mesh["fsdp"]
  # Each kernel is gathered forward and backward, its gradient scattered.
  assert _sums(found) == {
    ("all-gather", ("fsdp",)): (
      2 * layers,
      2 * layers * size,
      2 * layers * size * part,
    ),
    ("reduce-scatter", ("fsdp",)): (
      layers,
      layers * size,
      layers * size * part,
    ),
  }
  assert found.notes == ()
  # The gathers of the forward pass overlap with matmuls.
  assert any(c.is_asynchronous for c in found.collectives)
  assert found.kernels == kernels


def test_traffic_between_slices():
  found = collectives.find(
    hlo.parse(testing.read_text("v4_2_slices.txt")),
    mesh={"data": 2, "fsdp": 4},
    dcn=["data"],
  )
  between = [c for c in found.collectives if c.between_slices]
  # A quarter of each kernel's gradient, in a loop with a peeled end.
  assert {c.kind for c in between} == {"all-reduce"}
  assert {c.axes for c in between} == {("data",)}
  assert sum(c.count for c in between) == testing.LAYERS
  assert {c.payload_bytes for c in between} == {testing.WIDTH**2 * 2 // 4}
  inside = _sums(found)
  assert inside["all-gather", ("fsdp",)][0] == 2 * testing.LAYERS
  assert inside["reduce-scatter", ("fsdp",)][0] == testing.LAYERS


_ADD = """HloModule m

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %s = f32[] add(%a, %b)
}
"""


def _find(body, **computations):
  text = _ADD
  for name, lines in computations.items():
    text += f"\n%{name.replace('_', '-')} (p: f32[8]) -> f32[8] {{\n"
    text += "".join(f"  {line}\n" for line in lines) + "}\n"
  text += "\nENTRY %main (p: f32[8]) -> f32[8] {\n"
  text += "".join(f"  {line}\n" for line in body) + "}\n"
  return collectives.find(hlo.parse(text), mesh={"fsdp": 4, "tensor": 2})


_REDUCE = "channel_id=1, replica_groups=[2,4]<=[4,2]T(1,0), to_apply=%add"


def test_a_scatter_that_hides_in_a_fusion():
  found = _find(
    [
      "%p = f32[8]{0} parameter(0)",
      "ROOT %f = f32[2]{0} fusion(%p), kind=kCustom, calls=%all-reduce-scatter",
    ],
    all_reduce_scatter=[
      "%p = f32[8]{0} parameter(0)",
      "%z = s32[] constant(0)",
      f"%r = f32[8]{{0}} all-reduce(%p), {_REDUCE}",
      "%c = f32[8]{0} bitcast(%r)",
      "ROOT %d = f32[2]{0} dynamic-slice(%c, %z), dynamic_slice_sizes={2}",
    ],
  )
  (one,) = found.collectives
  assert (one.kind, one.axes) == ("reduce-scatter", ("fsdp",))
  assert (one.payload_bytes, one.wire_bytes) == (32, 24)


def test_several_scatters_in_a_fusion():
  part = "f32[2]{{0}} dynamic-slice({}, %z), dynamic_slice_sizes={{2}}"
  found = _find(
    [
      "%p = f32[8]{0} parameter(0)",
      "%f = (f32[2]{0}, f32[2]{0}) fusion(%p), kind=kCustom,"
      " calls=%all-reduce-scatter",
      "ROOT %g = f32[2]{0} get-tuple-element(%f), index=0",
    ],
    all_reduce_scatter=[
      "%p = f32[8]{0} parameter(0)",
      "%z = s32[] constant(0)",
      f"%r = (f32[8]{{0}}, f32[8]{{0}}) all-reduce(%p, %p), {_REDUCE}",
      "%a = f32[8]{0} get-tuple-element(%r), index=0",
      "%b = f32[8]{0} get-tuple-element(%r), index=1",
      f"%c = {part.format('%a')}",
      f"%d = {part.format('%b')}",
      "ROOT %t = (f32[2]{0}, f32[2]{0}) tuple(%c, %d)",
    ],
  )
  (one,) = found.collectives
  assert (one.kind, one.axes) == ("reduce-scatter", ("fsdp",))
  assert (one.payload_bytes, one.wire_bytes) == (64, 48)


def test_of_a_conditional_the_dearest_branch():
  reduce = f"all-reduce(%p), {_REDUCE}"
  found = _find(
    [
      "%p = f32[8]{0} parameter(0)",
      "%i = s32[] constant(0)",
      "ROOT %c = f32[8]{0} conditional(%i, %p, %p),"
      " branch_computations={%none, %two}",
    ],
    none=["%p = f32[8]{0} parameter(0)", f"ROOT %r = f32[8]{{0}} {reduce}"],
    two=[
      "%p = f32[8]{0} parameter(0)",
      f"%r = f32[8]{{0}} {reduce}",
      f"ROOT %s = f32[8]{{0}} {reduce}",
    ],
  )
  assert [c.count for c in found.collectives] == [1, 1]
  assert {c.computation for c in found.collectives} == {"two"}


def test_a_collective_that_matmuls_carry_along():
  found = _find(
    [
      "%p = f32[8]{0} parameter(0)",
      "ROOT %f = f32[8]{0} fusion(%p), kind=kCustom, calls=%begin",
    ],
    begin=[
      "%p = f32[8]{0} parameter(0)",
      f"%r = f32[8]{{0}} all-reduce(%p), {_REDUCE}",
      "ROOT %c = f32[8]{0} custom-call(%r),"
      ' custom_call_target="AsyncCollectiveStart"',
    ],
  )
  (one,) = found.collectives
  assert one.is_asynchronous
  assert found.kernels == {}


def test_a_gather_that_is_an_all_reduce_of_padded_parts():
  found = _find(
    [
      "%p = f32[8]{0} parameter(0)",
      "%f = f32[8]{0} fusion(%p), kind=kLoop, calls=%pad",
      f"ROOT %r = f32[8]{{0}} all-reduce(%f), {_REDUCE}",
    ],
    pad=[
      "%p = f32[8]{0} parameter(0)",
      "%z = s32[] constant(0)",
      "%q = f32[2]{0} dynamic-slice(%p, %z), dynamic_slice_sizes={2}",
      "ROOT %u = f32[8]{0} dynamic-update-slice(%p, %q, %z)",
    ],
  )
  (one,) = found.collectives
  assert (one.kind, one.gathers) == ("all-reduce", True)


def test_parts_of_one_asynchronous_collective_count_once():
  gather = (
    "%g = f32[8]{0} all-gather(%q), channel_id=7,"
    " replica_groups=[2,4]<=[4,2]T(1,0), dimensions={0}"
  )
  part = [
    "%p = f32[8]{0} parameter(0)",
    "%q = f32[2]{0} slice(%p), slice={[0:2]}",
    gather,
    "ROOT %n = f32[8]{0} negate(%g)",
  ]
  body = [
    "%p = f32[8]{0} parameter(0)",
    "%a = f32[8]{0} fusion(%p), kind=kCustom, calls=%begin",
    "%b = f32[8]{0} fusion(%a), kind=kCustom, calls=%middle",
    "ROOT %c = f32[8]{0} fusion(%b), kind=kCustom, calls=%end",
  ]
  found = _find(body, begin=part, middle=part, end=part)
  assert [c.count for c in found.collectives] == [1]
  # Called twice, a computation communicates twice.
  twice = [
    "%p = f32[8]{0} parameter(0)",
    "%a = f32[8]{0} call(%p), to_apply=%begin",
    "ROOT %b = f32[8]{0} call(%a), to_apply=%begin",
  ]
  assert [c.count for c in _find(twice, begin=part).collectives] == [1, 1]


_LAYER = """HloModule m

%add (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %s = f32[] add(%a, %b)
}}

{parts}
%condition (t: (s32[], f32[8])) -> pred[] {{
  %t = (s32[], f32[8]{{0}}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %n = s32[] constant(99)
  ROOT %l = pred[] compare(%i, %n), direction=LT
}}

%inner (t: (s32[], f32[8])) -> (s32[], f32[8]) {{
  %t = (s32[], f32[8]{{0}}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %x = f32[8]{{0}} get-tuple-element(%t), index=1
  %y = f32[8]{{0}} fusion(%x), kind=kCustom, calls=%middle
  ROOT %r = (s32[], f32[8]{{0}}) tuple(%i, %y)
}}

%inner.2 (t: (s32[], f32[8])) -> (s32[], f32[8]) {{
  %t = (s32[], f32[8]{{0}}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %x = f32[8]{{0}} get-tuple-element(%t), index=1
  %y = f32[8]{{0}} fusion(%x), kind=kCustom, calls=%later
  ROOT %r = (s32[], f32[8]{{0}}) tuple(%i, %y)
}}

%layer (t: (s32[], f32[8])) -> (s32[], f32[8]) {{
  %t = (s32[], f32[8]{{0}}) parameter(0)
{body}
}}

ENTRY %main (t: (s32[], f32[8])) -> (s32[], f32[8]) {{
  %t = (s32[], f32[8]{{0}}) parameter(0)
  ROOT %w = (s32[], f32[8]{{0}}) while(%t), condition=%condition, body=%layer, \
backend_config={{"known_trip_count":{{"n":"18"}}}}
}}
"""
_PART = """%{name} (p: f32[8]) -> f32[8] {{
  %p = f32[8]{{0}} parameter(0)
  %q = f32[2]{{0}} slice(%p), slice={{[0:2]}}
  ROOT %g = f32[8]{{0}} all-gather(%q), channel_id=7, \
replica_groups=[2,4]<=[4,2]T(1,0), dimensions={{0}}
}}
"""
_STEPS = {
  "begin": "fusion(%x), kind=kCustom, calls=%begin",
  "end": "fusion(%x), kind=kCustom, calls=%end",
}
_INNER = (
  "  {root}%{name} = (s32[], f32[8]{{0}}) while(%t), condition=%condition,"
  ' body=%{body}, backend_config={{"known_trip_count":{{"n":"4"}}}}'
)


@pytest.mark.parametrize(
  ("is_started_outside", "is_ended_outside"),
  [(True, True), (True, False), (False, True)],
)
def test_an_asynchronous_collective_spans_inner_loops_of_a_layer(
  is_started_outside, is_ended_outside
):
  lines = ["  %x = f32[8]{0} get-tuple-element(%t), index=1"]
  if is_started_outside:
    lines.append(f"  %b = f32[8]{{0}} {_STEPS['begin']}")
  lines.append(_INNER.format(root="", name="u", body="inner"))
  if is_ended_outside:
    lines.append(f"  %e = f32[8]{{0}} {_STEPS['end']}")
  lines.append(_INNER.format(root="ROOT ", name="v", body="inner.2"))
  names = ("begin", "middle", "later", "end")
  text = _LAYER.format(
    parts="".join(_PART.format(name=name) for name in names),
    body="\n".join(lines),
  )
  found = collectives.find(hlo.parse(text), mesh={"fsdp": 4, "tensor": 2})
  assert [c.count for c in found.collectives] == [18]


def test_a_start_lists_operands_and_results():
  found = _find(
    [
      "%p = f32[8]{0} parameter(0)",
      "%s = ((f32[2]{0}, f32[2]{0}), (f32[8]{0}, /*index=1*/f32[8]{0}))"
      " all-gather-start(%p, %p), channel_id=3,"
      " replica_groups=[2,4]<=[4,2]T(1,0), dimensions={0}",
      "%d = (f32[8]{0}, f32[8]{0}) all-gather-done(%s)",
      "ROOT %g = f32[8]{0} get-tuple-element(%d), index=0",
    ]
  )
  (one,) = found.collectives
  assert (one.payload_bytes, one.is_asynchronous) == (64, True)


def test_kernels_are_counted_and_buffers_are_not():
  call = functools.partial("custom-call(%p), custom_call_target={}".format)
  found = _find(
    [
      "%p = f32[8]{0} parameter(0)",
      f"%a = f32[8]{{0}} {call(chr(34) + '__cudnn$fmhaSoftmax' + chr(34))}",
      f"ROOT %b = f32[8]{{0}} {call(chr(34) + 'AllocateBuffer' + chr(34))}",
    ]
  )
  assert found.kernels == {"__cudnn$fmhaSoftmax": 1}


def test_a_loop_of_unknown_length_is_said():
  @jax.jit
  def until(x):
    return jax.lax.while_loop(
      lambda x: jnp.sum(x) < 100, lambda x: jnp.tanh(x + jnp.sum(x)), x
    )

  mesh = jax.make_mesh(
    (8,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,)
  )
  x = jax.ShapeDtypeStruct(
    (64,), jnp.float32, sharding=jax.NamedSharding(mesh, jax.P("fsdp"))
  )
  text = until.lower(x).compile().as_text()
  found = collectives.find(hlo.parse(text), mesh={"fsdp": 8})
  assert found.collectives
  (note,) = found.notes
  assert "not known; its collectives are counted once" in note

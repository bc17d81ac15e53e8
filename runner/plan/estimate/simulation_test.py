"""Tests for the walk over a schedule: every time is computed by hand.

A device here multiplies 100 FLOPs a second, and its memory moves 10 bytes: one
product of 2x5 and 5x5 float32 (100 FLOPs; 40 + 100 + 40 bytes) takes 1 s of
products and 18 s of memory.
"""

import pytest

from paxon.runner.plan import network
from paxon.runner.plan.estimate import efficiency, simulation
from paxon.runner.plan.program_text import costs, hlo

_HEAD = "HloModule m, is_scheduled=true\n\n"


def _rates(**changes):
  fields = {
    "matmul": {"float32": 100.0, "bfloat16": 200.0},
    "attention": {"float32": 50.0},
    "memory": 10.0,
    "links": network.Links(fast=1.0, count=1, network=1.0),
    "kernel_overhead": 0.0,
    "peak": 100.0,
  }
  return efficiency.Rates(**fields | changes)


def _cost(
  kind="elementwise", *, flops=0, num_bytes=0, dtype="float32", **fields
):
  return costs.Cost(
    kind=kind,
    flops=flops,
    dtype=dtype if flops else "",
    hbm_bytes=num_bytes,
    name="",
    **fields,
  )


def _program(body, *more):
  """A program whose entry has these lines."""
  lines = ["p = f32[2]{0} parameter(0)", *body]
  text = "\n".join(f"  %{line}" for line in lines)
  parts = [*more, f"ENTRY %main (p: f32[2]) -> f32[2] {{\n{text}\n}}\n"]
  return hlo.parse(_HEAD + "\n".join(parts))


def _simulate(
  program, times=None, transfers=None, attention_share=1.0, **changes
):
  """Simulates; operations by name, transfers as (seconds, axes[, queue])."""
  operations = {
    (c.name, i.name): _cost("none")
    for c in program.computations.values()
    for i in c.instructions.values()
  }
  where = {name: c for c, name in operations}
  for name, cost in (times or {}).items():
    operations[where[name], name] = cost
  sent = {
    (where[name], name): network.Transfer(
      seconds=seconds,
      axes=axes,
      queue=queue[0] if queue else axes,
      is_network=False,
    )
    for name, (seconds, axes, *queue) in (transfers or {}).items()
  }
  return simulation.simulate(
    program,
    operations=operations,
    transfers=sent,
    rates=_rates(**changes),
    attention_share=attention_share,
  )


def _offload(*between, host=2.0):
  """Moves 8 bytes to the host while other things run, and back."""
  start = (
    "to = ((f32[6]{0:S(5)}, f32[2]{0}, s32[]), f32[6]{0:S(5)}, u32[])"
    " dynamic-update-slice-start(%all, %p, %zero)"
  )
  back = (
    "from = ((f32[6]{0:S(5)}, s32[]), f32[2]{0}, u32[])"
    " dynamic-slice-start(%done, %zero)"
  )
  program = _program(
    [
      "zero = s32[] constant(0)",
      'all = f32[6]{0:S(5)} custom-call(), custom_call_target="AllocateBuffer"',
      start,
      *between,
      "done = f32[6]{0:S(5)} dynamic-update-slice-done(%to)",
      back,
      "last = f32[2] dynamic-slice-done(%from)",
    ]
  )
  times = {"other": _cost(num_bytes=30)} if between else {}
  return _simulate(program, times, host=host)


def test_copies_to_the_host_queue_on_its_link():
  # 8 bytes there and 8 back, at 2 bytes a second.
  found = _offload()
  assert found.exposed == {"host memory": 8.0}
  assert found.total == 8.0
  # 3 s of other work hide as much of the first copy.
  found = _offload("other = f32[2] add(%p, %p)")
  assert found.memory == 3.0
  assert found.exposed == {"host memory": 5.0}
  with pytest.raises(simulation.NotPredictedError, match="memory of the host"):
    _offload(host=None)


def test_the_slower_of_products_and_memory():
  program = _program(
    ["a = f32[2] add(%p, %p)", "b = f32[2] dot(%a, %a)", "c = f32[2] dot(%b)"]
  )
  found = _simulate(
    program,
    {
      # 60 bytes / 10 = 6 s.
      "a": _cost(num_bytes=60),
      # max(500 FLOPs / 100 = 5 s, 20 bytes / 10 = 2 s).
      "b": _cost("matmul", flops=500, num_bytes=20),
      # max(100 / 100 = 1 s, 30 / 10 = 3 s).
      "c": _cost("matmul", flops=100, num_bytes=30),
    },
  )
  assert (found.compute, found.memory) == (5.0, 6.0 + 3.0)
  assert (found.overhead, found.exposed, found.total) == (0.0, {}, 14.0)


def test_a_kernel_costs_its_start():
  program = _program(["a = f32[2] add(%p)", "b = f32[2] bitcast(%a)"])
  found = _simulate(program, {"a": _cost(num_bytes=60)}, kernel_overhead=0.5)
  # A bitcast is no kernel.
  assert (found.memory, found.overhead, found.total) == (6.0, 0.5, 6.5)


def test_attention_kernels_have_a_rate_of_their_own():
  program = _program(
    [
      'a = f32[2] custom-call(%p), custom_call_target="k"',
      "b = f32[2] dot(%p, %p)",
    ]
  )
  cost = _cost("attention", flops=600)
  # 600 / 50, then 600 / 100.
  assert _simulate(program, {"a": cost, "b": cost}).compute == 12.0 + 6.0
  # The kernel skips half of the pairs, the matmul none.
  found = _simulate(program, {"a": cost, "b": cost}, attention_share=0.5)
  assert found.compute == 6.0 + 6.0


def test_cudnn_says_itself_what_it_skips():
  config = (
    'custom-call(%p), custom_call_target="__cudnn$fmhaSoftmax", backend_config='
    '{"intermediate_tensor_shape": {"dimensions": ["1", "1", "3", "3"]},'
  )
  program = _program(
    [
      f'a = f32[2] {config} "mask_type": "CAUSAL"}}',
      f'b = f32[2] {config} "mask_type": "NO_MASK"}}',
    ]
  )
  cost = _cost("attention", flops=600)
  # Six of nine pairs; all of them.
  found = _simulate(program, {"a": cost, "b": cost}, attention_share=0.5)
  assert found.compute == pytest.approx(12.0 * 6 / 9 + 12.0)


@pytest.mark.parametrize(
  ("type_", "kernel", "multiple"),
  [
    ("(f32[1,2,3,128], u8[0])", "__cudnn$fmhaSoftmax", 1.0),
    ("(f32[1,2,3,64], u8[0])", "__cudnn$fmhaSoftmax", 0.5),
    ("(f32[1,2,3,128], u8[0])", "__cudnn$fmhaScaleBiasSoftmax", 0.6),
    ("(f32[1,2,3,64], u8[0])", "__cudnn$fmhaScaleBiasSoftmaxBackward", 0.3),
    # Not cuDNN's: its rate was not measured.
    ("f32[1,2,3,64]", "other", 1.0),
  ],
)
def test_cudnn_is_slower_with_narrow_heads_and_a_bias(type_, kernel, multiple):
  text = f'a = {type_} custom-call(%p), custom_call_target="{kernel}"'
  found = _simulate(
    _program([text]),
    {"a": _cost("attention", flops=600)},
    narrow_heads=0.5,
    attention_bias=0.6,
  )
  assert found.compute == pytest.approx(12.0 / multiple)


def test_a_synchronous_collective_stops_the_clock():
  program = _program(
    ["a = f32[2] add(%p)", "g = f32[2] all-gather(%a)", "b = f32[2] add(%g)"]
  )
  found = _simulate(
    program,
    {"a": _cost(num_bytes=10), "b": _cost(num_bytes=10)},
    {"g": (4.0, "fsdp")},
  )
  assert (found.memory, found.exposed) == (2.0, {"fsdp": 4.0})
  assert found.total == 6.0


_OVERLAP = [
  "s = f32[2] all-gather-start(%p)",
  "a = f32[2] add(%p)",
  "d = f32[2] all-gather-done(%s)",
]


@pytest.mark.parametrize(
  ("work", "exposed"),
  [
    # 4 s on the links, 3 s of other work: 1 s is waited for.
    pytest.param(30, {"fsdp": 1.0}, id="partly hidden"),
    pytest.param(50, {}, id="hidden"),
    pytest.param(0, {"fsdp": 4.0}, id="exposed"),
  ],
)
def test_an_asynchronous_collective_hides_behind_work(work, exposed):
  found = _simulate(
    _program(_OVERLAP), {"a": _cost(num_bytes=work)}, {"s": (4.0, "fsdp")}
  )
  assert found.exposed == exposed
  assert found.total == max(4.0, work / 10)


def _two(queue_of_second):
  program = _program(
    [
      "s = f32[2] all-gather-start(%p)",
      "t = f32[2] all-reduce-start(%p)",
      "a = f32[2] add(%p)",
      "d = f32[2] all-gather-done(%s)",
      "e = f32[2] all-reduce-done(%t)",
    ]
  )
  return _simulate(
    program,
    {"a": _cost(num_bytes=10)},
    {"s": (4.0, "fsdp"), "t": (3.0, "data", queue_of_second)},
  )


def test_transfers_of_one_queue_follow_each_other():
  # 0..4 and 4..7; the work ends at 1.
  assert _two("fsdp").exposed == {"fsdp": 3.0, "data": 3.0}
  assert _two("fsdp").total == 7.0


def test_transfers_of_two_queues_run_together():
  # 0..4 and 0..3: the second is over when the first is waited for.
  assert _two("data").exposed == {"fsdp": 3.0}
  assert _two("data").total == 4.0


_LOOP = """
%cond (c: (s32[])) -> pred[] {
  %c = (s32[]) parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  %n = s32[] constant(5)
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}
"""
_STARTS = "  %start = s32[] constant(0)\n"


def _loop(lines, *, trips=5):
  """A loop of five trips (unless it says another number) over some lines."""
  body = "\n".join(f"  %{line}" for line in lines)
  config = f', backend_config={{"known_trip_count":{{"n":"{trips}"}}}}'
  computation = f"""
%body (b: (s32[])) -> (s32[]) {{
  %b = (s32[]) parameter(0)
{body}
  ROOT %r = (s32[]) tuple(%b)
}}
"""
  return _program(
    [f"w = (s32[]) while(%p), condition=%cond, body=%body{config}"],
    _LOOP,
    computation,
  )


def test_a_loop_is_multiplied_by_its_trips():
  program = _loop(["a = f32[2] add(%b)", "g = f32[2] all-reduce(%a)"])
  found = _simulate(program, {"a": _cost(num_bytes=20)}, {"g": (3.0, "data")})
  assert (found.memory, found.exposed) == (5 * 2.0, {"data": 5 * 3.0})


@pytest.mark.parametrize("trips", [0, 1, 2, 5])
def test_what_one_trip_leaves_to_the_next(trips):
  # Each trip starts a transfer of 4 s that nothing in it waits for, works 1 s
  # and waits for another transfer of 1 s on the same links.
  program = _loop(
    [
      "s = f32[2] all-gather-start(%b)",
      "a = f32[2] add(%b)",
      "g = f32[2] all-reduce(%a)",
    ],
    trips=trips,
  )
  found = _simulate(
    program,
    {"a": _cost(num_bytes=10)},
    {"s": (4.0, "fsdp", "x"), "g": (1.0, "data", "x")},
  )
  # The links are never idle: 5 s a trip, of which 1 s is behind work.
  assert found.memory == trips * 1.0
  assert found.total == pytest.approx(trips * 5.0)


def test_a_transfer_may_last_longer_than_a_loop():
  program = _program(
    [
      "s = f32[2] all-gather-start(%p)",
      'w = (s32[]) while(%p), condition=%cond, body=%body, backend_config={"kn'
      'own_trip_count":{"n":"5"}}',
      "d = f32[2] all-gather-done(%s)",
    ],
    _LOOP,
    "%body (b: (s32[])) -> (s32[]) {\n  %b = (s32[]) parameter(0)\n"
    "  %a = f32[2] add(%b)\n  ROOT %r = (s32[]) tuple(%b)\n}\n",
  )
  found = _simulate(program, {"a": _cost(num_bytes=10)}, {"s": (7.0, "fsdp")})
  # 7 s, of which the loop hides 5 x 1 s.
  assert (found.memory, found.exposed) == (5.0, {"fsdp": 2.0})


def test_a_copy_uses_the_time_in_which_the_memory_rests():
  program = _program(
    [
      "s = (f32[2], f32[2]) copy-start(%p)",
      "a = f32[2] dot(%p)",
      "d = f32[2] copy-done(%s)",
    ]
  )
  # Of 5 s of products the memory is busy for 2: 3 s are free for a copy of 4.
  found = _simulate(
    program,
    {
      "s": _cost("copy", num_bytes=40),
      "a": _cost("matmul", flops=500, num_bytes=20),
    },
  )
  assert (found.compute, found.memory, found.total) == (5.0, 1.0, 6.0)


def test_products_that_are_started_are_not_hidden():
  program = _program(
    ["s = f32[2] async-start(%p)", "d = f32[2] async-done(%s)"]
  )
  # Only copies and collectives use what other work leaves idle.
  found = _simulate(program, {"s": _cost("matmul", flops=300)})
  assert found.compute == 3.0


def test_copies_follow_each_other():
  program = _program(
    [
      "s = (f32[2], f32[2]) copy-start(%p)",
      "t = (f32[2], f32[2]) copy-start(%p)",
      "e = f32[2] copy-done(%t)",
      "d = f32[2] copy-done(%s)",
    ]
  )
  copies = {"s": _cost("copy", num_bytes=40), "t": _cost("copy", num_bytes=10)}
  assert _simulate(program, copies).memory == 4.0 + 1.0


_PART = """
%{name} (q: f32[2]) -> f32[2] {{
  %q = f32[2] parameter(0)
  ROOT %{name}.g = f32[2] {opcode}(%q), channel_id=7
}}
"""


def test_one_collective_in_several_fusions():
  # As TPUs do it: the first starts it, work carries it, the last waits.
  names = ("first", "carrier", "last")
  program = _program(
    [
      "s = f32[2] fusion(%p), kind=kCustom, calls=%first",
      "m = f32[2] fusion(%s), kind=kCustom, calls=%carrier",
      "a = f32[2] add(%m)",
      "d = f32[2] fusion(%m), kind=kCustom, calls=%last",
    ],
    *(_PART.format(name=name, opcode="all-gather") for name in names),
  )
  found = _simulate(
    program,
    {
      "m": _cost("matmul", flops=300),
      "a": _cost(num_bytes=10),
      "d": _cost("collective"),
    },
    {"first.g": (6.0, "fsdp")},
  )
  # 6 s behind 3 + 1.
  assert (found.compute, found.memory) == (3.0, 1.0)
  assert found.exposed == {"fsdp": 2.0}


def test_a_fusion_works_on_what_comes_in():
  program = _program(
    ["s = f32[2] fusion(%p), kind=kCustom, calls=%scatter"],
    _PART.format(name="scatter", opcode="all-reduce"),
  )
  for num_bytes, exposed in ((20, {"fsdp": 4.0}), (80, {})):
    found = _simulate(
      program,
      {"s": _cost("collective", num_bytes=num_bytes)},
      {"scatter.g": (6.0, "fsdp")},
    )
    assert found.exposed == exposed
    assert found.total == max(6.0, num_bytes / 10)


_MEGASCALE = (
  'frontend_attributes={_xla_host_transfer_rendezvous="all-reduce.5_0"}'
)


def test_a_send_between_slices_is_waited_for_by_its_receiver():
  program = _program(
    [
      f"s = (f32[2], u32[], token[]) send(%p, %p), {_MEGASCALE}",
      f"r = (f32[2], u32[], token[]) recv(%p), {_MEGASCALE}",
      "a = f32[2] add(%p)",
      "sd = token[] send-done(%s)",
      "rd = (f32[2], token[]) recv-done(%r)",
    ]
  )
  found = _simulate(
    program, {"a": _cost(num_bytes=10)}, {"s": (5.0, "data", "network")}
  )
  assert (found.memory, found.exposed) == (1.0, {"data": 4.0})


def test_the_dearest_branch_is_taken():
  branch = "%{0} (q: f32[2]) -> f32[2] {{\n  %q{0} = f32[2] parameter(0)\n"
  branch += "  ROOT %x{0} = f32[2] add(%q{0})\n}}\n"
  program = _program(
    ["c = f32[2] conditional(%p, %p), branch_computations={%one, %two}"],
    branch.format("one"),
    branch.format("two"),
  )
  found = _simulate(
    program, {"xone": _cost(num_bytes=10), "xtwo": _cost(num_bytes=70)}
  )
  assert found.memory == 7.0


def test_the_branch_that_a_layer_expects_is_taken():
  branch = "%{0} (q: f32[2]) -> f32[2] {{\n  %q{0} = f32[2] parameter(0)\n"
  branch += (
    '  ROOT %x{0} = f32[2] add(%q{0}), metadata={{op_name="{1}/add"}}\n}}\n'
  )
  program = _program(
    ["c = f32[2] conditional(%p, %p), branch_computations={%one, %two}"],
    branch.format("one", "jit(f)/usual_branch"),
    branch.format("two", "jit(f)"),
  )
  found = _simulate(
    program, {"xone": _cost(num_bytes=10), "xtwo": _cost(num_bytes=70)}
  )
  assert found.memory == 1.0


@pytest.mark.parametrize(
  ("lines", "times", "message"),
  [
    (
      ["w = (s32[]) while(%p), condition=%cond, body=%cond"],
      {},
      "the trips of the loop w are not known",
    ),
    (
      ['k = f32[2] custom-call(%p), custom_call_target="mine"'],
      {"k": _cost("kernel", is_approximate=True)},
      "there is no formula for the kernel k",
    ),
    (
      ["k = f32[2] dot(%p)"],
      {"k": _cost("matmul", flops=1, dtype="int4")},
      "the rate of int4 matmuls is not known",
    ),
    (
      ["k = token[] send(%p, %p), channel_id=1"],
      {},
      "k has no known destination",
    ),
  ],
)
def test_what_is_not_known_is_said(lines, times, message):
  with pytest.raises(simulation.NotPredictedError, match=message):
    _simulate(_program(lines, _LOOP), times)


def test_an_unknown_operation_or_network_is_said():
  program = _program(["k = f32[2] add(%p)"])
  with pytest.raises(
    simulation.NotPredictedError, match=r"what p \(parameter\) costs is not"
  ):
    simulation.simulate(program, operations={}, transfers={}, rates=_rates())
  with pytest.raises(
    simulation.NotPredictedError, match="network along data is not known"
  ):
    _simulate(program, {}, {"k": (None, "data")})

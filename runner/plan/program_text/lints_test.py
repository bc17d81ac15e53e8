"""Tests for warnings about compiled programs."""

import dataclasses
import re

import pytest

from paxon.runner.plan.program_text import (
  collectives,
  costs,
  dataflow,
  hlo,
  lints,
  movements,
  name_stack,
)

_Data = dataflow.Data
_PART = "Lm/stack/layers/blocks_0/mlp"
_MIB = 2**20

# Two gathers of the same value, and one that runs beside something.
_PROGRAM = hlo.parse("""HloModule m

ENTRY %main (p: f32[2,8]) -> f32[8] {
  %p = f32[2,8]{1,0} parameter(0)
  %g = f32[8,8]{1,0} all-gather(%p), dimensions={0}
  %h = f32[8,8]{1,0} all-gather(%p), dimensions={0}
  %q = f32[2,8]{1,0} negate(%p)
  %s = (f32[2,8]{1,0}, f32[8,8]{1,0}) all-gather-start(%q), dimensions={0}
  %x = f32[8,8]{1,0} add(%g, %h)
  %d = f32[8,8]{1,0} all-gather-done(%s)
  ROOT %r = f32[8]{0} all-reduce(%x), to_apply=%main
}
""")


def _moved(data, kind, *, instruction="r", size=_MIB, axes=("fsdp",), **fields):
  options = {"part": _PART, "loop_depth": 1} | {
    name: fields.pop(name) for name in ("part", "loop_depth") if name in fields
  }
  return movements.Movement(
    collective=collectives.Collective(
      kind=kind,
      axes=axes,
      whole_axes=True,
      group_size=4,
      count=8,
      payload_bytes=size,
      wire_bytes=float(size),
      members=(0, 1, 2, 3),
      instruction=instruction,
      **{"computation": "main"} | fields,
    ),
    data=data,
    payload_bytes=size,
    **options,
  )


def _gather(instruction="s", **fields):
  is_start = instruction == "s"
  return _moved(
    _Data.WEIGHTS,
    "all-gather",
    instruction=instruction,
    is_asynchronous=is_start,
    **fields,
  )


def _check(
  *moved,
  counts=None,
  kernels=None,
  kernel_flops=None,
  platform="cuda",
  program=_PROGRAM,
):
  return lints.check(
    lints.Subject(
      program=program,
      moved=moved,
      total=costs.Costs(counts=counts or {}, kernels=kernel_flops or {}),
      kernels=kernels or {},
      batch_axes=("data", "fsdp"),
      platform=platform,
    )
  )


def test_nothing_to_say():
  assert (
    _check(
      _gather(),
      _moved(_Data.GRADIENTS, "reduce-scatter"),
      _moved(_Data.ACTIVATIONS, "all-reduce", axes=("tensor",)),
      # A router sends tokens to experts.
      _moved(_Data.ACTIVATIONS, "all-to-all"),
      counts={(_PART, "bfloat16"): 10**6},
      kernels={"__cudnn$fmhaSoftmax": 4, "__cudnn$fmhaSoftmaxBackward": 4},
    )
    == ()
  )


def test_small_things_are_silent():
  assert _check(*(
    _moved(data, kind, size=1000)
    for data in _Data
    for kind in ("all-gather", "all-reduce")
  )) == ()  # fmt: skip


def test_what_is_little_beside_the_rest_is_silent():
  norms = _moved(_Data.GRADIENTS, "all-reduce")
  assert _check(norms, _gather(size=200 * _MIB))
  assert _check(norms, _gather(size=2000 * _MIB)) == ()


def test_a_pipeline_may_permute():
  passed_on = _moved(
    _Data.ACTIVATIONS, "collective-permute", axes=("stage", "fsdp")
  )
  assert _check(passed_on) == ()


def test_tokens_may_be_gathered_for_their_experts():
  stack = "jit(step)/jvp(Lm)/feed_forward/shard_map/expert_parallel/all_gather"
  gathered = _moved(_Data.ACTIVATIONS, "all-gather", name=stack)
  assert _check(gathered) == ()
  # The same by another layer.
  other = stack.replace("expert_parallel/", "")
  assert _check(_moved(_Data.ACTIVATIONS, "all-gather", name=other))
  assert name_stack.part(stack) == "Lm/feed_forward"


def test_attention_with_a_bias_skips_nothing():
  biased, causal = "__cudnn$fmhaScaleBiasSoftmax", "__cudnn$fmhaSoftmax"
  (text,) = _check(
    counts={("Lm", "bfloat16"): 100},
    kernels={biased: 32},
    kernel_flops={biased: 26},
  )
  assert "32 of cuDNN's kernels read their mask as a bias" in text
  assert "26 % of the FLOPs" in text
  assert (
    _check(
      counts={("Lm", "bfloat16"): 100},
      kernels={causal: 32},
      kernel_flops={causal: 26},
    )
    == ()
  )


@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
def test_activations_over_an_axis_of_the_batch(platform):
  (text,) = _check(
    _moved(_Data.ACTIVATIONS, "all-gather"),
    _moved(_Data.ACTIVATIONS, "collective-permute"),
    _moved(_Data.ACTIVATIONS, "all-gather", loop_depth=0),
    platform=platform,
  )
  assert text.startswith(f"{_PART}: activations cross the axis fsdp, which")
  assert "16 times, 16.00 MiB a step (all-gather, collective-permute)" in text


def test_gathers_as_all_reduces():
  (text,) = _check(_moved(_Data.WEIGHTS, "all-reduce", gathers=True))
  assert f"{_PART}: weights are gathered as all-reduces (padded" in text
  assert "8 times, 8.00 MiB a step" in text
  assert "Another size of fsdp" in text


def test_gradients_that_are_not_scattered():
  gradients = _moved(_Data.GRADIENTS, "all-reduce")
  # Without weights split over the axis there is nothing to scatter to.
  assert _check(gradients) == ()
  (text,) = _check(gradients, _gather())
  assert f"{_PART}: gradients are all-reduced over fsdp, along which" in text
  assert "8 times, 8.00 MiB a step, twice what scatters send" in text
  assert _check(gradients, _gather(), platform="cpu") == ()


# Two ticks of a pipeline, three layers each; rows over two devices. The last
# all-reduce of the gradient is after the loops.
_NESTED = """HloModule m

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %s = f32[] add(%x, %y)
}

%layer (c: (s32[], f32[4,1024], f32[1024,1024])) -> (s32[], f32[4,1024], f32[1024,1024]) {
  %c = (s32[], f32[4,1024]{1,0}, f32[1024,1024]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  %x = f32[4,1024]{1,0} get-tuple-element(%c), index=1
  %w = f32[1024,1024]{1,0} get-tuple-element(%c), index=2
  %g = f32[1024,1024]{1,0} dot(%x, %x), lhs_contracting_dims={0}, rhs_contracting_dims={0}, metadata={op_name="jit(step)/transpose(jvp(Lm))/mlp/dot_general"}
  %r = f32[1024,1024]{1,0} all-reduce(%g), replica_groups={{0,1}}, to_apply=%add, metadata={op_name="jit(step)/transpose(jvp(Lm))/mlp/dot_general"}
  %n = f32[1024,1024]{1,0} add(%w, %r)
  ROOT %t = (s32[], f32[4,1024]{1,0}, f32[1024,1024]{1,0}) tuple(%i, %x, %n)
}

%more (c: (s32[], f32[4,1024], f32[1024,1024])) -> pred[] {
  %c = (s32[], f32[4,1024]{1,0}, f32[1024,1024]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  ROOT %p = pred[] compare(%i, %i), direction=LT
}

%tick (c: (s32[], f32[4,1024], f32[1024,1024])) -> (s32[], f32[4,1024], f32[1024,1024]) {
  %c = (s32[], f32[4,1024]{1,0}, f32[1024,1024]{1,0}) parameter(0)
  ROOT %l = (s32[], f32[4,1024]{1,0}, f32[1024,1024]{1,0}) while(%c), condition=%more, body=%layer, backend_config={"known_trip_count":{"n":"3"}}
}

ENTRY %main (b: f32[4,1024], w: f32[1024,1024], i: s32[]) -> f32[1024,1024] {
  %b = f32[4,1024]{1,0} parameter(0), metadata={op_name="batch['rows']"}
  %w = f32[1024,1024]{1,0} parameter(1), metadata={op_name="state"}
  %i = s32[] parameter(2), metadata={op_name="step"}
  %c = (s32[], f32[4,1024]{1,0}, f32[1024,1024]{1,0}) tuple(%i, %b, %w)
  %o = (s32[], f32[4,1024]{1,0}, f32[1024,1024]{1,0}) while(%c), condition=%more, body=%tick, backend_config={"known_trip_count":{"n":"2"}}
  %g = f32[1024,1024]{1,0} get-tuple-element(%o), index=2
  ROOT %r = f32[1024,1024]{1,0} all-reduce(%g), replica_groups={{0,1}}, to_apply=%add
}
"""  # noqa: E501


def test_gradients_that_are_reduced_in_each_layer_of_each_tick():
  program = hlo.parse(_NESTED)
  moved = movements.find(
    program, collectives.find(program, mesh={"data": 2, "fsdp": 1})
  )
  assert moved is not None
  (text,) = lints.check(
    lints.Subject(
      program=program,
      moved=moved,
      total=costs.Costs(counts={}),
      kernels={},
      batch_axes=("data",),
      platform="cuda",
    )
  )
  # 2 x 3 times 1024 x 1024 x 4 bytes.
  assert text.startswith("Lm/mlp: gradients, here and in other modules, are")
  assert "all-reduced over data inside nested loops" in text
  assert "6 times, 24.00 MiB a step" in text
  assert "Use fewer microbatches" in text


def test_gradients_reduced_in_each_layer_are_no_warning():
  gradients = _moved(_Data.GRADIENTS, "all-reduce", axes=("data",))
  assert _check(gradients) == ()
  nested = _moved(_Data.GRADIENTS, "all-reduce", axes=("data",), loop_depth=2)
  assert len(_check(nested)) == 1
  assert _check(nested, platform="cpu") == ()


def test_weights_that_are_gathered_twice():
  texts = _check(_gather("g"), _gather("h"), _gather())
  (text,) = (text for text in texts if "again" in text)
  assert text.startswith(f"{_PART}: the same weights are gathered again in the")
  assert "8 times, 8.00 MiB a step that could be saved" in text


# A head that each chunk of the loss gathers.
_CHUNKS = """HloModule m

%body (t: (s32[], f32[2,8])) -> (s32[], f32[2,8]) {
  %t = (s32[], f32[2,8]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %w = f32[2,8]{1,0} get-tuple-element(%t), index=1
  %one = s32[] constant(1)
  %j = s32[] add(%i, %one)
  %g = f32[8,8]{1,0} all-gather(%w), dimensions={0}
  ROOT %r = (s32[], f32[2,8]{1,0}) tuple(%j, %w)
}

%condition (t: (s32[], f32[2,8])) -> pred[] {
  %t = (s32[], f32[2,8]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %n = s32[] constant(8)
  ROOT %l = pred[] compare(%i, %n), direction=LT
}

ENTRY %main (w: f32[2,8]) -> f32[2,8] {
  %w = f32[2,8]{1,0} parameter(0)
  %o = s32[] constant(0)
  %t = (s32[], f32[2,8]{1,0}) tuple(%o, %w)
  %l = (s32[], f32[2,8]{1,0}) while(%t), condition=%condition, body=%body
  ROOT %x = f32[2,8]{1,0} get-tuple-element(%l), index=1
}
"""


def test_weights_that_each_chunk_of_the_loss_gathers():
  head = _moved(
    _Data.WEIGHTS,
    "all-gather",
    instruction="g",
    part="Lm/head",
    computation="body",
  )
  (text,) = _check(head, program=hlo.parse(_CHUNKS))
  assert text.startswith(
    "Lm/head: each of 8 trips of a loop gathers the same weights: 8 times, 8.00"
    " MiB a step, of which one trip would be enough."
  )
  assert "a larger loss_chunk_length has fewer" in text


def test_matmuls_in_float32():
  narrow, wide = (_PART, "bfloat16"), ("Lm/head", "float32")
  (text,) = _check(counts={narrow: 60, wide: 40})
  assert text.startswith("Lm/head: 40 % of the FLOPs are matmuls of float32")
  # A model in float32 means it, and a little of it is no matter.
  assert _check(counts={narrow: 40, wide: 60}) == ()
  assert _check(counts={narrow: 1000, wide: 1}) == ()


def test_attention_that_is_recomputed():
  (text,) = _check(
    kernels={"__cudnn$fmhaSoftmax": 64, "__cudnn$fmhaSoftmaxBackward": 32}
  )
  assert "attention: 64 forward kernels for 32 backward ones: 32 are" in text
  assert 'layers.remat.SaveOnly(("attention_residuals",)) saves' in text
  # In evaluation there is no backward pass.
  assert _check(kernels={"__cudnn$fmhaSoftmax": 64}) == ()


@pytest.mark.parametrize(
  ("compiled", "message"),
  [
    ({"a": 1000, "b": 1000}, None),
    ({"a": 1019, "b": 1000}, None),
    (
      {"a": 1000, "b": 1200},
      r"does 1\.100 of the FLOPs that were traced, b 1\.20 times: the compiler"
      r" recomputes to fit",
    ),
    (
      {"a": 3000, "b": 1000},
      r"does 2\.00 of the FLOPs that were traced, a 3\.00 times: devices do",
    ),
    ({"a": 1000}, r"has 0\.500 of the FLOPs that were traced"),
    ({"c": 3000}, r"does 1\.50 of the FLOPs that were traced: devices do the"),
  ],
)
def test_what_the_compiler_adds(compiled, message):
  found = lints.recomputation(compiled, {"a": 1000, "b": 1000})
  if message is None:
    assert found is None
  else:
    assert re.search(message, found)


def test_what_each_stage_computes():
  traced = {"layers": 9000, "head": 1000}
  found = lints.recomputation({"layers": 9000, "head": 4000}, traced, stages=4)
  assert found is not None
  assert "1.300 of the FLOPs" in found
  assert "each of the 4 stages computes head" in found
  assert "stream_io=True" in found
  other = lints.recomputation({"layers": 9000, "head": 3000}, traced, stages=4)
  assert other is not None
  assert "stages" not in other


def test_without_matmuls_there_is_nothing_to_compare():
  assert lints.recomputation({}, {}) is None


def _loop(saved: int) -> lints.Subject:
  """Two layers of one matmul, each of which stores rows of its result."""
  name = "jit(step)/jvp(Lm)/Lm.loss/stack/while/body"
  dot_name = f'{{op_name="{name}/layers.body/blocks_0/mlp/dot_general"}}'
  copy_name = f'{{op_name="{name}/jit(update)/dynamic_update_slice"}}'
  row, rows = f"f32[{saved},64]", f"f32[2,{saved},64]"
  carry = f"(s32[], f32[64,64], {rows})"
  program = hlo.parse(f"""HloModule m

%copy (a: {rows}, x: {row}, j: s32[]) -> {rows} {{
  %a = {rows} parameter(0)
  %x = {row} parameter(1)
  %j = s32[] parameter(2)
  %o = s32[] constant(0)
  %y = f32[1,{saved},64] bitcast(%x)
  ROOT %u = {rows} dynamic-update-slice(%a, %y, %j, %o, %o)
}}

%body (c: {carry}) -> {carry} {{
  %c = {carry} parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  %w = f32[64,64] get-tuple-element(%c), index=1
  %s = {rows} get-tuple-element(%c), index=2
  %d = f32[64,64] dot(%w, %w), lhs_contracting_dims={{1}}, \
rhs_contracting_dims={{0}}, metadata={dot_name}
  %v = {row} slice(%d), slice={{[0:{saved}], [0:64]}}
  %t = {rows} fusion(%s, %v, %i), kind=kLoop, calls=%copy, metadata={copy_name}
  ROOT %r = {carry} tuple(%i, %d, %t)
}}

%condition (e: {carry}) -> pred[] {{
  %e = {carry} parameter(0)
  ROOT %b = pred[] constant(true)
}}

ENTRY %main (p: {carry}) -> {carry} {{
  %p = {carry} parameter(0)
  ROOT %l = {carry} while(%p), condition=%condition, body=%body, \
backend_config={{"known_trip_count":{{"n":"2"}}}}
}}
""")
  return lints.Subject(
    program=program,
    moved=(),
    total=costs.read(program),
    kernels={},
    batch_axes=(),
    platform="cuda",
  )


def test_a_loop_that_copies_what_layers_save():
  (text,) = lints.check(_loop(saved=32))
  # Of both trips: 32 x 64 numbers are read and written.
  share = 2 * 32 * 64 / (3 * 64 * 64 + 4 * 32 * 64)
  assert text.startswith("Lm/stack: the loop over layers copies what each")
  assert f"{100 * share:.0f} % of the memory traffic" in text
  assert "Stack.scan=False" in text
  on_cpus = dataclasses.replace(_loop(saved=32), platform="cpu")
  assert lints.check(on_cpus) == ()


def test_copies_that_are_little_are_silent():
  assert lints.check(_loop(saved=2)) == ()


def test_large_sizes_are_in_gibibytes():
  (text,) = _check(
    _moved(_Data.WEIGHTS, "all-reduce", gathers=True, size=2**35)
  )
  assert "8 times, 256.00 GiB a step" in text

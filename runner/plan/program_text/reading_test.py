"""Tests for all that is read from a compiled training step."""

import math

import pytest

from paxon.runner.plan import kernel_contract, testing
from paxon.runner.plan.program_text import collectives, costs, hlo, reading

_FLOPS = 3 * testing.LAYERS * 2 * testing.ROWS * testing.WIDTH**2


def _read(file, mesh, *, dcn=(), platform="tpu", traced=_FLOPS):
  return reading.read(
    hlo.parse(testing.read_text(file)),
    mesh=mesh,
    dcn=dcn,
    batch_axes=("data", "fsdp"),
    platform=platform,
    traced={"": traced},
  )


@pytest.mark.parametrize(
  ("file", "mesh", "dcn", "platform"),
  [
    ("h200_1x8.txt", {"data": 1, "fsdp": 8}, (), "cuda"),
    ("v4_2_slices.txt", {"data": 2, "fsdp": 4}, ("data",), "tpu"),
  ],
)
def test_the_program_does_what_was_traced(file, mesh, dcn, platform):
  found = _read(file, mesh, dcn=dcn, platform=platform)
  assert found.compiled_flops == _FLOPS
  assert found.hbm_bytes > 0
  # Weights and gradients move, activations do not.
  assert found.communication.collectives
  assert found.notes == ()
  assert not any("FLOPs" in text for text in found.warnings)


@pytest.mark.parametrize(
  "name", ["v5e_2x4", "v6e_2x4", "v7x_2x2x1", "jax_0_11/v5e_2x4"]
)
def test_splash_attention(name):
  """Three layers: forward, and backward for queries and for keys and values."""
  found = _read(f"{name}_splash.txt.gz", {"data": 8})
  assert found.communication.kernels["tpu_custom_call"] == 3 * (1 + 2)
  assert found.notes == ()
  assert {c.kind for c in found.communication.collectives} == {"all-reduce"}


# Parameters of `LmCloudSpmd2B`, stored with 18, 4 or 2 of its layers.
_EMBED, _MLP, _VOCAB, _HEADS = 3072, 12_288, 32_000, 3072
_OUTPUT = _EMBED * _HEADS
_PROJECTIONS = 3 * _OUTPUT
_MATRIX = _EMBED * _MLP
_LAYER = _PROJECTIONS + _OUTPUT + 2 * _MATRIX
_TABLE = _EMBED * _VOCAB
_BFLOAT16, _FLOAT32 = 2, 4
# The stream of a tensor-parallel device: 8 sequences of 1,024 tokens.
_STREAM = _BFLOAT16 * 8 * 1024 * _EMBED


def _ring(devices):
  """Returns the shards that a matmul in a loop passes, over its size.

  Shards go around the ring in both directions: one before the loop, and two in
  each of `devices / 2` trips.
  """
  return (1 + 2 * (devices // 2)) / devices


def _fsdp_on_gpus(layers):
  # Forward, and again for recomputation; the table for lookup and for logits.
  return {
    "all-gather": _BFLOAT16 * 2 * (layers * _LAYER + _TABLE),
    "reduce-scatter": _BFLOAT16 * layers * _LAYER
    # Gradients of the table from the logits and from the lookup.
    + (_FLOAT32 + _BFLOAT16) * _TABLE,
  }


def _fsdp_on_tpus(layers, devices, *, scatters, reduces):
  # The backward pass gathers what it recomputes with, and the projections of
  # queries, keys and values once more for their gradient. Forward, in one
  # matmul backward, and for all gradients shards go around the ring.
  gathered = layers * (_OUTPUT + 2 * _PROJECTIONS + _MATRIX) + _TABLE
  passed = layers * _ring(devices) * (_LAYER + _MATRIX + _LAYER)
  return {
    "all-gather": _BFLOAT16 * gathered,
    "collective-permute": _BFLOAT16 * passed,
    "reduce-scatter": scatters * _TABLE,
    "all-reduce": reduces * _TABLE,
  }


def _fp8_on_gpus(layers):
  # Weights of layers are cast before they are gathered; gradients stay.
  plain = _fsdp_on_gpus(layers)
  gathered = 2 * layers * _LAYER + 2 * _BFLOAT16 * _TABLE
  return plain | {"all-gather": gathered}


# Of 4 stages with 2 layers and 8 microbatches.
_TICKS = 8 + 4 - 1


def _pipelined():
  # In each tick a stage gathers the weights of its layers forward, again, and
  # backward, and passes 4 sequences on in both directions. Sequences come in,
  # and go out to be summed, by 30 more exchanges.
  layers = 2 * _TICKS * _LAYER
  return {
    "all-gather": _BFLOAT16 * (3 * layers + 2 * _TABLE),
    "reduce-scatter": _BFLOAT16 * layers + (_FLOAT32 + _BFLOAT16) * _TABLE,
    "collective-permute": (2 * _TICKS + 30) * _STREAM / 2
    + _BFLOAT16 * _TABLE / 8,
  }


def _tensor(*, gathers=0, scatters=0, reduces=0, loops=0):
  """Returns the bytes of so many collectives of the whole stream."""
  return {
    "all-gather": gathers * _STREAM,
    "reduce-scatter": scatters * _STREAM,
    "all-reduce": reduces * _STREAM,
    "collective-permute": loops * _ring(8) * _STREAM,
  }


_BOTH = _FLOAT32 + _BFLOAT16
# Two matmuls of a layer begin with a gather, two end with a sum: forward,
# recomputed (all but the last sum) and backward; so does the table's.
_HAND_COMPUTED = (
  ("h200_1x8_fsdp", 8, "cuda", _fsdp_on_gpus(4)),
  ("jax_0_11/h200_1x8_fsdp", 8, "cuda", _fsdp_on_gpus(4)),
  ("h200_1x8_fp8", {"fsdp": 8}, "cuda", _fp8_on_gpus(4)),
  ("jax_0_11/h200_1x8_fp8", {"fsdp": 8}, "cuda", _fp8_on_gpus(4)),
  ("h200_1x8_pipelined", {"stage": 4, "fsdp": 2}, "cuda", _pipelined()),
  ("v5e_4x4_fsdp", 16, "tpu", _fsdp_on_tpus(18, 16, scatters=0, reduces=_BOTH)),
  (
    "v6e_2x4_fsdp",
    8,
    "tpu",
    _fsdp_on_tpus(4, 8, scatters=_FLOAT32, reduces=_BFLOAT16),
  ),
  ("v7x_2x2x1_fsdp", 8, "tpu", _fsdp_on_tpus(4, 8, scatters=_BOTH, reduces=0)),
  (
    "h200_1x8_tensor",
    8,
    "cuda",
    _tensor(gathers=4 * (2 + 2 + 2) + 2, scatters=4 * (2 + 1 + 2) + 2),
  ),
  # TPUs do some in loops around matmuls; on v5e attention's output is summed
  # forward and in recomputation without a scatter.
  (
    "v5e_2x4_tensor",
    8,
    "tpu",
    _tensor(gathers=2 * 4 + 2, scatters=1, reduces=2 * 2, loops=2 * 7 + 1),
  ),
  # The gradient of the projections gathers their input again; v6e sums the
  # outputs of attention, and their gradient, without a scatter.
  (
    "v6e_2x4_tensor",
    8,
    "tpu",
    _tensor(gathers=2 * 7 + 2, scatters=1, reduces=2 * 3, loops=2 * 3 + 1),
  ),
  (
    "v7x_2x2x1_tensor",
    8,
    "tpu",
    _tensor(gathers=2 * 7 + 2, scatters=2 * 3 + 1, loops=2 * 3 + 1),
  ),
)


@pytest.mark.nightly(keep=2)
@pytest.mark.parametrize(
  ("name", "devices", "platform", "expected"),
  _HAND_COMPUTED,
  ids=[case[0] for case in _HAND_COMPUTED],
)
def test_bytes_are_those_computed_by_hand(name, devices, platform, expected):
  mesh = devices
  if isinstance(devices, int):
    mesh = {name.rpartition("_")[2]: devices}
  found = _read(f"{name}.txt.gz", mesh, platform=platform)
  assert found.notes == ()
  for kind, size in expected.items():
    payload = sum(
      c.count * c.payload_bytes
      for c in found.communication.collectives
      if c.kind == kind
    )
    # Norms and metrics are all-reduced besides.
    assert payload == pytest.approx(size, rel=0.02, abs=4 * 2**20), kind


# `HasMixture`: two layers of two of eight experts, without padding.
_CHOICES = 2
_EXPERT = 3 * 1024 * 2816


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize(
  ("name", "mesh", "platform", "tokens"),
  [
    ("h200_1x8_mixture", {"expert": 8}, "cuda", 32 * 1024),
    ("v5e_4x4_mixture", {"expert": 4, "fsdp": 4}, "tpu", 64 * 1024),
  ],
)
def test_mixture(name, mesh, platform, tokens):
  program = hlo.parse(testing.read_text(f"{name}.txt.gz"))
  (experts,) = (
    flops
    for part, flops in costs.read(program).count_by_part().items()
    if part.endswith("/feed_forward")
  )
  # Forward and two gradients, nothing twice.
  active = 3 * 2 * _CHOICES * tokens * 2 * _EXPERT
  assert experts * math.prod(mesh.values()) == active
  found = _read(f"{name}.txt.gz", mesh, platform=platform)
  assert not any("known" in note for note in found.notes)
  choices = kernel_contract.choices(program, is_tuned=False)
  (grouped,) = (each for each in choices if each.part == "grouped matmuls")
  assert grouped.kernel == ("megablox" if platform == "tpu" else "pallas")
  # Three matrices, forward and two gradients, in two layers.
  assert grouped.count == 3 * 3 * 2
  assert grouped.is_final


def test_tokens_of_experts_are_exchanged():
  found = _read("h200_1x8_mixture.txt.gz", {"expert": 8}, platform="cuda")
  moved = [c for c in found.communication.collectives if c.kind == "all-to-all"]
  assert {c.axes for c in moved} == {("expert",)}
  # Room for 1.5 times the mean of two choices of each of 4,096 tokens.
  slots = 3 * 4096
  # Tokens and outputs, and both gradients; ids, weights and their gradient.
  layer = 4 * slots * 1024 * _BFLOAT16 + slots * (4 + 2 * _FLOAT32)
  assert sum(c.count * c.payload_bytes for c in moved) == 2 * layer


def test_every_stage_computes_the_head():
  head = 6 * 64 * 1024 * _TABLE
  program = hlo.parse(testing.read_text("h200_1x8_pipelined.txt.gz"))
  by_part = costs.read(program).count_by_part()
  assert 8 * by_part["DecoderLm/Embedding"] == 4 * head
  # As traced: once.
  traced = {part: 8 * flops for part, flops in by_part.items()}
  traced["DecoderLm/Embedding"] = head
  found = reading.read(
    program,
    mesh={"stage": 4, "fsdp": 2},
    dcn=(),
    batch_axes=("fsdp",),
    platform="cuda",
    traced=traced,
  )
  (warning,) = (w for w in found.warnings if "stages" in w)
  assert "each of the 4 stages computes DecoderLm/Embedding" in warning


_TOKENS = 64 * 1024
# FLOPs of a token in the attention of a layer: forward, again and backward.
_ATTENTION = 16 * 1024 * _HEADS


@pytest.mark.parametrize("name", ["h200_1x8_fp8", "jax_0_11/h200_1x8_fp8"])
def test_fp8_matmuls(name):
  found = _read(f"{name}.txt.gz", {"fsdp": 8}, platform="cuda")
  # All but the last matmul of a layer are computed again.
  layer = 8 * _LAYER - 2 * _MATRIX + _ATTENTION
  assert found.compiled_flops == _TOKENS * (4 * layer + 6 * _TABLE)
  # Four matmuls a layer, three again, and two gradients of each.
  kernels = found.communication.kernels
  assert kernels["__cublas$lt$matmul$f8"] == 4 * (4 + 3 + 8)


def test_a_pipeline_with_bubbles():
  mesh = {"stage": 4, "fsdp": 2}
  found = _read("h200_1x8_pipelined.txt.gz", mesh, platform="cuda")
  # Stages compute in all ticks; each of them computes the head.
  layers = 8 * (_TICKS / 8) * (8 * _LAYER + _ATTENTION)
  expected = _TOKENS * (layers + 4 * 6 * _TABLE)
  assert found.compiled_flops == pytest.approx(expected, rel=1e-6)


def test_cudnn_attention():
  found = _read("layouts/cudnn.txt.gz", {"fsdp": 16}, platform="cuda")
  kernels = found.communication.kernels
  assert kernels["__cudnn$fmhaSoftmax"] == 3
  assert kernels["__cudnn$fmhaSoftmaxBackward"] == 3
  # Llama 2 7B with three layers: nothing is computed again but the logits of
  # attention, one of five backward matmuls.
  layer = 4 * 4096**2 + 3 * 4096 * 11_008
  attention = 4096 * 4096 * (4 + 10)
  token = 3 * (6 * layer + attention) + 6 * 32_000 * 4096
  assert found.compiled_flops == 16 * 4096 * token


def test_an_asynchronous_gather_in_inner_loops_counts_once_per_layer():
  """On v5e the gather of the projections goes on during three inner loops."""
  found = _read("v5e_4x4_fsdp.txt.gz", {"fsdp": 16})
  (again,) = (text for text in found.warnings if "gathered again" in text)
  assert "18 times" in again


def test_collectives_on_the_sparsecore_are_asynchronous():
  found = _read("v7x_2x2x1_fsdp.txt.gz", {"fsdp": 8})
  assert all(
    c.is_asynchronous
    for c in found.communication.collectives
    if c.kind in ("all-gather", "reduce-scatter")
  )


def test_a_reader_that_fails_leaves_a_note(monkeypatch):
  def fail(*args, **kwargs):
    raise KeyError("fused_computation.378")

  monkeypatch.setattr(collectives, "find", fail)
  found = _read_text()
  assert found.compiled_flops == 8 * 7 * 2 * 64**3
  assert found.communication == reading.NOTHING.communication
  assert not found.is_communication_known
  assert found.notes == (
    "Communication could not be read: KeyError: 'fused_computation.378'",
  )


def test_a_call_with_an_unknown_opcode_is_noted():
  text = _TEXT.replace("while(%t)", "while-fancy(%t)")
  found = _read_text(text=text)
  (one,) = found.communication.collectives
  assert one.count == 1
  assert found.notes == (
    "The instruction w calls condition, body with the unknown opcode"
    " while-fancy; counted as one call.",
  )


def test_devices_that_do_the_same_work():
  # The program does not use the tensor axis.
  found = _read("v5e_2x4.txt", {"data": 1, "fsdp": 4, "tensor": 2})
  assert found.compiled_flops == 2 * _FLOPS
  (text,) = (text for text in found.warnings if "FLOPs" in text)
  assert "does 2.00 of the FLOPs that were traced" in text
  assert "devices do the same work" in text


_TEXT = """HloModule m

%sum (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %s = f32[] add(%a, %b)
}}

%body (t: (s32[], f32[64,64])) -> (s32[], f32[64,64]) {{
  %t = (s32[], f32[64,64]{{1,0}}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %x = f32[64,64]{{1,0}} get-tuple-element(%t), index=1
  %one = s32[] constant(1)
  %j = s32[] add(%i, %one)
  %y = f32[64,64]{{1,0}} {matmul}
  %z = f32[64,64]{{1,0}} all-reduce(%y), channel_id=1, \
replica_groups=[2,4]<=[4,2]T(1,0), to_apply=%sum, \
metadata={{op_name="jit(f)/Lm/mlp/dot_general"}}
  ROOT %r = (s32[], f32[64,64]{{1,0}}) tuple(%j, %z)
}}

%condition (t: (s32[], f32[64,64])) -> pred[] {{
  %t = (s32[], f32[64,64]{{1,0}}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %n = s32[] constant(7)
  ROOT %l = pred[] compare(%i, %n), direction=LT
}}

ENTRY %main (x: f32[64,64]) -> f32[64,64] {{
  %x = f32[64,64]{{1,0}} parameter(0){batch}
  %o = s32[] constant(0)
  %t = (s32[], f32[64,64]{{1,0}}) tuple(%o, %x)
  %w = (s32[], f32[64,64]{{1,0}}) while(%t), condition=%condition, body=%body
  ROOT %g = f32[64,64]{{1,0}} get-tuple-element(%w), index=1
}}
"""
_DOT = "dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
_BATCH = ", metadata={op_name=\"batch['inputs']\"}"


def _read_text(*, matmul=_DOT, batch=_BATCH, text=_TEXT):
  mesh = {"fsdp": 4, "tensor": 2}
  return reading.read(
    hlo.parse(text.format(matmul=matmul, batch=batch)),
    mesh=mesh,
    dcn=(),
    batch_axes=("fsdp",),
    platform="cuda",
    traced={"": math.prod(mesh.values()) * 7 * 2 * 64**3},
  )


def test_activations_in_a_loop():
  found = _read_text()
  (one,) = found.communication.collectives
  assert (one.kind, one.axes, one.count) == ("all-reduce", ("fsdp",), 7)
  assert (found.notes, found.warnings) == ((), ())


def test_a_kernel_whose_flops_are_not_known():
  found = _read_text(matmul='custom-call(%x), custom_call_target="mine"')
  assert found.compiled_flops is None
  (note,) = found.notes
  assert note.startswith("The FLOPs of mine are not known")


def test_a_batch_that_has_no_name():
  found = _read_text(batch="")
  (note,) = found.notes
  assert "no parameter of the program is named as the batch" in note


def test_nothing():
  assert reading.NOTHING.communication.collectives == ()
  assert reading.NOTHING.compiled_flops is None

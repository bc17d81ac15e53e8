"""Tests for the buffers of a compiled program."""

import jax
import jax.numpy as jnp
import pytest

from paxon.runner.plan.program_text import buffer_assignment

_ASSIGNMENT = """\
BufferAssignment:
allocation 0: size 100, parameter 0, shape |f32[25]| at ShapeIndex {}:
 value: <1 x.1 @0> (size=100,offset=0): f32[25]{0}
allocation 1: size 40, maybe-live-out:
 value: <2 sum @0> (size=40,offset=0): f32[10]{0}
allocation 2: size 4, thread-local:
 value: <3 p @0> (size=4,offset=0): f32[]
allocation 3: size 900, preallocated-temp:
 value: <4 a @0> (size=400,offset=0): f32[100]{0}
 value: <5 while{1} (phi) @0> (size=400,offset=0): f32[100]{0}
 value: <6 b @0> (size=200,offset=400): f32[50]{0}
 value: <7 c @0> (size=300,offset=400): f32[75]{0}
allocation 4: size 5000, color 5, preallocated-temp:
 value: <8 host @5> (size=5000,offset=0): f32[1250]{0:S(5)}
"""
_LIVE_RANGES = """\
HloLiveRange (max 12):
  InstructionSequence:
    0:x.1
  BufferLiveRange:
    x.1{}:0-12
    sum{}:10-12
    p{}:1-2
    a{}:1-4
    while{1}:4-8
    b{}:2-3
    c{}:6-9
    host{}:1-9
  Live ranges at 6 (peak):
    host{}: 5000 bytes (cumulative: 5000 bytes)
"""


def test_the_peak_is_of_the_device_alone():
  found = buffer_assignment.parse(_ASSIGNMENT, _LIVE_RANGES)
  assert found.lasting == 140
  # Values that share a buffer count once; c is live when b is not.
  assert found.peak == 140 + 400 + 300
  assert found.at_peak == (
    (buffer_assignment.Value("while", (1,), "f32[100]{0}", 400),),
    (buffer_assignment.Value("c", (), "f32[75]{0}", 300),),
  )


def test_a_value_without_a_live_range_is_an_error():
  text = _LIVE_RANGES.replace("    c{}:6-9\n", "")
  with pytest.raises(buffer_assignment.ReadError, match="live range of c"):
    buffer_assignment.parse(_ASSIGNMENT, text)


def test_a_missing_file_is_an_error(tmp_path):
  with pytest.raises(buffer_assignment.ReadError, match="wrote no file"):
    buffer_assignment.read(tmp_path)


def test_the_peak_is_that_of_the_compiler(tmp_path):
  def step(x):
    y = jnp.sin(x) @ x
    return jnp.sum(jnp.cos(y) @ jnp.tanh(y))

  x = jax.ShapeDtypeStruct((512, 512), jnp.float32)
  options = {"xla_dump_to": str(tmp_path), "xla_dump_hlo_as_text": True}
  lowered = jax.jit(jax.grad(step)).lower(x)
  compiled = lowered.compile(compiler_options=options)
  found = buffer_assignment.read(tmp_path)
  sizes = compiled.memory_analysis()
  lasting = sizes.argument_size_in_bytes + sizes.output_size_in_bytes
  assert found.lasting == pytest.approx(lasting, rel=1e-3)
  whole = lasting + sizes.temp_size_in_bytes
  assert found.peak == pytest.approx(whole, rel=1e-3)
  assert sum(slot[0].num_bytes for slot in found.at_peak) == pytest.approx(
    found.peak - found.lasting
  )

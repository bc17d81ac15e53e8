"""Tests for the estimate of a plan, and for why there is none."""

import dataclasses
import functools
import math

import pytest

from paxon.runner.plan import flops as flops_lib
from paxon.runner.plan import hardware, network, testing
from paxon.runner.plan.estimate import efficiency, prediction
from paxon.runner.plan.program_text import collectives, costs, hlo

_H200 = hardware.find_kind("h200")
_ROWS = (64, 32)


@functools.cache
def _program():
  return hlo.parse(testing.read_text("h200_1x8.txt"))


def _compiled_flops():
  """Of all eight devices."""
  return 8 * costs.read(_program()).flops


def _flops(count, *, recomputed=0, dtype="bfloat16"):
  def key(phase):
    return flops_lib.Key(
      phase=phase, kind=flops_lib.Kind.MATMUL, part="", dtype=dtype
    )

  counts = {key(flops_lib.Phase.FORWARD): count - recomputed}
  if recomputed:
    counts[key(flops_lib.Phase.REMAT)] = recomputed
  return flops_lib.Flops(counts)


def _of(flops, *, program=None, given=None, kind=_H200, batch=_ROWS):
  program = program or _program()
  return prediction.estimate_step(
    program,
    communication=collectives.find(program, mesh={"fsdp": 8}),
    placement=network.Placement(domains=(0,) * 8),
    kind=kind,
    efficiency=given,
    flops=flops,
    batch_shape=batch,
  )


def test_the_parts_make_up_the_step():
  count = _compiled_flops()
  given = efficiency.choose(_H200, {})
  found, notes = _of(_flops(count, recomputed=count // 4), given=given)
  assert notes == ()
  parts = [found.compute, found.memory, found.overhead]
  assert found.step == pytest.approx(sum(parts) + sum(found.exposed.values()))
  # Model FLOPs leave recomputation out; a peak is 989.4 TFLOP/s.
  model = count - count // 4
  peak = 8 * 989.4e12
  assert found.mfu == pytest.approx(model / peak / found.step)
  assert found.datasheet_mfu == pytest.approx(
    model / peak / found.datasheet_step
  )
  assert found.ceiling_mfu == pytest.approx(0.75)
  assert found.mfu < found.datasheet_mfu < found.ceiling_mfu
  assert found.tokens_per_second == pytest.approx(64 * 32 / found.step)
  assert found.band == given.band
  assert found.source == given.source


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "int8"])
def test_products_of_few_bits_have_their_own_rate(dtype):
  given = efficiency.choose(_H200, {})
  found, _ = _of(_flops(_compiled_flops(), dtype=dtype), given=given)
  # An MFU is of the bfloat16 peak.
  assert found.ceiling_mfu == pytest.approx(1978.9 / 989.4)


def test_at_full_rates_it_is_the_data_sheets():
  given = efficiency.DATASHEET
  found, _ = _of(_flops(_compiled_flops()), given=given)
  assert found.step == found.datasheet_step
  assert (found.overhead, found.mfu) == (0.0, found.datasheet_mfu)


def test_without_rows_there_are_no_tokens():
  given = efficiency.choose(_H200, {})
  found, _ = _of(_flops(_compiled_flops()), given=given, batch=None)
  assert found.tokens_per_second is None


@pytest.mark.parametrize("ratio", [0.9991, 1.0, 1.019])
def test_a_little_more_flops_are_the_compilers_recomputation(ratio):
  given = efficiency.choose(_H200, {})
  found, _ = _of(_flops(round(_compiled_flops() / ratio)), given=given)
  assert found is not None


@pytest.mark.parametrize("ratio", [0.5, 0.998])
def test_missing_flops_are_another_program(ratio):
  given = efficiency.choose(_H200, {})
  found, notes = _of(_flops(round(_compiled_flops() / ratio)), given=given)
  assert found is None
  (note,) = notes
  assert note == (
    "The time of a step is not predicted: the compiled program has"
    f" {ratio:.4f} of the FLOPs of the traced one, less than 0.999."
  )


@pytest.mark.parametrize("ratio", [1.021, 1.067, 4.0])
def test_what_the_compiler_computes_again_is_in_the_estimate(ratio):
  given = efficiency.choose(_H200, {})
  usual, _ = _of(_flops(_compiled_flops()), given=given)
  found, notes = _of(_flops(round(_compiled_flops() / ratio)), given=given)
  assert found.step == usual.step
  # Only what was traced counts for the MFU.
  assert found.mfu == pytest.approx(usual.mfu / ratio)
  assert found.ceiling_mfu == pytest.approx(1 / ratio)
  assert notes == (
    "The estimated step time includes what the compiler added:"
    f" {ratio:.3f} times the traced FLOPs.",
  )


def test_a_cpu_has_no_estimate():
  cpu = hardware.find_kind("cpu")
  found, (note,) = _of(_flops(_compiled_flops()), given=None, kind=cpu)
  assert found is None
  assert "the rates of cpu are not known" in note


def test_an_unknown_kernel_is_named():
  text = testing.read_text("h200_1x8.txt")
  root = next(line for line in text.splitlines() if line.startswith("ENTRY"))
  call = '  %mine = f32[2]{0} custom-call(), custom_call_target="mine"'
  program = hlo.parse(text.replace(root, f"{root}\n{call}"))
  given = efficiency.choose(_H200, {})
  found, (note,) = _of(_flops(_compiled_flops()), program=program, given=given)
  assert found is None
  assert "there is no formula for the FLOPs of mine." in note


def test_an_unknown_loop_is_named():
  text = testing.read_text("h200_1x8.txt")
  for known in ("known_trip_count", "direction=LT"):
    text = text.replace(known, "x")
  given = efficiency.choose(_H200, {})
  program = hlo.parse(text)
  count = 8 * costs.read(program).flops
  found, (note,) = _of(_flops(count), program=program, given=given)
  assert found is None
  assert "the trips of the loop while" in note


def test_the_factor_multiplies_the_simulated_time():
  given = efficiency.choose(_H200, {})
  assert given is not None
  alone = dataclasses.replace(given, load=0.0)
  found, _ = _of(_flops(_compiled_flops()), given=given)
  simulated, _ = _of(_flops(_compiled_flops()), given=alone)
  assert simulated.slowdown == 1.0
  assert found.slowdown == pytest.approx(math.exp(given.load))
  # All parts, so they still make up the step.
  for name in ("step", "compute", "memory", "overhead"):
    expected = getattr(simulated, name) * found.slowdown
    assert getattr(found, name) == pytest.approx(expected)
  assert found.datasheet_step == simulated.datasheet_step


def test_few_bits_take_longer_by_their_share():
  given = efficiency.choose(_H200, {})
  wide, _ = _of(_flops(_compiled_flops()), given=given)
  flops = _flops(_compiled_flops(), dtype="float8_e4m3fn")
  narrow, _ = _of(flops, given=given)
  # All of the FLOPs are in 8 bits.
  assert narrow.slowdown / wide.slowdown == pytest.approx(1 + given.casts)

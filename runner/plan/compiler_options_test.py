"""Tests for compiler options: which a program gets, and what is refused."""

from unittest import mock

import jax
import numpy as np
import pytest

from paxon.runner import user_error
from paxon.runner.plan import compiler_options, hardware
from paxon.runner.settings import compiler

_GATHERS = "xla_gpu_all_gather_combine_threshold_bytes"
_LATENCY = "xla_gpu_enable_latency_hiding_scheduler"
_CUDA, _TPU = hardware.Platform.CUDA, hardware.Platform.TPU


@pytest.mark.parametrize(
  ("kind", "given", "expected"),
  [
    ("cpu", {}, {}),
    ("v4", {}, {}),
    ("h200", {}, {_LATENCY: True}),
    ("h200", {_LATENCY: False}, {_LATENCY: False}),
    (
      "h200",
      {"xla_tpu_x": 1, "xla_gpu_x": 2},
      {_LATENCY: True, "xla_gpu_x": "2"},
    ),
    ("v4", {"xla_tpu_x": 1, "xla_gpu_x": 2}, {"xla_tpu_x": "1"}),
    (
      "cpu",
      {"xla_cpu_x": 1.5, "xla_all": "a"},
      {"xla_cpu_x": "1.5", "xla_all": "a"},
    ),
    ("cpu", {"xla_enable_async_all_gather": True}, {}),
    (
      "v4",
      {"xla_enable_async_all_gather": True, "xla_jf_x": 0},
      {"xla_enable_async_all_gather": True, "xla_jf_x": "0"},
    ),
  ],
)
def test_a_program_gets_the_options_of_its_platform(kind, given, expected):
  found = compiler_options.resolve_for_hardware(
    given, hardware.find_kind(kind), num_devices=2
  )
  assert found == expected


def test_a_device_that_nobody_knows_gets_what_is_for_all():
  device = mock.Mock(spec=jax.Device, device_kind="abacus", platform="wood")
  given = {"xla_gpu_x": 1, "xla_all": "a"}
  found = compiler_options.resolve_options(given, device, num_devices=2)
  assert found == {"xla_all": "a"}


@pytest.mark.parametrize("given", [{}, {_LATENCY: True}])
def test_one_device_has_no_latency_to_hide(given):
  found = compiler_options.resolve_for_hardware(
    given, hardware.find_kind("h200"), num_devices=1
  )
  assert found == {_LATENCY: False} | given


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"no_such": 1}, r"compiler for cpu has no option 'no_such'\.$"),
    (
      {"xla_enable_async_all_gathers": True},
      r"did you mean 'xla_enable_async_all_gather'\?",
    ),
    (
      {"xla_cpu_enable_fast_math": "maybe"},
      r"\['xla_cpu_enable_fast_math'\]: 'maybe' is not a valid bool value",
    ),
  ],
)
def test_the_compiler_is_asked_before_anything_runs(options, message):
  with pytest.raises(user_error.UserError, match=message):
    compiler_options.check(options, jax.devices()[0])


def test_options_of_other_platforms_are_not_asked_about():
  compiler_options.check({"xla_gpu_no_such": 1}, jax.devices()[0])


def test_an_option_changes_the_compiled_program():
  device = jax.devices()[0]
  given = {"xla_disable_hlo_passes": "fusion"}

  def text(options):
    lowered = jax.jit(lambda x: x * 2.0 + 1.0).lower(np.ones(8, np.float32))
    return lowered.compile(compiler_options=options).as_text()

  # One fusion of both; without the pass there is none of both.
  def options(given):
    return compiler_options.resolve_options(given, device, num_devices=1)

  assert "broadcast_add_fusion" in text(options({}))
  assert "broadcast_add_fusion" not in text(options(given))


def test_a_plan_says_how_it_differs_from_the_run():
  (note,) = compiler_options.differences(_CUDA)
  assert note.startswith("Compiled with xla_gpu_autotune_level=0, because ")
  assert compiler_options.differences(_TPU) == ()


def test_another_error_of_the_compiler_is_passed_on():
  with (
    pytest.raises(jax.errors.JaxRuntimeError, match=r"RESOURCE_EXHAUSTED"),
    compiler_options.refusals(jax.devices()[0]),
  ):
    raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: too large")


@pytest.mark.parametrize(
  ("kind", "sets", "given", "name", "expected"),
  [
    ("h200", ("combined_collectives",), {}, _GATHERS, str(128 * 2**20)),
    ("h200", ("combined_collectives",), {_GATHERS: 1}, _GATHERS, "1"),
    ("h200", (), {}, _GATHERS, None),
    ("cpu", ("combined_collectives",), {}, _GATHERS, None),
    ("v4", ("async_collectives",), {}, "xla_enable_async_all_gather", True),
    ("v5e", ("async_collectives",), {}, "xla_enable_async_all_gather", None),
    ("v6e", ("large_vmem",), {}, "xla_tpu_scoped_vmem_limit_kib", "98304"),
    ("v5p", ("large_vmem",), {}, "xla_tpu_scoped_vmem_limit_kib", None),
  ],
)
def test_a_set_gives_a_kind_its_own_options(kind, sets, given, name, expected):
  found = compiler_options.resolve_for_hardware(
    given, hardware.find_kind(kind), num_devices=8, sets=sets
  )
  assert found.get(name) == expected


def _is_gpu(name):
  return hardware.find_kind(name).platform is hardware.Platform.CUDA


def test_every_set_says_what_it_is_for_and_who_says_so():
  for each in compiler.SETS:
    assert each.purpose
    assert set(each.source.split(", ")) <= set("ABCD")
    assert set(each.hardware) <= set(hardware.names())
    # A set is for all GPUs or for none.
    gpus = {n for n in hardware.names() if _is_gpu(n)}
    assert gpus <= set(each.hardware) or not gpus & set(each.hardware)
    compiler.check_options(each.options)
    # None is left out as one of another platform.
    for name in each.hardware:
      found = compiler_options.resolve_for_hardware(
        {}, hardware.find_kind(name), num_devices=8, sets=(each.name,)
      )
      assert set(each.options) <= set(found)
    wrong = compiler_options.resolve_for_hardware(
      each.options, hardware.find_kind("cpu"), num_devices=8
    )
    assert wrong == {}
  pairs = [
    (each.name, kind) for each in compiler.SETS for kind in each.hardware
  ]
  assert len(set(pairs)) == len(pairs)

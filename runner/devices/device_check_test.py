"""Tests for the verdicts on devices, from invented measurements."""

import dataclasses

import jax
import pytest

from paxon.runner import user_error
from paxon.runner.devices import device_check, device_speed

_H200 = device_speed.Measurement(
  device="cuda:0",
  kind="NVIDIA H200",
  process=0,
  host="a",
  matmul=750e12,
  memory=4.2e12,
  ring=300e9,
)
# No datasheet has it.
_OTHER = dataclasses.replace(_H200, kind="Mine")


def _make(count, *, base=_H200, per_process=4, changes=None):
  """Devices of hosts `a`, `b`, ..., of which some differ."""
  found = []
  for index in range(count):
    process = index // per_process
    each = dataclasses.replace(
      base,
      device=f"cuda:{index}",
      process=process,
      host="abcdefgh"[process % 8],
      is_across=index % per_process == 0,
    )
    found.append(dataclasses.replace(each, **(changes or {}).get(index, {})))
  return found


def _describe(measurements):
  return [each.describe() for each in device_check.judge(measurements)]


def test_equal_devices_are_ok_and_compared_with_the_datasheet():
  found = device_check.judge(_make(8))
  assert {each.describe() for each in found} == {"ok"}
  for each in found:
    # NVIDIA's H200 SXM: 989.4 TFLOP/s and 4.8 TB/s.
    assert each.shares["matmul"] == pytest.approx(750 / 989.4)
    assert each.shares["memory"] == pytest.approx(4.2 / 4.8)


@pytest.mark.parametrize(
  ("name", "share", "is_slow"),
  [
    ("matmul", 0.79, True),
    ("matmul", 0.81, False),
    ("memory", 0.79, True),
    ("memory", 0.81, False),
    ("ring", 0.49, True),
    ("ring", 0.51, False),
  ],
)
@pytest.mark.parametrize("count", [2, 3, 8])
def test_slow_devices_are_those_below_a_share_of_the_others(
  count, name, share, is_slow
):
  rate = share * getattr(_OTHER, name)
  measured = _make(count, base=_OTHER, per_process=8, changes={1: {name: rate}})
  measured = [dataclasses.replace(each, is_across=False) for each in measured]
  text = f"slow {name} ({share:.2f} of the median of the others)"
  expected = ["ok"] * count
  if is_slow:
    expected[1] = text
  assert _describe(measured) == expected


def test_devices_that_are_all_slow_are_found_by_the_datasheet():
  changes = {"matmul": 300e12}
  measured = _make(4, changes=dict.fromkeys(range(4), changes))
  text = "slow matmul (0.30 of the datasheet)"
  assert _describe(measured) == [text] * 4
  lone = [dataclasses.replace(_H200, memory=2e12, ring=None)]
  assert _describe(lone) == ["slow memory (0.42 of the datasheet)"]
  lone = [dataclasses.replace(_OTHER, memory=2e12, ring=None)]
  assert _describe(lone) == ["ok"]


def test_links_between_processes_are_compared_with_each_other():
  between = {index: {"ring": 40e9} for index in (0, 4, 8)}
  assert set(_describe(_make(12, changes=between))) == {"ok"}
  between[8] = {"ring": 15e9}
  found = _describe(_make(12, changes=between))
  assert found[8] == "slow ring (0.38 of the median of the others)"
  assert {*found[:8], *found[9:]} == {"ok"}


def test_kinds_are_compared_with_themselves():
  older = {"kind": "NVIDIA A100-SXM4-80GB", "matmul": 230e12, "memory": 1.8e12}
  measured = _make(8, changes=dict.fromkeys(range(4), older))
  assert set(_describe(measured)) == {"ok"}


def _run(measured, *, is_strict=False):
  device_check.run(is_strict=is_strict, measure=lambda: measured)


def test_slow_devices_warn_or_end_a_strict_check(capsys):
  measured = _make(
    8, changes={index: {"memory": 2.1e12} for index in range(4, 8)}
  )
  measured[4] = dataclasses.replace(measured[4], matmul=500e12)
  _run(measured)
  problem = (
    "Devices are slow: 4 of 4 devices of process 1 (b), cuda:4: slow matmul"
    " (0.67 of the median of the others), slow memory (0.50 of the median of"
    " the others)"
  )
  *table, line = capsys.readouterr().out.splitlines()
  assert line == f"warning: {problem}"
  assert [row.split()[:3] for row in table[1:]] == [
    [each.device, f"{each.process}", each.host] for each in measured
  ]
  assert table[1].split() == [
    *("cuda:0", "0", "a", "750", "76%", "4,200", "88%", "300", "ok")
  ]
  with pytest.raises(user_error.UserError) as error:
    _run(measured, is_strict=True)
  assert error.value.status == 69
  assert str(error.value) == f"{problem}. Start again without them."


@pytest.mark.parametrize("is_strict", [False, True])
def test_wrong_device_ends_the_start(is_strict):
  measured = _make(8, changes={6: {"wrong": ("matmul", "ring")}})
  with pytest.raises(user_error.UserError) as error:
    _run(measured, is_strict=is_strict)
  assert error.value.status == 69
  assert str(error.value) == (
    "Devices compute wrong values: 1 of 4 devices of process 1 (b), cuda:6:"
    " wrong matmul, wrong ring. Start again without them."
  )


def test_large_runs_show_devices_with_problems_only(capsys):
  measured = _make(64, changes={9: {"matmul": 75e12}})
  _run(measured)
  header, row, medians, warning = capsys.readouterr().out.splitlines()
  assert header.startswith("device")
  assert row.split()[:3] == ["cuda:9", "2", "c"]
  assert medians == (
    "64 devices, 63 of them ok; medians: 750 TFLOP/s, 4,200 GB/s"
  )
  assert warning.startswith("warning: Devices are slow: 1 of 4 devices of")


def test_many_processes_with_problems_are_counted():
  measured = _make(
    32, changes={index: {"wrong": ("ring",)} for index in range(32)}
  )
  with pytest.raises(user_error.UserError, match=r"; 4 more processes\. Start"):
    _run(measured)


def test_device_that_fails_ends_the_start():
  def fail():
    raise jax.errors.JaxRuntimeError("INTERNAL: CUDA_ERROR_ECC\nand a trace")

  with pytest.raises(user_error.UserError) as error:
    device_check.run(is_strict=False, measure=fail)
  assert error.value.status == 69
  assert str(error.value).endswith(") failed: INTERNAL: CUDA_ERROR_ECC")


def test_too_little_memory_is_no_fault_of_a_device():
  def fail():
    raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 4 GiB")

  with pytest.raises(jax.errors.JaxRuntimeError):
    device_check.run(is_strict=False, measure=fail)

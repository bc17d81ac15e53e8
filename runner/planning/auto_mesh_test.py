"""Tests for `mesh="auto"`."""

import types

from etils import epath
import jax
import pytest

from paxon.runner import user_error
from paxon.runner.configuration import overrides as overrides_lib
from paxon.runner.plan import result, topology
from paxon.runner.plan import target as targets
from paxon.runner.planning import auto_mesh, run_mesh
from paxon.runner.training import run_files, testing

_TINY = "runner.training.testing.TinyLm"


def _plan(forecast, peak=None, fit=result.Fit.FITS):
  memory = types.SimpleNamespace(forecast=forecast, peak=peak, fit=fit)
  return types.SimpleNamespace(memory=memory)


def _first(forecasts, compiled=None, usable=100.0):
  """The first that fits, and which were forecast and compiled."""
  asked, verified = [], []

  def forecast(mesh):
    asked.append(mesh)
    found = forecasts[mesh]
    if isinstance(found, str):
      return result.Failure(target="", message=found)
    return _plan(found)

  def compile_(mesh):
    verified.append(mesh)
    return compiled[mesh]

  found = auto_mesh.first_that_fits(
    list(forecasts),
    forecast=forecast,
    compiled=None if compiled is None else compile_,
    usable=usable,
  )
  return found, asked, verified


def test_the_first_whose_forecast_fits_is_compiled_once():
  forecasts = {"data=8": 200, "fsdp=8": 60, "tensor=8": 50}
  found, asked, verified = _first(forecasts, {"fsdp=8": _plan(60, peak=70)})
  assert found.mesh == "fsdp=8"
  assert found.reason == (
    "which sends least of 3 meshes and fits: 70 B of 100 B a device (compiled);"
    " the 1 that send less do not"
  )
  assert (asked, verified) == (["data=8", "fsdp=8"], ["fsdp=8"])


def test_what_the_compiler_needs_more_counts_for_the_next():
  forecasts = {"a": 80, "b": 70, "c": 40}
  no = _plan(80, peak=160, fit=result.Fit.DOES_NOT_FIT)
  found, _, verified = _first(forecasts, {"a": no, "c": _plan(40, peak=75)})
  # b would take 140 by the compiler's measure, c 80.
  assert (found.mesh, verified) == ("c", ["a", "c"])


def test_without_a_compiler_the_forecast_decides():
  found, _, _ = _first({"a": "a part refuses it", "b": 40})
  assert found.mesh == "b"
  assert "(forecast)" in found.reason


def test_the_least_that_is_needed_where_nothing_fits():
  assert _first({"a": 300, "b": 200, "c": "no"})[0] == 200


def test_no_mesh_that_can_be_planned():
  with pytest.raises(user_error.UserError, match="can be planned: no heads"):
    _first({"a": "no heads", "b": "no heads"})


def _choose(target, **knobs):
  job, _ = testing.make(mesh="auto", **knobs)
  given = tuple(
    overrides_lib.Override(name, str(value)) for name, value in knobs.items()
  )
  return auto_mesh.choose(
    job, experiment=_TINY, overrides=given, target=targets.parse(target)
  )


def test_cpu_devices_get_what_sends_least():
  # Gradients are reduced, which is less than gathering weights twice.
  choice = _choose("cpu:8", global_batch_size=16)
  assert choice.mesh == "data=8"
  assert choice.line.startswith("mesh=auto: data=8, which sends least of ")
  # Rows for four devices only, and two heads.
  assert _choose("cpu:8", global_batch_size=4).mesh == "data=4,tensor=2"
  assert _choose("cpu:1").line.startswith("mesh=auto: one device, which")


@pytest.mark.parametrize("rules", ["fsdp", "data", "expert"])
def test_an_axis_that_splits_no_work_is_not_chosen(rules):
  # These rules split nothing by tensor, so it would send nothing at all.
  choice = _choose("cpu:8", global_batch_size=16, rules=rules)
  assert choice.mesh in ("data=8", "fsdp=8")
  # Rows for four devices only, and no other axis has work for the rest.
  with pytest.raises(user_error.UserError, match="of cpu:8 divides the job"):
    _choose("cpu:8", global_batch_size=4, rules=rules)


def test_a_state_that_does_not_fit_whole_is_split(monkeypatch):
  # 19 GiB in all by float32 Adam; nothing is compiled here. Of 128 tokens
  # activations are small, so sending them costs less than sending weights.
  monkeypatch.setattr(topology, "missing", lambda target: ("a compiler",))
  choice = _choose("v5e:2x4", embed_dim=8192, num_layers=3, global_batch_size=8)
  assert choice.mesh == "data=4,tensor=2"
  assert "15.75 GiB a device (forecast)" in choice.reason


def test_refuses_where_nothing_fits_or_divides():
  with pytest.raises(
    user_error.UserError,
    match=r"mesh=auto: none of \d+ meshes of v5e:2x4 fits: the smallest needs"
    r" .* GiB of 15\.75 GiB a device; The state takes .* TiB in all; .* At"
    r" least \d+ such devices hold it",
  ):
    _choose("v5e:2x4", embed_dim=65536, num_layers=16)
  with pytest.raises(
    user_error.UserError,
    match=r"none of \d+ meshes of cpu:7 divides the job; .* global_batch_size"
    r" \(8\) that is a multiple of 7",
  ):
    _choose("cpu:7")


def _store(folder, mesh, *, experiment=None, is_saved=True):
  """What a run leaves in its folder that has trained on a mesh."""
  run_files.store_settings(
    experiment or testing.TinyLm.import_path(),
    [overrides_lib.Override("mesh", mesh)],
    epath.Path(folder),
  )
  (folder / "checkpoints" / ("4" if is_saved else "4.tmp-1")).mkdir(
    parents=True
  )


def _of(folder, *overrides):
  job, _ = testing.make(mesh="auto", global_batch_size=16)
  return run_mesh.of(
    job, experiment=_TINY, overrides=overrides, run_dir=epath.Path(folder)
  )


def test_a_run_that_goes_on_keeps_its_mesh(tmp_path):
  asked = overrides_lib.Override("mesh", "auto")
  _store(tmp_path, "fsdp=4,tensor=2")
  again = _of(tmp_path, asked)
  assert again.line == ("mesh=auto: fsdp=4,tensor=2, which this run has had")


@pytest.mark.parametrize(
  ("mesh", "left"),
  [
    # On other devices it is chosen anew.
    ("fsdp=3", {}),
    # Another job, and one that was perhaps of another size, chose these.
    ("fsdp=4,tensor=2", {"experiment": "shop.Other"}),
    ("fsdp=4,tensor=2", {"is_saved": False}),
  ],
  ids=["other-devices", "other-experiment", "no-checkpoint"],
)
def test_a_mesh_that_is_not_this_runs_is_chosen_anew(tmp_path, mesh, left):
  _store(tmp_path, mesh, **left)
  assert _of(tmp_path, overrides_lib.Override("mesh", "auto")).mesh == "data=8"


def test_a_choice_takes_the_place_of_what_was_asked_for(tmp_path):
  asked = overrides_lib.Override("mesh", "auto")
  first = _of(tmp_path, asked)
  assert first.mesh == "data=8"
  chosen = first.overrides((asked, overrides_lib.Override("seed", "1")))
  assert [str(each) for each in chosen][-1].endswith("mesh=data=8")
  assert len(chosen) == 2


def _devices(number, kind, shape=None, slices=1, processes=1):
  def device(i):
    per_slice = number // slices
    at = i % per_slice
    found = types.SimpleNamespace(
      device_kind=kind,
      slice_index=i // per_slice,
      process_index=i * processes // number,
    )
    if shape is not None:
      found.coords = (
        at % shape[0],
        at // shape[0] % shape[1],
        at // (shape[0] * shape[1]),
      )
    return found

  return [device(i) for i in range(number)]


@pytest.mark.parametrize(
  ("devices", "expected"),
  [
    (_devices(16, "NVIDIA H200", processes=2), "h200:2x8"),
    (_devices(4, "NVIDIA H200"), "h200:1x4"),
    # A process for each GPU; hosts are what JAX calls slices.
    (_devices(16, "NVIDIA H200", slices=2, processes=16), "h200:2x8"),
    (_devices(8, "TPU v5 lite", (2, 4, 1)), "v5e:2x4"),
    (_devices(128, "TPU v4", (4, 4, 4), 2), "v4:2x(4x4x4)"),
    (_devices(3, "some card"), "cpu:3"),
    # Of a host's GPUs there are never five.
    (_devices(5, "NVIDIA H200"), "cpu:5"),
    # No target has hosts of twelve or of four, or an uneven number on each.
    (_devices(12, "NVIDIA H100 80GB HBM3"), "cpu:12"),
    (_devices(16, "NVIDIA H200", slices=4, processes=4), "cpu:16"),
    (_devices(12, "NVIDIA H200", slices=5, processes=5), "cpu:12"),
  ],
  ids=lambda value: value if isinstance(value, str) else "",
)
def test_devices_as_a_target(devices, expected):
  # What is asked of devices are attributes alone.
  assert _target_of(devices) == expected


def _target_of(devices):
  return run_mesh.target_of(devices).text


def test_the_devices_here():
  assert _target_of(jax.devices()) == "cpu:8"

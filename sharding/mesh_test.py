"""Tests for device meshes."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

from paxon.sharding import axes, mesh


@pytest.mark.parametrize(
  ("text", "ici", "dcn"),
  [
    ("", {}, {}),
    ("fsdp=4,tensor=2", {"fsdp": 4, "tensor": 2}, {}),
    ("fsdp=64, dcn.data=2", {"fsdp": 64}, {"data": 2}),
    ("data=-1", {"data": -1}, {}),
  ],
)
def test_parse(text, ici, dcn):
  assert mesh.MeshSpec.parse(text) == mesh.MeshSpec(ici=ici, dcn=dcn)


def test_text_round_trip_is_in_mesh_order():
  spec = mesh.MeshSpec(ici={"tensor": 2, "fsdp": 4}, dcn={"data": 2})
  assert str(spec) == "fsdp=4,tensor=2,dcn.data=2"
  assert str(mesh.MeshSpec.parse(str(spec))) == str(spec)


@pytest.mark.parametrize(
  ("text", "message"),
  [
    ("fsdp", "'fsdp' is not axis=size"),
    ("fsdp=four", "'fsdp=four' is not axis=size"),
    ("fsdp=2,fsdp=4", "gives 'fsdp' twice"),
    ("fdsp=2", "unknown axis 'fdsp'; did you mean 'fsdp'?"),
    ("dcn.replica=2", r"MeshSpec.dcn has the unknown axis 'replica'"),
    ("fsdp=0", r"ici\['fsdp'\] must be positive, or -1 to fill, got 0"),
    ("auto", "'auto' is no mesh yet: the command line chooses one"),
    ("fsdp=-1,data=-1", "At most one mesh axis may be -1"),
  ],
)
def test_parse_rejects(text, message):
  with pytest.raises(ValueError, match=message):
    mesh.MeshSpec.parse(text)


def test_fill_uses_all_remaining_devices():
  full = mesh.MeshSpec.parse("fsdp=-1,tensor=2").resolve(8)
  assert dict(full.ici) == {
    "stage": 1,
    "data": 1,
    "fsdp": 4,
    "expert": 1,
    "sequence": 1,
    "tensor": 2,
  }


@pytest.mark.parametrize(
  ("text", "message"),
  [
    ("fsdp=3", "'fsdp=3' needs exactly 3 devices, but there are 8"),
    ("fsdp=3,data=-1", "needs a multiple of 3 devices, but there are 8"),
    ("", "needs exactly 1 devices, but there are 8"),
  ],
)
def test_resolve_rejects(text, message):
  with pytest.raises(ValueError, match=message):
    mesh.MeshSpec.parse(text).resolve(8)


def test_mesh_has_all_axes_of_type_auto():
  made = mesh.make_mesh(mesh.MeshSpec.parse("data=2,tensor=4"))
  assert made.axis_names == axes.MESH_AXES
  assert dict(made.shape)["tensor"] == 4
  assert set(made.axis_types) == {jax.sharding.AxisType.Auto}


def test_ici_axes_stay_inside_a_slice():
  spec = mesh.MeshSpec.parse("data=2,tensor=2,dcn.data=2")
  made = mesh.make_mesh(spec)
  ids = np.vectorize(lambda d: d.id)(made.devices).reshape(4, 2)
  # Devices 0-3 stand for one slice, 4-7 for the other; `data` is 2 x 2 with
  # the slow network outermost.
  assert {int(i) for i in ids[:2].flat} == {0, 1, 2, 3}
  assert {int(i) for i in ids[2:].flat} == {4, 5, 6, 7}


@dataclasses.dataclass(frozen=True)
class _Device:
  """What a mesh looks at; TPUs and CUDA devices have `slice_index` too."""

  id: int
  process_index: int
  platform: str = "cuda"
  device_kind: str = "NVIDIA H200"


@dataclasses.dataclass(frozen=True)
class _InSlice(_Device):
  slice_index: int = 0


@dataclasses.dataclass(frozen=True)
class _Chip(_Device):
  coords: tuple[int, int, int] = (0, 0, 0)
  core_on_chip: int = 0


def _array(text: str, devices: Any) -> Any:
  return mesh.device_array(mesh.MeshSpec.parse(text), devices)


def _in_slices(number, slices, platform="cuda"):
  # Neighbours by number are in different slices, as they may well be.
  return [
    _InSlice(i, process_index=i // 2, platform=platform, slice_index=i % slices)
    for i in range(number)
  ]


def test_dcn_axes_are_between_slices():
  made = _array("fsdp=2,tensor=2,dcn.data=2,dcn.fsdp=2", _in_slices(16, 4))
  assert made.shape == (1, 2, 4, 1, 1, 2)
  slices = np.vectorize(lambda d: d.slice_index)(made)[0, :, :, 0, 0]
  # [data, fsdp, tensor]: fsdp is 2 slices of 2.
  np.testing.assert_array_equal(
    slices,
    [[[0, 0], [0, 0], [1, 1], [1, 1]], [[2, 2], [2, 2], [3, 3], [3, 3]]],
  )


@pytest.mark.parametrize(
  ("per_process", "text"),
  [
    (4, "fsdp=4,dcn.data=2"),
    (1, "fsdp=4,dcn.data=2"),
    (2, "dcn.data=4,fsdp=2"),
  ],
)
def test_without_slices_dcn_axes_are_between_processes(per_process, text):
  devices = [_Device(i, process_index=i // per_process) for i in range(8)]
  made = _array(text, devices[::-1])
  blocks = made.reshape(mesh.MeshSpec.parse(text).dcn["data"], -1)
  # A group is one process, or as many as make it up; never parts of two.
  groups = [{d.process_index for d in block} for block in blocks]
  assert sum(map(len, groups)) == 8 // per_process
  assert all(block.size == made.shape[2] for block in blocks)


@pytest.mark.parametrize(
  ("text", "devices", "message"),
  [
    pytest.param(
      "fsdp=4,dcn.data=2",
      _in_slices(8, 4),
      r"has dcn.data=2 between slices, which makes 2, but the 8 devices are in"
      r" 4 slices",
      id="slices",
    ),
    pytest.param(
      "fsdp=8",
      _in_slices(8, 2, platform="tpu"),
      r"'fsdp=8' has no axis between slices, but the 8 devices are in 2 slices;"
      r" add one, such as dcn.data=2",
      id="no axis between",
    ),
    pytest.param(
      "fsdp=8,tensor=8",
      [
        _Chip(i, 0, "tpu", "TPU v5p", (i % 4, i // 4 % 4, i // 16))
        for i in range(64)
      ],
      r"'fsdp=8,tensor=8' cannot be placed on a slice of 4x4x4 chips: .* must"
      r" be one of 1, 4, 16, 64, and",
      id="sides",
    ),
    pytest.param(
      "fsdp=2,dcn.data=4",
      [_Device(i, process_index=i // 4) for i in range(8)],
      r"dcn.data=4 between groups of processes, which makes 4, but the 8"
      r" devices belong to 2 processes, with 4 each",
      id="fewer processes",
    ),
    pytest.param(
      "fsdp=4,dcn.data=2",
      [_Device(i, process_index=i // 6) for i in range(8)],
      r"belong to 2 processes, with 2 or 6 each",
      id="unequal processes",
    ),
  ],
)
def test_rejects_meshes_that_do_not_fit_the_network(text, devices, message):
  with pytest.raises(ValueError, match=message):
    _array(text, devices)


def test_hosts_with_gpus_need_no_axis_between():
  assert _array("fsdp=8", _in_slices(8, 2)).shape == (1, 1, 8, 1, 1, 1)

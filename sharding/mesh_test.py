"""Tests for device meshes."""

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
    ("fsdp=-1,data=-1", "At most one mesh axis may be -1"),
  ],
)
def test_parse_rejects(text, message):
  with pytest.raises(ValueError, match=message):
    mesh.MeshSpec.parse(text)


def test_fill_takes_what_is_left():
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

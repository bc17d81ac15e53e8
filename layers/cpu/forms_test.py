"""Choices of one CPU, of several, and of another platform."""

import jax
import jax.numpy as jnp
import pytest

from paxon.layers import testing
from paxon.layers.cpu import forms
from paxon.sharding import mesh as mesh_lib
from paxon.sharding import target


def _choices():
  return (
    forms.cached_dtype(jnp.bfloat16),
    forms.saved_dtype(jnp.bfloat16),
    forms.recomputes_elementwise(),
    forms.scatters_one_head(),
    forms.separates_layers(1 << 30),
    forms.drop_single_axes(testing.normal(1, 1, 2, 3)).shape,
  )


def test_one_cpu():
  assert _choices() == (jnp.float32, jnp.float32, True, True, True, (2, 3))


def test_several_cpus_share_a_cache_but_no_loop():
  with jax.set_mesh(mesh_lib.make_mesh(mesh_lib.MeshSpec.parse("data=8"))):
    found = _choices()
  assert found == (jnp.float32, jnp.bfloat16, *[False] * 3, (1, 1, 2, 3))


def test_other_platforms_keep_everything(monkeypatch):
  monkeypatch.setattr(target, "is_cpu", lambda: False)
  expected = (jnp.bfloat16, jnp.bfloat16, *[False] * 3, (1, 1, 2, 3))
  assert _choices() == expected


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16, jnp.float64])
def test_other_dtypes_stay(dtype):
  assert forms.cached_dtype(dtype) == forms.saved_dtype(dtype) == dtype


def test_layers_of_small_models_stay_stacked():
  assert not forms.separates_layers(1 << 20)


def test_the_last_axis_stays():
  assert forms.drop_single_axes(testing.normal(1, 1, 1)).shape == (1,)

"""Tests that the contenders of the cases of mixtures compute the same."""

import dataclasses

import jax
import numpy as np
import pytest

from paxon.tools.benchmarks import cases, moe_case, pure_jax_mixture

_SMALL = cases.resized(
  dataclasses.replace(cases.MIXTURE, global_batch_size=2, length=16),
  {"embed_dim": 8, "mlp_dim": 12},
)


@pytest.mark.parametrize("tile", [4, 128])
def test_plain_jax_computes_our_outputs_and_gradients(monkeypatch, tile):
  monkeypatch.setattr(pure_jax_mixture, "TILE", tile)
  layer = moe_case.make_layer(_SMALL)
  ours = moe_case.our_step(layer)()
  theirs = moe_case.pure_jax_step(layer)()
  assert jax.tree.structure(ours) == jax.tree.structure(theirs)
  for a, b in zip(*map(jax.tree.leaves, (ours, theirs)), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_transformers_computes_our_outputs_and_gradients():
  pytest.importorskip("torch")
  layer = moe_case.make_layer(_SMALL)
  (y, dx), gradients = moe_case.torch_step(layer)()
  ours = moe_case.our_step(layer)()
  theirs = jax.tree.map(lambda x: x.numpy(), ((y, dx), gradients))
  for a, b in zip(*map(jax.tree.leaves, (ours, theirs)), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_a_case_reports_its_ratio():
  result = moe_case.run(_SMALL, name="moe", rounds=2)
  assert result.ratio.median > 0
  assert result.limit == moe_case.JAX_LIMIT

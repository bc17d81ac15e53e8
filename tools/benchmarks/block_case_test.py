"""Tests that the contenders of the cases of blocks compute the same."""

import dataclasses

import jax
import numpy as np
import pytest

from paxon.tools.benchmarks import block_case, cases, pure_jax_mixture

_SMALL = cases.resize(
  dataclasses.replace(cases.CASES["vit_block"].workload, global_batch_size=2),
  {"embed_dim": 8, "mlp_dim": 12, "num_heads": 2, "head_dim": 4, "length": 16},
)


def _assert_close(a, b):
  np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
  ("kind", "tile"), [*((kind, 128) for kind in block_case.KINDS), ("moe", 4)]
)
def test_plain_jax_computes_our_outputs_and_gradients(kind, tile, monkeypatch):
  monkeypatch.setattr(pure_jax_mixture, "TILE", tile)
  of = block_case.make_block(_SMALL, kind)
  y, averages, gradients, dx = block_case.our_step(of)()
  theirs = block_case.pure_jax_step(of)()
  jax.tree.map(_assert_close, (y, gradients, dx), (theirs[0], *theirs[2:]))
  # The moments move the averages, which begin at 0 and 1, by a tenth.
  found = sorted(np.sum(x) for x in jax.tree.leaves(averages))
  expected = sorted(
    np.sum(0.1 * np.asarray(value) + 0.9 * is_variance)
    for moments in theirs[1]
    for is_variance, value in enumerate(moments)
  )
  np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", block_case.KINDS)
def test_torch_computes_our_outputs_and_gradients(kind):
  pytest.importorskip("torch")
  from paxon.tools.benchmarks import torch_blocks

  of = block_case.make_block(_SMALL, kind)
  y, _, gradients, dx = block_case.our_step(of)()
  theirs = block_case.torch_step(of, is_compiled=False)()
  _assert_close(y, theirs[0].detach().numpy())
  _assert_close(dx, theirs[2].numpy())
  jax.tree.map_with_path(
    lambda k, a, b: _assert_close(torch_blocks.from_jax(k, a), b.numpy()),
    gradients,
    theirs[1],
  )


def test_a_case_reports_its_ratio():
  result = block_case.run(
    _SMALL, name="vit_block", rounds=2, kind="vit_block", use_torch=False
  )
  assert result.ratio.median > 0
  assert result.limit == block_case.JAX_LIMIT

"""One battery for all attention kernels: each serves a case, or says why not.

Values, and gradients in some cases, are held against `kernels.plain`, whose
oracle is in `kernels_test`. Rows are packed, in every case.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxon.layers import testing
from paxon.layers.attention import (
  cudnn_attention,
  kernel_support,
  kernels,
  local_blocks,
  ring,
  splash,
)
from paxon.layers.attention import mask as attention_mask

BATCH, LENGTH, HEADS, KV_HEADS, HEAD_DIM = 3, 12, 4, 2, 8
# Two documents and padding; padding between documents; one document.
SEGMENTS = (
  [1] * 5 + [2] * 4 + [0] * 3,
  [0] * 2 + [3] * 4 + [0] + [4] * 5,
  [1] * 12,
)
KERNELS = {
  "fused": kernels.fused,
  "cudnn": functools.partial(cudnn_attention.cudnn, implementation="xla"),
  "local_blocks": local_blocks.LocalBlocks(block_length=2),
  "auto": kernels.auto,
  "splash": splash.Splash(interpret=True),
  "ring": ring.Ring(block_q=4, block_kv=3),
}
# Fields of the mask, keywords of the kernel, and who refuses the case.
CASES = {
  "causal": ({}, {"scale": 0.4}, {"local_blocks"}),
  "window": (
    {"window": 3},
    {"logit_cap": 1.5, "sinks": True},
    {"fused", "cudnn"},
  ),
  "both directions": (
    {"causal": False},
    {},
    {"local_blocks"},
  ),
  "two windows": (
    {"causal": False, "window": 3, "right_window": 1},
    {},
    set(),
  ),
  "chunks": ({"chunk": 2}, {}, set()),
  "prefix": (
    {"prefix": 2},
    {},
    {"local_blocks", "splash"},
  ),
  "bias": (
    {"window": 3},
    {"bias": True},
    {"cudnn", "local_blocks", "splash", "ring"},
  ),
}
# A compilation of the backward pass takes a second.
WITH_GRADIENTS = ("causal", "window")


def _positions(segments):
  seen: dict = {}
  out = []
  for segment in segments:
    out.append(seen.get(segment, 0))
    seen[segment] = out[-1] + 1
  return out


def _mask(prefix=None, **settings):
  segments = testing.array(SEGMENTS, jnp.int32)
  positions = testing.array([_positions(row) for row in SEGMENTS], jnp.int32)
  is_prefix = None if prefix is None else positions < prefix
  return attention_mask.AttentionMask(
    q_positions=positions,
    kv_positions=positions,
    q_segment_ids=segments,
    kv_segment_ids=segments,
    q_prefix=is_prefix,
    kv_prefix=is_prefix,
    rules=attention_mask.MaskRules(**settings),
  )


def _arguments(keywords):
  shapes = [(BATCH, LENGTH, n, HEAD_DIM) for n in (HEADS, KV_HEADS, KV_HEADS)]
  arrays = [testing.normal(*s, seed=i) for i, s in enumerate(shapes)]
  given = dict(keywords)
  if "sinks" in given:
    given["sinks"] = testing.normal(HEADS, seed=5)
  if "bias" in given:
    given["bias"] = testing.normal(BATCH, HEADS, LENGTH, LENGTH, seed=6)
  return arrays, given


@functools.cache
def _outcome(kernel, case):
  """The values, and the gradients of all that is an array."""
  settings, keywords, _ = CASES[case]
  mask = _mask(**settings)
  arrays, given = _arguments(keywords)
  scalars = {k: v for k, v in given.items() if isinstance(v, float)}
  named = {k: v for k, v in given.items() if k not in scalars}

  def loss(arrays, named):
    out = kernel(*arrays, mask, **named, **scalars)
    return jnp.sum(jnp.sin(out)), out

  step = jax.grad(loss, argnums=(0, 1), has_aux=True)
  step = jax.jit(step if case in WITH_GRADIENTS else loss)
  return jax.tree.map(np.asarray, step(arrays, named))


@pytest.mark.nightly(keep=6)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", KERNELS)
def test_agrees_with_plain_or_says_why_not(name, case):
  kernel = KERNELS[name]
  settings, keywords, refusing = CASES[case]
  if name in refusing:
    arrays, given = _arguments(keywords)
    with pytest.raises(ValueError, match=r"kernels\.plain"):
      kernel(*arrays, mask=_mask(**settings), **given)
    return
  found, expected = _outcome(kernel, case), _outcome(kernels.plain, case)
  for a, e in zip(
    jax.tree.leaves(found), jax.tree.leaves(expected), strict=True
  ):
    np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-5)


def test_the_cases_see_something_else_each():
  """No case is another one with a rule that hides nothing."""
  outs = [_outcome(kernels.plain, case)[1] for case in CASES]
  for i, a in enumerate(outs):
    assert not np.any(a[0, 9:]), "padding gathers zeros"
    assert not any(np.allclose(a, b, atol=1e-3) for b in outs[:i])


@pytest.mark.parametrize("name", KERNELS)
def test_the_declaration_is_what_the_kernel_does(name):
  declared = set()
  for case, (settings, keywords, _) in CASES.items():
    arrays, given = _arguments(keywords)
    given.pop("scale", None)
    request = kernel_support.from_call(*arrays, mask=_mask(**settings), **given)
    support = kernel_support.find_support(KERNELS[name])
    reasons = list(support.problems(request))
    if reasons:
      declared.add(case)
      with pytest.raises(ValueError, match=re.escape(reasons[0])):
        KERNELS[name](*arrays, mask=_mask(**settings), **given)
  assert declared == {c for c, (*_, names) in CASES.items() if name in names}

"""Tests of views of arrays, compared with the definition of each layout."""

import numpy as np
import pytest

from paxon.tools.pax_checkpoints import array_views, axis_pattern, pax_files

L, D, N, K, H = 3, 5, 4, 2, 6


def _make_array(value):
  def read(region=None):
    return value[... if region is None else region]

  return pax_files.PaxArray(
    name="x",
    shape=value.shape,
    unpadded=None,
    dtype=value.dtype,
    read=read,
    find_chunks=lambda: (1,) * value.ndim,
  )


def _layouts():
  """Yields a view, its pattern, the stored array and the selected entries."""
  rng = np.random.default_rng(0)
  query, key, value = (rng.normal(size=(L, n, H, D)) for n in (N, K, K))
  stored = np.concatenate(
    [
      block
      for k in range(K)
      for block in (
        *(query[:, k * N // K + g] for g in range(N // K)),
        *(key[:, k], value[:, k]),
      )
    ],
    axis=1,
  )
  for view, part in (("query", query), ("key", key), ("value", value)):
    yield view, "(N H) D -> D N H", stored, part.reshape(L, -1, D)
  pairs = np.empty_like(query)
  for i in range(H // 2):
    pairs[:, :, 2 * i] = query[:, :, i]
    pairs[:, :, 2 * i + 1] = query[:, :, i + H // 2]
  yield (
    *("pairs", "(N H) D -> D N H"),
    *(pairs.reshape(L, -1, D), query.reshape(L, -1, D)),
  )
  moved = [np.moveaxis(x, 3, 1) for x in (pairs, query)]
  yield "pairs", "D N H -> D N H", *moved
  first, second = query.reshape(2, L, -1, D)
  both = np.concatenate([first, second], axis=1)
  yield "first_half", "F D -> D F", both, first
  yield "second_half", "F D -> D F", both, second
  yield "unpad", "V D -> V D", both, both[:, :7]


@pytest.mark.parametrize("layout", list(_layouts()), ids=lambda each: each[0])
def test_regions(layout):
  view, text, stored, expected = layout
  pattern = axis_pattern.parse(text)
  heads = K if view in ("key", "value") else N
  sizes = {"D": D, "N": heads, "H": H, "F": N * H // 2, "V": 7}
  found = array_views.make(_make_array(stored), view, pattern, sizes)
  assert found.shape == expected.shape
  np.testing.assert_array_equal(found.read(), expected)
  rng = np.random.default_rng(1)
  for _ in range(20):
    ends = [sorted(rng.choice(n + 1, 2, replace=False)) for n in found.shape]
    region = tuple(slice(int(a), int(b)) for a, b in ends)
    np.testing.assert_array_equal(found.read(region), expected[region])


@pytest.mark.parametrize("view", array_views.NAMES)
def test_rejects_other_sizes(view):
  pattern = axis_pattern.parse("(N H) D -> D N H")
  sizes = {"D": D, "N": N, "H": H}
  with pytest.raises(ValueError, match=rf"24 entries by {view}"):
    array_views.make(_make_array(np.zeros((23, D))), view, pattern, sizes)
  with pytest.raises(ValueError, match="has shape"):
    array_views.make(_make_array(np.zeros(24)), view, pattern, sizes)

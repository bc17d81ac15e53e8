"""Tests for the assignment of pages."""

import numpy as np
import pytest

from paxon.layers.decoding import pages

LENGTH = 4


def _read(host, prompt, count):
  lease = host.begin(prompt, count)
  if lease is not None:
    host.share(lease, len(prompt))
  return lease


def test_prompts_share_their_first_pages_and_free_them_once():
  host = pages.Pages(10, length=LENGTH)
  prompt = [*range(10)]
  first = _read(host, prompt, 13)
  assert (len(first.pages), first.num_shared, host.num_reused) == (4, 2, 0)
  second = host.begin([*prompt[:8], 99], 9)
  assert second.pages[:2] == first.pages[:2]
  assert second.pages[2] not in first.pages
  assert (host.num_reused, host.num_free) == (8, 5)
  # The last id is read again, so that its page is another one until then.
  third = host.begin(prompt[:8], 8)
  assert third.pages[0] == first.pages[0]
  assert third.pages[1] not in first.pages
  host.share(third, 8)
  assert third.pages == first.pages[:2]
  # The same ids after others are not the same content.
  other = _read(host, [7, *prompt[1:8], 0], 9)
  assert other.num_shared == 2
  assert not {*other.pages} & {*first.pages, *second.pages}
  for lease in (first, second, third, other):
    host.end(lease)
  assert host.num_free == 10


def test_the_least_recently_used_pages_are_taken_first():
  host = pages.Pages(4, length=LENGTH)
  for first in (1, 2):
    host.end(_read(host, [first] * LENGTH + [0], 5))
  # Of each prompt one page is known; using the first makes the second older.
  host.end(_read(host, [1] * LENGTH + [0], 5))
  assert host.num_reused == LENGTH
  large = host.begin([9] * 3, 3 * LENGTH)
  host.end(large)
  assert host.begin([1] * LENGTH + [0], 5).num_shared == 1
  assert host.begin([2] * LENGTH + [0], 5).num_shared == 0


def test_too_few_pages_take_none():
  host = pages.Pages(3, length=LENGTH)
  lease = _read(host, [1] * 5, 8)
  assert host.begin([1] * 5, 12) is None
  assert host.num_free == 1
  assert host.num_reused == 0
  assert host.grow(lease, 12)
  assert not host.grow(lease, 13)
  host.end(lease)
  assert host.num_free == 3


def test_random_requests_never_share_what_is_written():
  """A page that others read has been filled by a prompt."""
  rng = np.random.default_rng(0)
  host = pages.Pages(12, length=LENGTH)
  open_leases, content = [], {}
  for _ in range(2000):
    if open_leases and rng.random() < 0.5:
      host.end(open_leases.pop(rng.integers(len(open_leases)))[0])
      continue
    prompt = rng.integers(0, 2, rng.integers(1, 14)).tolist()
    count = len(prompt) + int(rng.integers(6))
    lease = host.begin(prompt, count)
    if lease is None:
      assert host.num_free < host.count(count)
      continue
    # It reads what the shared pages hold, and writes the others.
    for i in range(lease.num_shared):
      assert content[lease.pages[i]] == prompt[: (i + 1) * LENGTH]
    for i in range(lease.num_shared, len(lease.pages)):
      page = lease.pages[i]
      assert not any(page in other.pages for other, _ in open_leases)
      content[page] = prompt[: (i + 1) * LENGTH]
    host.share(lease, len(prompt))
    open_leases.append((lease, prompt))
    for other, ids in open_leases:
      for i in range(len(ids) // LENGTH):
        assert content[other.pages[i]] == ids[: (i + 1) * LENGTH]
    used = {page for other, _ in open_leases for page in other.pages}
    assert host.num_free == 12 - len(used)
  assert host.num_reused > 500


def test_nothing_is_shared_if_it_must_not():
  host = pages.Pages(10, length=LENGTH, is_shared=False)
  host.end(_read(host, [1] * 9, 9))
  assert host.begin([1] * 9, 9).num_shared == 0


def test_rejects_sizes():
  with pytest.raises(ValueError, match=r"num_pages must be positive, got 0"):
    pages.Pages(0, length=4)

"""Page allocator with prefix sharing.

The host assigns the pages of `attention.paged_slots` to requests. A page that a
prompt fills is never written again; it is kept after its request has ended, and
other requests whose prompts begin with the same ids share it, at the same time
or later (prefix reuse). The pages of requests that have ended are taken back
when no others are free, those first that were used least recently.

Prompts are compared page by page, by their ids and by the page before. A page
holds one chunk of a prompt, so the chunks that a request still reads are those
that it would read alone, and its logits the same, bit by bit. Generated tokens
are not shared: a step of one token rounds differently than a chunk.
"""

import collections
from collections.abc import Sequence
import dataclasses

from paxon.sharding import checks

# The content of a page: number of that of the page before (-1 if none), ids.
_Key = tuple[int, tuple[int, ...]]


@dataclasses.dataclass
class Lease:
  """The pages of a request.

  Attributes:
    prompt: Its ids.
    pages: Numbers of pages, in the order of tokens; the first ones may be
      shared.
    num_shared: Number of pages whose content is known to others.
    content: Number of the content of the last of these; -1 if there is none.
  """

  prompt: Sequence[int]
  pages: list[int]
  num_shared: int = 0
  content: int = -1


class Pages:
  """Assigns pages to requests.

  Attributes:
    num_pages: Number of pages, from number 1 on.
    length: Number of tokens of a page.
    num_reused: Number of prompt tokens that were not read again, of all
      requests.
  """

  def __init__(
    self, num_pages: int, *, length: int, is_shared: bool = True
  ) -> None:
    """Makes all pages free; `is_shared` allows to reuse prefixes."""
    self.num_pages, self.length = num_pages, length
    checks.check_positive(self, "num_pages")
    checks.check_positive(self, "length")
    self._is_shared = is_shared
    self.num_reused = 0
    self._free = list(range(num_pages, 0, -1))
    self._users = [0] * (num_pages + 1)
    # Pages with known content: by content, and the content and number of each.
    self._known: dict[_Key, int] = {}
    self._content: dict[int, tuple[_Key, int]] = {}
    # Those without users, least recently used first.
    self._idle: collections.OrderedDict[int, None] = collections.OrderedDict()
    self._next_content = 0

  @property
  def num_free(self) -> int:
    """Number of pages without users."""
    return len(self._free) + len(self._idle)

  def count(self, num_tokens: int) -> int:
    """Returns the number of pages of a sequence."""
    return -(-num_tokens // self.length)

  def begin(self, prompt: Sequence[int], num_tokens: int) -> Lease | None:
    """Returns pages for a request, or None if too few are free.

    `num_tokens` is the number of tokens of prompt and completion. At least the
    last token of a prompt is read again, because its logits are needed.
    """
    lease = Lease(prompt=prompt, pages=[])
    for i in range((len(prompt) - 1) // self.length):
      page = self._known.get(self._key(lease, i))
      if page is None:
        break
      lease.pages.append(page)
      lease.content = self._content[page][1]
    lease.num_shared = len(lease.pages)
    needed = self.count(num_tokens) - lease.num_shared
    reused_idle = sum(page in self._idle for page in lease.pages)
    if needed > self.num_free - reused_idle:
      return None
    for page in lease.pages:
      self._use(page)
    for _ in range(needed):
      lease.pages.append(self._take())
    self.num_reused += lease.num_shared * self.length
    return lease

  def grow(self, lease: Lease, num_tokens: int) -> bool:
    """Adds pages for a number of tokens; returns False if too few are free."""
    needed = self.count(num_tokens) - len(lease.pages)
    if needed > self.num_free:
      return False
    for _ in range(needed):
      lease.pages.append(self._take())
    return True

  def share(self, lease: Lease, num_read: int) -> None:
    """Allows others to use the pages that the first ids of a prompt fill."""
    if not self._is_shared:
      return
    for i in range(lease.num_shared, num_read // self.length):
      key, page = self._key(lease, i), lease.pages[i]
      known = self._known.get(key)
      if known is not None:
        # Another request has filled one with the same; one is enough.
        self._use(known)
        lease.pages[i] = known
        self._users[page] -= 1
        self._free.append(page)
        page = known
      else:
        self._known[key] = page
        self._content[page] = key, self._next_content
        self._next_content += 1
      lease.content, lease.num_shared = self._content[page][1], i + 1

  def end(self, lease: Lease) -> None:
    """Takes the pages of a request back."""
    # The last ones first: without them the others are of use.
    for page in reversed(lease.pages):
      self._users[page] -= 1
      if self._users[page]:
        continue
      if page in self._content:
        self._idle[page] = None
      else:
        self._free.append(page)
    lease.pages = []

  def _key(self, lease: Lease, i: int) -> _Key:
    """Returns the content of the page after those that are known."""
    ids = lease.prompt[i * self.length : (i + 1) * self.length]
    return lease.content, tuple(ids)

  def _use(self, page: int) -> None:
    self._users[page] += 1
    self._idle.pop(page, None)

  def _take(self) -> int:
    if not self._free:
      page, _ = self._idle.popitem(last=False)
      key, _ = self._content.pop(page)
      del self._known[key]
      self._free.append(page)
    page = self._free.pop()
    self._users[page] = 1
    return page

"""The `Host` header of HTTP requests, checked by servers of this machine.

A page of a web site can have its name lead to this machine (DNS rebinding). It
could then read what a server here answers, but its requests name that site.
"""

from collections.abc import Collection
import re

LOOPBACK = ("localhost", "127.0.0.1", "[::1]")


def is_one_of(header: str, names: Collection[str]) -> bool:
  """Returns whether a header has one of some names, with any port or none.

  Args:
    header: Its value; empty without one.
    names: In lower case; IPv6 addresses in brackets.
  """
  found = re.fullmatch(r"(\[[^\]]*\]|[^:]*)(?::[0-9]*)?", header.strip())
  return found is not None and found[1].lower() in names

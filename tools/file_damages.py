"""Damages of files for tests, drawn from seeds.

Bytes are cut, flipped, zeroed, repeated, inserted and replaced; numbers and
JSON values are changed; and files become files of other formats.
"""

import json
import os
import pathlib
import random
import re
import socket


def damage(data: bytes, draw: random.Random) -> bytes:
  """Returns other bytes."""
  kinds = (_cut_bytes, _flip, _zero, _repeat, _insert, _number, _value, _other)
  for _ in range(draw.randint(1, 3)):
    data = draw.choice(kinds)(data, draw)
  return data


def _span(data, draw):
  begin = draw.randrange(len(data) + 1)
  return begin, min(len(data), begin + draw.choice((1, 2, 8, 64)))


def _cut_bytes(data, draw):
  begin, end = _span(data, draw)
  return data[:begin] if draw.random() < 0.5 else data[:begin] + data[end:]


def _flip(data, draw):
  changed = bytearray(data)
  for _ in range(draw.choice((1, 1, 3)) if data else 0):
    changed[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
  return bytes(changed)


def _zero(data, draw):
  begin, end = _span(data, draw)
  fill = draw.choice((b"\0", b"\xff"))
  return data[:begin] + fill * (end - begin) + data[end:]


def _repeat(data, draw):
  begin, end = _span(data, draw)
  return data[:end] + data[begin:end] * draw.choice((1, 50)) + data[end:]


def _insert(data, draw):
  begin, _ = _span(data, draw)
  return data[:begin] + draw.randbytes(draw.choice((1, 8))) + data[begin:]


_NUMBERS = (b"-1", b"0", b"999999999999999999999", b"1e309", b"0.5", b"NaN")


def _number(data, draw):
  """Replaces a number in a text, or eight bytes by a large integer."""
  found = [*re.finditer(rb"-?\d+(\.\d+)?", data)]
  if found and draw.random() < 0.7:
    match = draw.choice(found)
    return data[: match.start()] + draw.choice(_NUMBERS) + data[match.end() :]
  begin = 8 * draw.randrange(len(data) // 8 + 1)
  large = draw.choice((2**63 - 1, 2**62, 2**40, 2**32 - 1, 2**31))
  return data[:begin] + large.to_bytes(8, "little") + data[begin + 8 :]


_VALUES = (None, True, -1, 1e400, "x", "", [], {}, [[]], {"a": None}, "\ud800")


def _value(data, draw):
  """Replaces a value of a JSON text, or of its first line."""
  line, newline, rest = data.partition(b"\n")
  for text, after in ((data, b""), (line, newline + rest)):
    try:
      content = json.loads(text)
    except (ValueError, RecursionError):
      continue
    changed = _replace_bytes(content, draw)
    return json.dumps(changed).encode("utf-8", "surrogatepass") + after
  return data


def _replace_bytes(content, draw):
  if not isinstance(content, dict | list) or not content or draw.random() < 0.2:
    return draw.choice(_VALUES)
  keys = [*content] if isinstance(content, dict) else [*range(len(content))]
  key = draw.choice(keys)
  if isinstance(content, dict) and draw.random() < 0.2:
    return {k: v for k, v in content.items() if k != key}
  changed = content.copy()
  changed[key] = _replace_bytes(content[key], draw)
  return changed


_OTHERS = (
  b"",
  b"\n",
  b"null",
  b"[]",
  b"[" * 20_000,
  b'{"a":' * 20_000,
  b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
  b"PK\x03\x04",
  b"\x1f\x8b",
  b"\xef\xbb\xbf{}",
)


def _other(data, draw):
  return draw.choice(_OTHERS) if draw.random() < 0.3 else data


def _make_pipe(path: pathlib.Path) -> None:
  os.mkfifo(path)


def _make_folder(path: pathlib.Path) -> None:
  path.mkdir()


def _make_loop(path: pathlib.Path) -> None:
  path.symlink_to(path.name)


def _make_link_to_nowhere(path: pathlib.Path) -> None:
  path.symlink_to("nowhere")


def _make_device(path: pathlib.Path) -> None:
  path.symlink_to("/dev/zero")


def _make_socket(path: pathlib.Path) -> None:
  # The name of a socket may have 107 bytes.
  folder = os.open(path.parent, os.O_RDONLY)
  with socket.socket(socket.AF_UNIX) as made:
    made.bind(f"/proc/self/fd/{folder}/{path.name}")
  os.close(folder)


def _make_huge(path: pathlib.Path) -> None:
  # Sparse: it takes no room.
  with path.open("wb") as file:
    file.truncate(1 << 40)


# By name, what is in place of a file: each makes it at a path.
OTHER_KINDS = {
  make.__name__.removeprefix("_make_"): make
  for make in (
    *(_make_pipe, _make_folder, _make_loop, _make_link_to_nowhere),
    *(_make_device, _make_socket, _make_huge),
  )
}

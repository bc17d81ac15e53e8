"""Comparison of a tokenizer with the library that its vocabulary is made for.

Lines are generated: twenty languages, emoji, code, numbers, spaces, control
and unassigned characters, and bytes that are not UTF-8. The library reads the
same file itself, or another file of the same vocabulary, such as a
`tokenizer.json` beside a rank file.
"""

# ruff: noqa: RUF001

import base64
from collections.abc import Callable, Iterable, Iterator, Sequence
import dataclasses
import random
from typing import Any

from paxon.inputs import optional_library
from paxon.inputs.tokenizers import (
  load,
  rank_file,
  sentence_piece,
  text_tokenizer,
  tokenizer_json,
)
from paxon.runner.checkpoints import text_table

# Lines that are printed for each check.
_MAX_EXAMPLES = 3
_SENTENCES = (
  "The committee isn't sure they'll agree; we've 1,024 reasons, don't we?",
  "Die Straßenbahn fährt über die Brücke, weil Züge ausgefallen sind.",
  "L'été, où qu'il soit, n'est jamais assez long pour les élèves.",
  "¿Qué pasó con el niño? ¡Mañana vendrá más temprano!",
  "A manhã começou com pão, café e uma canção antiga.",
  "Perché la città è così silenziosa, e nessuno più risponde?",
  "Het schip vertrok om vijf uur 's ochtends uit de haven.",
  "Zażółć gęślą jaźń, a potem idź prosto do domu.",
  "Příliš žluťoučký kůň úpěl ďábelské ódy nad řekou.",
  "Çocuklar İstanbul'da ışıl ışıl bir gün geçirdi, ığdır uzaktı.",
  "Buổi sáng, người bán hàng đã dọn những chiếc ghế ra đường.",
  "Съешь ещё этих мягких французских булок, да выпей чаю.",
  "Ο γρήγορος λύκος πήδηξε πάνω από τον τεμπέλη σκύλο.",
  "الطقس اليوم جميل، والأطفال يلعبون في الحديقة الكبيرة.",
  "הילדים הלכו אל הים, ושם מצאו צדפים רבים.",
  "आज मौसम अच्छा है, और बच्चे बाग़ में खेल रहे हैं।",
  "วันนี้อากาศดีมาก เด็กๆ กำลังเล่นอยู่ในสวน",
  "今天天气很好,孩子们在公园里玩耍。一二三,四五六!",
  "きょうは天気がいいので、公園でカメラを使いました。",
  "오늘은 날씨가 좋아서 아이들이 공원에서 놀고 있습니다.",
)
_CODE = (
  "def f(x: int) -> dict[str, int]:\n    return {k: v ** 2 for k, v in x}\n",
  "for (size_t i = 0; i < n; ++i) { sum += a[i] * b[i]; }\t// O(n)",
  "SELECT name, COUNT(*) FROM t WHERE x >= 3.14e-10 GROUP BY 1;",
  '<a href="https://example.org/?q=1&amp;r=%20">it\'s</a>\r\n',
  "\\frac{\\partial L}{\\partial w_{ij}} = \\sum_k x_k",
  "$HOME/.config/app.toml --flag='a b' | xargs -0 -n1 echo 2>&1",
)
_EMOJI = (
  *("🦊", "😀😃", "❤️", "👍🏽", "👩‍👩‍👧‍👦", "🏳️‍🌈", "🇩🇪🇯🇵"),
  *("1️⃣", "🧑🏿‍🚀", "☃", "…"),
)
_SPACES = (" ", "  ", "   ", "\t", "\n", "\n\n", "\r\n", "\u00a0", "\u3000")
# Controls, joiners, marks of direction, and what normalization changes.
_ODD = (
  *map(chr, (*range(0x20), 0x7F, 0x85, 0xAD, 0x200B, 0x200D, 0x200F)),
  *("\u202e", "\u2028", "\u2029", "\u2060", "\ufeff", "\ufffd", "\uffff"),
  *("e\u0301", "\u0301", "\u212b", "\u1e9b\u0323", "\u0f73", "\u0958"),
  *("\u1100\u1161", "\u2581", "\u0120", "\U0001d400", "\uff76\uff9e"),
  *("\ufb01", "\u2460", "\u00bd", "\u216b", "\uff21"),
)
_INVALID = (
  *(b"\xff", b"\xc3", b"\xe2\x82", b"\xf0\x9f\xa6", b"\x80\x80", b"\xc0\xaf"),
  *(b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xfe\xfe"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Check:
  """A property of a tokenizer.

  Attributes:
    name: The property.
    lines: The number of lines it was tried on.
    different: The lines without it.
  """

  name: str
  lines: int
  different: tuple[str | bytes, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Library:
  """A vocabulary as its own library reads it."""

  encode: Callable[[str], list[int]]
  decode: Callable[[list[int]], str]


def make_lines(count: int, *, seed: int) -> list[str | bytes]:
  """Returns generated lines; every tenth has bytes that are not UTF-8."""
  rng = random.Random(seed)
  lines: list[str | bytes] = []
  for i in range(count):
    # Each language occurs equally often.
    text = _fragment(rng, _SENTENCES[i % len(_SENTENCES)])
    for _ in range(rng.randrange(4)):
      text += rng.choice(("", *_SPACES)) + _fragment(rng)
    if i % 10:
      lines.append(text)
    else:
      data = bytearray(text.encode())
      for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(len(data) + 1)
        data[at:at] = rng.choice(_INVALID)
      lines.append(bytes(data))
  return lines


def _fragment(rng: random.Random, sentence: str | None = None) -> str:
  if sentence is not None or rng.random() < 0.4:
    text = sentence or rng.choice(_SENTENCES)
    start, stop = sorted(rng.randrange(len(text) + 1) for _ in range(2))
    text = text if rng.random() < 0.3 else text[start:stop]
    return text.upper() if rng.random() < 0.1 else text
  kinds: tuple[Callable[[], str], ...] = (
    lambda: rng.choice(_CODE),
    lambda: "".join(rng.choices(_EMOJI, k=rng.randrange(1, 4))),
    lambda: "".join(rng.choices(_SPACES, k=rng.randrange(1, 9))),
    lambda: "".join(rng.choices(_ODD, k=rng.randrange(1, 6))),
    lambda: str(rng.randrange(10 ** rng.randrange(1, 12))),
    lambda: rng.choice("aA.-=_ ") * rng.randrange(1, 40),
    # Any characters but surrogates, most of them unassigned.
    lambda: "".join(
      chr(n + 0x800 * (n >= 0xD800))
      for n in (rng.randrange(0x10F800) for _ in range(rng.randrange(1, 4)))
    ),
  )
  return rng.choice(kinds)()


def compare(
  path: str, lines: Sequence[str | bytes], *, other: str | None = None
) -> list[Check]:
  """Compares a tokenizer with its library.

  Args:
    path: A vocabulary, as for `load.load`.
    lines: Texts, and bytes that may not be UTF-8.
    other: Another file of the same vocabulary, which the library reads instead.

  Raises:
    ValueError: `path` or `other` is no vocabulary.
  """
  tokenizer = _load(path)
  library = _read(tokenizer if other is None else _load(other))
  ids = {line: tokenizer.encode(line) for line in lines}
  texts = [line for line in lines if isinstance(line, str)]
  data = [line for line in lines if isinstance(line, bytes)]

  def has_same_ids(line: str | bytes) -> bool:
    text = line if isinstance(line, str) else line.decode(errors="replace")
    expected = library.encode(text)
    if isinstance(line, bytes) and tokenizer.is_byte_level:
      # They are ids of bytes, which is not what the library can show.
      return tokenizer.decode(ids[line]) == library.decode(expected)
    return ids[line].tolist() == expected

  def has_same_text(line: str) -> bool:
    return tokenizer.decode(ids[line]) == library.decode(ids[line].tolist())

  def is_decoded_in_steps(line: str) -> bool:
    decoder = text_tokenizer.Decoder(tokenizer)
    found = "".join(decoder.push(number) for number in ids[line])
    return found + decoder.finish() == tokenizer.decode(ids[line])

  def is_kept(line: str | bytes) -> bool:
    expected = line if isinstance(line, bytes) else line.encode()
    counts = tokenizer.byte_counts(ids[line])
    found = tokenizer.decode_bytes(ids[line])
    return found == expected and len(expected) == counts.sum()

  checks = [
    _check("ids", texts, has_same_ids),
    _check("decoded text", texts, has_same_text),
    _check("decoded one by one", texts, is_decoded_in_steps),
  ]
  if tokenizer.is_lossless:
    return [*checks, _check("bytes kept", lines, is_kept)]
  return [*checks, _check("invalid as U+FFFD", data, has_same_ids)]


def format_checks(checks: Iterable[Check]) -> Iterator[str]:
  """Yields a table, then examples of lines that differ."""
  rows = [("check", "lines", "different")]
  rows += [
    (check.name, f"{check.lines:,}", f"{len(check.different):,}")
    for check in checks
  ]
  yield from text_table.format_lines(rows, right=(1, 2))
  for check in checks:
    for line in check.different[:_MAX_EXAMPLES]:
      yield f"{check.name}: {line!r}"


def _check(
  name: str, lines: Sequence[str | bytes], holds: Callable[[Any], bool]
) -> Check:
  different = tuple(line for line in lines if not holds(line))
  return Check(name=name, lines=len(lines), different=different)


def _load(path: str) -> text_tokenizer.TextTokenizer:
  tokenizer = load.load(path)
  if not isinstance(tokenizer, text_tokenizer.TextTokenizer):
    raise ValueError(f"tokenizer={path!r} must be a vocabulary file or folder.")
  # Reads the file, whose errors are clearer than the library's.
  tokenizer.encode("")
  return tokenizer


def _read(tokenizer: text_tokenizer.TextTokenizer) -> _Library:
  """Returns the library of a vocabulary file, which it reads by itself."""
  path = tokenizer.path
  if isinstance(tokenizer, tokenizer_json.TokenizerJson):
    with optional_library.explain("tokenizers", extra="text"):
      import tokenizers
    own = tokenizers.Tokenizer.from_file(path)
    return _Library(
      encode=lambda text: own.encode(text, add_special_tokens=False).ids,
      decode=own.decode,
    )
  if isinstance(tokenizer, sentence_piece.SentencePiece):
    with optional_library.explain("sentencepiece", extra="text"):
      import sentencepiece
    processor: Any = sentencepiece.SentencePieceProcessor(model_file=path)
    return _Library(encode=processor.encode, decode=processor.decode)
  assert isinstance(tokenizer, rank_file.RankFile)
  with optional_library.explain("tiktoken", "regex", extra="text"):
    import tiktoken
  with open(path, "rb") as file:
    pairs = [line.split() for line in file if line.strip()]
  encoding = tiktoken.Encoding(
    path,
    pat_str=tokenizer.split_pattern,
    mergeable_ranks={base64.b64decode(token): int(n) for token, n in pairs},
    special_tokens={},
  )
  return _Library(encode=encoding.encode_ordinary, decode=encoding.decode)

"""Sources of transcribed audio with random access.

A source has a length, and its items are `{"audio": float32 [N], "text": str}`,
with samples from -1 to 1 at the source's `sample_rate`. Files are read when
they are first used, so an experiment can be planned without its data.
"""

import bisect
import dataclasses
import functools
import os
from typing import Any

import numpy as np

from paxon.inputs import checks
from paxon.inputs.sources import example_source
from paxon.inputs.speech import wav_file

Example = dict[str, Any]

_CONSONANTS, _VOWELS = "bdfgklmnprst", "aeiou"


@dataclasses.dataclass(kw_only=True, eq=False)
class TranscribedFiles:
  """WAV files that a table lists with their transcripts.

  Attributes:
    table: Path of a text file whose lines are the path of a WAV file, absolute
      or relative to the table's folder, a tab and its text.
    sample_rate: Samples per second of the items; others are resampled.
    max_seconds: Longer files are left out; None keeps all.
    how: A sentence about how to make the table, for the error without it.
  """

  table: str
  sample_rate: int
  max_seconds: float | None = None
  how: str = ""

  def __post_init__(self) -> None:
    checks.check_not_empty(self, "table")
    checks.check_positive(self, "sample_rate", optional=["max_seconds"])

  def __len__(self) -> int:
    return len(self._lines)

  def __getitem__(self, index: int, /) -> Example:
    """Returns `audio`, float32 [N], and `text`.

    Raises:
      ValueError: The file cannot be read.
    """
    path, text, _ = self._lines[index]
    audio, rate = wav_file.read_wav(path)
    audio = wav_file.resample(audio, rate=rate, new_rate=self.sample_rate)
    return {"audio": audio, "text": text}

  def size(self, index: int) -> tuple[int, int]:
    """Returns the numbers of samples and characters of an item.

    The file is read only if `max_seconds` is None.
    """
    _, text, samples = self._lines[index]
    return samples or len(self[index]["audio"]), len(text)

  def check(self) -> None:
    """Raises ValueError if the table cannot be read."""
    _ = self._lines

  @functools.cached_property
  def _lines(self) -> list[tuple[str, str, int]]:
    """Paths, texts and numbers of samples, 0 if they were not counted."""
    try:
      with open(self.table, encoding="utf-8") as file:
        lines = file.read().splitlines()
    except OSError as error:
      raise ValueError(
        f"Cannot read {self.table}: {os.strerror(error.errno or 0)}."
        f"{self.how and ' '}{self.how}"
      ) from None
    found = []
    for number, line in enumerate(lines, start=1):
      path, tab, text = line.partition("\t")
      if not (path and tab):
        raise ValueError(
          f"{self.table}: line {number} must be a path, a tab and a text, got"
          f" {line!r}."
        )
      path = os.path.join(os.path.dirname(self.table), path)
      samples = 0
      if self.max_seconds is not None:
        audio, rate = wav_file.read_wav(path)
        if len(audio) > self.max_seconds * rate:
          continue
        samples = -(-len(audio) * self.sample_rate // rate)  # As `resample`.
      found.append((path, text, samples))
    return found


@dataclasses.dataclass(kw_only=True, eq=False)
class JoinedClips:
  """Clips of a source one after another, so that a batch has less padding.

  The longest clips come first; each later one joins the item that it fills best
  (best fit decreasing), or begins another. All clips are read once to measure
  them, unless the source has the method `size`.

  Attributes:
    source: A source with a `sample_rate`.
    max_seconds: Items are at most this long; longer clips are their own items.
    max_characters: The same for the characters of the text.
    separator: Stands between the texts.
  """

  source: Any
  max_seconds: float
  max_characters: int
  separator: str = " "

  def __post_init__(self) -> None:
    checks.check_positive(self, "max_seconds", "max_characters")

  @property
  def sample_rate(self) -> int:
    """Sample rate of the source."""
    return self.source.sample_rate

  def __len__(self) -> int:
    return len(self._items)

  def __getitem__(self, index: int, /) -> Example:
    """Returns `audio`, float32 [N], and `text`."""
    clips = [self.source[i] for i in self._items[index]]
    return {
      "audio": np.concatenate([clip["audio"] for clip in clips]),
      "text": self.separator.join(clip["text"] for clip in clips),
    }

  def check(self) -> None:
    """Raises ValueError if the source cannot be read."""
    example_source.call_optional(self.source, "check")

  @functools.cached_property
  def _items(self) -> list[list[int]]:
    """Indices of the clips of each item."""
    size = example_source.find_optional(self.source, "size", self._read_size)
    sizes = [size(i) for i in range(len(self.source))]
    items: list[list[int]] = []
    characters: list[int] = []
    # Free samples and number of each item, sorted.
    free: list[tuple[int, int]] = []
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i][0]):
      samples, count = sizes[index]
      place = bisect.bisect_left(free, (samples, 0))
      longest = self.max_characters - count - len(self.separator)
      while place < len(free) and characters[free[place][1]] > longest:
        place += 1
      if place < len(free):
        left, number = free.pop(place)
        items[number].append(index)
        characters[number] += len(self.separator) + count
      else:
        left, number = round(self.max_seconds * self.sample_rate), len(items)
        items.append([index])
        characters.append(count)
      bisect.insort(free, (left - samples, number))
    return items

  def _read_size(self, index: int) -> tuple[int, int]:
    clip = self.source[index]
    return len(clip["audio"]), len(clip["text"])


@dataclasses.dataclass(kw_only=True, eq=False)
class ToneSpeech:
  """Made-up words in which each letter is a chord, for smoke tests.

  Attributes:
    num_examples: Number of clips.
    sample_rate: Samples per second.
    max_words: Largest number of words of a clip.
    letter_seconds: Mean duration of a letter; that of a pause is the same.
    noise: Standard deviation of the noise.
    seed: Clips with another seed have the same letters and other words.
  """

  num_examples: int
  sample_rate: int = 8000
  max_words: int = 3
  letter_seconds: float = 0.08
  noise: float = 0.02
  seed: int = 0

  def __post_init__(self) -> None:
    checks.check_positive(
      self, "num_examples", "sample_rate", "max_words", "letter_seconds"
    )

  def __len__(self) -> int:
    return self.num_examples

  def __getitem__(self, index: int, /) -> Example:
    """Returns `audio` and `text` of words of one to three syllables."""
    rng = np.random.Generator(np.random.Philox(key=(self.seed << 32) + index))
    words = []
    for _ in range(rng.integers(1, self.max_words + 1)):
      count = int(rng.integers(1, 4))
      drawn = rng.integers(0, (len(_CONSONANTS), len(_VOWELS)), (count, 2))
      words.append("".join(_CONSONANTS[c] + _VOWELS[v] for c, v in drawn))
    text = " ".join(words)
    parts = [self._letter(c, rng) for c in f" {text} "]
    audio = np.concatenate(parts)
    audio += self.noise * rng.standard_normal(len(audio))
    return {"audio": audio.astype(np.float32), "text": text}

  def _letter(self, letter: str, rng: np.random.Generator) -> np.ndarray:
    seconds = self.letter_seconds * rng.uniform(0.6, 1.4)
    count = round(seconds * self.sample_rate)
    if letter == " ":
      return np.zeros(count)
    time = np.arange(count) / self.sample_rate
    place = ord(letter) - ord("a")
    # Vowels are lower; both tones are below 4 kHz.
    low = 300 + 45 * place if letter in _VOWELS else 1000 + 35 * place
    high = low + 400 + 50 * (place % 7)
    chord = np.sin(2 * np.pi * low * time) + np.sin(2 * np.pi * high * time)
    # Begins and ends at zero.
    return 0.3 * chord * np.sin(np.pi * np.arange(count) / max(count - 1, 1))

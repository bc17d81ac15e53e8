"""Telephone prompts: recorded and synthesized clips with transcripts.

Asterisk's English prompts are 568 clips of one speaker, 25 minutes at 8 kHz, in
packages of Debian. More speech with the same words is synthesized by espeak-ng:

  apt-get install asterisk-core-sounds-en-wav asterisk-core-sounds-en espeak-ng
  tools/python -m paxon.tasks.speech.telephone_data --folder=/data/telephone

The folder gets WAV files, `texts.txt` for the language model of
`tasks/speech/transcribe.py`, and three tables for
`speech_sources.TranscribedFiles`:

* `train.tsv`: the recorded training prompts; and, by random voices, speeds and
  pitches, their sentences, random phrases of their words, and phrases of the
  docstrings of Python's standard library;
* `synthesized_test.tsv`: the sentences of held-out prompts, synthesized;
* `recorded_test.tsv`: the recorded held-out prompts.

Every fourth of the prompts' different texts with at least three words, by their
hashes, is held out with all of its clips. No sentence that is synthesized for
the test is a part of a training text.
"""

import argparse
import ast
import collections
from collections.abc import Iterator, Sequence
import concurrent.futures
import dataclasses
import gzip
import hashlib
import os
import pathlib
import re
import shutil
import subprocess
import sys

import numpy as np

from paxon.inputs.sources import python_stdlib
from paxon.inputs.speech import alphabet, wav_file

SAMPLE_RATE = 8000
_TEXTS = "/usr/share/doc/asterisk-core-sounds-en/core-sounds-en.txt.gz"
_SOUNDS = "/usr/share/asterisk/sounds/en_US_f_Allison"
_HELD_OUT_EVERY = 4
_NUMBERS = [
  "zero",
  "one",
  "two",
  "three",
  "four",
  "five",
  "six",
  "seven",
  "eight",
  "nine",
]
# Variants of espeak-ng's American English.
_VOICES = ("en-us", "en-us+m3", "en-us+f2")
# Words per minute, and the pitch from 0 to 99.
_SPEEDS, _PITCHES = (145, 175), (40, 60)
_WORDS_OF_PHRASES = (5, 10)
_MIN_MODULES = 3
_MAX_WORDS = 14


@dataclasses.dataclass(frozen=True)
class Prompt:
  """A recorded clip.

  Attributes:
    path: Path of the WAV file.
    sentences: Its sentences, in characters of `alphabet.ENGLISH`.
  """

  path: str
  sentences: tuple[str, ...]

  @property
  def text(self) -> str:
    """The whole text."""
    return " ".join(self.sentences)


def normalize(text: str) -> str:
  """Returns a text in small letters, digits as words, without punctuation."""
  text = re.sub(r"\[.*?\]", "", text).replace("*", " star ")
  text = text.replace("#", " pound ")
  text = re.sub(r"\d", lambda found: f" {_NUMBERS[int(found[0])]} ", text)
  text = "".join(c if c in alphabet.ENGLISH else " " for c in text.lower())
  return " ".join(text.split())


def read_prompts(texts: str, sounds: str) -> list[Prompt]:
  """Returns the clips whose text is known and speech.

  Raises:
    ValueError: A file or folder is missing.
  """
  how = "Debian's packages asterisk-core-sounds-en and -wav have them."
  try:
    with gzip.open(texts, "rt", encoding="utf-8") as file:
      lines = file.read().splitlines()
  except OSError as error:
    raise ValueError(f"Cannot read {texts}: {error}. {how}") from None
  found = []
  for line in lines:
    name, colon, text = line.partition(":")
    path = os.path.join(sounds, f"{name}.wav")
    text = text.strip()
    # Remarks about sounds, and abbreviations, whose spelling is not spoken.
    is_speech = text and text[0] not in "[(<" and text[-1] not in ">)"
    is_plain = not re.search(r"[A-Z]{3}|\d{3}|[A-Z] [A-Z] [A-Z]|@", text)
    if colon and is_speech and is_plain and os.path.exists(path):
      parts = [normalize(s) for s in re.split(r"(?<=[a-z])[.!?]+\s", text)]
      parts = [s for s in parts if s]
      if parts:
        found.append(Prompt(path, tuple(parts)))
  if not found:
    raise ValueError(f"No clip of {texts} is in {sounds}. {how}")
  return found


def is_held_out(text: str) -> bool:
  """Returns whether clips of this text are for the test."""
  digest = hashlib.sha256(text.encode()).digest()
  return len(text.split()) >= 3 and digest[0] % _HELD_OUT_EVERY == 0


def read_docstrings() -> list[list[str]]:
  """Returns runs of words in docstrings of Python's standard library.

  A word has small letters only and occurs in several modules.
  """
  source = python_stdlib.PythonStdlib(split="train")
  found: list[list[str]] = []
  modules = collections.Counter[str]()
  for i in range(len(source)):
    try:
      tree = ast.parse(source[i])
    except (SyntaxError, ValueError):
      continue
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef
    texts = [
      ast.get_docstring(n) for n in ast.walk(tree) if isinstance(n, kinds)
    ]
    runs = re.findall(
      r"(?<![\w'.-])[a-z]+(?:\s[a-z]+)*(?![\w'(-])",
      "\n".join(filter(None, texts)),
    )
    found += [run.split() for run in runs]
    modules.update({word for run in runs for word in run.split()})
  usual = {word for word, count in modules.items() if count >= _MIN_MODULES}
  return [run for run in found if usual.issuperset(run)]


def make_phrases(
  sentences: Sequence[str],
  others: Sequence[Sequence[str]],
  *,
  excluded: Sequence[str],
  count: int,
  seed: int,
) -> Iterator[str]:
  """Yields texts that have none of the excluded ones as a part.

  They are random words of the sentences, fragments of two sentences, and
  fragments of `others`, a third each.
  """
  rng = np.random.default_rng(seed)
  vocabulary = sorted({word for s in sentences for word in s.split()})
  long = [words for words in others if len(words) >= _WORDS_OF_PHRASES[0]]

  def cut_at(words: Sequence[str], size: int) -> list[str]:
    begin = int(rng.integers(max(1, len(words) - size + 1)))
    return list(words[begin : begin + size])

  made = 0
  while made < count:
    size = int(rng.integers(*_WORDS_OF_PHRASES))
    kind = rng.integers(3)
    if kind == 0:
      words = [vocabulary[i] for i in rng.integers(0, len(vocabulary), size)]
    elif kind == 1:
      chosen = [
        sentences[i].split() for i in rng.integers(0, len(sentences), 2)
      ]
      words = [
        *cut_at(chosen[0], size // 2),
        *cut_at(chosen[1], size - size // 2),
      ]
    else:
      words = cut_at(long[rng.integers(len(long))], size)
    text = " ".join(words)
    if not any(f" {other} " in f" {text} " for other in excluded):
      made += 1
      yield text


def synthesize(text: str, path: str, key: str) -> None:
  """Writes a clip at `SAMPLE_RATE`, with a voice that depends on the key.

  Raises:
    ValueError: espeak-ng is missing or fails.
  """
  digest = hashlib.sha256(key.encode()).digest()
  rng = np.random.default_rng(list(digest))
  voice = _VOICES[rng.integers(len(_VOICES))]
  speed, pitch = rng.integers(*_SPEEDS), rng.integers(*_PITCHES)
  program = shutil.which("espeak-ng")
  if program is None:
    raise ValueError("espeak-ng is missing; Debian's package has its name.")
  command = [program, "-v", voice, "-s", str(speed), "-p", str(pitch)]
  raw = f"{path}.raw"
  done = subprocess.run(
    [*command, "-w", raw, text], check=False, capture_output=True, text=True
  )
  if done.returncode:
    raise ValueError(f"espeak-ng failed for {text!r}: {done.stderr.strip()}")
  audio, rate = wav_file.read_wav(raw)
  os.remove(raw)
  audio = wav_file.resample(audio, rate=rate, new_rate=SAMPLE_RATE)
  pathlib.Path(path).write_bytes(wav_file.to_wav(audio, SAMPLE_RATE))


def write(
  folder: pathlib.Path,
  prompts: Sequence[Prompt],
  *,
  num_phrases: int,
  repeats: int,
  seed: int,
) -> dict[str, int]:
  """Writes the clips and tables; returns the number of clips of each table."""
  by_split: dict[bool, list[Prompt]] = {False: [], True: []}
  for prompt in prompts:
    by_split[is_held_out(prompt.text)].append(prompt)
  known = sorted({s for p in by_split[False] for s in p.sentences})
  texts = [f" {p.text} " for p in by_split[False]]
  test = sorted({s for p in by_split[True] for s in p.sentences})
  test = [s for s in test if not any(f" {s} " in text for text in texts)]
  excluded = [*test, *(p.text for p in by_split[True])]
  docstrings = read_docstrings()
  phrases = make_phrases(
    known, docstrings, excluded=excluded, count=num_phrases, seed=seed
  )
  lines = [
    line
    for line in [*(p.text for p in by_split[False]), *map(" ".join, docstrings)]
    if not any(f" {other} " in f" {line} " for other in excluded)
  ]
  spoken = [s for s in known if len(s.split()) <= _MAX_WORDS]
  spoken_test = [s for s in test if len(s.split()) <= _MAX_WORDS]
  tables = {
    "train": _synthesize_all(
      folder, "train", [*(spoken * repeats), *phrases], seed
    )
    + [(p.path, p.text) for p in by_split[False]] * repeats,
    "synthesized_test": _synthesize_all(
      folder, "test", spoken_test * repeats, seed
    ),
    "recorded_test": [(p.path, p.text) for p in by_split[True]],
  }
  for name, clips in tables.items():
    table = "".join(f"{path}\t{text}\n" for path, text in clips)
    (folder / f"{name}.tsv").write_text(table, encoding="utf-8")
  language = "".join(f"{line}\n" for line in lines)
  (folder / "texts.txt").write_text(language, encoding="utf-8")
  return {name: len(clips) for name, clips in tables.items()}


def _synthesize_all(
  folder: pathlib.Path, split: str, texts: Sequence[str], seed: int
) -> list[tuple[str, str]]:
  """Writes a clip for each text; returns the lines of a table."""
  (folder / split).mkdir(parents=True, exist_ok=True)
  paths = [f"{split}/{i:05}.wav" for i in range(len(texts))]
  keys = [f"{seed}/{path}" for path in paths]
  with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
    whole = [str(folder / path) for path in paths]
    for _ in pool.map(synthesize, texts, whole, keys):
      pass
  return list(zip(paths, texts, strict=True))


def main(argv: Sequence[str] | None = None) -> int:
  """Makes the folder; returns the exit code."""
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--folder", type=pathlib.Path, required=True)
  parser.add_argument("--texts", default=_TEXTS, help="Table of transcripts.")
  parser.add_argument("--sounds", default=_SOUNDS, help="Folder of WAV files.")
  parser.add_argument("--phrases", type=int, default=5000)
  parser.add_argument(
    "--repeats", type=int, default=3, help="Clips of each sentence."
  )
  parser.add_argument("--seed", type=int, default=0)
  args = parser.parse_args(argv)
  try:
    counts = write(
      args.folder,
      read_prompts(args.texts, args.sounds),
      num_phrases=args.phrases,
      repeats=args.repeats,
      seed=args.seed,
    )
  except ValueError as error:
    print(error, file=sys.stderr)
    return 1
  for name, count in counts.items():
    print(f"{name}.tsv: {count} clips")
  return 0


if __name__ == "__main__":
  sys.exit(main())

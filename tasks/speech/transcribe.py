"""Texts of a recognizer, found with a language model of words.

`--mode=infer` writes the log probabilities of each clip. This command counts
the words of texts, searches for the most likely text of each clip (see
`layers/speech/word_search.py`), and compares it with the clip's own:

  bazel run //runner:main -- --mode=infer --job_log_dir=RUN
  tools/python -m paxon.tasks.speech.transcribe
  --predictions=RUN/infer/3000-synthesized_test.jsonl
  --texts=/data/telephone/texts.txt --texts=/data/telephone/train.tsv

The texts must not be those of the test. The result, `PREDICTIONS.tsv`, has a
line for each clip: its text, that of greedy decoding, and that of the search.
"""

import argparse
from collections.abc import Iterator, Sequence
import dataclasses
import json
import pathlib
import sys
from typing import Any

import numpy as np

from paxon.inputs.speech import alphabet as alphabet_lib
from paxon.layers.speech import ctc, word_search

# Labels of a frame with less than 0.03 % are not tried.
_MIN_LOG_PROB = -8.0
_KEYS = ("labels", "num_frames", "log_probs")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Transcript:
  """Texts of a clip.

  Attributes:
    reference: The spoken text.
    greedy: The text of the most likely alignment.
    found: The text that the search found.
  """

  reference: str
  greedy: str
  found: str


def read_lines(path: str) -> list[str]:
  """Returns the lines of a file.

  Raises:
    ValueError: The file cannot be read.
  """
  try:
    return pathlib.Path(path).read_text(encoding="utf-8").splitlines()
  except (OSError, UnicodeDecodeError) as error:
    raise ValueError(f"Cannot read {path}: {error}.") from None


def transcribe(
  lines: Sequence[str],
  *,
  alphabet: alphabet_lib.Alphabet,
  model: word_search.WordModel,
  weight: float,
  bonus: float,
  beam_size: int,
) -> Iterator[Transcript]:
  """Yields the transcripts of predictions.

  Args:
    lines: JSON, written with `recognizer.write_log_probs`.
    alphabet: Alphabet of the recognizer.
    model: The language model.
    weight: Factor of its log probability.
    bonus: Added for each word.
    beam_size: Of the search.

  Raises:
    ValueError: A line is something else, or its labels are not in the alphabet.
  """
  scorer = word_search.WordScorer(
    model=model, symbols=alphabet.symbols, weight=weight, bonus=bonus
  )
  for number, line in enumerate(lines, start=1):
    try:
      example = _parse(line, alphabet)
    except ValueError as error:
      raise ValueError(f"Line {number} of the predictions: {error}") from None
    log_probs = np.asarray(example["log_probs"]) / 1000
    log_probs = log_probs[: example["num_frames"]]
    best = np.argmax(log_probs, axis=1)
    changes = np.diff(best, prepend=0) != 0
    found = ctc.search(
      log_probs,
      beam_size=beam_size,
      scorer=scorer,
      min_log_prob=_MIN_LOG_PROB,
    )
    yield Transcript(
      reference=alphabet.decode(example["labels"]),
      greedy=alphabet.decode(best[changes]),
      found=alphabet.decode(found[0][0]) if found else "",
    )


def _parse(line: str, alphabet: alphabet_lib.Alphabet) -> dict[str, Any]:
  example = json.loads(line)
  if not isinstance(example, dict) or not set(_KEYS) <= set(example):
    raise ValueError(
      f"expected {', '.join(_KEYS)}, written by --mode=infer of a recognizer."
    )
  size = np.shape(example["log_probs"])[-1]
  if size != alphabet.vocab_size:
    raise ValueError(
      f"log_probs have {size} labels, but --symbols and the blank are"
      f" {alphabet.vocab_size}."
    )
  labels = example["labels"]
  if not all(label in range(alphabet.vocab_size) for label in labels):
    raise ValueError(f"labels must be below {alphabet.vocab_size}: {labels}.")
  return example


def _rates(transcripts: Sequence[Transcript], field: str) -> str:
  words, characters = ctc.Errors(), ctc.Errors()
  for each in transcripts:
    text = getattr(each, field)
    words += ctc.count_errors(each.reference.split(), text.split())
    characters += ctc.count_errors(each.reference, text)
  return (
    f"word error rate {words.rate:.1%}, character error rate"
    f" {characters.rate:.1%}"
  )


def main(argv: Sequence[str] | None = None) -> int:
  """Writes the transcripts and prints error rates; returns the exit code."""
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--predictions", required=True, help="JSON lines.")
  parser.add_argument(
    "--texts",
    required=True,
    action="append",
    help="Lines of text, or a table with texts in its last column; repeatable.",
  )
  parser.add_argument("--symbols", default=alphabet_lib.ENGLISH)
  parser.add_argument("--order", type=int, default=3, help="Words of n-grams.")
  parser.add_argument("--weight", type=float, default=0.5)
  parser.add_argument("--bonus", type=float, default=1.0)
  parser.add_argument("--beam_size", type=int, default=32)
  args = parser.parse_args(argv)
  try:
    alphabet = alphabet_lib.Alphabet(symbols=args.symbols)
    model = word_search.WordModel(
      # Of a table, its last column.
      [
        line.rpartition("\t")[2]
        for path in args.texts
        for line in read_lines(path)
      ],
      symbols=args.symbols,
      order=args.order,
    )
    transcripts = list(
      transcribe(
        read_lines(args.predictions),
        alphabet=alphabet,
        model=model,
        weight=args.weight,
        bonus=args.bonus,
        beam_size=args.beam_size,
      )
    )
  except ValueError as error:
    print(error, file=sys.stderr)
    return 2
  path = pathlib.Path(args.predictions).with_suffix(".tsv")
  path.write_text(
    "".join("\t".join(dataclasses.astuple(t)) + "\n" for t in transcripts),
    encoding="utf-8",
  )
  print(f"{len(transcripts)} clips: {path}")
  print(f"greedy: {_rates(transcripts, 'greedy')}")
  print(f"with words: {_rates(transcripts, 'found')}")
  return 0


if __name__ == "__main__":
  sys.exit(main())

"""Tokenizes a corpus into a token file.

  tools/tokenize --files='texts/*.txt' --out=corpus [--documents=file|line|json]
    [--text_key=text] [--tokenizer=PATH] [--workers=N] [--no_end] [--begin]
  tools/tokenize train --files='texts/*.txt' --out=FOLDER [--documents=...]
    [--text_key=text] [--kind=bpe] [--vocab_size=32768]
  tools/tokenize compare --tokenizer=PATH [--with=PATH] [--lines=10000]
    [--seed=0]
  tools/tokenize check --out=corpus

The first command writes corpus.bin, corpus.idx (Megatron's format) and
corpus.json, for `inputs.sources.token_file.TokenFile(path="corpus")`.

  --files       comma-separated paths, folders, patterns, or URLs of them in
                stores (s3://...); .gz and .zst files are decompressed
  --out         path or URL of the output, without an ending
  --documents   unit of a document; default: json for .json, .jsonl and their
                .gz and .zst, otherwise file
  --text_key    key of the text in a JSON object; default: text
  --tokenizer   bytes (default); a tokenizer.json, a SentencePiece model, a rank
                file of tiktoken, or a Hugging Face folder with one of them; or
                a constructor call such as 'mine.tokens.Words(path="words.txt")'
  --workers     number of processes; default: the cores of the machine. The
                output does not depend on it
  --no_end      do not append the tokenizer's end token to each document
  --begin       prepend the tokenizer's begin token to each document

`train` trains a tokenizer and writes a folder for --tokenizer. The same text
gives the same vocabulary.

  --kind        bpe (byte-level BPE, as GPT-2's; default), sentencepiece_bpe or
                sentencepiece_unigram
  --vocab_size  number of ids, with special tokens and bytes; default: 32768

`compare` compares ids and text of generated lines (twenty languages, emoji,
code, control characters, invalid UTF-8) with the library of the vocabulary, and
exits with status 1 if they differ.

  --with        another file of the same vocabulary, for the library to read
  --lines       number of lines; default: 10000
  --seed        selects the lines; default: 0

`check` reads a token file as a whole and compares it with the checksums in
corpus.json. A damaged file is an error with status 2.

Rerun a stopped command to resume it. Usage errors print one line to stderr and
exit with status 2.
"""

import ast
from collections.abc import Sequence
import dataclasses
import importlib
import os
import re
import sys
import time
from typing import Final

from paxon.inputs import tokenizer_protocol
from paxon.inputs.sources import (
  corpus_shards,
  corpus_tokenizer,
  data_files,
  record_files,
  token_file,
)
from paxon.inputs.tokenizers import load, training
from paxon.tools import console_scripts, tokenizer_comparison

_WRONG_USE: Final = 2
_INTERRUPTED: Final = 130
_TRAIN: Final = "train"
_COMPARE: Final = "compare"
_CHECK: Final = "check"
_SHARED: Final = ("files", "out", "documents", "text_key")
_VALUES: Final = (*_SHARED, "tokenizer", "workers")
_TRAIN_VALUES: Final = (*_SHARED, "kind", "vocab_size")
_COMPARE_VALUES: Final = ("tokenizer", "with", "lines", "seed")
_SWITCHES: Final = ("no_end", "begin")
_VOCAB_SIZE: Final = "32768"
_LINES: Final = "10000"
_FORMS: Final = {
  "file": corpus_shards.Form.FILE,
  "line": corpus_shards.Form.LINE,
  "json": corpus_shards.Form.JSON_LINE,
}
_JSON: Final = tuple(
  name + ending
  for name in (".json", ".jsonl")
  for ending in ("", *data_files.GZIP, *data_files.ZSTD)
)
_BAR: Final = 30
# Between files, not between the alternatives of a pattern.
_COMMA: Final = re.compile(r",(?![^{}]*\})")


def main(argv: Sequence[str]) -> int:
  """Runs the command and returns its exit status."""
  if not argv or argv[0] in ("-h", "--help", "help"):
    print(console_scripts.name_programs(__doc__ or ""))
    return 0 if argv else _WRONG_USE
  try:
    if argv[0] == _TRAIN:
      return _train(_parse(argv[1:], values=_TRAIN_VALUES))
    if argv[0] == _COMPARE:
      return _compare(
        _parse(argv[1:], values=_COMPARE_VALUES, required=("tokenizer",))
      )
    if argv[0] == _CHECK:
      path = _parse(argv[1:], values=("out",), required=("out",))["out"]
      tokens = token_file.TokenFile(path=path)
      print(f"{path}.bin: {tokens.check_tokens():,} tokens, as written")
      return 0
    given = _parse(argv, values=_VALUES, switches=_SWITCHES)
    corpus = _corpus(given)
    with _Bar() as bar:
      last = corpus_tokenizer.run(
        corpus,
        given["out"],
        num_workers=_workers(given),
        report=bar.show,
      )
  except (ValueError, OSError) as error:
    print(str(error), file=sys.stderr)
    return _WRONG_USE
  except KeyboardInterrupt:
    print("stopped; rerun the command to resume", file=sys.stderr)
    return _INTERRUPTED
  print(
    f"{given['out']}.bin: {last.documents:,} documents, {last.tokens:,} tokens"
  )
  return 0


def _train(given: dict[str, str]) -> int:
  """Trains a tokenizer; returns the exit status."""
  kinds = [kind.value for kind in training.Kind]
  kind = given.get("kind", kinds[0])
  size = given.get("vocab_size", _VOCAB_SIZE)
  if kind not in kinds:
    raise ValueError(f"--kind must be one of {', '.join(kinds)}, got {kind!r}.")
  if not size.isdecimal():
    raise ValueError(f"--vocab_size must be a positive integer, got {size!r}.")
  corpus = _corpus(given)
  shards = corpus_shards.cut_shards(
    corpus.paths, form=corpus.form, shard_bytes=corpus.shard_bytes
  )
  texts = (
    text
    for shard in shards
    for _, text in corpus_shards.documents(
      shard, form=corpus.form, text_key=corpus.text_key
    )
  )
  path = training.train(
    texts, given["out"], kind=training.Kind(kind), vocab_size=int(size)
  )
  print(f"{path}: {int(size):,} ids")
  return 0


def _compare(given: dict[str, str]) -> int:
  """Prints a comparison; returns the exit status."""
  count, seed = given.get("lines", _LINES), given.get("seed", "0")
  for name, value in (("lines", count), ("seed", seed)):
    if not value.isdecimal():
      raise ValueError(f"--{name} must be a whole number, got {value!r}.")
  checks = tokenizer_comparison.compare(
    given["tokenizer"],
    tokenizer_comparison.make_lines(int(count), seed=int(seed)),
    other=given.get("with"),
  )
  print("\n".join(tokenizer_comparison.format_checks(checks)))
  return 1 if any(check.different for check in checks) else 0


def _parse(
  argv: Sequence[str],
  *,
  values: Sequence[str],
  switches: Sequence[str] = (),
  required: Sequence[str] = ("files", "out"),
) -> dict[str, str]:
  """Returns values by flag.

  Raises:
    ValueError: A flag is unknown or missing.
  """
  given = {}
  named = [f"--{switch}" for switch in switches]
  for argument in argv:
    name, equals, value = argument.removeprefix("--").partition("=")
    is_value = name in values and equals and value
    is_switch = name in switches and not equals
    if not argument.startswith("--") or not (is_value or is_switch):
      raise ValueError(
        f"Unknown argument {argument!r}; choose from"
        f" {', '.join((*(f'--{v}=...' for v in values), *named))} (see --help)."
      )
    given[name] = value
  for name in required:
    if name not in given:
      raise ValueError(f"--{name} is missing (see --help).")
  return given


def _corpus(given: dict[str, str]) -> corpus_tokenizer.Corpus:
  paths = record_files.find(_COMMA.split(given["files"]), field="--files")
  are_json = all(path.endswith(_JSON) for path in paths)
  form = given.get("documents", "json" if are_json else "file")
  if form not in _FORMS:
    raise ValueError(
      f"--documents must be one of {', '.join(_FORMS)}, got {form!r}."
    )
  return corpus_tokenizer.Corpus(
    paths=paths,
    form=_FORMS[form],
    tokenizer=make_tokenizer(given.get("tokenizer", load.BYTES)),
    text_key=given.get("text_key", "text"),
    append_end="no_end" not in given,
    prepend_begin="begin" in given,
  )


def _workers(given: dict[str, str]) -> int:
  text = given.get("workers")
  if text is None:
    return len(os.sched_getaffinity(0))
  if not text.isdecimal():
    raise ValueError(f"--workers must be a non-negative integer, got {text!r}.")
  return int(text)


def make_tokenizer(text: str) -> tokenizer_protocol.Tokenizer:
  """Returns the tokenizer of a path or a call such as `a.b.C(path="x")`.

  Args:
    text: A path for `load.load`; or a dotted name, with keyword arguments in
      parentheses.

  Raises:
    ValueError: It is neither, or its result is not a tokenizer.
  """
  is_path = os.path.exists(os.path.expanduser(text)) or text == load.BYTES
  if is_path or ("(" not in text and os.sep in text):
    return load.load(text)
  try:
    call = ast.parse(text if "(" in text else text + "()", mode="eval").body
    if not isinstance(call, ast.Call) or call.args:
      raise ValueError("it must be a call with keyword arguments")
    values = {
      str(keyword.arg): ast.literal_eval(keyword.value)
      for keyword in call.keywords
    }
    module, _, name = ast.unparse(call.func).rpartition(".")
    tokenizer = getattr(importlib.import_module(module), name)(**values)
  except (ValueError, SyntaxError, ImportError, AttributeError, TypeError) as e:
    raise ValueError(f"--tokenizer={text!r} cannot be made: {e}.") from e
  if not isinstance(tokenizer, tokenizer_protocol.Tokenizer):
    raise ValueError(
      f"--tokenizer={text!r} is not a tokenizer; see"
      " inputs.tokenizer_protocol.Tokenizer."
    )
  return tokenizer


@dataclasses.dataclass
class _Bar:
  """A progress line, or a line every ten seconds if not on a terminal."""

  begin: float = dataclasses.field(default_factory=time.monotonic)
  last: float = float("-inf")

  def __enter__(self) -> "_Bar":
    return self

  def __exit__(self, *unused: object) -> None:
    if sys.stderr.isatty():
      print(file=sys.stderr)

  def show(self, progress: corpus_tokenizer.Progress) -> None:
    """Prints the progress."""
    now = time.monotonic()
    is_terminal = sys.stderr.isatty()
    is_end = progress.bytes_done == progress.bytes_total
    if not is_end and now - self.last < (0.1 if is_terminal else 10):
      return
    self.last = now
    line = bar_line(progress, seconds=now - self.begin)
    if is_terminal:
      print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)
    else:
      print(line, file=sys.stderr, flush=True)


def bar_line(progress: corpus_tokenizer.Progress, *, seconds: float) -> str:
  """Returns the text of a progress bar."""
  total, done = progress.bytes_total, progress.bytes_done
  share = done / total if total else 1.0
  speed = (done - progress.bytes_found) / max(seconds, 1e-9)
  is_running = speed > 0 and done < total
  left = f", {(total - done) / speed:,.0f} s left" if is_running else ""
  filled = round(_BAR * share)
  return (
    f"[{'#' * filled}{'.' * (_BAR - filled)}] {share:4.0%}"
    f" {done / 1e6:,.1f} of {total / 1e6:,.1f} MB,"
    f" {progress.documents:,} documents, {progress.tokens:,} tokens,"
    f" {speed / 1e6:,.1f} MB/s{left}"
  )


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))

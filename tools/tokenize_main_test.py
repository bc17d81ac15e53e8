"""Tests for the command line that tokenizes; a kill is a real one."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from paxon.inputs.sources import corpus_tokenizer, token_file
from paxon.inputs.tokenizers import load
from paxon.tools import tokenize_main

# A tokenizer that takes its time, so that there is time for a kill.
_SLOW = """
import dataclasses, time
from paxon.inputs import byte_tokenizer


@dataclasses.dataclass(frozen=True)
class Slow(byte_tokenizer.ByteTokenizer):
  seconds: float = 0.0

  def encode(self, text):
    time.sleep(self.seconds)
    return super().encode(text)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  for i in range(6):
    pathlib.Path(f"{i}.txt").write_text(f"text {i}\n" * 1000)
  pathlib.Path("rows.jsonl").write_text('{"text": "a"}\n{"text": "bc"}\n')
  return tmp_path


def test_a_trained_tokenizer_reads_the_corpus_again(folder, capsys):
  arguments = ["--files=*.txt", "--vocab_size=264"]
  assert tokenize_main.main(["train", *arguments, "--out=bpe"]) == 0
  assert capsys.readouterr().out == "bpe/tokenizer.json: 264 ids\n"
  shared = ["--files=*.txt", "--workers=0", "--tokenizer=bpe"]
  assert tokenize_main.main([*shared, "--out=c"]) == 0
  tokenizer = load.load("bpe")
  tokens = token_file.TokenFile(path="c", tokenizer=tokenizer)
  tokens.check()
  assert tokenizer.decode(tokens.tokens(2)) == "text 2\n" * 1000
  other = tokenize_main.main(["train", *arguments[:1], "--vocab_size=263"])
  assert other == 2  # --out is missing.
  assert "--out is missing" in capsys.readouterr().err
  # The same number of ids, but other merges.
  pathlib.Path("d.txt").write_text("and other words " * 20)
  arguments = ["train", "--files=d.txt", "--vocab_size=264", "--out=other"]
  assert tokenize_main.main(arguments) == 0
  with pytest.raises(ValueError, match="made by a tokenizer with probe"):
    token_file.TokenFile(path="c", tokenizer=load.load("other")).check()


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    (["--kind=wordpiece"], "--kind must be one of bpe, sentencepiece_bpe"),
    (["--vocab_size=-1"], "--vocab_size must be a positive integer"),
    (["--vocab_size=9"], "vocab_size must be at least 259"),
    (["--no_end"], "Unknown argument '--no_end'"),
  ],
)
def test_wrong_training_is_one_line(folder, capsys, arguments, message):
  given = ["train", "--files=*.txt", "--out=bpe", *arguments]
  assert tokenize_main.main(given) == 2
  error = capsys.readouterr().err
  assert message in error
  assert error.count("\n") == 1


def test_files_and_rows(folder, capsys):
  assert tokenize_main.main(["--files=*.txt", "--out=c", "--workers=0"]) == 0
  captured = capsys.readouterr()
  assert captured.out == "c.bin: 6 documents, 42,006 tokens\n"
  assert "[##############################] 100% 0.0 of 0.0 MB" in captured.err
  assert len(token_file.TokenFile(path="c")) == 6
  assert tokenize_main.main(["check", "--out=c"]) == 0
  assert capsys.readouterr().out == "c.bin: 42,006 tokens, as written\n"
  with open("c.bin", "r+b") as file:
    file.write(b"\7")
  assert tokenize_main.main(["check", "--out=c"]) == 2
  assert "c.bin is damaged" in capsys.readouterr().err
  # A file that two patterns name is read once.
  arguments = ["--files=5.txt,*.txt", "--out=e", "--workers=0"]
  assert tokenize_main.main(arguments) == 0
  overlapping = token_file.TokenFile(path="e")
  assert len(overlapping) == 6
  assert overlapping.tokens(0)[5] == ord("5") + 3
  arguments = ["--files=rows.jsonl", "--out=d", "--workers=0", "--no_end"]
  assert tokenize_main.main([*arguments, "--begin"]) == 0
  rows = token_file.TokenFile(path="d")
  assert [rows.tokens(i).tolist() for i in range(2)] == [
    [1, 100],
    [1, 101, 102],
  ]


def test_a_killed_command_goes_on(folder):
  (folder / "slow.py").write_text(_SLOW)

  def command(seconds):
    return [
      sys.executable,
      *("-m", "paxon.tools.tokenize_main"),
      *("--files=*.txt", "--documents=line", "--out=c", "--workers=1"),
      f"--tokenizer=slow.Slow(seconds={seconds})",
    ]

  environment = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join([str(folder), *sys.path]),
  }
  # Each shard is a file here, with a thousand lines.
  with subprocess.Popen(
    command(0.0005),
    env=environment,
    stderr=subprocess.DEVNULL,
    start_new_session=True,
  ) as process:
    for _ in range(600):
      if list(folder.glob("c.parts/*.npy")):
        break
      time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
  whole = len(list(folder.glob("c.parts/*.npy")))
  assert 1 <= whole < 6
  done = subprocess.run(
    command(0.0), env=environment, check=True, capture_output=True, text=True
  )
  assert done.stdout == "c.bin: 6,000 documents, 42,000 tokens\n"
  arguments = ["--files=*.txt", "--documents=line", "--out=d", "--workers=0"]
  assert tokenize_main.main(arguments) == 0
  for ending in (".bin", ".idx"):
    assert (folder / f"c{ending}").read_bytes() == (
      folder / f"d{ending}"
    ).read_bytes()


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    ([], None),
    (["--out=c"], "--files is missing"),
    (["--files=*.txt"], "--out is missing"),
    (["--files=*.txt", "--ouf=c"], "Unknown argument '--ouf=c'"),
    (
      ["--files=*.rst", "--out=c"],
      "--files: no file has the name '*.rst'; give",
    ),
    (
      ["--files=*.txt", "--out=c", "--documents=page"],
      "--documents must be one of file, line, json, got 'page'.",
    ),
    (
      ["--files=*.txt", "--out=c", "--workers=x"],
      "--workers must be a non-negative integer, got 'x'.",
    ),
    (
      ["--files=*.txt", "--out=c", "--tokenizer=no.such.Thing"],
      "--tokenizer='no.such.Thing' cannot be made: No module named 'no'.",
    ),
    (
      ["--files=*.txt", "--out=c", "--tokenizer=a.b(1)"],
      "it must be a call with keyword arguments",
    ),
    (
      ["--files=*.txt", "--out=c", "--tokenizer=collections.OrderedDict"],
      "is not a tokenizer; see inputs.tokenizer_protocol.Tokenizer",
    ),
    (
      ["--files=*.txt", "--out=c", "--documents=json", "--workers=0"],
      "0.txt, byte 0: a line is no JSON",
    ),
  ],
)
def test_wrong_use_is_one_line(folder, capsys, arguments, message):
  assert tokenize_main.main(arguments) == 2
  captured = capsys.readouterr()
  if message is None:
    assert "tools/tokenize --files=" in captured.out
    return
  last = captured.err.splitlines()[-1]
  assert message in last


def test_the_bar_says_how_much_is_left():
  progress = corpus_tokenizer.Progress(
    bytes_done=6_000_000,
    bytes_total=10_000_000,
    bytes_found=2_000_000,
    documents=1234,
    tokens=5_000_000,
  )
  assert tokenize_main.bar_line(progress, seconds=2.0) == (
    "[##################............]  60% 6.0 of 10.0 MB, 1,234 documents,"
    " 5,000,000 tokens, 2.0 MB/s, 2 s left"
  )

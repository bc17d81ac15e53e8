"""Tests for the processes of grammars."""

import contextlib
import json
import os
import random
import signal
import subprocess
import time

import llguidance
import numpy as np
import pytest

from paxon.inputs import byte_tokenizer
from paxon.runner.endpoint import grammars

VOCAB, END = 264, 2


@pytest.fixture(name="compiler", scope="module")
def _compiler():
  found = grammars.Grammars(
    byte_tokenizer.ByteTokenizer(), vocab_size=VOCAB, end_ids=[END]
  )
  yield found
  found.close()


class _Bytes:
  """The tokenizer for llguidance, in this process."""

  eos_token_id, bos_token_id = END, None

  def __init__(self):
    self.special_token_ids = [0, 1, 2, *range(259, VOCAB)]
    self.tokens = [
      bytes([i - 3]) if 3 <= i < 259 else b"\xff<%d>" % i for i in range(VOCAB)
    ]

  def __call__(self, text):
    return [3 + byte for byte in text]


def _to_ids(mask):
  bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
  return np.flatnonzero(bits[:VOCAB]).tolist()


@pytest.mark.parametrize(
  ("kind", "source"),
  [
    ("json", {"type": "object", "properties": {"a": {"type": "integer"}}}),
    ("json", {"enum": ["one", {"two": [3, "é"]}]}),
    ("regex", "(ab|cd+){2,9}"),
    ("grammar", 'start: "<" item* ">"\nitem: /[0-9]+/ | "(" item ")"'),
  ],
)
def test_masks_are_those_of_the_library(compiler, kind, source):
  matcher = llguidance.LLMatcher
  if kind == "json":
    options = {"whitespace_flexible": False}
    text = matcher.grammar_from_json_schema(json.dumps(source), options)
  elif kind == "regex":
    text = matcher.grammar_from_regex(source)
  else:
    text = matcher.grammar_from_lark(source)
  tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Bytes()))
  grammar = compiler.compile(kind, source)
  choices = [grammar() for _ in range(3)]
  expected = [matcher(tokenizer, text) for _ in choices]
  draw = random.Random(0)
  for _ in range(20):
    for choice, other in zip(choices, expected, strict=True):
      ids = _to_ids(choice.mask())
      bits = np.frombuffer(other.compute_bitmask(), np.uint32)
      assert ids == _to_ids(bits)
      assert ids == _to_ids(choice.mask())
      if ids != [END]:
        number = draw.choice([i for i in ids if i != END])
        choice.advance(number)
        other.consume_token(number)
  grammar.close()


def _find_processes(parent):
  found = subprocess.run(
    ["ps", "-o", "pid=", "--ppid", str(parent)],
    check=False,
    capture_output=True,
  )
  return [*map(int, found.stdout.split())]


def test_what_ends_is_started_again_and_nothing_is_left(compiler):
  def count_files():
    return len(os.listdir("/proc/self/fd"))

  compiler.compile("regex", "ab").close()
  before = count_files()
  server, _ = compiler._server
  # A fork that is stopped, and one that is killed.
  for number in (signal.SIGSTOP, signal.SIGKILL):
    grammar = compiler.compile("regex", "abc")
    choice, other = grammar(), grammar()
    (fork,) = _find_processes(server.pid)
    os.kill(fork, number)
    begin = time.monotonic()
    for each in (choice, other):
      # That of the first id is known.
      assert _to_ids(each.mask()) == [3 + ord("a")]
      each.advance(3 + ord("a"))
      with pytest.raises(ValueError, match=r"after some tokens: it took too"):
        each.mask()
    assert time.monotonic() - begin < 10
    with contextlib.suppress(ProcessLookupError):
      os.kill(fork, signal.SIGKILL)
    grammar.close()
  # The server.
  grammar = compiler.compile("regex", "abc")
  server.kill()
  server.wait()
  choice = grammar()
  choice.advance(3 + ord("a"))
  assert _to_ids(choice.mask()) == [3 + ord("b")]
  another = compiler.compile("regex", "b")
  assert _to_ids(another().mask()) == [3 + ord("b")]
  assert compiler._server[0] is not server
  grammar.close()
  another.close()
  assert count_files() == before
  while _find_processes(compiler._server[0].pid):
    time.sleep(0.02)


def test_tokenizers_without_bytes():
  class Words:
    vocab_size = 9

  compiler = grammars.Grammars(Words(), vocab_size=9, end_ids=[0])
  with pytest.raises(ValueError, match=r"A Words has no decode_bytes"):
    compiler.compile("regex", "a")

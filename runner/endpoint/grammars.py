"""Constraints by JSON schemas, regular expressions and grammars.

`llguidance` finds the ids that may follow. A grammar of a request may cost it
minutes or gigabytes, and it recurses on the stack, so a deep one ends its
process. It therefore runs in other processes:

  server     holds the tokenizer; started when a request first has a grammar
  fork of it one for each such request: compiles the grammar, then returns the
             mask of a choice after each of its ids

The kernel ends a fork at a limit of time or memory, which fails its own request
only. The server never sees a grammar.
"""

from collections.abc import Iterator, Sequence
import contextlib
import json
from multiprocessing import connection
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from typing import Any, Final

import numpy as np

from paxon.inputs import optional_library

# Characters of a grammar; a schema counts as JSON.
MAX_LENGTH: Final = 2**17
# CPU time of a fork: to compile, and for a mask. Masks that take longer than
# the refill use up the rest, so that slow grammars cannot slow all requests
# down, which wait for the masks of a step.
_COMPILE_SECONDS: Final = 2.0
_MASK_SECONDS: Final = 0.25
_MASK_REFILL: Final = 0.03
# Memory of a fork beyond that of the server.
_BYTES: Final = 2**29
# Waiting times where other programs use the CPUs.
_START_WAIT: Final = 120.0
_COMPILE_WAIT: Final = 10.0
_MASK_WAIT: Final = 0.8

# Models would fill a context with white space, which JSON allows anywhere.
_JSON_OPTIONS: Final = {"whitespace_flexible": False}
# Bytes that no text has: ids that stand for none.
_NO_TEXT: Final = b"\xff"
_NO_TOKEN: Final = "no token may come next."
_MAX_MESSAGE: Final = 500
# A choice, and an id or the length of what is wrong with it.
_HEAD: Final = struct.Struct("<ii")


class Grammars:
  """Compiles grammars for one tokenizer; may be used from any thread."""

  def __init__(
    self, tokenizer: Any, *, vocab_size: int, end_ids: Sequence[int]
  ) -> None:
    """Records the arguments; the server is started once it is needed.

    Args:
      tokenizer: With the method `decode_bytes`; can be pickled.
      vocab_size: Number of ids of the model, at least those of the tokenizer.
      end_ids: Ids that end a completion.
    """
    self._tokenizer = tokenizer
    self._setup = tokenizer, vocab_size, list(end_ids)
    self._lock = threading.Lock()
    self._server: tuple[subprocess.Popen[bytes], socket.socket] | None = None

  def compile(self, kind: str, source: Any) -> "Grammar":
    """Returns a factory of constraints for a grammar.

    Args:
      kind: `json` for a JSON schema, `regex`, or `grammar` for one in
        llguidance's form of Lark.
      source: The schema, or a text.

    Raises:
      ValueError: The grammar is not valid, not supported or too large, or the
        library is not installed.
    """
    with optional_library.explain("llguidance", extra="serve"):
      import llguidance  # noqa: F401
    if not hasattr(self._tokenizer, "decode_bytes"):
      raise ValueError(
        f"A {type(self._tokenizer).__name__} has no decode_bytes, which"
        " grammars need."
      )
    text = json.dumps(source) if kind == "json" else source
    if len(text) > MAX_LENGTH:
      raise ValueError(
        f"A grammar must have at most {MAX_LENGTH} characters, got {len(text)}."
      )
    grammar = Grammar(self._fork())
    try:
      grammar.start(kind, text)
    except BaseException:
      grammar.close()
      raise
    return grammar

  def close(self) -> None:
    """Ends the server; forks end with their grammars."""
    with self._lock:
      if self._server is not None:
        server, control = self._server
        control.close()
        server.wait()
        self._server = None

  def _fork(self) -> socket.socket:
    """Returns a socket whose other end a new fork has."""
    ours, theirs = socket.socketpair()
    with theirs, self._lock:
      if self._server is None or self._server[0].poll() is not None:
        self._server = self._start()
      socket.send_fds(self._server[1], [b"f"], [theirs.fileno()])
    return ours

  def _start(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Returns a new server, which is ready, and the socket to it."""
    if self._server is not None:
      self._server[1].close()
    control, theirs = socket.socketpair()
    variables = {
      # The same modules as here, wherever they come from.
      "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
      "PYTHONSAFEPATH": "1",
      # A process that forks should have one thread.
      "OPENBLAS_NUM_THREADS": "1",
      "TOKENIZERS_PARALLELISM": "false",
    }
    with theirs:
      server = subprocess.Popen(
        [sys.executable, "-m", "paxon.runner.endpoint.grammars"],
        stdin=theirs.fileno(),
        env=os.environ | variables,
        # Ctrl-C ends the endpoint after the requests that it has.
        start_new_session=True,
      )
    try:
      with contextlib.closing(_connect(control)) as channel:
        channel.send(self._setup)
        if not channel.poll(_START_WAIT):
          server.kill()
        channel.recv_bytes()
    except (OSError, EOFError) as error:
      control.close()
      raise RuntimeError("The process for grammars has not started.") from error
    return server, control


class Grammar:
  """A compiled grammar and its fork; calling it makes a constraint."""

  def __init__(self, ours: socket.socket) -> None:
    """Records the socket whose other end the fork has."""
    self._socket, self._channel = ours, _connect(ours)
    self._lock, self._is_closed = threading.Lock(), False
    self._num_choices = 0
    # When masks were asked for, and those that have come, by choice.
    self._asked: dict[int, float] = {}
    self._masks: dict[int, np.ndarray] = {}

  def __call__(self) -> "_Choice":
    """Returns the constraint of a further choice."""
    choice = self._num_choices
    self._num_choices += 1
    self._masks[choice] = self._first
    return _Choice(self, choice)

  def start(self, kind: str, text: str) -> None:
    """Compiles the grammar; the arguments are those of `Grammars.compile`.

    Raises:
      ValueError: See there.
    """
    with contextlib.suppress(OSError):  # `_receive` notices that it has ended.
      self._channel.send_bytes(json.dumps([kind, text]).encode())
    found = self._receive(time.monotonic() + _COMPILE_WAIT)
    if found is None:
      raise ValueError(
        "The grammar is too large or nested too deeply: to compile it takes"
        f" more than {_COMPILE_SECONDS:g} s, {_BYTES >> 20} MiB or the stack."
      )
    _, mask, problem = found
    if problem:
      raise ValueError(f"The grammar is not valid: {problem}")
    self._first = mask

  def advance(self, choice: int, number: int) -> None:
    """Appends an id to a choice; its next mask is computed meanwhile."""
    self._asked[choice] = time.monotonic()
    with self._use(), contextlib.suppress(OSError):  # As above.
      self._channel.send_bytes(_HEAD.pack(choice, number))

  def mask(self, choice: int) -> np.ndarray:
    """Returns the ids that may follow, uint32 [ceil(vocab_size / 32)].

    Raises:
      ValueError: The fork has failed or takes too long; close the grammar.
    """
    while choice in self._asked:
      with self._use():
        found = self._receive(self._asked[choice] + _MASK_WAIT)
      if found is None:
        found = choice, np.zeros(0, np.uint32), "it took too long."
      which, mask, problem = found
      if problem:
        self.close()
        raise ValueError(
          f"The grammar cannot be followed after some tokens: {problem}"
        )
      self._masks[which] = mask
      del self._asked[which]
    return self._masks[choice]

  def close(self) -> None:
    """Ends the fork; does not wait for a thread that uses it."""
    self._is_closed = True
    # Wakes that thread up, which then closes: the number of a closed socket
    # may be that of another one before the thread uses it.
    with contextlib.suppress(OSError):
      self._socket.shutdown(socket.SHUT_RDWR)
    if self._lock.acquire(blocking=False):
      self._socket.close()
      self._channel.close()
      self._lock.release()

  @contextlib.contextmanager
  def _use(self) -> Iterator[None]:
    with self._lock:
      yield
    if self._is_closed:
      self.close()

  def _receive(self, end: float) -> tuple[int, np.ndarray, str] | None:
    """Returns a choice, its mask and what is wrong; None without an answer."""
    try:
      # Messages that have come by now count, even if this thread was late.
      if not self._channel.poll(max(0.0, end - time.monotonic())):
        return None
      data = self._channel.recv_bytes()
    except (OSError, EOFError):
      return None
    choice, size = _HEAD.unpack_from(data)
    data = data[_HEAD.size :]
    return choice, np.frombuffer(data[size:], "<u4"), data[:size].decode()


class _Choice:
  """A `continuous_batching.Constraint`, of one choice."""

  def __init__(self, grammar: Grammar, choice: int) -> None:
    self._grammar, self._choice = grammar, choice

  def mask(self) -> np.ndarray:
    """Returns the ids that may follow."""
    return self._grammar.mask(self._choice)

  def advance(self, number: int) -> None:
    """Appends an id."""
    self._grammar.advance(self._choice, number)


def _connect(channel: socket.socket) -> connection.Connection:
  return connection.Connection(os.dup(channel.fileno()))


def _serve() -> None:
  """Forks for each socket that comes through stdin, until that is closed."""
  control = socket.socket(fileno=os.dup(0))
  with contextlib.closing(_connect(control)) as channel:
    tokenizer = _make_tokenizer(*channel.recv())
    channel.send_bytes(b"ready")
  os.close(0)
  signal.signal(signal.SIGCHLD, signal.SIG_IGN)
  while True:
    data, files, _, _ = socket.recv_fds(control, 1, 1)
    if not data:
      return
    if not os.fork():
      try:
        control.close()
        _follow(connection.Connection(files[0]), tokenizer)
      finally:
        os._exit(0)
    os.close(files[0])


def _follow(channel: connection.Connection, tokenizer: Any) -> None:
  """Compiles a grammar and answers each id of a choice, in a fork."""
  # The library reports there how it ends.
  os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
  resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
  # Other systems than Linux have no such file, and do not limit memory.
  with contextlib.suppress(OSError), open("/proc/self/statm") as file:
    size = int(file.read().split()[0]) * resource.getpagesize() + _BYTES
    resource.setrlimit(resource.RLIMIT_AS, (size, size))
  kind, text = json.loads(channel.recv_bytes())
  # Ends this process at once, whatever it is doing.
  signal.setitimer(signal.ITIMER_PROF, _COMPILE_SECONDS)
  try:
    matcher = _compile(kind, text, tokenizer)
  except ValueError as error:
    channel.send_bytes(_pack(-1, _to_line(str(error)), b""))
    return
  channel.send_bytes(_answer(-1, matcher))
  choices, left = {}, _MASK_SECONDS
  with contextlib.suppress(EOFError):
    while True:
      choice, number = _HEAD.unpack(channel.recv_bytes())
      left = min(_MASK_SECONDS, left + _MASK_REFILL)
      signal.setitimer(signal.ITIMER_PROF, left)
      if choice not in choices:
        choices[choice] = matcher.deep_copy()
      choices[choice].consume_token(number)
      found = _answer(choice, choices[choice])
      left, _ = signal.setitimer(signal.ITIMER_PROF, 0)
      channel.send_bytes(found)


def _compile(kind: str, text: str, tokenizer: Any) -> Any:
  import llguidance

  library: Any = llguidance
  matcher = library.LLMatcher
  if kind == "json":
    grammar = matcher.grammar_from_json_schema(text, defaults=_JSON_OPTIONS)
  elif kind == "regex":
    grammar = matcher.grammar_from_regex(text)
  else:
    grammar = matcher.grammar_from_lark(text)
  # Errors without the state of the parser.
  limits = library.LLParserLimits(verbose_errors=False)
  return matcher(tokenizer, grammar, log_level=0, limits=limits)


def _answer(choice: int, matcher: Any) -> bytes:
  """Returns a message with the next mask, or with an error."""
  mask, problem = matcher.compute_bitmask(), ""
  if matcher.is_error():
    problem = matcher.get_error() or "unknown error"
  elif not any(mask):
    problem = _NO_TOKEN
  if problem.startswith("NoExtension"):
    problem = _NO_TOKEN
  return _pack(choice, _to_line(problem), mask)


def _pack(choice: int, problem: str, mask: bytes) -> bytes:
  data = problem.encode(errors="replace")
  return _HEAD.pack(choice, len(data)) + data + mask


def _to_line(text: str) -> str:
  line = " ".join(text.split())
  return line if len(line) <= _MAX_MESSAGE else f"{line[:_MAX_MESSAGE]} ..."


def _make_tokenizer(
  tokenizer: Any, vocab_size: int, end_ids: Sequence[int]
) -> Any:
  import llguidance

  library: Any = llguidance
  tokens = [
    tokenizer.decode_bytes(np.asarray([i], np.int32))
    if i < tokenizer.vocab_size and i not in end_ids
    else b""
    for i in range(vocab_size)
  ]
  wrapper = _Wrapped(tokenizer, tokens, end_ids)
  return library.LLTokenizer(
    library.TokenizerWrapper(wrapper), eos_token=[*end_ids]
  )


class _Wrapped:
  """A tokenizer as llguidance reads it."""

  def __init__(
    self, tokenizer: Any, tokens: Sequence[bytes], end_ids: Sequence[int]
  ) -> None:
    self._tokenizer = tokenizer
    self.eos_token_id, self.bos_token_id = end_ids[0], None
    self.special_token_ids = [i for i, text in enumerate(tokens) if not text]
    self.tokens = [
      text or _NO_TEXT + f"<{i}>".encode() for i, text in enumerate(tokens)
    ]

  def __call__(self, text: str | bytes) -> list[int]:
    return self._tokenizer.encode(text).tolist()


if __name__ == "__main__":
  _serve()

"""Answers of a trained run to the requests of an evaluation harness.

`Responses` has the three methods of EleutherAI's `lm_eval.api.model.LM` and
does not import the harness. The rules are those of its class for Hugging
Face models, `HFLM`, so that an imported model gets the same numbers:

  context      The ids of a text begin as the model's tokenizer begins a prompt;
               an empty context is the begin id alone.
  continuation The ids of context + continuation after those of the context;
               spaces at the end of a context belong to the continuation.
  truncation   The last `max_length + 1` ids are kept. Before generation, the
               last `max_length - max_new_tokens`.
  rolling      The ids of a text, in windows without overlap after a begin id;
               the last window has a full context. For a tokenizer that begins a
               prompt with a begin id, that id is predicted, too.

A tokenizer without a rule of its model (`encode_prompt`), such as that of
bytes, begins contexts with its begin id, as training documents do; it is not
predicted.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import types
from typing import Any, NamedTuple

from etils import epath
import jax
import numpy as np

from paxon.inputs import tokenizer_protocol
from paxon.inputs.tokenizers import conversation
from paxon.layers.decoding import continuous_batching, sampling
from paxon.layers.models import document_scores
from paxon.learners import train_state
from paxon.runner import job as job_lib
from paxon.runner import run_dir as run_dirs
from paxon.runner import user_error
from paxon.runner.configuration import overrides as overrides_lib
from paxon.runner.configuration import resolving
from paxon.runner.endpoint import serve, text_stream
from paxon.runner.generation import (
  generation_limits,
  generation_program,
  samples,
)
from paxon.runner.hosts import followers
from paxon.runner.session import model_loss, restore, run_files, serving
from paxon.runner.settings import generation
from paxon.sharding import arrays, axes
from paxon.tools import command_line
from paxon.tools.hugging_face import hf_files

# Sequences are padded to this length times a power of two.
_MIN_LENGTH = 16
# Caches have a multiple of this length, so that few are compiled.
_CACHE_MULTIPLE = 64
_NAMES_OF_LENGTH = (
  "max_gen_toks",
  "max_new_tokens",
  "max_tokens",
  "max_completion_tokens",
)
# As `HFLM` reads a configuration.
_POSITIONS = ("n_positions", "max_position_embeddings", "n_ctx")
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


class Score(NamedTuple):
  """A log likelihood, and whether each id is the most likely one."""

  log_likelihood: float
  is_greedy: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Opened:
  """A run that is ready to answer.

  Attributes:
    generator: Its model.
    run_dir: Its directory.
    max_length: Tokens that the model reads.
  """

  generator: samples.Generator
  run_dir: epath.Path
  max_length: int


def open_run(
  place: str,
  given: Sequence[overrides_lib.Override] = (),
  *,
  max_length: int | None = None,
) -> Opened:
  """Restores a checkpoint of a run.

  Args:
    place: `RUN` or `RUN@STEP`.
    given: Overrides of its settings.
    max_length: Tokens that the model reads; None for those of the run.

  Raises:
    UserError: There is no such run or checkpoint, or it does not generate text
      or has fewer positions.
  """
  path, step = command_line.parse_place(place)
  run_dir = run_dirs.check_existing(path)
  settings = run_files.complete_settings(None, given, run_dir)
  resolved = resolving.resolve(settings.experiment, settings.overrides)
  with resolving.user_errors(resolved.config):
    job = resolving.build(resolved.config)
    with contextlib.closing(job):
      return _open(job, run_dir, step, max_length)


def _open(
  job: job_lib.Job,
  run_dir: epath.Path,
  step: int | None,
  max_length: int | None,
) -> Opened:
  reason = generation_program.generation_problem(job)
  if reason is not None:
    raise user_error.UserError(
      f"{job.experiment} cannot be evaluated on text: {reason}."
    )
  serving.check_mode(job, "decode")
  settings = job.generation or generation.GenerationSettings()
  settings = dataclasses.replace(settings, search=None, speculation=None)
  job = dataclasses.replace(job, generation=settings)
  most = generation_limits.find_capacity(job.task.model).tokens
  if max_length is None:
    found = _find_max_length(job, run_dir)
    max_length = found if most is None else min(found, most)
  elif most is not None and max_length > most:
    raise user_error.UserError(
      f"--max_length must be at most {most}, the number of positions that the"
      f" model has, got {max_length}."
    )
  session, state = restore.open_trained(job, run_dir, step=step)
  return Opened(
    generator=samples.Generator(session, state),
    run_dir=run_dir,
    max_length=max_length,
  )


def _find_max_length(job: job_lib.Job, run_dir: epath.Path) -> int:
  folder = run_dir / hf_files.FOLDER
  config = hf_files.read_config(folder) if folder.is_dir() else {}
  config = config.get("text_config") or config
  found = [config[name] for name in _POSITIONS if config.get(name)]
  return int(found[0]) if found else job.train_input.length


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Pair:
  """Ids whose last `count` are predicted from those before them."""

  ids: list[int]
  count: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Generation:
  """A prompt, the texts that end its continuation, and its settings."""

  request: continuous_batching.Request
  stops: tuple[str, ...]


class Responses:
  """Scores and continues texts with a trained model.

  Attributes:
    generator: The model, its tokenizer and its end ids.
    max_length: Maximum number of ids that the model reads.
    batch_size: Number of sequences that are computed together.
    max_new_tokens: Number of new tokens where a request sets none.
    make_bar: Makes a progress bar from `total` and `desc`, or None.
    cache_hook: Receives each answer, from the harness.
  """

  cache_hook: Any = None

  def __init__(
    self,
    generator: samples.Generator,
    *,
    max_length: int,
    batch_size: int = 16,
    max_new_tokens: int = 256,
    make_bar: Callable[..., Any] | None = None,
  ) -> None:
    """Prepares; programs are compiled for the first requests.

    Raises:
      UserError: A number is too small, or the model is an encoder-decoder.
    """
    for name, value, least in (
      ("max_length", max_length, 2),
      ("batch_size", batch_size, 1),
      ("max_new_tokens", max_new_tokens, 1),
    ):
      if value < least:
        raise user_error.UserError(
          f"{name} must be at least {least}, got {value}."
        )
    session = generator.session
    if generation_program.reads_source(session.job):
      raise user_error.UserError(
        f"{session.job.experiment} cannot score continuations: its model,"
        f" {type(session.job.task.model).__name__}, is an encoder-decoder."
      )
    self.generator, self.make_bar = generator, make_bar
    self.max_length, self.max_new_tokens = max_length, max_new_tokens
    shards = generator.layout.shards(axes.BATCH)
    self.batch_size = -(-batch_size // shards) * shards
    self._score = self._make_score()
    # Its steps are compiled; kept for requests that it can serve.
    self._batcher: continuous_batching.Batcher | None = None
    self._functions: dict[str, Callable[..., Any]] = {
      "score": self._launch,
      "open": self._open_batcher,
    }
    self._leader = followers.Leader(self._functions)

  def _launch(self, batch: Mapping[str, np.ndarray]) -> Any:
    placed = arrays.split_batch(batch, self.generator.layout)
    return self._score(self.generator.state, placed)

  def follow(self) -> None:
    """Computes what process 0 answers, until it calls `close`."""
    followers.follow(self._functions)

  def close(self) -> None:
    """Ends `follow` on the other processes."""
    self._leader.close()

  @property
  def prefix_id(self) -> int:
    """The id before a text without a context."""
    return self.generator.tokenizer.begin_id

  def loglikelihood(
    self, requests: Sequence[Any], disable_tqdm: bool = False
  ) -> list[tuple[float, bool]]:
    """Returns the score of each continuation after its context.

    The `args` of a request are the context and the continuation.

    Raises:
      UserError: A continuation has no id, or more than `max_length`.
    """
    texts = [(str(each.args[0]), str(each.args[1])) for each in requests]
    bar = self._open_bar(len(texts), "loglikelihood", disable_tqdm)
    found: list[Score | None] = [None] * len(texts)
    for i, score in self._score_pairs([self._pair(*each) for each in texts]):
      found[i] = score
      self._remember("loglikelihood", texts[i], score)
      bar.update(1)
    bar.close()
    return [tuple(score) for score in found if score is not None]

  def loglikelihood_rolling(
    self, requests: Sequence[Any], disable_tqdm: bool = False
  ) -> list[float]:
    """Returns the log likelihood of all ids of each text, `args[0]`."""
    texts = [str(each.args[0]) for each in requests]
    windows = [
      (i, window) for i, text in enumerate(texts) for window in self._roll(text)
    ]
    bar = self._open_bar(len(windows), "loglikelihood_rolling", disable_tqdm)
    totals = [0.0] * len(texts)
    for i, score in self._score_pairs([window for _, window in windows]):
      totals[windows[i][0]] += score.log_likelihood
      bar.update(1)
    bar.close()
    for text, total in zip(texts, totals, strict=True):
      self._remember("loglikelihood_rolling", (text,), total)
    return totals

  def generate_until(
    self, requests: Sequence[Any], disable_tqdm: bool = False
  ) -> list[str]:
    """Returns a continuation of each context, up to a text of `until`.

    The `args` of a request are the context and a mapping with `until`,
    `max_gen_toks` and settings of sampling; without `temperature` the most
    likely ids are chosen.

    Raises:
      UserError: A setting is not known, or leaves no room for a context.
    """
    arguments = [(str(each.args[0]), each.args[1]) for each in requests]
    asked = [
      self._generation(text, settings, seed=i)
      for i, (text, settings) in enumerate(arguments)
    ]
    if not asked:
      return []
    bar = self._open_bar(len(asked), "generate_until", disable_tqdm)
    found = [""] * len(asked)
    for i, text in self._continue(asked):
      found[i] = text
      self._remember("generate_until", arguments[i], text)
      bar.update(1)
    bar.close()
    return found

  def apply_chat_template(
    self,
    chat_history: list[dict[str, str]],
    add_generation_prompt: bool = True,
  ) -> str:
    """Returns the text of a chat for the assistant's next turn."""
    template = self.generator.settings.chat_template
    if template is None:
      raise user_error.UserError(
        "--apply_chat_template needs the model's chat template, and this run"
        " has none."
      )
    if not add_generation_prompt:
      raise user_error.UserError(
        "A turn of the assistant that the task begins (gen_prefix) is not"
        " supported with --apply_chat_template."
      )
    try:
      given = conversation.read_prompt(
        {conversation.MESSAGES: chat_history}, key=conversation.MESSAGES
      )
      return template(given.messages, **given.variables)
    except ValueError as error:
      raise user_error.UserError(str(error)) from error

  def _encode(self, text: str, *, begins: bool = True) -> list[int]:
    """Returns the ids of a text, with the special tokens of a prompt."""
    tokenizer: Any = self.generator.tokenizer
    with generation_program.tokenizer_errors():
      encode = tokenizer.encode
      if isinstance(tokenizer, tokenizer_protocol.EncodesSpecial):
        encode = tokenizer.encode_special
      ids = encode(text).tolist()
      # A text that begins with the begin token has its special tokens.
      if not begins or ids[:1] == [self.prefix_id]:
        return ids
      if self._adds_special:
        return tokenizer.encode_prompt(text).tolist()
    return [self.prefix_id, *ids]

  def _check_ids(self, ids: Sequence[int], text: str) -> None:
    """Raises UserError if the model does not embed an id of a text."""
    generation_limits.check_ids(self.generator.session.job, ids, text=text)

  @property
  def _adds_special(self) -> bool:
    """Whether the tokenizer has a rule for the special tokens of a prompt."""
    tokenizer = self.generator.tokenizer
    return isinstance(tokenizer, tokenizer_protocol.EncodesPrompts)

  def _pair(self, context: str, continuation: str) -> _Pair:
    stripped = context.rstrip() if context else ""
    if context:
      continuation = context[len(stripped) :] + continuation
      first = self._encode(stripped)
      whole = self._encode(stripped + continuation)
      count = len(whole) - len(first)
      ids = [*first, *whole[len(first) :]]
    else:
      ids = self._encode(continuation, begins=False)
      if ids[:1] != [self.prefix_id]:
        ids = [self.prefix_id, *ids]
      count = len(ids) - 1
    if not 1 <= count <= self.max_length or len(ids) == count:
      raise user_error.UserError(
        f"A continuation must have 1 to {self.max_length} (max_length) tokens"
        f" and a context, got {max(count, 0)} of {continuation!r}."
      )
    self._check_ids(ids, stripped + continuation)
    return _Pair(ids=ids[-(self.max_length + 1) :], count=count)

  def _roll(self, text: str) -> Iterator[_Pair]:
    """Yields windows of a text, in which each id is predicted once."""
    ids = self._encode(text, begins=self._adds_special)
    if not ids:
      return
    self._check_ids(ids, text)
    ids = [self.prefix_id, *ids]
    done = 1
    while done < len(ids):
      end = min(done + self.max_length, len(ids))
      begin = max(0, end - self.max_length - 1)
      yield _Pair(ids=ids[begin:end], count=end - done)
      done = end

  def _score_pairs(self, pairs: Sequence[_Pair]) -> Iterator[tuple[int, Score]]:
    """Yields indices and scores, the longest pairs first."""
    order = sorted(range(len(pairs)), key=lambda i: -len(pairs[i].ids))
    pending: tuple[list[int], Any] | None = None
    for begin in range(0, len(order), self.batch_size):
      chosen = order[begin : begin + self.batch_size]
      batch = self._make_batch([pairs[i] for i in chosen])
      launched = chosen, self._leader.call("score", batch)
      # Read one batch late, so that the device never waits for the host.
      if pending is not None:
        yield from _read(*pending)
      pending = launched
    if pending is not None:
      yield from _read(*pending)

  def _make_batch(self, pairs: Sequence[_Pair]) -> dict[str, np.ndarray]:
    longest = max(len(pair.ids) for pair in pairs) - 1
    length = _MIN_LENGTH
    while length < longest:
      length *= 2
    length = max(longest, min(length, self.max_length))
    shape = self.batch_size, length
    names = ("inputs", "targets", "segment_ids")
    batch: dict[str, np.ndarray] = {
      name: np.zeros(shape, np.int32) for name in names
    }
    batch["weights"] = np.zeros(shape, np.float32)
    batch["positions"] = np.tile(
      np.arange(length, dtype=np.int32), (shape[0], 1)
    )
    for i, pair in enumerate(pairs):
      n = len(pair.ids) - 1
      batch["inputs"][i, :n], batch["targets"][i, :n] = (
        pair.ids[:-1],
        pair.ids[1:],
      )
      batch["segment_ids"][i, :n] = 1
      batch["weights"][i, n - pair.count : n] = 1
    return batch

  def _make_score(self) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """Returns the compiled function from a state and a batch to scores [B]."""
    session, layout = self.generator.session, self.generator.layout
    loss_fn = model_loss.make_loss_fn(
      session.job.task.model, specs=session.specs, deterministic=True
    )

    def score(
      state: train_state.TrainState, batch: Mapping[str, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
      outputs = loss_fn(session.evaluation_variables(state), batch, {}).outputs
      found = document_scores.score_outputs(outputs, batch["segment_ids"])
      # Each sequence has one document.
      return found.log_likelihood[:, 0], found.is_greedy[:, 0]

    return layout.jit(
      score,
      out_shardings=layout.replicated,
      compiler_options=session.compiler_options,
    )

  def _generation(
    self, text: str, settings: Mapping[str, Any], *, seed: int
  ) -> _Generation:
    """Returns a request of the batch from one of the harness."""
    left = dict(settings)
    stops = left.pop("until", None) or ()
    stops = (stops,) if isinstance(stops, str) else tuple(stops)
    lengths = [left.pop(name, None) for name in _NAMES_OF_LENGTH]
    given = [int(each) for each in lengths if each is not None]
    count = given[0] if given else self.max_new_tokens
    do_sample = left.pop("do_sample", None)
    chosen = {k: v for k in _SAMPLING if (v := left.pop(k, None)) is not None}
    if left.pop("num_beams", 1) != 1 or left:
      raise user_error.UserError(
        "generation_kwargs: supported are until, do_sample,"
        f" {', '.join((*_NAMES_OF_LENGTH, *_SAMPLING))}, got {dict(settings)}."
      )
    chosen["temperature"] = float(chosen.get("temperature", 0.0))
    if do_sample is False:
      chosen["temperature"] = 0.0
    if not 1 <= count < self.max_length:
      raise user_error.UserError(
        f"max_gen_toks must be from 1 to {self.max_length - 1}, less than the"
        f" {self.max_length} tokens that the model reads (max_length), got"
        f" {count}."
      )
    ids = self._encode(text)[-(self.max_length - count) :] or [self.prefix_id]
    self.generator.check_length(ids, count)
    try:
      made = sampling.Settings(**chosen, max_new_tokens=count, seed=seed)
    except ValueError as error:
      raise user_error.UserError(f"generation_kwargs: {error}") from error
    return _Generation(
      request=continuous_batching.Request(
        prompt=ids, settings=made, end_ids=self.generator.end_ids
      ),
      stops=tuple(filter(None, stops)),
    )

  def _continue(
    self, asked: Sequence[_Generation]
  ) -> Iterator[tuple[int, str]]:
    """Yields indices and texts as they end."""
    batcher = self._find_batcher([each.request for each in asked])
    tokenizer = self.generator.tokenizer
    # Long prompts first, so that the last steps have a full batch.
    order = sorted(
      range(len(asked)), key=lambda i: -len(asked[i].request.prompt)
    )
    numbers = {batcher.submit(asked[i].request): i for i in order}
    ids: dict[int, list[int]] = {number: [] for number in numbers}
    streams = {
      number: text_stream.TextStream(tokenizer, stops=asked[i].stops)
      for number, i in numbers.items()
    }
    while batcher.is_busy:
      for token in batcher.step():
        number = token.request
        if number not in streams:
          continue  # Cancelled.
        generation_limits.check_finite(token.log_prob)
        if token.finish != "stop":
          ids[number].append(token.id)
          streams[number].add(token.id)
        if token.finish is None and not streams[number].stopped:
          continue
        if token.finish is None:
          batcher.cancel(number)
        del streams[number]
        text = tokenizer.decode(np.asarray(ids.pop(number), np.int32))
        for stop in asked[numbers[number]].stops:
          text = text.split(stop)[0]
        yield numbers[number], text

  def _find_batcher(
    self, requests: Sequence[continuous_batching.Request]
  ) -> continuous_batching.Batcher:
    """Returns a batch whose cache is long enough for the requests."""
    needed = max(
      len(each.prompt) + (each.settings.max_new_tokens or 0)
      for each in requests
    )
    if self._batcher is None or self._batcher.cache_length + 1 < needed:
      context = -(-needed // _CACHE_MULTIPLE) * _CACHE_MULTIPLE
      self._leader.call("open", self.batch_size, context)
    assert self._batcher is not None
    return self._batcher

  def _open_batcher(self, slots: int, context: int) -> None:
    """Makes the batch of which all processes take the steps."""
    # The last one is freed first.
    self._batcher = None
    model = self.generator.session.job.task.model
    options = serve.Options(slots=slots, context=context)
    batcher = serve.make_batcher(
      self.generator, serve.limit_context(options, model)
    )
    steps = batcher.steps
    self._functions |= {"insert": steps.insert, "generate": steps.generate}
    batcher.steps = serve.LedSteps(self._leader)
    self._batcher = batcher

  def _open_bar(self, total: int, name: str, is_off: bool) -> Any:
    if self.make_bar is None or is_off:
      return types.SimpleNamespace(update=lambda _: None, close=lambda: None)
    return self.make_bar(total=total, desc=name)

  def _remember(self, name: str, args: Any, answer: Any) -> None:
    if self.cache_hook is not None:
      self.cache_hook.add_partial(name, args, answer)


def _read(chosen: list[int], launched: Any) -> Iterator[tuple[int, Score]]:
  """Yields indices and scores of a batch; blocks until it is computed."""
  values, greedy = jax.device_get(launched)
  generation_limits.check_finite(values[: len(chosen)])
  for i, value, is_greedy in zip(chosen, values, greedy, strict=False):
    yield i, Score(float(value), bool(is_greedy))

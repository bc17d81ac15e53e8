"""Serves the newest checkpoint of a run (`--mode=serve`).

For trying a model, evaluating it and generating data; at scale, export it and
use a serving engine.

Several processes hold one model: process 0 answers requests, and the others
take the steps of the batch with it.
"""

from collections.abc import Callable, Mapping, Sequence
import contextlib
import dataclasses
import gc
import os
import re
import socket
from typing import Any

from etils import epath
import jax
import numpy as np

from paxon.inputs import optional_library
from paxon.layers import contracts
from paxon.layers.decoding import (
  batch_steps,
  continuous_batching,
  model_steps,
  sampling,
)
from paxon.learners import train_state
from paxon.runner import interrupts, user_error
from paxon.runner import job as job_lib
from paxon.runner.endpoint import engine as engine_lib
from paxon.runner.endpoint import grammars, openai_requests
from paxon.runner.generation import (
  decoding_state,
  generation_limits,
  generation_program,
  samples,
)
from paxon.runner.hosts import agreement, followers
from paxon.runner.session import restore
from paxon.runner.settings import generation
from paxon.sharding import axes
from paxon.sharding import layout as layouts
from paxon.sharding import rules as rules_lib

# Alternatives of a token: OpenAI's maximum for chats.
_MAX_LOGPROBS = 20
# Not a flag, which other users of the machine could read.
_KEY_VARIABLE = "PAXON_API_KEY"
# Choices of a request, of all its prompts.
_MAX_CHOICES = 128
# Ids of a prompt that are read in one step, and tokens of a page.
_CHUNK = 64
# Requests that wait for a slot, for each slot.
_WAITING_PER_SLOT = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
  """Flags of the endpoint, in the ranges of `command_line`.

  Attributes:
    host: Address to listen at.
    port: Port to listen at; 0 for any free one.
    slots: Number of requests that generate at the same time.
    context: Maximum number of tokens of a prompt and its completion.
    cache_tokens: Number of tokens of a cache in pages, which prompts that begin
      alike share; 0 gives each slot a cache of its context.
    allowed_hosts: Names that the `Host` of requests may have; see
      `access.Access`.
    api_key: Key that requests must have, or None.
  """

  host: str = "127.0.0.1"
  port: int = 8000
  slots: int = 8
  context: int = 2048
  cache_tokens: int = 0
  allowed_hosts: tuple[str, ...] = ()
  api_key: str | None = dataclasses.field(default=None, repr=False)


def read_api_key(environ: Mapping[str, str]) -> str | None:
  """Returns the key that requests must have; None if the variable is not set.

  Raises:
    UserError: It is empty, or has characters that a header may not have.
  """
  key = environ.get(_KEY_VARIABLE)
  if key is not None and re.fullmatch("[!-~]+", key) is None:
    raise user_error.UserError(
      f"{_KEY_VARIABLE} must be printable ASCII without spaces, at least one"
      " character; unset it to serve without a key."
    )
  return key


def run(
  job: job_lib.Job,
  run_dir: epath.Path,
  options: Options,
  *,
  step: int | None = None,
  when_ready: Callable[[Any], None] | None = None,
) -> int:
  """Answers requests until SIGINT or SIGTERM.

  Args:
    job: The job of the run.
    run_dir: Its directory, to which nothing is written.
    options: Options of the endpoint.
    step: Step of the checkpoint; None for the newest.
    when_ready: Gets the server before it answers, for tests.

  Raises:
    UserError: The libraries are not installed, the address cannot be used,
      there is no checkpoint that fits, the model does not generate text, or
      the job drafts tokens.
    Exception: A step of the batch failed, or a process was lost.
  """
  libraries = _import_app()
  job = _check(job)
  with contextlib.ExitStack() as stack:
    stack.enter_context(contextlib.closing(job))
    listener = None
    if agreement.is_first():
      listener = stack.enter_context(_listen(options))
    session, state = restore.open_trained(job, run_dir, step=step)
    session, state = decoding_state.prepare(session, state)
    generator = samples.Generator(session, state)
    options = limit_context(options, session.job.task.model)
    batcher = make_batcher(generator, options)
    _compile(batcher, options)
    steps = batcher.steps
    functions = {"insert": steps.insert, "generate": steps.generate}
    if listener is None:
      with interrupts.ignore_signals():
        followers.follow(functions)
      return 0
    leader = followers.Leader(functions)
    batcher.steps = LedSteps(leader)
    engine = engine_lib.Engine(
      batcher,
      max_waiting=_WAITING_PER_SLOT * options.slots,
      when_idle=None if agreement.is_alone() else leader.wait,
    )
    _answer(
      generator, engine, options, libraries, listener, when_ready=when_ready
    )
    # Not after an error, which may be that of a lost process.
    leader.close()
  print("stopped", flush=True)
  return 0


def _answer(
  generator: samples.Generator,
  engine: engine_lib.Engine,
  options: Options,
  libraries: tuple[Any, Any],
  listener: socket.socket,
  *,
  when_ready: Callable[[Any], None] | None,
) -> None:
  """Answers requests; returns after the engine has stopped, or raises."""
  app, access = libraries
  name = _get_name(generator.session.job)
  constrained = grammars.Grammars(
    generator.tokenizer,
    vocab_size=engine.batcher.vocab_size,
    end_ids=generator.end_ids,
  )
  with contextlib.closing(constrained), contextlib.closing(engine):
    endpoint = app.Endpoint(
      engine,
      make_served(generator, engine, options, name=name),
      tokenizer=generator.tokenizer,
      end_ids=generator.end_ids,
      constrained=constrained,
    )
    allowed = access.Access(
      endpoint.app,
      hosts=(options.host, *options.allowed_hosts),
      api_key=options.api_key,
    )
    server = app.Server(allowed, listener)
    engine.start(when_failed=server.stop)
    # A collection while a large body is read would stall all requests.
    gc.freeze()
    host = f"[{options.host}]" if ":" in options.host else options.host
    print(
      f"serving {name} (step {int(generator.state.step)}) at"
      f" http://{host}:{server.port}/v1: {options.slots} slots of"
      f" {options.context} tokens; Ctrl-C stops",
      flush=True,
    )
    if when_ready is not None:
      when_ready(server)
    server.answer()
    if engine.failure is not None:
      raise engine.failure


def _check(job: job_lib.Job) -> job_lib.Job:
  """Returns the job as it is served, or raises."""
  if job.generation is not None and job.generation.speculation is not None:
    raise user_error.UserError(
      "--mode=serve does not draft tokens; unset draft_tokens and draft_run."
    )
  if job.generation is not None and job.generation.method is not None:
    raise user_error.UserError(
      "--mode=serve does not use GenerationSettings.method, which is"
      f" {job.generation.method!r}; set best_end, guidance_scale, rerank_every"
      " and cache_stages to None."
    )
  if (
    job.generation is None
    and generation_program.generation_problem(job) is None
  ):
    settings = generation.GenerationSettings()
    return dataclasses.replace(job, generation=settings)
  return job


def limit_context(options: Options, model: Any) -> Options:
  """Caps the context at the model's position table.

  Learned positions are a table; after its last one a model gives NaN.
  """
  most = generation_limits.find_capacity(model).tokens
  if most is None:
    return options
  return dataclasses.replace(options, context=min(options.context, most))


def make_batcher(
  generator: samples.Generator, options: Options
) -> continuous_batching.Batcher:
  """Returns a batch that draws as the generator does.

  Raises:
    UserError: The model is an encoder-decoder, or the cache is too small.
  """
  session, model = generator.session, generator.session.job.task.model
  num_pages, length = None, options.context - 1
  is_whole = generation_limits.reads_whole_prompts(model)
  chunk = length if is_whole else min(_CHUNK, length)
  if options.cache_tokens:
    num_pages, needed = options.cache_tokens // chunk, -(-length // chunk)
    if num_pages < needed:
      raise user_error.UserError(
        f"--serve_cache_tokens={options.cache_tokens} must be at least"
        f" {needed * chunk}, for a context of {options.context} tokens in pages"
        f" of {chunk}."
      )
  if isinstance(model, contracts.EncoderDecoder):
    raise user_error.UserError(
      f"{session.job.experiment} cannot be served: its model,"
      f" {type(model).__name__}, is an encoder-decoder."
    )

  def make_steps(state: train_state.TrainState) -> Any:
    variables = session.evaluation_variables(state)
    return (
      model_steps.make_prefill(model, variables),
      model_steps.make_decode_step(model, variables),
    )

  layout = generator.layout
  return continuous_batching.Batcher(
    make_steps,
    generator.state,
    num_slots=options.slots,
    cache_length=length,
    chunk=chunk,
    num_pages=num_pages,
    reuse_prefixes=not is_whole,
    key=generator.key,
    max_end_ids=len(generator.end_ids),
    max_alternatives=_MAX_LOGPROBS,
    # A prompt is read alone, so the batch is not split.
    layout=layouts.Layout(
      layout.mesh, rules_lib.replace(layout.rules, {axes.BATCH: None})
    ),
  )


def _compile(batcher: continuous_batching.Batcher, options: Options) -> None:
  """Runs both steps of a batch once."""
  settings = sampling.Settings(max_new_tokens=min(2, options.context - 1))
  batcher.run([continuous_batching.Request(prompt=[0], settings=settings)] * 2)


class LedSteps:
  """The steps of a batch, which all processes take with this one."""

  def __init__(self, leader: followers.Leader) -> None:
    """Records the leader, whose functions are `insert` and `generate`."""
    self._leader = leader

  def insert(
    self,
    chunk: batch_steps.Chunk,
    allowed: batch_steps.Allowed,
    table: np.ndarray,
  ) -> dict[str, jax.Array]:
    """Reads a chunk of a prompt; returns the first id after the last one."""
    return self._leader.call("insert", chunk, allowed, table)

  def generate(
    self, keep: np.ndarray, allowed: batch_steps.Allowed, table: np.ndarray
  ) -> dict[str, jax.Array]:
    """Returns one id for each active slot that is kept."""
    return self._leader.call("generate", keep, allowed, table)


def make_served(
  generator: samples.Generator,
  engine: engine_lib.Engine,
  options: Options,
  *,
  name: str,
) -> openai_requests.Served:
  """Returns the model as requests see it."""

  def encode(prompt: samples.Prompt) -> list[int]:
    try:
      return generator.encode(prompt).ids
    except user_error.UserError as error:
      raise ValueError(str(error)) from error

  def check(ids: Sequence[int], count: int) -> None:
    try:
      generator.check_length(ids, count)
    except user_error.UserError as error:
      raise ValueError(str(error)) from error

  return openai_requests.Served(
    name=name,
    context=options.context,
    max_logprobs=_MAX_LOGPROBS,
    vocab_size=engine.batcher.vocab_size,
    encode=encode,
    check=check,
    # More could never be admitted.
    max_choices=min(_MAX_CHOICES, engine.max_open),
    max_n=engine.batcher.num_slots,
  )


def _get_name(job: job_lib.Job) -> str:
  """Returns the name of the experiment without its package."""
  return job.experiment.rpartition(".")[2]


def _import_app() -> tuple[Any, Any]:
  """Returns the modules `app` and `access`, which need optional libraries."""
  try:
    with optional_library.explain("starlette", "uvicorn", extra="serve"):
      from paxon.runner.endpoint import access, app
  except optional_library.MissingLibraryError as error:
    raise user_error.UserError(f"--mode=serve: {error}") from error
  return app, access


def _listen(options: Options) -> socket.socket:
  """Returns a socket that listens at the address.

  Raises:
    UserError: The address cannot be used.
  """
  family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
  try:
    listener = socket.create_server((options.host, options.port), family=family)
  except OSError as error:
    raise user_error.UserError(
      f"Cannot listen at --serve_host={options.host} and"
      f" --serve_port={options.port}:"
      f" {os.strerror(error.errno) if error.errno else error}."
    ) from error
  # Or the body of a response waits for the acknowledgement of its head, 40 ms;
  # asyncio sets it only for sockets that name their protocol.
  listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
  return listener

"""The compiled program that generates text, laid out on a job's devices."""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import dataclasses
import os
from typing import Any

from etils import epath
import jax
import jax.numpy as jnp
import numpy as np

from paxon.inputs import tokenizer_protocol
from paxon.layers import contracts
from paxon.layers.decoding import (
  generate,
  methods,
  model_steps,
  samplers,
  sampling,
  speculative,
)
from paxon.layers.decoding import prompts as prompts_lib
from paxon.learners import train_state
from paxon.runner import job as job_lib
from paxon.runner import run_dir as run_dirs
from paxon.runner import user_error
from paxon.runner.configuration import resolving
from paxon.runner.generation import generation_limits
from paxon.runner.session import restore, run_files, serving
from paxon.runner.session import session as session_lib
from paxon.runner.settings import generation
from paxon.sharding import axes, variables
from paxon.sharding import layout as layouts
from paxon.sharding import mesh as meshes
from paxon.sharding import rules as rules_lib


def generation_problem(
  job: job_lib.Job, *, decoder_only: bool = False
) -> str | None:
  """Returns why a job cannot generate text; None if it can.

  With `decoder_only` an encoder-decoder cannot, either.
  """
  model = job.task.model
  if not isinstance(model, contracts.Generator):
    missing = "decode_step" if hasattr(model, "prefill") else "prefill"
    return f"its model, {type(model).__name__}, has no {missing}"
  if job.task.tokenizer is None:
    # Folders of imported models, which should have one.
    folders = " or ".join(map(str, job.run_files.values()))
    return "its task has no tokenizer" + (
      f", and no file of one is in {folders}; pass --fdl.tokenizer=PATH"
      if folders
      else ""
    )
  if decoder_only and reads_source(job):
    return "its model is an encoder-decoder"
  return None


def get_settings(
  job: job_lib.Job,
) -> tuple[generation.GenerationSettings, tokenizer_protocol.Tokenizer]:
  """Returns the settings and the tokenizer of a job that generates text.

  Raises:
    UserError: It does not, or its settings contradict.
  """
  settings, tokenizer = job.generation, job.task.tokenizer
  reason = generation_problem(job)
  if reason is None and settings is None:
    reason = "its generation settings are missing"
  if reason is not None:
    raise user_error.UserError(
      f"{job.experiment} cannot generate text: {reason}."
    )
  assert settings is not None
  assert tokenizer is not None
  if settings.search and isinstance(settings.sampler, sampling.Settings):
    raise user_error.UserError(
      "GenerationSettings.sampler has penalties or other settings, which a beam"
      " search does not use; set beam_size or repetition_penalty to None."
    )
  if settings.speculation is not None and reads_source(job):
    raise user_error.UserError(
      "GenerationSettings.speculation must be None for an encoder-decoder; set"
      " no draft."
    )
  if settings.suffixes and reads_source(job):
    raise user_error.UserError(
      "GenerationSettings.suffixes must be () for an encoder-decoder, got"
      f" {settings.suffixes}."
    )
  return settings, tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Draft:
  """A draft model.

  Attributes:
    session: Its job on the devices of the model that it drafts for.
    checkpoints: The directory of its checkpoints.
  """

  session: session_lib.Session
  checkpoints: epath.Path

  def shardings(self, layout: layouts.Layout) -> Any:
    """Returns the shardings of its state while samples are drawn.

    Raises:
      UserError: The mesh does not fit it.
    """
    try:
      return layout.shardings(
        session_lib.strip_for_evaluation(self.session.state_specs)
      )
    except ValueError as error:
      raise user_error.UserError(f"DraftRun: {error}") from error

  def read(self, layout: layouts.Layout) -> tuple["Draft", Any]:
    """Returns the draft with its stored dtypes, and its state.

    Raises:
      UserError: There is no checkpoint that fits it.
    """
    session, state = restore.read_for_evaluation(self.session, self.checkpoints)
    draft = dataclasses.replace(self, session=session)
    state = session_lib.strip_for_evaluation(state)
    return draft, jax.device_put(state, draft.shardings(layout))

  def abstract_state(self, layout: layouts.Layout) -> Any:
    """Returns the shapes and shardings of its state."""
    specs = session_lib.strip_for_evaluation(self.session.state_specs)
    return variables.abstract(specs, self.shardings(layout))


def open_draft(session: session_lib.Session) -> Draft | None:
  """Returns the draft model of a job; None if another run does not draft.

  Raises:
    UserError: See `find_draft`.
  """
  found = find_draft(session.job)
  if found is None:
    return None
  job, checkpoints = found
  return Draft(session=session_lib.open_session(job), checkpoints=checkpoints)


def find_draft(job: job_lib.Job) -> tuple[job_lib.Job, epath.Path] | None:
  """Returns the job of a draft model, and the folder of its checkpoints.

  Args:
    job: The job of the model; its mesh is that of the draft.

  Returns:
    None if another run does not draft.

  Raises:
    UserError: There is no such run, or its vocabulary or tokenizer is another.
  """
  settings, tokenizer = get_settings(job)
  draft = settings.speculation
  if not isinstance(draft, generation.DraftRun):
    return None
  folder = run_dirs.resolve(draft.run, os.environ)
  stored = run_files.read_settings(folder)
  if stored is None:
    raise user_error.UserError(
      f"draft_run={draft.run} is not the directory of a run: it has no"
      f" {run_dirs.SETTINGS}."
    )
  resolved = resolving.resolve(stored.experiment, stored.overrides)
  resolved.config.mesh = job.mesh
  resolved.config.generation = None
  resolved.config.decode_mesh = resolved.config.decode_rules = None
  small = resolving.build(resolved.config)
  reason = generation_problem(small, decoder_only=True)
  if reason is not None:
    raise user_error.UserError(
      f"draft_run={draft.run} cannot draft text: {reason}."
    )
  sizes = [
    generation_limits.find_vocab_size(each.task.model) for each in (job, small)
  ]
  if sizes[0] != sizes[1]:
    raise user_error.UserError(
      f"draft_run={draft.run} has a vocabulary of {sizes[1]} ids, and the model"
      f" one of {sizes[0]}; both must have the same tokenizer."
    )
  probe = "The draft must read 3 texts alike:\n\tdef f(x): return 'é'."
  with tokenizer_errors():
    assert small.task.tokenizer is not None
    theirs = small.task.tokenizer.encode(probe).tolist()
    if theirs != tokenizer.encode(probe).tolist():
      raise user_error.UserError(
        f"draft_run={draft.run} has another tokenizer than the model."
      )
  return small, serving.checkpoints(small, folder)


def get_end_ids(job: job_lib.Job) -> tuple[int, ...]:
  """Returns the ids that end a sequence, of those that the model embeds.

  Raises:
    UserError: There are none, or the tokenizer cannot be read.
  """
  settings, tokenizer = get_settings(job)
  with tokenizer_errors():
    found = settings.end_ids or (tokenizer.end_id,)
  size = generation_limits.find_vocab_size(job.task.model)
  kept = tuple(i for i in found if size is None or i < size)
  if not kept:
    generation_limits.check_ids(job, found)
  return kept


def reads_source(job: job_lib.Job) -> bool:
  """Whether the model is an encoder-decoder, whose encoder reads the prompt."""
  return generation_limits.has_encoder(job.task.model)


def decoding_layout(session: session_lib.Session) -> layouts.Layout:
  """Returns the layout for samples: training's, or the job's.

  A decoding step has one token per sequence, so the length is not split.

  Raises:
    UserError: The mesh of the job does not fit the devices.
  """
  job, mesh = session.job, session.layout.mesh
  if job.decode_mesh is not None:
    try:
      mesh = meshes.reshape(mesh, meshes.MeshSpec.parse(job.decode_mesh))
    except ValueError as error:
      raise user_error.UserError(f"Job.decode_mesh: {error}") from error
  rules = job.decode_rules or session.layout.rules
  return layouts.Layout(mesh, rules_lib.keep_lengths(rules))


def state_shardings(
  session: session_lib.Session, layout: layouts.Layout
) -> Any:
  """Returns the state's shardings while samples are drawn."""
  if layout.mesh is session.layout.mesh and session.job.decode_rules is None:
    return session_lib.strip_for_evaluation(session.state_shardings)
  try:
    return layout.shardings(
      session_lib.strip_for_evaluation(session.state_specs)
    )
  except ValueError as error:
    job, named = session.job, []
    if job.decode_mesh is not None:
      named.append(f"Job.decode_mesh {job.decode_mesh!r}")
    if job.decode_rules is not None:
      # Not printed: rules have no name and are long.
      named.append("Job.decode_rules")
    raise user_error.UserError(f"{' and '.join(named)}: {error}") from error


def make(
  session: session_lib.Session, layout: layouts.Layout, draft: Draft | None
) -> layouts.LaidOut:
  """Returns the generating function: (state, *arguments, key, draft state).

  With `speculation` it returns a `Speculation`, otherwise a `Generation`.
  Without a draft, it is the same function for the same session and layout.
  """
  if draft is None and layout in session.generating:
    return session.generating[layout]
  program = layout.jit(
    _make_run(session, draft),
    out_shardings=layout.replicated,
    compiler_options=session.compiler_options,
  )
  if draft is None:
    session.generating[layout] = program
  return program


def _make_run(
  session: session_lib.Session, draft: Draft | None
) -> Callable[..., generate.Generation | speculative.Speculation]:
  """Returns the function that `make` compiles."""
  settings, tokenizer = get_settings(session.job)
  model = session.job.task.model
  has_encoder = reads_source(session.job)
  end_ids = get_end_ids(session.job)
  with tokenizer_errors():
    begin_id = tokenizer.begin_id if has_encoder else 0
  negative = _encode_negative(session.job)
  run_method = _find_method(settings, [begin_id] if has_encoder else negative)
  add_suffixes = _make_suffix_scores(session.job)

  def run(
    state: train_state.TrainState,
    ids: jax.Array,
    lengths: jax.Array,
    each: sampling.BatchSettings | None,
    key: jax.Array,
    draft_state: train_state.TrainState | None,
  ) -> generate.Generation | speculative.Speculation:
    variables = session.evaluation_variables(state)
    source = {}
    if has_encoder:
      source = to_source(*_append_negative(ids, lengths, negative))
      ids = jnp.full((ids.shape[0], 1), begin_id, jnp.int32)
      lengths = jnp.ones_like(lengths)
    steps = (
      model_steps.make_prefill(model, variables, **source),
      model_steps.make_decode_step(model, variables),
    )
    shared: dict[str, Any] = {
      "max_new_tokens": settings.max_new_tokens,
      "end_id": end_ids,
      "num_samples": settings.num_samples,
    }
    if settings.search is not None:
      result = settings.search.generate(*steps, ids, lengths, **shared)
      return add_suffixes(steps[0], ids, lengths, result)
    sampler = settings.sampler if each is None else each
    assert not isinstance(sampler, sampling.Settings)
    shared |= {
      "sampler": sampler,
      "key": key,
      "num_alternatives": settings.num_alternatives,
    }
    drafts = settings.speculation
    if drafts is None:
      result = run_method(*steps, ids, lengths, **shared)
      return add_suffixes(steps[0], ids, lengths, result)
    if isinstance(drafts, generation.DraftRun):
      assert draft is not None
      assert draft_state is not None
      drafts = _make_draft_model(draft, draft_state, drafts.num_tokens)
    return speculative.generate(*steps, ids, lengths, draft=drafts, **shared)

  return run


def _find_method(
  settings: generation.GenerationSettings, negative: Sequence[int]
) -> Callable[..., generate.Generation]:
  """Returns the generating function; `negative` are ids for the decoder."""
  method = settings.method
  if isinstance(method, generation.NegativePrompt):
    method = methods.Guidance(scale=method.scale, negative_ids=tuple(negative))
  return generate.generate if method is None else method.generate


def _encode_negative(job: job_lib.Job) -> list[int]:
  """Returns the ids of the negative prompt; empty without one.

  Raises:
    UserError: It is too long for the model, or has an unknown id.
  """
  settings, _ = get_settings(job)
  if not isinstance(settings.method, generation.NegativePrompt):
    return []
  text = settings.method.prompt
  ids = encode(job, text, is_chat=False)
  generation_limits.check_ids(job, ids, text=text)
  generation_limits.check_lengths(
    job.task.model, len(ids), settings.max_new_tokens
  )
  return ids


def _append_negative(
  ids: jax.Array, lengths: jax.Array, negative: Sequence[int]
) -> tuple[jax.Array, jax.Array]:
  """Returns the sources of `methods.Guidance`: prompts, then negative ones."""
  if not negative:
    return ids, lengths
  width = max(ids.shape[1], len(negative))
  both = [
    jnp.pad(x, ((0, 0), (0, width - x.shape[1])))
    for x in (ids, jnp.asarray([negative], ids.dtype))
  ]
  both[1] = jnp.broadcast_to(both[1], both[0].shape)
  sizes = jnp.full_like(lengths, len(negative))
  return jnp.concatenate(both), jnp.concatenate([lengths, sizes])


def _encode_suffixes(job: job_lib.Job) -> list[list[int]]:
  """Returns the ids of each suffix.

  Raises:
    UserError: A suffix has no token, or one that the model does not embed.
  """
  settings, tokenizer = get_settings(job)
  with tokenizer_errors():
    encoded = [tokenizer.encode(text).tolist() for text in settings.suffixes]
  for text, ids in zip(settings.suffixes, encoded, strict=True):
    if not ids:
      raise user_error.UserError(
        f"GenerationSettings.suffixes has {text!r}, which has no token."
      )
    generation_limits.check_ids(job, ids, text=text)
  return encoded


def _make_suffix_scores(
  job: job_lib.Job,
) -> Callable[..., generate.Generation]:
  """Returns a function that adds the scores of suffixes to a generation.

  Its arguments are the prefill, prompts, their lengths and the generation.

  Raises:
    UserError: See `_encode_suffixes`.
  """
  encoded = _encode_suffixes(job)
  if not encoded:
    return lambda prefill, ids, lengths, result: result
  suffixes = prompts_lib.pad_right(encoded)

  def add(
    prefill: generate.Prefill,
    ids: jax.Array,
    lengths: jax.Array,
    result: generate.Generation,
  ) -> generate.Generation:
    scores = methods.score_suffixes(
      prefill,
      ids,
      lengths,
      result,
      jnp.asarray(suffixes.ids),
      jnp.asarray(suffixes.lengths),
    )
    return dataclasses.replace(result, suffix_log_probs=scores)

  return add


def _make_draft_model(
  draft: Draft, state: train_state.TrainState, num_tokens: int
) -> speculative.DraftModel:
  model = draft.session.job.task.model
  values = draft.session.evaluation_variables(state)
  return speculative.DraftModel(
    prefill=model_steps.make_prefill(model, values),
    decode_step=model_steps.make_decode_step(model, values),
    num_tokens=num_tokens,
  )


def make_arguments(
  session: session_lib.Session,
  batch: prompts_lib.Prompts,
  multiple: int,
  each: Sequence[sampling.Settings] | None = None,
  draft: Draft | None = None,
) -> tuple[np.ndarray, np.ndarray, sampling.BatchSettings | None]:
  """Returns prompts and their settings as the program reads them.

  Raises:
    UserError: An id is not in the model's vocabulary, or a prompt is too long.
  """
  settings, _ = get_settings(session.job)
  model = session.job.task.model
  generation_limits.check_ids(session.job, batch.ids)
  most = settings.max_new_tokens
  counts = [most] * len(batch.lengths)
  if each is not None:
    counts = [min(most, s.max_new_tokens or most) for s in each]
  small = None if draft is None else draft.session.job.task.model
  suffix = max(map(len, _encode_suffixes(session.job)), default=0)
  for size, count in {*zip(batch.lengths.tolist(), counts, strict=True)}:
    generation_limits.check_lengths(
      model, size, count, draft=small, suffix=suffix
    )
  sampler = settings.sampler
  if settings.speculation is not None and not isinstance(
    sampler, samplers.Greedy
  ):
    sampler = generation.to_settings(sampler)
  batch = _pad(batch, multiple=multiple)
  if each is None and isinstance(sampler, sampling.Settings):
    each = [
      dataclasses.replace(sampler, seed=(sampler.seed + i) % 2**31)
      for i in range(len(batch.lengths))
    ]
  if each is None:
    return batch.ids, batch.lengths, None
  missing = len(batch.lengths) - len(each)
  size = generation_limits.find_vocab_size(model)
  stacked = sampling.stack(
    [*each, *[each[-1]] * missing],
    num_samples=settings.num_samples,
    vocab_size=size if any(e.logit_bias for e in each) else None,
  )
  return batch.ids, batch.lengths, stacked


def trace(session: session_lib.Session) -> jax.stages.Traced:
  """Returns the program that `draw` runs, traced; nothing is computed."""
  settings, _ = get_settings(session.job)
  layout = decoding_layout(session)
  batch = prompts_lib.pad_right(
    [encode(session.job, text, is_chat=False) for text in settings.prompts]
  )
  draft = open_draft(session)
  arguments = make_arguments(
    session, batch, layout.shards(axes.BATCH), draft=draft
  )
  program = make(session, layout, draft)
  state = abstract_state(session, layout)
  draft_state = None if draft is None else draft.abstract_state(layout)
  key = jax.eval_shape(lambda: jax.random.key(0))
  # Placed as that of `draw`, which thus needs no trace.
  key = jax.ShapeDtypeStruct(key.shape, key.dtype, sharding=layout.replicated)
  return program.trace(state, *arguments, key, draft_state)


def abstract_state(session: session_lib.Session, layout: layouts.Layout) -> Any:
  """Returns the shapes and shardings of the state while samples are drawn."""
  specs = session_lib.strip_for_evaluation(session.state_specs)
  return variables.abstract(specs, state_shardings(session, layout))


def to_source(ids: jax.Array, lengths: jax.Array) -> dict[str, jax.Array]:
  """Returns right-padded texts as the inputs of an encoder."""
  positions = jax.lax.broadcasted_iota(jnp.int32, ids.shape, 1)
  inside = (positions < lengths[:, None]).astype(jnp.int32)
  return {
    "encoder_inputs": ids * inside,
    "encoder_positions": positions,
    "encoder_segment_ids": inside,
  }


def _pad(batch: prompts_lib.Prompts, *, multiple: int) -> prompts_lib.Prompts:
  """Repeats the last prompt until the batch size divides by `multiple`."""
  missing = -len(batch.lengths) % multiple
  return prompts_lib.Prompts(
    ids=np.pad(batch.ids, ((0, missing), (0, 0)), mode="edge"),
    lengths=np.pad(batch.lengths, (0, missing), mode="edge"),
  )


def encode(job: job_lib.Job, text: str, *, is_chat: bool) -> list[int]:
  """Returns the ids of a prompt."""
  tokenizer: Any = job.task.tokenizer
  if is_chat and isinstance(tokenizer, tokenizer_protocol.EncodesSpecial):
    # A chat template writes all special tokens itself.
    with tokenizer_errors():
      return tokenizer.encode_special(text).tolist()
  return encode_prompt(tokenizer, text, as_source=reads_source(job))


def encode_prompt(
  tokenizer: tokenizer_protocol.Tokenizer, text: str, *, as_source: bool = False
) -> list[int]:
  """Returns the ids of a prompt as its model expects them, at least one.

  Without `EncodesPrompts` a prompt begins with `begin_id`, or, for an
  encoder (`as_source`), ends with `end_id`.

  Raises:
    UserError: The tokenizer cannot be read, or is not that of the model.
  """
  with tokenizer_errors():
    if isinstance(tokenizer, tokenizer_protocol.EncodesPrompts):
      ids = tokenizer.encode_prompt(text).tolist()
      return ids or [tokenizer.begin_id]
    ids = tokenizer.encode(text).tolist()
    return [*ids, tokenizer.end_id] if as_source else [tokenizer.begin_id, *ids]


@contextlib.contextmanager
def tokenizer_errors() -> Iterator[None]:
  """Turns errors of a tokenizer, which reads its file now, into the user's."""
  try:
    yield
  except (OSError, ValueError) as error:
    raise user_error.UserError(str(error)) from error

"""Settings of text generation, at the end of a run and in `--mode=decode`."""

from collections.abc import Callable, Mapping
import dataclasses
import math
from typing import Any

import fiddle as fdl

from paxon.layers.decoding import (
  beam_search,
  generate,
  samplers,
  sampling,
  speculative,
)
from paxon.runner import knobs as knobs_lib
from paxon.sharding import checks

_STOPS = {
  True: beam_search.Stop.FULL,
  False: beam_search.Stop.HEURISTIC,
}
# Values of a `generation_config.json` that are read.
_FILE = "generation_config.json"
_INTEGERS = ("top_k", "num_beams", "min_new_tokens")
_NUMBERS = (
  *("temperature", "top_p", "min_p", "typical_p", "epsilon_cutoff"),
  *("repetition_penalty", "length_penalty"),
)
_MAX_ID = 2**31 - 1


class GenerationKnobs(knobs_lib.Group):
  """Prompts to continue, and the sampler or search.

  Attributes:
    prompts: Prompts to continue at the end of training and by `--mode=decode`
      without `--prompt`; '' begins a document. Without any of these knobs there
      are no samples at the end of training.
    max_new_tokens: Maximum number of tokens generated for each prompt.
    num_samples: Continuations of each prompt; more than 1 needs `temperature`.
    temperature: Divides the logits; 0 always selects the most likely token.
    top_k: Samples from the k most likely tokens only; needs `temperature`.
    top_p: Samples from the fewest tokens with this probability; as `top_k`.
    min_p: Removes tokens less likely than this times the most likely one.
    repetition_penalty: Above 1 avoids tokens of the prompt or continuation.
    beam_size: Searches for the most likely text; not with `temperature`.
    best_end: Ends each continuation where it is most likely as a whole (Pax:
      `optimize_eos`).
    guidance_scale: Factor of the difference to the logits after
      `negative_prompt` (classifier-free guidance).
    negative_prompt: A prompt whose continuations are avoided; '' is an empty
      document.
    rerank_every: Number of tokens after which the most likely of each
      `rerank_samples` continuations replaces the others.
    rerank_samples: See `rerank_every`; divides `num_samples`.
    cache_stages: Numbers of new tokens up to which the cache grows in turn.
    suffixes: Texts whose log likelihoods after each continuation are written.
    draft_tokens: Tokens that are drafted for each step (speculative decoding).
    draft_run: Run of a draft model; None looks drafts up in the text so far.
    stop: Texts that end a continuation.
  """

  prompts: tuple[str, ...] | None = None
  max_new_tokens: int | None = None
  num_samples: int | None = None
  temperature: float | None = None
  top_k: int | None = None
  top_p: float | None = None
  min_p: float | None = None
  repetition_penalty: float | None = None
  beam_size: int | None = None
  best_end: bool | None = None
  guidance_scale: float | None = None
  negative_prompt: str | None = None
  rerank_every: int | None = None
  rerank_samples: int | None = None
  cache_stages: tuple[int, ...] | None = None
  suffixes: tuple[str, ...] | None = None
  draft_tokens: int | None = None
  draft_run: str | None = None
  stop: tuple[str, ...] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftRun:
  """The model of another run, which drafts tokens of the same vocabulary.

  Attributes:
    run: Its directory, with the newest checkpoint to use.
    num_tokens: Number of drafted tokens for each step.
  """

  run: str
  num_tokens: int = 4

  def __post_init__(self) -> None:
    checks.check_size(self, "num_tokens")
    if not self.run:
      raise ValueError("DraftRun.run must be the directory of a run, got ''.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class NegativePrompt:
  """A prompt whose continuations are avoided (`methods.Guidance`).

  Attributes:
    scale: See `methods.Guidance`.
    prompt: The text; an empty one is the beginning of a document.
  """

  scale: float | tuple[float, ...]
  prompt: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerationSettings:
  """Prompts and how they are continued.

  Attributes:
    prompts: Texts to continue; an empty string starts a new document.
    max_new_tokens: Maximum number of tokens generated for each prompt.
    sampler: Draws a token from the logits of each sequence: a function, or the
      settings of all sequences, of which the n-th prompt has the seed + n.
    search: Searches for the most likely continuations instead; `None` samples.
    speculation: Drafts tokens that one step verifies (speculative decoding);
      None generates one token a step. The tokens, or the distribution of
      samples, are the same.
    method: Generates in another way than `generate.generate`, such as the
      methods of `decoding.methods`; None for that one.
    suffixes: Texts whose log likelihoods after each continuation are returned.
    num_samples: Number of continuations of each prompt; more than one requires
      another sampler than `Greedy`, or a search.
    num_alternatives: Number of most likely tokens that are stored for each
      step, with their log probabilities; not with a search.
    stop: Texts that end a continuation; they are no part of it.
    end_ids: Ids that end a sequence; None for the tokenizer's `end_id`.
    chat_template: Returns the prompt for the assistant's next turn in a list of
      messages; with named arguments if a chat has `tools` or other values.
      None without chats.
  """

  prompts: tuple[str, ...] = ("",)
  max_new_tokens: int = 256
  sampler: samplers.Sampler | sampling.Settings = dataclasses.field(
    default_factory=samplers.Greedy
  )
  search: beam_search.BeamSearch | None = None
  speculation: speculative.PromptLookup | DraftRun | None = None
  method: generate.Method | NegativePrompt | None = None
  suffixes: tuple[str, ...] = ()
  num_samples: int = 1
  num_alternatives: int = 0
  stop: tuple[str, ...] = ()
  end_ids: tuple[int, ...] | None = None
  chat_template: Callable[..., str] | None = None

  def __post_init__(self) -> None:
    if not self.prompts:
      raise ValueError(
        "GenerationSettings.prompts is empty; set at least one, such as ('',)."
      )
    checks.check_positive(self, "max_new_tokens", "num_samples")
    checks.check_size(self, "max_new_tokens")  # Positions are int32.
    checks.check_non_negative(self, "num_alternatives")
    if not all(self.stop):
      raise ValueError(
        f"GenerationSettings.stop must have no empty text, got {self.stop}."
      )
    is_greedy = isinstance(self.sampler, samplers.Greedy) or (
      isinstance(self.sampler, sampling.Settings)
      and not self.sampler.temperature
    )
    if self.search is not None:
      if not is_greedy:
        raise ValueError(
          "GenerationSettings.search and sampler must not both be set: a search"
          " draws nothing; set no temperature."
        )
      if self.num_samples > self.search.beam_size:
        raise ValueError(
          f"GenerationSettings.num_samples ({self.num_samples}) must be at most"
          f" BeamSearch.beam_size ({self.search.beam_size})."
        )
      if self.num_alternatives:
        raise ValueError(
          "GenerationSettings.num_alternatives must be 0 with a search, got"
          f" {self.num_alternatives}."
        )
    elif self.num_samples > 1 and is_greedy:
      raise ValueError(
        f"GenerationSettings.num_samples is {self.num_samples}, but greedy"
        " samples of a prompt are all equal; set a temperature."
      )
    if self.speculation is not None:
      self._check_speculation()
    if self.method is not None and (self.search or self.speculation):
      raise ValueError(
        "GenerationSettings.method must be None with a search or speculation,"
        f" got {self.method!r}."
      )
    if self.suffixes and self.speculation is not None:
      raise ValueError(
        "GenerationSettings.suffixes must be () with speculation, got"
        f" {self.suffixes}."
      )
    if not all(self.suffixes):
      raise ValueError(
        "GenerationSettings.suffixes must have no empty text, got"
        f" {self.suffixes}."
      )
    if self.end_ids is not None and not self.end_ids:
      raise ValueError(
        "GenerationSettings.end_ids is empty; use None for the tokenizer's"
        " end_id."
      )

  def _check_speculation(self) -> None:
    if self.search is not None:
      raise ValueError(
        "GenerationSettings.speculation must be None with a search, whose beams"
        " are not drafted; set no beam_size or no draft."
      )
    if to_settings(self.sampler) is None:
      raise ValueError(
        "GenerationSettings.speculation needs the sampler Greedy, Temperature"
        f" or Settings, got {self.sampler!r}."
      )


def to_settings(sampler: Any) -> sampling.Settings | None:
  """Returns a sampler as settings of a request; None if it is another one.

  `Temperature.top_k_recall` changes speed only; settings find all ids.
  """
  if isinstance(sampler, sampling.Settings):
    return sampler
  if isinstance(sampler, samplers.Greedy):
    return sampling.Settings(temperature=0.0)
  if isinstance(sampler, samplers.Temperature):
    return sampling.Settings(
      temperature=sampler.temperature,
      top_k=sampler.top_k,
      top_p=1.0 if sampler.top_p is None else sampler.top_p,
      global_normalize=sampler.global_normalize,
    )
  return None


def make_sampler(
  temperature: float | None,
  top_k: int | None,
  top_p: float | None,
  *,
  min_p: float | None = None,
  **others: Any,
) -> fdl.Config[Any]:
  """Returns a sampler; a temperature of 0 or None selects the most likely id.

  Args:
    temperature: Divides the logits.
    top_k: See `sampling.Settings`, as all others; None leaves a field unset.
    top_p: See above.
    min_p: See above.
    **others: Fields that need no temperature, such as `repetition_penalty`.

  Raises:
    ValueError: `top_k`, `top_p` or `min_p` is set without a temperature.
  """
  truncation = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
  given = {k: v for k, v in truncation.items() if v is not None}
  others = {k: v for k, v in others.items() if v is not None}
  if given and temperature is None:
    raise ValueError(f"{' and '.join(given)}: set temperature, too.")
  if others or (temperature and min_p is not None):
    return fdl.Config(
      sampling.Settings, temperature=temperature or 0.0, **given, **others
    )
  if temperature:
    return fdl.Config(samplers.Temperature, temperature=temperature, **given)
  return fdl.Config(samplers.Greedy)


def from_knobs(knobs: GenerationKnobs) -> fdl.Config[GenerationSettings] | None:
  """Returns the settings of knobs; None if all are None.

  A beam search has Pax's length norm.

  Raises:
    knobs.KnobError: See `make_sampler`.
  """
  others = {
    "min_p": knobs.min_p,
    "repetition_penalty": knobs.repetition_penalty,
  }
  sampled = (knobs.temperature, knobs.top_k, knobs.top_p)
  sampler = search = speculation = None
  if any(value is not None for value in (*sampled, *others.values())):
    try:
      sampler = make_sampler(*sampled, **others)
    except ValueError as error:
      raise knobs_lib.make_error(knobs, f".{error}") from None
  if knobs.beam_size is not None:
    search = fdl.Config(beam_search.BeamSearch, beam_size=knobs.beam_size)
  count, run = knobs.draft_tokens, knobs.draft_run
  drafted = {} if count is None else {"num_tokens": count}
  if run is not None:
    speculation = fdl.Config(DraftRun, run=run, **drafted)
  elif drafted:
    speculation = fdl.Config(speculative.PromptLookup, **drafted)
  fields = {
    "prompts": knobs.prompts,
    "max_new_tokens": knobs.max_new_tokens,
    "num_samples": knobs.num_samples,
    "stop": knobs.stop,
    "sampler": sampler,
    "search": search,
    "speculation": speculation,
    "method": _make_method(knobs),
    "suffixes": knobs.suffixes,
  }
  given = {name: value for name, value in fields.items() if value is not None}
  return fdl.Config(GenerationSettings, **given) if given else None


# Knobs that need another one.
_REQUIRED = {
  "negative_prompt": "guidance_scale",
  "rerank_every": "rerank_samples",
  "rerank_samples": "rerank_every",
}
_METHODS = ("best_end", "guidance_scale", "rerank_every", "cache_stages")


def _make_method(knobs: GenerationKnobs) -> fdl.Config[Any] | None:
  """Returns the method of knobs, or None.

  Raises:
    knobs.KnobError: Knobs of two methods are set, or one is missing.
  """
  for name, other in _REQUIRED.items():
    if getattr(knobs, name) is not None and getattr(knobs, other) is None:
      raise knobs_lib.make_error(knobs, f".{name}: set {other}, too.")
  chosen = [n for n in _METHODS if getattr(knobs, n) not in (None, False)]
  if not chosen:
    return None
  if len(chosen) > 1:
    raise knobs_lib.make_error(
      knobs, f".{chosen[0]} and {chosen[1]} are two methods; set one of them."
    )
  from paxon.layers.decoding import methods  # Few jobs need it.

  if knobs.best_end:
    return fdl.Config(methods.BestEnd)
  if knobs.cache_stages is not None:
    return fdl.Config(methods.Growth, stages=knobs.cache_stages)
  if knobs.rerank_every is not None:
    return fdl.Config(
      methods.Rerank,
      interval=knobs.rerank_every,
      block_num_samples=knobs.rerank_samples,
    )
  return fdl.Config(
    NegativePrompt,
    scale=knobs.guidance_scale,
    prompt=knobs.negative_prompt or "",
  )


def read_end_ids(value: Any) -> tuple[int, ...]:
  """Returns the ids of an `eos_token_id`.

  Raises:
    ValueError: It is neither an id nor a list of ids.
  """
  ids = tuple(value) if isinstance(value, list) else (value,)
  if not all(type(i) is int and -1 <= i <= _MAX_ID for i in ids):
    raise ValueError(
      f"{_FILE}: eos_token_id must be an id or a list of ids, got {value!r}."
    )
  return ids


def _check_file(found: Mapping[str, Any]) -> None:
  """Raises ValueError for a value of another type."""
  flags = {"early_stopping": "true, false or 'never'", "do_sample": "a boolean"}
  expected = {
    **flags,
    **dict.fromkeys(_INTEGERS, "an integer"),
    **dict.fromkeys(_NUMBERS, "a finite number"),
  }
  for name in found.keys() & expected.keys():
    value, what = found[name], expected[name]
    if name in flags:
      is_valid = isinstance(value, bool) or what.endswith(repr(value))
    elif isinstance(value, float) and name in _NUMBERS:
      is_valid = math.isfinite(value)
    else:
      is_valid = type(value) is int
    if not is_valid:
      raise ValueError(f"{_FILE}: {name} must be {what}, got {value!r}.")


def use_file(
  settings: fdl.Config[GenerationSettings],
  found: Mapping[str, Any],
  knobs: GenerationKnobs,
) -> None:
  """Sets the sampler or search of a `generation_config.json`, in place.

  Where the file has no value, transformers' defaults apply. A knob replaces the
  value of the file; any of those of sampling replaces all of them.

  Args:
    settings: Settings of the knobs.
    found: The content of the file.
    knobs: The knobs that the settings have.

  Raises:
    ValueError: A value of the file has another type.
  """
  found = {name: value for name, value in found.items() if value is not None}
  _check_file(found)
  penalty = knobs.repetition_penalty
  if penalty is None:
    penalty = found.get("repetition_penalty")
  sampled: dict[str, Any] = {
    "temperature": knobs.temperature,
    "top_k": knobs.top_k,
    "top_p": knobs.top_p,
    "min_p": knobs.min_p,
  }
  others = {
    "repetition_penalty": None if penalty == 1.0 else penalty,
    "min_new_tokens": found.get("min_new_tokens") or None,
  }
  draws = found.get("do_sample") and all(v is None for v in sampled.values())
  beams = found.get("num_beams") or 1
  if draws:
    sampled = {
      "temperature": found.get("temperature", 1.0),
      "top_k": found.get("top_k", 50) or None,
      "top_p": found.get("top_p"),
      "min_p": found.get("min_p") or None,
    }
    for name, field, neutral in (
      ("typical_p", "typical_p", 1.0),
      ("epsilon_cutoff", "epsilon", 0.0),
    ):
      if found.get(name) not in (None, neutral):
        others[field] = found[name]
  elif beams > 1 and not any(sampled.values()) and settings.search is None:
    early = found.get("early_stopping", False)
    settings.search = fdl.Config(
      beam_search.BeamSearch,
      beam_size=beams,
      length_alpha=found.get("length_penalty", 1.0),
      length_offset=0.0,
      min_new_tokens=found.get("min_new_tokens") or 0,
      pool=beam_search.Pool.TOP,
      stop=_STOPS.get(early, beam_search.Stop.BOUND),
    )
    return
  if draws or any(value is not None for value in others.values()):
    settings.sampler = make_sampler(**sampled, **others)

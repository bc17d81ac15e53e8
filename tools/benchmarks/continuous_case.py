"""Continuous batching compared with static batches, and with shared prefixes.

Requests have prompts and completions of different lengths: the numbers of new
tokens are log-normal, so a few are several times longer than most. A static
batch ends with its longest completion; continuous batching begins another
request in each slot that becomes free. Decoding is greedy.
"""

from collections.abc import Callable, Sequence
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paxon.layers.decoding import (
  continuous_batching,
  generate,
  model_steps,
  prompts,
  sampling,
)
from paxon.tools.benchmarks import (
  decoder_lm_workload,
  pure_jax_decoder_lm,
  timing,
)

# At least 1.5 times as fast as static batches.
LIMIT = 1 / 1.5
_NUM_BATCHES = 16
_MEDIAN_NEW, _MAX_NEW = 24, 256


@dataclasses.dataclass(frozen=True, kw_only=True)
class Served:
  """A model and requests to it.

  Attributes:
    make_steps: Returns the steps of the model.
    values: Its variables.
    requests: Greedy ones, several batches of them.
    num_slots: Sequences of a batch.
    cache_length: Slots for the longest request.
    vocab_size: Number of ids.
  """

  make_steps: Callable[[Any], Any]
  values: Any
  requests: Sequence[continuous_batching.Request]
  num_slots: int
  cache_length: int
  vocab_size: int

  @property
  def num_new(self) -> int:
    """Number of new tokens of all requests."""
    return sum(_count(request) for request in self.requests)

  def make_batcher(self, **fields: Any) -> continuous_batching.Batcher:
    """Returns a batch for the requests."""
    return continuous_batching.Batcher(
      self.make_steps,
      self.values,
      num_slots=self.num_slots,
      cache_length=self.cache_length,
      key=jax.random.key(0),
      **fields,
    )


def make_served(
  workload: decoder_lm_workload.Workload, *, prefix: int = 0
) -> Served:
  """Returns a model and requests, which begin with `prefix` equal ids.

  The length of the workload is that of the rest of the longest prompt.
  """
  c = workload.config
  model = decoder_lm_workload.make_model(c, scan=workload.scan)
  initial = pure_jax_decoder_lm.initial_state(c, jax.random.key(0))["params"]
  rng = np.random.default_rng(0)
  first = rng.integers(0, c.vocab_size, prefix).tolist()
  requests = []
  for _ in range(_NUM_BATCHES * workload.global_batch_size):
    size = int(rng.integers(workload.length // 2, workload.length + 1))
    count = round(rng.lognormal(np.log(_MEDIAN_NEW)))
    settings = sampling.Settings(
      temperature=0.0, max_new_tokens=int(np.clip(count, 1, _MAX_NEW))
    )
    requests.append(
      continuous_batching.Request(
        prompt=[*first, *rng.integers(0, c.vocab_size, size).tolist()],
        settings=settings,
      )
    )

  def make_steps(values: Any) -> Any:
    return (
      model_steps.make_prefill(model, values),
      model_steps.make_decode_step(model, values),
    )

  return Served(
    make_steps=make_steps,
    values=decoder_lm_workload.decoding_variables(c, initial),
    requests=requests,
    num_slots=workload.global_batch_size,
    cache_length=prefix + workload.length + _MAX_NEW,
    vocab_size=c.vocab_size,
  )


def make_static(served: Served) -> Callable[[], list[list[int]]]:
  """Returns a function that returns the ids by batches in order of arrival."""
  width = max(len(request.prompt) for request in served.requests)

  @jax.jit
  def run(values: Any, ids: Any, lengths: Any, settings: Any) -> Any:
    prefill, decode_step = served.make_steps(values)
    return generate.generate(
      prefill,
      decode_step,
      ids,
      lengths,
      sampler=settings,
      key=jax.random.key(0),
      max_new_tokens=_MAX_NEW,
    )

  def serve() -> list[list[int]]:
    found = []
    for i in range(0, len(served.requests), served.num_slots):
      part = served.requests[i : i + served.num_slots]
      batch = prompts.pad_right([r.prompt for r in part], length=width)
      settings = sampling.stack(
        [request.settings for request in part],
        vocab_size=served.vocab_size,
      )
      ids, lengths = jnp.asarray(batch.ids), jnp.asarray(batch.lengths)
      done = run(served.values, ids, lengths, settings)
      ids = np.asarray(done.ids)
      found += [
        ids[row, : _count(request)].tolist() for row, request in enumerate(part)
      ]
    return found

  return serve


def make_continuous(
  served: Served, batcher: continuous_batching.Batcher
) -> Callable[[], list[list[int]]]:
  """Returns a function that returns the ids by continuous batching."""

  def serve() -> list[list[int]]:
    tokens = batcher.run(served.requests)
    return [[token.id for token in each] for each in tokens]

  return serve


def run(
  workload: decoder_lm_workload.Workload, *, name: str, rounds: int
) -> timing.Comparison:
  """Returns the time of continuous batching over that of static batches."""
  served = make_served(workload)
  ours = make_continuous(served, served.make_batcher())
  pairs = timing.interleave(ours, make_static(served), rounds=rounds)
  return _compare(served, pairs, workload, name, "static batches", LIMIT)


def run_prefixes(
  workload: decoder_lm_workload.Workload, *, name: str, rounds: int
) -> timing.Comparison:
  """Returns the time with shared pages over that of a contiguous cache."""
  served = make_served(workload, prefix=4 * workload.length)
  whole = make_continuous(served, served.make_batcher())
  # As much memory.
  pages = served.num_slots * -(-served.cache_length // 64)
  shared = make_continuous(served, served.make_batcher(num_pages=pages))
  pairs = timing.interleave(shared, whole, rounds=rounds)
  return _compare(served, pairs, workload, name, "contiguous cache", 1.0)


def _compare(
  served: Served,
  pairs: timing.Pairs,
  workload: decoder_lm_workload.Workload,
  name: str,
  second: str,
  limit: float,
) -> timing.Comparison:
  return timing.Comparison(
    case=name,
    first="continuous batching",
    second=second,
    pairs=pairs,
    limit=limit,
    facts={
      **workload.facts(),
      "requests": len(served.requests),
      "new tokens": served.num_new,
      "new tokens/s": served.num_new / min(pairs.first),
    },
  )


def _count(request: continuous_batching.Request) -> int:
  count = request.settings.max_new_tokens
  assert count is not None
  return count

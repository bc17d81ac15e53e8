"""Which microbatch and repeat a stage works on at each tick of a pipeline.

In a tick every stage computes once and hands on what it has made. Stage `s`
follows stage 0 by `s` ticks, so its work at tick `t` is number `t - s` of

  repeat 0: microbatch 0 ... M - 1,   repeat 1: microbatch 0 ... M - 1,   ...

A microbatch that begins its next repeat must have left the last stage, so a
repeat takes at least as many ticks as there are stages. A stage without work
computes anyway, on something: a bubble.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp


class Work(NamedTuple):
  """What a stage does in a tick.

  Attributes:
    repeat: Which of its repeats, int; of a bubble, any.
    microbatch: Which microbatch, int; of a bubble, any.
    is_live: Whether it is no bubble.
  """

  repeat: jax.Array
  microbatch: jax.Array
  is_live: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timetable:
  """The ticks of a pipeline.

  Attributes:
    num_stages: P.
    num_microbatches: M.
    num_repeats: How often each microbatch passes through all stages, R.
  """

  num_stages: int
  num_microbatches: int
  num_repeats: int = 1

  @property
  def repeat_ticks(self) -> int:
    """Ticks between the beginnings of two repeats."""
    return max(self.num_microbatches, self.num_stages)

  @property
  def num_ticks(self) -> int:
    """Ticks until the last microbatch has left the last stage."""
    last = (self.num_repeats - 1) * self.repeat_ticks
    return last + self.num_microbatches + self.num_stages - 1

  @property
  def wait(self) -> int:
    """Ticks that a microbatch waits before its next repeat."""
    if self.num_repeats == 1:
      return 0
    return self.repeat_ticks - self.num_stages

  def work(self, tick: jax.Array, stage: jax.Array) -> Work:
    """Returns what a stage does in a tick, both int32."""
    number = tick - stage
    last = self.num_repeats - 1
    repeat = jnp.clip(number // self.repeat_ticks, 0, last)
    microbatch = number - repeat * self.repeat_ticks
    is_live = (microbatch >= 0) & (microbatch < self.num_microbatches)
    microbatch = jnp.clip(microbatch, 0, self.num_microbatches - 1)
    return Work(repeat, microbatch, is_live)

  def first_tick(self, *, repeat: int) -> int:
    """Returns the tick at which stage 0 begins a repeat."""
    return repeat * self.repeat_ticks

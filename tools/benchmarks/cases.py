"""The cases of the bench, by name."""

from collections.abc import Callable, Mapping
import dataclasses
from typing import Any, Final

from paxon.tools.benchmarks import (
  comparison,
  decoder_lm_workload,
  layer_contests,
  pure_jax_decoder_lm,
)

Workload = decoder_lm_workload.Workload
Config = pure_jax_decoder_lm.Config


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
  """Something that can be measured.

  Attributes:
    summary: One line of what it compares.
    workload: Its sizes; options of the command line change them.
    run: `(workload, name, rounds) -> Comparison`.
    rounds: How many rounds it has by default.
    is_default: Whether it is measured when no case is named.
    group: Name by which all cases of a group are measured.
    unused: Sizes of the workload that it has no use for.
  """

  summary: str
  workload: Workload
  run: Callable[[Workload, str, int], comparison.Comparison]
  rounds: int
  is_default: bool = True
  group: str | None = None
  unused: tuple[str, ...] = ()


# As in tasks/lm/params/quickstart.py, which tools must not import.
QUICKSTART = Workload(
  config=Config(
    vocab_size=264,
    num_layers=4,
    embed_dim=128,
    mlp_dim=384,
    num_heads=4,
    num_kv_heads=1,
    head_dim=32,
  ),
  global_batch_size=8,
  length=256,
)
# About six times the work in matrix products.
LARGER = Workload(
  config=Config(
    vocab_size=1024,
    num_layers=6,
    embed_dim=256,
    mlp_dim=768,
    num_heads=8,
    num_kv_heads=2,
    head_dim=32,
  ),
  global_batch_size=8,
  length=256,
)
# Of one layer.
LAYER = Workload(
  config=Config(
    vocab_size=264,
    num_layers=1,
    embed_dim=256,
    mlp_dim=768,
    num_heads=8,
    num_kv_heads=2,
    head_dim=32,
  ),
  global_batch_size=8,
  length=256,
)
# A step reads 72 MB of parameters; with less, the time of a single operation
# would count.
GENERATION = dataclasses.replace(QUICKSTART, length=128)
# Its steps read 80 MB of parameters.
LARGER_GENERATION = Workload(
  config=Config(
    vocab_size=1024,
    num_layers=6,
    embed_dim=512,
    mlp_dim=1536,
    num_heads=8,
    num_kv_heads=2,
    head_dim=64,
  ),
  global_batch_size=8,
  length=128,
)
DEEP = dataclasses.replace(
  QUICKSTART, config=dataclasses.replace(QUICKSTART.config, num_layers=48)
)
# GPT-2's sizes with this model's parts: three mlp kernels of 2048 have as many
# parameters as GPT-2's two of 3072. The vocabulary is rounded up to 64.
GPT2_124M = Workload(
  config=Config(
    vocab_size=50_304,
    num_layers=12,
    embed_dim=768,
    mlp_dim=2048,
    num_heads=12,
    num_kv_heads=12,
    head_dim=64,
    dtype="bfloat16",
  ),
  global_batch_size=16,
  length=1024,
)
DENSE_1B = Workload(
  config=Config(
    vocab_size=32_768,
    num_layers=16,
    embed_dim=2048,
    mlp_dim=6144,
    num_heads=16,
    num_kv_heads=8,
    head_dim=128,
    dtype="bfloat16",
  ),
  global_batch_size=4,
  length=2048,
)


def _train_step(
  steps: int,
) -> Callable[[Workload, str, int], comparison.Comparison]:
  def run(workload: Workload, name: str, rounds: int) -> comparison.Comparison:
    from paxon.tools.benchmarks import train_step_case

    return train_step_case.run(workload, name=name, rounds=rounds, steps=steps)

  return run


# Imported when they run: these need the packages of the whole program.
def _loop(workload: Workload, name: str, rounds: int) -> comparison.Comparison:
  from paxon.tools.benchmarks import loop_case

  return loop_case.run(workload, name=name, rounds=rounds)


def _save(workload: Workload, name: str, rounds: int) -> comparison.Comparison:
  from paxon.tools.benchmarks import save_case

  return save_case.run(workload, name=name, rounds=rounds)


def _layer(workload: Workload, name: str, rounds: int) -> comparison.Comparison:
  from paxon.tools.benchmarks import layer_case

  return layer_case.run(workload, name=name, rounds=rounds, calls=1)


def _generation(
  workload: Workload, name: str, rounds: int
) -> comparison.Comparison:
  from paxon.tools.benchmarks import generation_case

  return generation_case.run(workload, name=name, rounds=rounds)


def _compile_depth(
  workload: Workload, name: str, rounds: int
) -> comparison.Comparison:
  from paxon.tools.benchmarks import compile_depth_case

  return compile_depth_case.run(workload, name=name, rounds=rounds)


def _pipeline_compile(
  num_microbatches: int, *, has_schedule: bool
) -> Callable[[Workload, str, int], comparison.Comparison]:
  def run(workload: Workload, name: str, rounds: int) -> comparison.Comparison:
    from paxon.tools.benchmarks import pipeline_compile_case

    return pipeline_compile_case.run(
      workload,
      name=name,
      rounds=rounds,
      num_microbatches=num_microbatches,
      has_schedule=has_schedule,
    )

  return run


LAYERS: Final = "layers"
PIPELINE_COMPILE: Final = "pipeline_compile"

CASES: Mapping[str, Case] = {
  "train_step": Case(
    summary="our train step / plain JAX, at the quickstart's size",
    workload=QUICKSTART,
    run=_train_step(1),
    rounds=45,
  ),
  "train_step_larger": Case(
    summary="the same with about six times the work",
    workload=LARGER,
    run=_train_step(1),
    rounds=11,
  ),
  "save_blocking": Case(
    summary="the time for which a save blocks / a step",
    workload=QUICKSTART,
    run=_save,
    rounds=15,
  ),
  "loop": Case(
    summary="the whole training program / its bare step",
    workload=QUICKSTART,
    run=_loop,
    rounds=11,
  ),
  "gpt2_124m": Case(
    summary="our train step / plain JAX, GPT-2 124M; for a GPU",
    workload=GPT2_124M,
    run=_train_step(10),
    rounds=11,
    is_default=False,
  ),
  "dense_1b": Case(
    summary="our train step / plain JAX, 1B parameters; for a large GPU",
    workload=DENSE_1B,
    run=_train_step(5),
    rounds=11,
    is_default=False,
  ),
  **{
    name: Case(
      summary=f"forward and backward / plain JAX: {summary}",
      workload=LAYER,
      run=_layer,
      rounds=45,
      is_default=False,
      group=LAYERS,
      unused=("vocab_size", "num_layers"),
    )
    for name, (summary, _) in layer_contests.CONTESTS.items()
  },
  "generation": Case(
    summary="greedy, 128 tokens after 128, batch 8 / plain JAX",
    workload=GENERATION,
    run=_generation,
    # A short one each, so that both see the same weather.
    rounds=101,
    is_default=False,
    group=LAYERS,
  ),
  "generation_larger": Case(
    summary="the same with 24 times the parameters in products",
    workload=LARGER_GENERATION,
    run=_generation,
    rounds=21,
    is_default=False,
    group=LAYERS,
  ),
  "compile_depth": Case(
    summary="time to compile 48 scanned layers / 2 layers",
    workload=DEEP,
    run=_compile_depth,
    rounds=5,
    is_default=False,
    group=LAYERS,
  ),
  **{
    f"{PIPELINE_COMPILE}_{number}{'_schedule' * has_schedule}": Case(
      summary=f"time to compile {number} microbatches of a pipeline / 4"
      + ", by a schedule" * has_schedule,
      workload=QUICKSTART,
      run=_pipeline_compile(number, has_schedule=has_schedule),
      rounds=5,
      is_default=False,
      group=PIPELINE_COMPILE,
      unused=("global_batch_size",),
    )
    for has_schedule in (False, True)
    for number in (16, 64)
  },
}


def named(name: str) -> list[str]:
  """Returns the cases of a name: one, those of a group, or none."""
  if name in CASES:
    return [name]
  return [case for case, value in CASES.items() if value.group == name]


def defaults() -> list[str]:
  """Returns the names of the cases that are measured when none is named."""
  return [name for name, case in CASES.items() if case.is_default]


def resized(workload: Workload, sizes: Mapping[str, Any]) -> Workload:
  """Returns a workload with other sizes.

  Args:
    workload: Not changed.
    sizes: By name: fields of the workload, or of its model. `None` is as it is.
  """
  given = {name: value for name, value in sizes.items() if value is not None}
  own = {f.name for f in dataclasses.fields(Workload)}
  model = {name: given.pop(name) for name in set(given) - own}
  return dataclasses.replace(
    workload, **given, config=dataclasses.replace(workload.config, **model)
  )

"""The cases of the bench and their sizes."""

from collections.abc import Callable, Mapping
import dataclasses
import functools
from typing import Any

from paxon.tools.benchmarks import (
  block_case,
  continuous_case,
  decoder_lm_workload,
  generation_case,
  loop_case,
  pure_jax_decoder_lm,
  step_cases,
  timing,
)

Workload = decoder_lm_workload.Workload
Config = pure_jax_decoder_lm.Config
Run = Callable[..., timing.Comparison]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
  """A pair of contenders.

  Attributes:
    summary: One line for the help text.
    workload: Sizes; options of the command line change them.
    run: `(workload, *, name, rounds) -> Comparison`.
    rounds: Default number of rounds.
    is_default: Whether it runs when the command names no case.
  """

  summary: str
  workload: Workload
  run: Run
  rounds: int
  is_default: bool = False


# The sizes of tasks/lm/params/quickstart.py, which tools must not import.
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
# About six times the FLOPs in matmuls.
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
# The size of the comparison with peers; `long` has as many tokens.
PEERS = Workload(
  config=Config(
    vocab_size=1024,
    num_layers=4,
    embed_dim=256,
    mlp_dim=768,
    num_heads=8,
    num_kv_heads=8,
    head_dim=32,
  ),
  global_batch_size=8,
  length=256,
)
DEEP = dataclasses.replace(
  PEERS, config=dataclasses.replace(PEERS.config, num_layers=24)
)
# As many tokens as QUICKSTART; attention is most of the time.
LONG = dataclasses.replace(QUICKSTART, global_batch_size=1, length=2048)
GENERATION = dataclasses.replace(QUICKSTART, length=128)
# A decoding step reads 80 MB of parameters.
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
# One layer of eight experts, two for each token.
MIXTURE = dataclasses.replace(
  QUICKSTART,
  config=dataclasses.replace(QUICKSTART.config, embed_dim=256, mlp_dim=512),
)
# GPT-2's size with this model's layers: three mlp kernels of width 2048 have as
# many parameters as GPT-2's two of 3072. The vocabulary is rounded up to 64.
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


# Images of 14 x 14 patches or pixels, and about two seconds of speech.
BLOCKS = Workload(
  config=Config(
    vocab_size=1,
    num_layers=1,
    embed_dim=192,
    mlp_dim=768,
    num_heads=4,
    num_kv_heads=4,
    head_dim=48,
  ),
  global_batch_size=8,
  length=196,
)
RECURRENT_BLOCKS = dataclasses.replace(BLOCKS, length=256)


def _make_train_step(
  steps: int, baseline: step_cases.Baseline = step_cases.Baseline.PLAIN
) -> Run:
  return functools.partial(step_cases.run, steps=steps, baseline=baseline)


_run_transformers = functools.partial(
  generation_case.run_torch, use_transformers=True
)


CASES: Mapping[str, Case] = {
  "train_step": Case(
    summary="train step / plain JAX, quickstart size",
    workload=QUICKSTART,
    run=_make_train_step(1),
    rounds=45,
    is_default=True,
  ),
  "train_step_larger": Case(
    summary="train step / plain JAX, six times the work",
    workload=LARGER,
    run=_make_train_step(1),
    rounds=11,
    is_default=True,
  ),
  "train_step_long": Case(
    summary="train step / plain JAX, one sequence of 2,048 tokens",
    workload=LONG,
    run=_make_train_step(1),
    rounds=11,
  ),
  "tuned": Case(
    summary="train step / JAX tuned by hand for CPUs",
    workload=PEERS,
    run=_make_train_step(4, step_cases.Baseline.TUNED),
    rounds=11,
  ),
  "flax": Case(
    summary="train step / flax.linen and optax",
    workload=PEERS,
    run=_make_train_step(4, step_cases.Baseline.FLAX),
    rounds=11,
  ),
  "torch": Case(
    summary="train step / torch.compile; needs torch and a C++ compiler",
    workload=PEERS,
    run=_make_train_step(4, step_cases.Baseline.TORCH),
    rounds=11,
  ),
  "torch_eager": Case(
    summary="train step / torch without compiling; needs torch",
    workload=PEERS,
    run=_make_train_step(4, step_cases.Baseline.EAGER_TORCH),
    rounds=11,
  ),
  "compile": Case(
    summary="compiling the train step / plain JAX, 24 layers",
    workload=DEEP,
    run=step_cases.run_compile,
    rounds=5,
  ),
  **{
    f"{kind}{'_torch' if use_torch else ''}": Case(
      summary=f"{words} / {'torch; needs it' if use_torch else 'plain JAX'}",
      workload=workload,
      run=functools.partial(block_case.run, kind=kind, use_torch=use_torch),
      rounds=45,
    )
    for kind, words, workload in (
      ("moe", "a mixture of experts, forward and backward", MIXTURE),
      ("residual_block", "a residual block, forward and backward", BLOCKS),
      ("vit_block", "a block of a vision transformer", BLOCKS),
      ("conformer_block", "a block of a Conformer", BLOCKS),
      ("lstm", "an LSTM", RECURRENT_BLOCKS),
      ("mamba2_block", "a Mamba-2 block", RECURRENT_BLOCKS),
      ("vector_quantizer", "a vector quantizer", BLOCKS),
    )
    for use_torch in (False, True)
  },
  "gpt2_124m": Case(
    summary="train step / plain JAX, GPT-2 124M; for a GPU",
    workload=GPT2_124M,
    run=_make_train_step(10),
    rounds=11,
  ),
  "dense_1b": Case(
    summary="train step / plain JAX, 1B parameters; for a large GPU",
    workload=DENSE_1B,
    run=_make_train_step(5),
    rounds=11,
  ),
  "save_blocking": Case(
    summary="time that a save blocks / train step",
    workload=QUICKSTART,
    run=step_cases.run_save,
    rounds=15,
    is_default=True,
  ),
  "loop": Case(
    summary="training program / its bare train step",
    workload=QUICKSTART,
    run=loop_case.run,
    rounds=11,
    is_default=True,
  ),
  "generation": Case(
    summary="greedy decoding of 128 tokens / plain JAX, batch 8",
    workload=GENERATION,
    run=generation_case.run,
    # Short ones, so that both contenders see the same state of the machine.
    rounds=101,
  ),
  "generation_larger": Case(
    summary="the same with 24 times the parameters",
    workload=LARGER_GENERATION,
    run=generation_case.run,
    rounds=21,
  ),
  "transformers": Case(
    summary="greedy decoding of 128 tokens / transformers; needs torch",
    workload=dataclasses.replace(PEERS, length=128),
    run=_run_transformers,
    rounds=15,
  ),
  "torch_generation": Case(
    summary="greedy decoding of 128 tokens / torch.compile; needs torch",
    workload=dataclasses.replace(PEERS, length=128),
    run=generation_case.run_torch,
    rounds=15,
  ),
  **{
    f"{name}_{batch}": Case(
      summary=f"batch {batch} / {second}",
      workload=dataclasses.replace(
        LARGER_GENERATION, global_batch_size=batch, length=64
      ),
      run=run,
      rounds=11,
    )
    for batch in (1, 8, 64)
    for name, second, run in (
      ("generation", "plain JAX", generation_case.run),
      ("transformers", "transformers", _run_transformers),
    )
  },
  **{
    f"quantized_{recipe}": Case(
      summary=f"decoding with {recipe} weights / float weights, batch 1",
      workload=dataclasses.replace(
        LARGER_GENERATION, global_batch_size=1, length=64
      ),
      run=functools.partial(generation_case.run_quantized, recipe=recipe),
      rounds=11,
    )
    for recipe in ("int8", "int4", "int4_group", "fp8")
  },
  "continuous": Case(
    summary="continuous batching / static batches, skewed lengths",
    workload=dataclasses.replace(LARGER_GENERATION, length=64),
    run=continuous_case.run,
    rounds=7,
  ),
  "prefixes": Case(
    summary="pages that prompts share / contiguous cache, 256 equal ids",
    workload=dataclasses.replace(LARGER_GENERATION, length=64),
    run=continuous_case.run_prefixes,
    rounds=7,
  ),
}


def resize(workload: Workload, sizes: Mapping[str, Any]) -> Workload:
  """Returns a workload with other sizes.

  Args:
    workload: Not changed.
    sizes: Fields of the workload or of its model, by name; None keeps a field.
  """
  given = {name: value for name, value in sizes.items() if value is not None}
  own = {f.name for f in dataclasses.fields(Workload)}
  model = {name: given.pop(name) for name in set(given) - own}
  return dataclasses.replace(
    workload, **given, config=dataclasses.replace(workload.config, **model)
  )

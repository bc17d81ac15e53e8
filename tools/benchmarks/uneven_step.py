"""Train steps with a vocabulary that the mesh does not divide, and with one.

  tools/python -m paxon.tools.benchmarks.uneven_step [--vocab_size=50257]
    [--tensor=8] [--embed_dim=768] [--length=512] [--rounds=5] [--steps=1]

Blocks of steps with the vocabulary alternate with blocks of the next multiple
of 64 that `tensor` divides. The cost of moving the table does not depend on the
number of tokens, 2 * `length`, so its share of a step is realistic only if this
is; few tokens (`--embed_dim=128 --length=64`) measure mostly the move. On a
machine without accelerators the mesh has virtual devices of the CPU, so the
ratio is that of all work, not of one device.
"""

import argparse
from collections.abc import Callable, Sequence
import dataclasses
import math
import sys

import jax

from paxon.sharding import rules
from paxon.tools.benchmarks import cases, decoder_lm_workload, timing


def measure(
  vocab_sizes: tuple[int, int],
  *,
  tensor: int,
  embed_dim: int,
  length: int,
  rounds: int,
  steps: int,
) -> timing.Pairs:
  """Returns seconds of a step with each of two vocabularies.

  Args:
    vocab_sizes: The vocabularies.
    tensor: Devices that share the vocabulary.
    embed_dim: Width of the model.
    length: Tokens of each of two sequences.
    rounds: Number of blocks of each.
    steps: Steps of a block.
  """
  first, second = (
    _make_block(n, tensor, embed_dim, length, steps) for n in vocab_sizes
  )
  found = timing.interleave(first, second, rounds=rounds)
  return timing.Pairs(
    first=tuple(seconds / steps for seconds in found.first),
    second=tuple(seconds / steps for seconds in found.second),
  )


def _make_block(
  vocab_size: int, tensor: int, embed_dim: int, length: int, steps: int
) -> Callable[[], None]:
  """Returns a function that runs a block of steps."""
  sizes = {
    "vocab_size": vocab_size,
    "embed_dim": embed_dim,
    "mlp_dim": 4 * embed_dim,
    "num_heads": tensor,
    "num_kv_heads": tensor,
    "head_dim": 16,
  }
  base = cases.QUICKSTART
  workload = dataclasses.replace(
    base,
    config=dataclasses.replace(base.config, **sizes),
    global_batch_size=2,
    length=length,
  )
  ours = decoder_lm_workload.compile_ours(
    workload.job(mesh=f"tensor={tensor}"), devices=jax.devices()[:tensor]
  )
  state = ours.session.initial_state()

  def run() -> None:
    nonlocal state
    for step in range(steps):
      state, _ = ours.step(state, ours.batches[step % len(ours.batches)])
    jax.block_until_ready(state)

  return run


def main(argv: Sequence[str]) -> int:
  """Prints the times of a step and their ratio; returns the exit status."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--vocab_size", type=int, default=50_257)
  parser.add_argument("--tensor", type=int, default=8)
  parser.add_argument("--embed_dim", type=int, default=768)
  parser.add_argument("--length", type=int, default=512)
  parser.add_argument("--rounds", type=int, default=5)
  parser.add_argument("--steps", type=int, default=1)
  given = parser.parse_args(argv)
  for name, value in vars(given).items():
    if value <= 0:
      parser.error(f"--{name} must be positive, got {value}")
  # Before the first use of JAX; it has no effect on accelerators.
  jax.config.update("jax_num_cpu_devices", given.tensor)
  even = rules.round_up(given.vocab_size, math.lcm(64, given.tensor))
  pairs = measure(
    (given.vocab_size, even),
    tensor=given.tensor,
    embed_dim=given.embed_dim,
    length=given.length,
    rounds=given.rounds,
    steps=given.steps,
  )
  for size, seconds in zip(
    (given.vocab_size, even), (pairs.first, pairs.second), strict=True
  ):
    median = timing.median_interval(seconds).median
    print(f"step with {size:,} words: {1e3 * median:.2f} ms")
  ratio = timing.median_interval(pairs.ratios())
  print(f"ratio: {ratio.median:.4f} ({ratio.low:.4f} to {ratio.high:.4f})")
  return 0


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))

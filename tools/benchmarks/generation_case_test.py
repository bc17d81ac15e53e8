"""Our decoding compared with plain JAX: the same tokens at the same cost.

Costs are XLA's own counts, which do not depend on the load of the machine.
"""

from collections.abc import Callable
import functools
import itertools
import re
from typing import Any

import jax
import numpy as np
import pytest

from paxon.layers.cpu import forms
from paxon.tools.benchmarks import (
  cases,
  continuous_case,
  generation_case,
  torch_decoder_lm,
)


def _costs(step: jax.stages.Compiled) -> dict[str, float]:
  cost, memory = step.cost_analysis(), step.memory_analysis()
  return {
    "flops": cost["flops"],
    "memory": memory.temp_size_in_bytes
    + memory.argument_size_in_bytes
    + memory.output_size_in_bytes,
  }


def _layer_operations(program: jax.stages.Compiled) -> list[str]:
  """Returns the operations of one layer of a decoding step, compiled.

  A generation has a loop over layers in a loop over steps, and nothing else has
  loops in loops.
  """
  bodies, body = {}, None
  for line in program.as_text().splitlines():
    if line.endswith("{"):
      body = bodies.setdefault(line.split()[0].lstrip("%"), [])
    elif body is not None and " = " in line:
      body.append(line.strip())
  inner = {
    name: re.findall(r"\bbody=%?([\w.-]+)", "\n".join(lines))
    for name, lines in bodies.items()
  }
  (layer,) = {
    name for outer in itertools.chain(*inner.values()) for name in inner[outer]
  }
  free = r"[\])}] (parameter|get-tuple-element|tuple|bitcast|constant)\("
  return [line for line in bodies[layer] if not re.search(free, line)]


def test_generations_agree_and_cost_the_same():
  sizes = {"embed_dim": 128, "mlp_dim": 192, "vocab_size": 64, "length": 16}
  workload = cases.resize(cases.LARGER_GENERATION, {**sizes, "head_dim": 16})
  both = generation_case.compile_both(workload, is_stacked=True)
  ids, expected = both.run_ours(), both.run_theirs()
  assert ids.shape == expected.shape == (8, 16)
  np.testing.assert_array_equal(ids, expected)
  assert len(np.unique(ids)) > 4
  costs, given = _costs(both.ours), _costs(both.theirs)
  ratios = {cost: costs[cost] / given[cost] for cost in costs}
  # Caches are no more memory. Ours has logits of all tokens of a prompt, and
  # each loop is counted once, so they weigh more here than in a generation.
  assert ratios["memory"] < 1.02, ratios
  assert ratios["flops"] < 1.08, ratios
  # Positions and masks are not computed again in every layer.
  ours, theirs = (_layer_operations(each) for each in (both.ours, both.theirs))
  assert len(theirs) > 20
  assert len(ours) <= len(theirs), sorted(ours)


@pytest.mark.parametrize("num_kv_heads", [1, 2])
def test_separate_layers_do_not_copy_caches(num_kv_heads, monkeypatch):
  monkeypatch.setattr(forms, "MIN_BYTES_TO_SEPARATE", 0)
  sizes = {"embed_dim": 32, "mlp_dim": 48, "vocab_size": 64, "length": 12}
  sizes |= {"num_layers": 3, "num_heads": 4, "head_dim": 8}
  sizes |= {"num_kv_heads": num_kv_heads}
  both = generation_case.compile_both(cases.resize(cases.PEERS, sizes))
  np.testing.assert_array_equal(both.run_ours(), both.run_theirs())
  text = both.ours.as_text()
  # The last of 24 tokens is not stored.
  assert f"f32[8,{num_kv_heads},23,8]" in text
  assert not re.search(r"f32\[(1,)?8,[12],23,8\]\S* copy\(", text)
  # Positions and segments of three layers.
  written = re.findall(r"s32\[(?:1,)?8,23\]\S* dynamic-update-slice\(", text)
  assert len(written) == 3 * 2
  # Nor do layers compute angles again: those of the prompt and of a step.
  assert text.count(" sine(") == 2


def test_quantized_generation_reads_stored_weights():
  sizes = {"embed_dim": 64, "mlp_dim": 96, "vocab_size": 32, "length": 8}
  sizes |= {"num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
  workload = cases.resize(cases.CASES["quantized_int8"].workload, sizes)
  both = generation_case.compile_both(workload)
  program, values = generation_case.compile_quantized(both, workload, "int8")
  ids = program(values, both.prompts, both.lengths)
  assert ids.shape == both.run_ours().shape == (1, 8)
  kernels = 2 * 64 * (2 * 64 + 2 * 32 + 3 * 96)
  outputs = 2 * (64 + 2 * 32 + 64 + 2 * 96 + 64)
  saved = 4 * kernels - (kernels + 4 * outputs)
  float_bytes, stored = (
    each.memory_analysis().argument_size_in_bytes
    for each in (both.ours, program)
  )
  assert float_bytes - stored == saved


def test_continuous_batching_generates_what_static_batches_do(monkeypatch):
  monkeypatch.setattr(continuous_case, "_MEDIAN_NEW", 3)
  monkeypatch.setattr(continuous_case, "_MAX_NEW", 12)
  sizes = {"embed_dim": 32, "mlp_dim": 48, "vocab_size": 64, "length": 6}
  sizes |= {"num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
  sizes |= {"global_batch_size": 4}
  workload = cases.resize(cases.CASES["continuous"].workload, sizes)
  served = continuous_case.make_served(workload, prefix=9)
  batcher = served.make_batcher(num_pages=40, chunk=4)
  ids = continuous_case.make_continuous(served, batcher)()
  assert ids == continuous_case.make_static(served)()
  assert batcher.pages.num_reused >= 20 * 8
  counts = [len(each) for each in ids]
  assert sum(counts) == served.num_new
  # In order of arrival, the longest of a batch is much longer than most.
  longest = [max(counts[i : i + 4]) for i in range(0, len(counts), 4)]
  assert sum(longest) * 4 > 1.5 * sum(counts)


def test_transformers_generates_the_same():
  pytest.importorskip("transformers")
  _check_torch(torch_decoder_lm.make_generate)


def test_torch_generates_the_same():
  pytest.importorskip("torch")
  make = torch_decoder_lm.make_static_generate
  _check_torch(functools.partial(make, is_compiled=False))


def _check_torch(make: Callable[..., Any]) -> None:
  sizes = {"embed_dim": 32, "mlp_dim": 48, "vocab_size": 64, "length": 12}
  sizes |= {"num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
  workload = cases.resize(cases.PEERS, sizes)
  both = generation_case.compile_both(workload)
  # With initial values the last id of a prompt is repeated.
  params = {
    name: 16 * x if name in ("out", "down") else x
    for name, x in both.their_values.items()
  }
  arrays = both.prompts, both.lengths
  expected = np.asarray(both.theirs(params, *arrays))
  generate = make(workload.config, params, *arrays, num_new=workload.length)
  # The second call begins with a full cache.
  for _ in range(2):
    np.testing.assert_array_equal(generate(), expected)
  assert np.mean(expected[:, 1:] != expected[:, :-1]) > 0.5

"""Tests that our layers compute and cost what the hand-written ones do.

They share no code, so each is a witness for the other; costs are XLA's own
counts, which do not depend on how busy a machine is.
"""

import ast
import itertools
import pathlib
import re

import jax
import numpy as np
import pytest

from paxon.tools.benchmarks import (
  cases,
  compile_depth_case,
  generation_case,
  layer_case,
  layer_contests,
  pipeline_compile_case,
  pure_jax_attention,
  pure_jax_block,
  pure_jax_cross_block,
  pure_jax_generation,
  pure_jax_latent_attention,
)

BASELINES = (
  pure_jax_attention,
  pure_jax_block,
  pure_jax_cross_block,
  pure_jax_generation,
  pure_jax_latent_attention,
)

# The derivative of a combined projection with biases is 3.2 % more bytes than
# that of the baseline's slices: two products read one concatenation, and
# XLA:CPU writes it for each.
TOLERANCE = 0.04
COSTS = ("flops", "transcendentals", "bytes accessed")


def _costs(step: jax.stages.Compiled) -> dict[str, float]:
  cost, memory = step.cost_analysis(), step.memory_analysis()
  return {name: cost[name] for name in COSTS} | {
    "memory": memory.temp_size_in_bytes
    + memory.argument_size_in_bytes
    + memory.output_size_in_bytes
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


@pytest.mark.parametrize("name", layer_contests.CONTESTS)
def test_layers_agree_and_cost_the_same(name):
  sizes = {"global_batch_size": 4, "length": 128}
  workload = cases.resized(cases.LAYER, sizes)
  contest = layer_contests.CONTESTS[name][1](workload)
  # With little effort of the compiler; it counts the same.
  ours, theirs = (
    contest.compiled(layer, xla_backend_optimization_level=0)
    for layer in (contest.ours, contest.baseline)
  )
  arguments = contest.arguments()
  actual, expected = ours(*arguments), theirs(*arguments)
  assert jax.tree.structure(actual) == jax.tree.structure(expected)
  for a, e in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
    assert a.dtype == e.dtype
    size = np.linalg.norm(e)
    assert size > 0
    assert np.linalg.norm(a - e) < 1e-5 * size
  costs, given = _costs(ours), _costs(theirs)
  ratios = {cost: costs[cost] / given[cost] for cost in given}
  print(name, ratios)
  assert all(ratio < 1 + TOLERANCE for ratio in ratios.values()), ratios
  # Both count all products, or a bug of the count would pass.
  assert abs(ratios["flops"] - 1) < TOLERANCE


def test_compares_two_running_layers():
  workload = cases.resized(cases.LAYER, {"global_batch_size": 1, "length": 8})
  result = layer_case.run(workload, name="block_pre", rounds=3, calls=2)
  assert len(result.pairs.first) == len(result.pairs.second) == 3
  assert min(result.pairs.first + result.pairs.second) > 0
  assert result.limit == layer_case.LIMIT
  assert result.facts["batch"] == "1x8"


def test_generations_agree_and_cost_the_same():
  sizes = {"embed_dim": 128, "mlp_dim": 192, "vocab_size": 64, "length": 16}
  workload = cases.resized(cases.LARGER_GENERATION, {**sizes, "head_dim": 16})
  both = generation_case.compile_both(workload)
  ids, expected = both.run_ours(), both.run_theirs()
  assert ids.shape == expected.shape == (8, 16)
  np.testing.assert_array_equal(ids, expected)
  assert len(np.unique(ids)) > 4
  costs, given = _costs(both.ours), _costs(both.theirs)
  ratios = {cost: costs[cost] / given[cost] for cost in ("flops", "memory")}
  # Caches are no more memory. Ours has logits of all tokens of a prompt, and
  # each loop is counted once, so they weigh more here than in a generation.
  assert ratios["memory"] < 1.02, ratios
  assert ratios["flops"] < 1.08, ratios
  # Where tokens stand, and masks, must not be made in every layer.
  ours, theirs = (_layer_operations(each) for each in (both.ours, both.theirs))
  assert len(theirs) > 20
  assert len(ours) <= len(theirs), sorted(ours)


def test_the_depth_of_a_scanned_model_does_not_change_its_program():
  sizes = {"embed_dim": 32, "mlp_dim": 48, "vocab_size": 64, "length": 16}
  workload = cases.resized(cases.DEEP, sizes)
  shallow, deep = (
    compile_depth_case.lowered(workload, num_layers=n).as_text().count("\n")
    for n in (compile_depth_case.SHALLOW, workload.config.num_layers)
  )
  assert workload.config.num_layers == 48
  assert shallow == deep


@pytest.mark.parametrize("has_schedule", [False, True])
def test_microbatches_of_a_pipeline_do_not_change_its_program(has_schedule):
  sizes = {"embed_dim": 8, "mlp_dim": 8, "vocab_size": 16, "length": 8}
  workload = cases.resized(cases.QUICKSTART, sizes)
  few, many = (
    pipeline_compile_case.lowered(
      workload, num_microbatches=n, has_schedule=has_schedule
    )
    .as_text()
    .count("\n")
    for n in (pipeline_compile_case.FEW, 64)
  )
  assert few == many


@pytest.mark.parametrize("module", BASELINES)
def test_baselines_are_short_and_need_only_jax(module):
  text = pathlib.Path(module.__file__).read_text()
  assert len(text.splitlines()) < 150
  nodes = list(ast.walk(ast.parse(text)))
  imported = {n.module for n in nodes if isinstance(n, ast.ImportFrom)}
  imported |= {
    a.name for n in nodes if isinstance(n, ast.Import) for a in n.names
  }
  allowed = {"dataclasses", "functools", "typing", "jax", "jax.numpy"}
  assert imported <= allowed

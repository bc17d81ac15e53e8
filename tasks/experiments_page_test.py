"""Tests for the table of experiments."""

import json
import pathlib

import pytest

from paxon.tasks import experiments_page, golden

_ROOT = pathlib.Path(__file__).parent.parent
_PLANS = pathlib.Path(__file__).parent / "plans" / "files"
_PARAMS = "paxon.tasks.lm.params."


def test_page_is_up_to_date():
  stored = (_ROOT / experiments_page.PAGE).read_text().splitlines()
  assert experiments_page.page().splitlines() == stored, experiments_page.MEND


@pytest.mark.parametrize(
  ("plan", "rel"),
  [
    # Compilers pad; arguments also include a batch and counters.
    ("LmCloudSpmd2B.v4_2x2x1", 0.001),
    ("LmCloudSpmd128B.v4_4x8x8", 0.001),
    ("LmCloudSpmd1024B.v4_8x16x16", 0.001),
    ("C4Spmd22BAdam2xv4_128.v4_2x_4x4x4", 0.001),
  ],
)
def test_estimates_match_compiled_programs(plan, rel):
  stored = json.loads((_PLANS / f"{plan}.json").read_text())
  found = experiments_page.figures(golden.load(stored["experiment"]).job())
  figures = stored["figures"]
  assert found.devices == figures["devices"]
  assert found.flops == pytest.approx(figures["flops"]["model"], rel=1e-3)
  assert found.state == pytest.approx(figures["memory"]["arguments"], rel=rel)


def test_a_small_model_by_hand():
  found = experiments_page.figures(
    golden.load(f"{_PARAMS}lm_cloud.LmCloudSpmdTest").job()
  )
  layer = 4 * 64 * 64 + 2 * 64 * 256
  norms = 2 * 2 * 64 + 256 + 64
  assert found.parameters == 32_000 * 64 + 2 * (layer + norms) + 2 * 64
  products = 32_000 * 64 + 2 * layer
  attention = 12 * 2 * 64 * 1024**2 * 4
  assert found.flops == 6 * products * 4 * 1024 + attention
  assert found.state == 12 * found.parameters
  assert found.layer_inputs == 2 * 4 * 1024 * 64 * 2


def _ticks(stages, microbatches, repeats):
  """Returns the number of ticks of a pipeline."""
  begin = 0
  for repeat in range(repeats):
    # The first microbatch has returned, and the last one has started.
    begin += max(stages, microbatches) if repeat else 0
  return begin + microbatches - 1 + stages


def test_stages_split_the_layers():
  made = golden.load(f"{_PARAMS}lm_cloud.LmCloudSpmdPipeline9B")
  whole = experiments_page.figures(made.without_pipeline().job())
  split = experiments_page.figures(made.job())
  assert (whole.parameters, whole.flops) == (split.parameters, split.flops)
  # Everything except the layers is replicated.
  rest = 12 * (32_000 * 4096 + 2 * 4096)
  assert whole.state - rest == pytest.approx(16 * (split.state - rest))
  # A stage of 3 layers saves its input in each tick: 4 sequences of 1,024
  # tokens in float32, over 4 devices; 128 ticks are work and 15 are bubbles.
  assert _ticks(16, 128, 1) == 143
  assert split.layer_inputs == 143 * 4 / 4 * 1024 * 4096 * 4


def test_circular_stages_save_inputs_of_each_repeat():
  made = golden.load(
    f"{_PARAMS}lm_cloud.LmCloudSpmdPipelineMultislice2BCircular"
  )
  found = experiments_page.figures(made.job())
  rows = made.pipeline_microbatch_size
  number = made.global_batch_size // rows
  ticks = _ticks(made.num_stages, number, made.circular_repeats)
  assert made.circular_repeats > 1
  # Four devices per stage; two bytes per value.
  kept = ticks * rows / 4 * made.length * made.embed_dim
  assert found.layer_inputs == pytest.approx(kept * 2)

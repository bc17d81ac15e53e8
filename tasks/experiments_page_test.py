"""Tests for the table of experiments."""

import json
import pathlib

import pytest

from paxon.tasks import experiments_page, golden

_ROOT = pathlib.Path(__file__).parent.parent
_PLANS = pathlib.Path(__file__).parent / "plans" / "files"
_PARAMS = "paxon.tasks.lm.params."


@pytest.mark.nightly
def test_page_is_up_to_date():
  stored = (_ROOT / experiments_page.PAGE).read_text().splitlines()
  assert experiments_page.page().splitlines() == stored, experiments_page.UPDATE


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
  found = experiments_page.estimate(golden.load(stored["experiment"]).job())
  figures = stored["figures"]
  assert found.devices == figures["devices"]
  assert found.flops == pytest.approx(figures["flops"]["model"], rel=1e-3)
  assert found.state == pytest.approx(figures["memory"]["arguments"], rel=rel)


def test_a_small_model_by_hand():
  found = experiments_page.estimate(
    golden.load(f"{_PARAMS}lm_cloud.LmCloudSpmdTest").job()
  )
  layer = 4 * 64 * 64 + 2 * 64 * 256
  norms = 2 * 2 * 64 + 256 + 64
  assert found.parameters == 32_000 * 64 + 2 * (layer + norms) + 2 * 64
  products = 32_000 * 64 + 2 * layer
  attention = 12 * 2 * 64 * 1024**2 * 4
  assert found.flops == 6 * products * 4 * 1024 + attention
  assert found.state == 12 * found.parameters


def test_stages_split_the_layers():
  made = golden.load(f"{_PARAMS}lm_cloud.LmCloudSpmdPipeline9B")
  whole = experiments_page.estimate(made.without_pipeline().job())
  split = experiments_page.estimate(made.job())
  assert (whole.parameters, whole.flops) == (split.parameters, split.flops)
  # Everything except the layers is replicated.
  rest = 12 * (32_000 * 4096 + 2 * 4096)
  assert whole.state - rest == pytest.approx(16 * (split.state - rest))

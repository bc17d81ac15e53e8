"""Tests of the analytical estimate of memory and FLOPs against outside counts.

Memory: what the compiler for CUDA reserves. FLOPs: the products in the program
without loops, read from its StableHLO text by the parser below.
"""

import collections
import functools
import math
import re
import subprocess
import sys

import fiddle as fdl
import jax
import pytest

from paxon.layers import remat
from paxon.runner.plan import flops, hardware, result, testing
from paxon.runner.plan.memory import forecast
from paxon.runner.planning import child, forecast_cases
from paxon.runner.training import compiled_steps
from paxon.runner.training import session as session_lib

_CASES = forecast_cases.CASES


@pytest.fixture(scope="module")
def plans(tmp_path_factory):
  """All cases, compiled for H200 in one process."""
  target = testing.target("h200:1x8")
  file = tmp_path_factory.mktemp("plans") / "plan.json"
  subprocess.run(
    [sys.executable, "-m", forecast_cases.__name__, str(file)],
    env=child.environment(target, is_compiled=True),
    capture_output=True,
    timeout=1200,
    check=True,
  )
  return {plan.experiment: plan for plan in result.from_json(file.read_text())}


# Where jaxlib 0.11's schedulers hold a tensor longer than those of 0.10, which
# the forecast follows: docs/design/0013.
_LATER = {"projections": 0.17, "fsdp_tensor_wide_bf16": 0.12}


def _tolerance(name):
  is_later = jax.__version_info__ >= (0, 11)
  return _LATER.get(name, 0.1) if is_later else 0.1


@pytest.mark.parametrize("name", _CASES)
def test_the_peak_is_within_a_tenth_of_the_compilers(plans, name):
  memory = plans[name].memory
  assert memory.forecast == pytest.approx(memory.peak, rel=_tolerance(name))


def test_half_of_the_cases_are_mostly_activations(plans):
  larger = [p.memory.temporaries > p.memory.arguments for p in plans.values()]
  assert len(larger) >= 12
  assert sum(larger) >= len(larger) / 2


def test_twice_the_batch_needs_more_for_both(plans):
  once, twice = plans["nothing"].memory, plans["twice"].memory
  assert twice.temporaries > 1.5 * once.temporaries
  assert twice.forecast - twice.arguments > 1.5 * (
    once.forecast - once.arguments
  )
  assert twice.saved["layer inputs"] == 2 * once.saved["layer inputs"]


def test_saving_everything_needs_more_for_both(plans):
  less, more = plans["nothing"].memory, plans["none"].memory
  assert sum(more.saved.values()) > 10 * sum(less.saved.values())
  assert more.temporaries > 5 * less.temporaries
  # What one more saves, the other needs.
  saved = sum(more.saved.values()) - sum(less.saved.values())
  assert more.temporaries - less.temporaries == pytest.approx(saved, rel=0.25)


def _session(**knobs):
  config = forecast_cases.ForecastLm(**knobs).job()
  devices = jax.devices()[: 4 if knobs.get("mesh") else 1]
  return session_lib.open_session(fdl.build(config), devices=devices)


@functools.cache
def _forecast(**knobs):
  session = _session(**knobs)
  return forecast.forecast(
    compiled_steps.trace_train_step(session),
    inputs=(session.abstract_state(), dict(session.batch)),
    mesh=session.layout.mesh,
    arguments=0,
    platform=hardware.Platform.CUDA,
  )


_OTHERS = {"layer inputs", "unnamed"}


@pytest.mark.parametrize("microbatches", [1, 2])
def test_saved_names_are_those_of_the_policy(microbatches):
  changed = {"num_microbatches": microbatches} if microbatches > 1 else {}
  found = _forecast(remat="only", **changed)
  assert set(found.saved) - _OTHERS == set(forecast_cases.ONLY)
  knobs = forecast_cases.ForecastLm()
  tokens = knobs.num_layers * 16 * knobs.length // microbatches
  assert found.saved[remat.FEED_FORWARD_HIDDEN] == 4 * tokens * knobs.mlp_dim
  assert found.saved[remat.ATTENTION_CONTEXT] == 4 * tokens * 8 * 64
  assert found.saved["layer inputs"] == 4 * tokens * knobs.embed_dim


@pytest.mark.parametrize("mesh", ["", "fsdp=4"])
def test_nothing_saved_is_the_layers_inputs_alone(mesh):
  knobs = {"compute_dtype": "bfloat16", "mesh": mesh}
  saved = _forecast(remat="nothing", **knobs).saved
  assert set(saved) == _OTHERS
  assert saved["layer inputs"] == 2 * 6 * 16 * 1024 * 512 // (4 if mesh else 1)


def test_everything_saved_has_all_names_but_the_unread():
  # Nothing reads an output again whose gradient is only passed on.
  assert set(_forecast(remat="none").saved) - _OTHERS == {
    remat.ATTENTION_QUERY,
    remat.ATTENTION_KEY,
    remat.ATTENTION_VALUE,
    remat.ATTENTION_CONTEXT,
    remat.FEED_FORWARD_HIDDEN,
  }


def test_a_mesh_divides_what_is_saved():
  one = _forecast(remat="only")
  four = _forecast(remat="only", mesh="fsdp=4")
  for name in (*forecast_cases.ONLY, "layer inputs"):
    assert four.saved[name] == one.saved[name] // 4


_FUNCTION = re.compile(r"func\.func \w+ @(\w+)\(.*?\n  \}", re.DOTALL)
_TENSOR = r"tensor<([\dx]*)x?\w+>"
_DOT = re.compile(
  r"stablehlo\.dot_general .*?contracting_dims = \[([\d, ]*)\] x .*?"
  rf": \({_TENSOR}, {_TENSOR}\) -> {_TENSOR}"
)


def _products(text):
  """FLOPs of the products of a StableHLO module without loops."""
  assert "stablehlo.while" not in text
  own, calls = {}, {}
  for function in _FUNCTION.finditer(text):
    body = function[0]
    own[function[1]] = 0
    for contract, lhs, _, out in _DOT.findall(body):
      lhs, out = (
        [int(n) for n in shape.split("x") if n] for shape in (lhs, out)
      )
      summed = math.prod(lhs[int(d)] for d in contract.split(",") if d.strip())
      own[function[1]] += 2 * summed * math.prod(out)
    calls[function[1]] = collections.Counter(re.findall(r"call @(\w+)\(", body))

  def total(name):
    return own[name] + sum(n * total(c) for c, n in calls[name].items())

  return total("main")


@functools.cache
def _unrolled_products(**knobs):
  """FLOPs of the products of a step, read from its text without loops.

  Cases that differ by their microbatches alone have one such text.
  """
  # A chunk of the head is a loop too.
  session = _session(**knobs, scan=False, chunk_length=None)
  unrolled = session.layout.lower(compiled_steps.trace_train_step(session))
  return _products(unrolled.as_text())


def _small(name):
  """Knobs of a case with fewer layers: lowering without a loop is slow."""
  return {**_CASES[name][1], "num_layers": 2}


@pytest.mark.parametrize("name", _CASES)
def test_flops_are_those_of_the_products_without_loops(name):
  knobs = _small(name)
  knobs.pop("mesh", None)
  counted = flops.count(
    compiled_steps.trace_train_step(_session(**knobs)).jaxpr
  )
  assert counted.notes == ()
  # A microbatch is a loop too.
  knobs.pop("num_microbatches", None)
  assert counted.hardware_flops == pytest.approx(
    _unrolled_products(**knobs), rel=0.02
  )

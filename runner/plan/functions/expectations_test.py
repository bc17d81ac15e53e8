"""Expectations of plans: sizes from shapes, and what errors name."""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
import pytest

from paxon.runner import user_error
from paxon.runner.plan import result, sample_plan, topology
from paxon.runner.plan.functions import expectations, function_plan

_ROWS, _WIDTH, _DEVICES = 64, 256, 8
# Bytes of the whole weight, which each device gathers, and of its arguments.
_WEIGHT = _WIDTH * _WIDTH * 4
_ARGUMENTS = (_WEIGHT + _ROWS * _WIDTH * 4) // _DEVICES


def _apply(weight, x):
  with jax.named_scope("dense"):
    return x @ weight


_SHAPES = (
  jax.ShapeDtypeStruct((_WIDTH, _WIDTH), jnp.float32),
  jax.ShapeDtypeStruct((_ROWS, _WIDTH), jnp.float32),
)
_KEYWORDS = {
  "target": "cpu:8",
  "mesh": {"fsdp": _DEVICES},
  "in_shardings": (PartitionSpec("fsdp"), PartitionSpec("fsdp")),
}


@pytest.fixture(name="plan", scope="module")
def _plan():
  return function_plan.plan(_apply, *_SHAPES, **_KEYWORDS)


def test_met_expectations_return_the_plan():
  found = expectations.assert_plan(
    _apply,
    *_SHAPES,
    **_KEYWORDS,
    peak=f">={_ARGUMENTS}B",
    arguments=f"<={_ARGUMENTS}B",
    # 2 K multiply-adds for each element of the result.
    flops=f"<={2 * _ROWS * _WIDTH * _WIDTH}FLOP",
    collectives={
      "all-gather over fsdp": f"<={_WEIGHT}B",
      "all-gather": f">={_WEIGHT}B",
      "all-to-all": "none",
    },
  )
  assert isinstance(found, result.Plan)


@pytest.mark.parametrize(
  ("expected", "texts"),
  [
    (
      {"arguments": f"<{_ARGUMENTS}B"},
      ["arguments: 40.00 KiB", "32.00 KiB  argument weight"],
    ),
    ({"peak": "<1KiB"}, ["peak: ", "expected <1KiB", "argument weight"]),
    ({"temporaries": "<1KiB"}, ["temporaries: 2", "f32[256,256]"]),
    ({"flops": ">1GFLOP"}, ["flops: 8.389 MFLOP", "dense"]),
    (
      {"collectives": {"all-gather over fsdp": "<100KiB"}},
      ["all-gather over fsdp: 256.00 KiB, expected <100KiB", "dense"],
    ),
    ({"collectives": "none"}, ["collectives: 256.00 KiB, expected none"]),
    ({"step": "<1s"}, ["step: unknown", "rates of cpu are not known"]),
    ({"fits": True}, ["fits: unknown, expected True", "usable unknown"]),
  ],
)
def test_an_unmet_expectation_names_value_and_causes(plan, expected, texts):
  with pytest.raises(AssertionError) as caught:
    expectations.assert_plan(plan, **expected)
  message = str(caught.value)
  assert message.startswith("_apply on cpu:8:\n")
  for text in texts:
    assert text in message


@pytest.mark.parametrize(
  ("expected", "text"),
  [
    ({"peak": "70 gigs"}, r"peak='70 gigs': .* GiB"),
    ({"peak": "70GiB"}, "<, <=, > or >="),
    ({"peak": "<70GB"}, "MiB, GiB"),
    ({"step": "<1GiB"}, "step='<1GiB'.* s, ms, us, such as '<70s'"),
    ({"collectives": {"allgather": "none"}}, "'allgather' is not a value"),
    ({"collectives": {"all-gather over": "none"}}, "is not a value"),
    ({"collectives": {"all-gather over data": "none"}}, "axis data.* fsdp"),
    ({"collectives": "few"}, "collectives='few'"),
    ({"target": "cpu:8"}, "only expectations, but got target"),
  ],
)
def test_a_bad_expectation_is_an_error(plan, expected, text):
  with pytest.raises(user_error.UserError, match=text):
    expectations.assert_plan(plan, **expected)


def test_without_the_compiler_nothing_passes(monkeypatch):
  monkeypatch.setattr(topology, "missing", lambda _: ("libtpu",))
  with pytest.raises(AssertionError, match="pip install libtpu"):
    expectations.assert_plan(
      _apply, *_SHAPES, **_KEYWORDS | {"target": "v5e:2x4"}, flops="<1PFLOP"
    )


def test_fit_and_time_of_a_known_plan():
  plan = sample_plan.plan()
  expectations.assert_plan(plan, fits=True, step="<=900ms", peak="<72.1GiB")
  with pytest.raises(AssertionError, match="fits: fits, expected False"):
    expectations.assert_plan(plan, fits=False)
  with pytest.raises(AssertionError, match=r"900 ms.*\n.*610 ms  matmuls"):
    expectations.assert_plan(plan, step="<899ms")


def test_a_program_that_the_compiler_rejects_does_not_fit():
  memory = sample_plan.memory(
    peak=None, temporaries=None, compiler_error="RESOURCE_EXHAUSTED: 99G"
  )
  plan = sample_plan.plan(memory=memory, compiled=False, collectives=())
  expectations.assert_plan(plan, fits=False)
  with pytest.raises(AssertionError) as caught:
    expectations.assert_plan(plan, fits=True, peak="<70GiB", collectives="none")
  message = str(caught.value)
  assert "fits: does not fit, expected True" in message
  assert "peak: unknown, expected <70GiB\n    RESOURCE_EXHAUSTED" in message
  assert "collectives: unknown" in message


def test_unread_collectives_are_not_none():
  plan = sample_plan.plan(
    collectives=(), notes=("Communication could not be read: KeyError: 1",)
  )
  with pytest.raises(AssertionError, match="collectives: unknown"):
    expectations.assert_plan(plan, collectives="none")


def test_a_limit_of_collectives_is_of_a_kind_of_collective():
  with pytest.raises(user_error.UserError, match="write peak="):
    expectations.assert_plan(sample_plan.plan(), collectives={"peak": "<1B"})

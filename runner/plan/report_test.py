"""Tests for plans as text: every figure, sentences, the comparison."""

import pytest

from paxon.runner import units
from paxon.runner.plan import report, result, sample_plan, sentences

_GIB = 2**30


@pytest.mark.parametrize(
  ("form", "number", "text"),
  [
    (units.size, 0, "0 B"),
    (units.size, 2048, "2.00 KiB"),
    (units.size, 1.5 * _GIB, "1.50 GiB"),
    (units.size, 2000 * _GIB, "1.95 TiB"),
    (units.flops, 0, "0 FLOP"),
    (units.flops, 5e5, "0.500 MFLOP"),
    (units.flops, 12.5e9, "12.500 GFLOP"),
    (units.flops, 3e18, "3.000 EFLOP"),
    (units.seconds, 0, "0 s"),
    (units.seconds, 1234.5, "1,234.50 s"),
    (units.seconds, 0.5, "500 ms"),
    (units.seconds, 0.9996, "1000 ms"),
    (units.seconds, 1.25e-3, "1.25 ms"),
    (units.seconds, 18.44e-6, "18.4 us"),
    (units.seconds, 1.4e-10, "< 0.01 us"),
    (units.share, 0.42, "42 %"),
    (units.share, 0.0125, "1.2 %"),
    (units.share, 1e-5, "< 0.1 %"),
    (units.share, 0, "0.0 %"),
  ],
)
def test_writes_numbers_for_people(form, number, text):
  assert form(number) == text


def test_the_text_has_every_figure():
  text = report.to_text(sample_plan.plan())
  for part in (
    "plan: tasks.a.B on h200:1x8",
    "  --fdl.mesh=fsdp=8",
    "  8 devices on 8 GPUs as fsdp=8, batch 16x4096",
    "  parameters                                     10.00 GiB",
    "    of which (analytical estimate)",
    "    saved: layer inputs                          12.00 GiB",
    "  peak                                           72.00 GiB",
    "  HBM traffic per step                          777.00 GiB",
    "118.00 of 131.00 GiB are usable; the CUDA compiler enforces no limit",
    "excluding masked attention (causal)              2.987 PFLOP",
    "recomputed                                       802.000 TFLOP",
    "executed (compiled program)                        4.011 PFLOP",
    "    62 %  DecoderLm/stack/layers/blocks_0/feed_forward",
    "all-gather                  fsdp       fast       129  61.00 GiB",
    "all-reduce (padded shards)  data,fsdp  network      3      812 B",
    "all-to-all  fsdp  65  7.00 GiB  DecoderLm/stack/layers/blocks_0/norm",
    "attention forward  cudnn             decided",
    "cublas or triton  autotuned at run time  bf16  451 matmuls",
    "decided                bf16     33 calls",
    "32  __cudnn$fmhaSoftmax",
    "sent  at least  dtypes",
    "53.38 GiB    128 ms  bfloat16, float8_e4m3fn",
    "quantized matmuls: 35 % of the executed FLOPs are covered, 30 % run in"
    " low precision",
    "  DecoderLm/stack/layers/blocks_0/feed_forward/einsum/gate  cublas fp8:"
    " weight gradient",
    "triton float16 (may change by autotuning): input gradient",
    "roofline lower bound on the step time (datasheet rates)",
    "  at most 125,548 tokens/s",
    "  MFU at most 72 %",
    "estimated step time (calibrated, independent of the bound)",
    "  exposed collectives (fsdp)              143 ms",
    "  range 720 ms to 1.12 s",
    "MFU: 77 % if only matmuls took time; 45 % at datasheet rates;"
    " 36 % estimated, from 29 % to 45 %",
    "factors: h200.json, measured 2026-11-01 on one NVIDIA H200",
    "generated: compiled in 4.5 s on 2026-11-21T10:41:09Z by jax 0.10.2",
    "  fingerprint 0123456789abcdef\n",
    "  xla_gpu_some_option=true",
    "warning: a table is left whole",
    "warning: gathers wait for each other",
    "note: a loop is counted once",
    "h200:1x8: fits, 61 % of usable memory",
  ):
    assert part in text


def test_says_when_the_program_executes_more_than_the_step_asks():
  assert "x the traced FLOPs" not in report.to_text(sample_plan.plan())
  more = sample_plan.plan(compiled_flops=5_978 * 10**12)
  text = report.to_text(more)
  assert "  the compiled program executes 1.490x the traced FLOPs" in text


def test_a_refusal_is_shown_with_what_to_change():
  memory = sample_plan.memory(
    peak=None,
    arguments=None,
    temporaries=None,
    compiler_error="RESOURCE_EXHAUSTED: 36.47G exceeds 30.75G",
  )
  plan = sample_plan.plan(
    memory=memory,
    compiled=False,
    fit="does not fit",
    advice=("Halve it.",),
    collectives=(),
  )
  text = report.to_text(plan)
  assert "compiler error: RESOURCE_EXHAUSTED: 36.47G" in text
  assert "rejected by the compiler after 4.5 s" in text
  assert "h200:1x8: does not fit\n  1. Halve it." in text
  assert "collectives per step" not in text


def test_changes_that_were_tried_stand_in_place_of_advice():
  plan = sample_plan.plan(
    memory=sample_plan.memory(peak=120 * _GIB),
    fit="does not fit",
    advice=("Halve it.",),
    verified_changes=(sample_plan.change(),),
    search=(sample_plan.change(overrides=("--fdl.mesh=tensor=8",)),),
  )
  text = report.to_text(plan)
  assert "two microbatches" in text
  assert "  --fdl.num_microbatches=2" in text
  assert "--fdl.mesh=tensor=8" in text
  assert "Halve it." not in text


def test_a_plan_without_a_compiler_has_its_state():
  plan = sample_plan.plan(
    memory=sample_plan.memory(peak=None, arguments=None, temporaries=None),
    compiled=False,
    fit="unknown",
    estimate=None,
    hbm_bytes=None,
    compiled_flops=None,
    fingerprint=None,
    compile_seconds=None,
    kernels={},
    kernel_choices=(),
    resharding=(),
  )
  text = report.to_text(plan)
  assert "traced, not compiled on 2026" in text
  assert (
    "  temporaries (analytical estimate)\n    gradients (upper bound)" in text
  )
  for absent in ("fingerprint", "kernels", "estimated step", "collectives per"):
    assert absent not in text


@pytest.mark.parametrize(
  ("kind", "devices", "chips", "text"),
  [
    ("cpu", 8, 8, "8 CPU devices"),
    ("h200", 1, 1, "1 device on 1 GPU"),
    ("h200", 512, 512, "512 devices on 512 GPUs"),
    ("v5e", 16, 16, "16 devices on 16 chips"),
    (
      "v4",
      2048,
      2048,
      r"2,048 devices on 2,048 chips (megacore: one device per chip)",
    ),
    ("v7x", 2, 1, "2 devices on 1 chip (2 per chip)"),
  ],
)
def test_says_devices_and_chips(kind, devices, chips, text):
  plan = sample_plan.plan(
    device_kind=kind, num_devices=devices, num_chips=chips
  )
  assert sentences.devices(plan).startswith(text)


def test_says_what_is_usable_and_who_says_so():
  tpu = sample_plan.memory(usable=30.75 * _GIB, capacity=32.0 * _GIB)
  plan = sample_plan.plan(device_kind="v4", memory=tpu)
  assert (
    sentences.capacity(plan)
    == "30.75 of 32.00 GiB are usable; the TPU compiler enforces this limit"
  )
  machine = sample_plan.memory(usable=None, capacity=None)
  plan = sample_plan.plan(device_kind="cpu", memory=machine)
  assert "not checked" in sentences.capacity(plan)


def test_says_when_jax_must_be_given_more_of_a_gpu():
  small, large = (
    sentences.capacity(sample_plan.plan(memory=sample_plan.memory(peak=n)))
    for n in (98 * _GIB, 99 * _GIB)
  )
  assert "XLA_PYTHON_CLIENT_MEM_FRACTION=0.9" in large
  assert "XLA_PYTHON_CLIENT_MEM_FRACTION" not in small


def test_names_the_compilers_of_the_platform_alone():
  versions = {"jax": "1", "libtpu": "2", "jax-cuda13-plugin": "3"}
  for kind, text in (
    ("cpu", "by jax 1"),
    ("v4", "by jax 1, libtpu 2"),
    ("h200", "by jax 1, jax-cuda13-plugin 3"),
  ):
    plan = sample_plan.plan(device_kind=kind, versions=versions)
    assert sentences.origin(plan).endswith(text)


@pytest.mark.parametrize(
  ("fields", "fit", "text"),
  [
    ({}, "fits", "fits, 61 % of usable memory"),
    (
      {"peak": 120 * _GIB},
      "does not fit",
      "does not fit, 102 % of usable memory",
    ),
    ({"compiler_error": "no", "peak": None}, "does not fit", "does not fit"),
    ({"usable": None}, "unknown", "unknown whether it fits"),
    (
      {"peak": None},
      "unknown",
      "unknown whether it fits (not compiled); state and batch take",
    ),
    (
      {"peak": None, "usable": None},
      "unknown",
      "unknown whether it fits (not compiled)",
    ),
  ],
)
def test_says_whether_it_fits(fields, fit, text):
  plan = sample_plan.plan(memory=sample_plan.memory(**fields), fit=fit)
  assert sentences.verdict(plan).startswith(text)


def test_says_what_came_from_the_cache():
  plan = sample_plan.plan(is_from_cache=True)
  assert "generated: from cache, compiled in 4.5 s on 2026" in report.to_text(
    plan
  )


def test_the_table_marks_the_best_that_fits():
  fast = sample_plan.plan(
    target="v4:4x4x4",
    num_chips=64,
    estimate=sample_plan.estimate(
      step=0.7, exposed={"fsdp": 0.08}, tokens_per_second=90_000.0, mfu=0.41
    ),
  )
  # Without an estimate, and best in everything if it only did fit.
  full = sample_plan.plan(
    target="h200:1x1",
    num_chips=1,
    memory=sample_plan.memory(peak=120 * _GIB),
    fit="does not fit",
    estimate=None,
  )
  failure = result.Failure(target="v5e:4x4", message="heads do not divide.")
  text = report.to_table([sample_plan.plan(), fast, full], [failure])
  assert text.splitlines() == [
    "target    chips        peak      usable  fit             bound  estimate"
    "  tokens/s    MFU   exposed   cost",
    "h200:1x8      8   72.00 GiB  118.00 GiB  fits          522 ms*    900 ms"
    "    72,816   36 %    163 ms  1.00*",
    "v4:4x4x4     64   72.00 GiB  118.00 GiB  fits          522 ms*   700 ms*"
    "   90,000*  41 %*  80.0 ms*   6.47",
    "h200:1x1      1  120.00 GiB  118.00 GiB  does not fit   522 ms         -"
    "         -      -         -      -",
    "v5e:4x4   no plan: heads do not divide.",
    "* best. tokens/s, MFU and cost are by the estimate. Cost is chips x"
    " seconds for each token, relative to the best that fits; prices of chips"
    " are not in it.",
  ]


def test_bounds_are_not_compared_with_estimates():
  text = report.to_table(
    [sample_plan.plan(), sample_plan.plan(target="h200:2x8", estimate=None)]
  )
  first, second = text.splitlines()[1:3]
  assert "tokens/s, MFU and cost are by the bound" in text
  assert "125,548*" in first
  assert "125,548*" in second


def test_targets_without_rates_are_compared_by_memory():
  cpu = sample_plan.plan(
    target="cpu:8",
    bound=None,
    estimate=None,
    fit="unknown",
    memory=sample_plan.memory(usable=None, capacity=None),
  )
  line = report.to_table([cpu]).splitlines()[1]
  assert line.split() == [
    *("cpu:8", "8", "72.00", "GiB", "-", "unknown"),
    *("-", "-", "-", "-", "-", "-"),
  ]

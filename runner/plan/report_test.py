"""Tests for plans as text: every figure, sentences, the comparison."""

import dataclasses

import pytest

from paxon.runner import units
from paxon.runner.plan import report, result, sample_plan, sections

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


def _words(text):
  """Returns the lines with single spaces, without indentation."""
  return [" ".join(line.split()) for line in text.splitlines()]


def test_the_text_has_every_section():
  lines = _words(report.to_text(sample_plan.plan()))
  for line in (
    "plan: tasks.a.B on h200:1x8",
    "--fdl.mesh=fsdp=8",
    "devices 8 devices on 8 GPUs, mesh fsdp=8",
    "batch 16x4096, 65,536 tokens",
    "parameters 7,504,924,672",
    # 72,816 x 86,400
    "throughput 72,816 tokens/s, 6.29 B a day, MFU 36 %",
    "training on 1,500,000,000,000 tokens 238.0 days, 45,777 device-hours,"
    " price 114,442",
    "parameters 10.00 GiB",
    "optimizer, in host memory 3.00 GiB",
    "host memory 4.00 GiB",
    "gradients (upper bound) 9.00 GiB",
    "saved: layer inputs (estimate) 12.00 GiB",
    "peak 72.00 GiB",
    "HBM traffic per step 777.00 GiB",
    "evaluation 6.00 GiB 37.00 GiB -",
    "saving - - 240.00 GiB all devices",
    "without masked attention (causal) 2.987 PFLOP",
    "recomputed 802.000 TFLOP",
    "The pipeline bubble is 2.8 % of the executed FLOPs.",
    "executed (compiled program) 4.011 PFLOP",
    "DecoderLm/stack/layers/blocks_0/feed_forward 62 % 2.501 PFLOP",
    "kind axes link count async payload sent at least dtypes",
    "all-gather fsdp fast 129 127 61.00 GiB 53.38 GiB 128 ms"
    " bfloat16 44.00 GiB, float8_e4m3fn 17.00 GiB",
    "all-reduce (padded shards) data,fsdp network 3 0 812 B 1.39 KiB 4.30 ms -",
    "DecoderLm/Unembedding all-gather fsdp 14.00 GiB",
    "attention forward cudnn as in the run bf16 33 calls",
    "matmuls cublas or triton autotuned at run time bf16 451 matmuls",
    "__cudnn$fmhaSoftmax 32",
    "35 % of the executed FLOPs are covered by the recipe, 30 % run in low"
    " precision.",
    "DecoderLm/stack/layers/blocks_0/feed_forward/einsum/gate weight gradient"
    " float8_e5m2 cublas fp8 34 1.203 PFLOP",
    "roofline lower bound on the step time (datasheet rates)",
    "tokens/s at most 125,548",
    "MFU is at most 72 %.",
    "exposed collectives (fsdp) 143 ms",
    "step 900 ms 720 ms 1.12 s",
    "MFU 36 % 29 % 45 %",
    "At datasheet rates a step takes 732 ms, MFU 45 %; if only matmuls took"
    " time, MFU is 77 %.",
    "Efficiency factors: h200.json, measured 2026-11-01 on one NVIDIA H200",
    "All times include the factor 1.125 for load, slow hosts and casts, which"
    " the simulation lacks.",
    "plan compiled in 4.5 s on 2026-11-21T10:41:09Z by jax 0.10.2",
    "xla_gpu_some_option true",
    "warning: a table is left whole",
    "warning: gathers wait for each other",
    "note: a loop is counted once",
  ):
    assert line in lines


def test_three_numbers_follow_the_verdict():
  plan = sample_plan.plan()
  first = report.to_text(plan).split("\n\n")[0].splitlines()
  # 72,816 tokens/s for 86,400 seconds.
  assert [" ".join(line.split()) for line in first[2:]] == [
    "peak memory per device 72.00 GiB of 118.00 GiB",
    "time per step 900 ms, from 720 ms to 1.12 s",
    "throughput 72,816 tokens/s, 6.29 B a day, MFU 36 %",
  ]
  without = dataclasses.replace(plan, estimate=None)
  first = report.to_text(without).split("\n\n")[0].splitlines()
  assert [" ".join(line.split()) for line in first[3:]] == [
    "time per step at least 522 ms",
    "throughput at most 125,548 tokens/s, 10.85 B a day, MFU at most 72 %",
  ]


def test_the_verdict_is_first_and_last():
  lines = report.to_text(sample_plan.plan()).splitlines()
  verdict = (
    "h200:1x8: fits, 61 % of usable memory; estimated step time 900 ms,"
    " MFU 36 %"
  )
  assert lines[1] == verdict
  assert lines[-1] == verdict


@pytest.mark.parametrize(
  "note",
  [
    "",
    "Communication could not be read: KeyError: 'x'",
    "The compiled program could not be read: ValueError: 'y'",
  ],
)
def test_collectives_that_could_not_be_read_are_not_none(note):
  notes = (note,) if note else ()
  text = report.to_text(sample_plan.plan(collectives=(), notes=notes))
  line = note or "none"
  assert f"collectives per step, per device\n  {line}\n" in text


def test_a_bound_without_communication_is_marked():
  whole = sample_plan.plan()
  assert whole.bound is not None
  bound = dataclasses.replace(whole.bound, fast_link=None, network=None)
  plan = sample_plan.plan(bound=bound, target="h100:1x8")
  lines = _words(report.to_text(plan))
  assert "step, all overlapped, without communication 522 ms" in lines
  assert not any(line.startswith("fast link") for line in lines)
  assert "step, all overlapped 522 ms" in _words(report.to_text(whole))
  compared = report.compare([whole, plan])
  assert compared.lines[0].endswith("Bounds without communication: h100:1x8.")
  assert "without communication" not in report.compare([whole]).lines[0]


def test_throughput_below_what_the_host_allows_is_left_out():
  # 65,536 tokens in 3 us would be 21 billion tokens/s.
  step = {"step": 3e-6, "tokens_per_second": 21_845_333_333.0}
  plan = sample_plan.plan()
  assert plan.bound is not None
  plan = dataclasses.replace(
    plan,
    bound=dataclasses.replace(plan.bound, **step),
    estimate=sample_plan.estimate(**step),
    training_cost=None,
  )
  text = report.to_text(plan)
  assert "21,845" not in text
  assert "tokens/s at most" not in text
  assert "MFU at most" not in text
  assert "MFU is at most" not in text
  assert "Below 1.00 ms the host limits the step" in text
  assert "its time is a guess" in text
  assert report.compare([plan]).rows[0][7] == "-"


def test_a_step_of_mostly_launches_has_no_throughput():
  found = sample_plan.estimate(step=0.01, overhead=0.006)
  assert not sections.is_meaningful(found)
  assert sections.is_meaningful(sample_plan.estimate())


def test_a_cost_by_the_bound_is_a_lower_bound():
  cost = sample_plan.plan().training_cost
  assert cost is not None
  cost = dataclasses.replace(cost, is_lower_bound=True, money=None)
  text = report.to_text(sample_plan.plan(training_cost=cost))
  assert "at least 238.0 days, 45,777 device-hours\n" in text


def test_compares_the_flops_of_the_program_with_those_of_the_step():
  assert "x the traced FLOPs" not in report.to_text(sample_plan.plan())
  more = sample_plan.plan(compiled_flops=5_978 * 10**12)
  text = report.to_text(more)
  assert "The compiled program executes 1.490x the traced FLOPs." in text


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
  )
  text = report.to_text(plan)
  assert "traced, not compiled on 2026" in text
  assert "gradients (upper bound)" in text
  assert not any(line.startswith("temporaries 41") for line in _words(text))
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
  assert sections.devices(plan).startswith(text)


def test_says_what_is_usable_and_who_says_so():
  tpu = sample_plan.memory(usable=30.75 * _GIB, capacity=32.0 * _GIB)
  plan = sample_plan.plan(device_kind="v4", memory=tpu)
  text = report.to_text(plan)
  assert "usable 30.75 GiB" in _words(text)
  assert "The TPU compiler rejects programs that need more" in text
  machine = sample_plan.memory(usable=None, capacity=None)
  plan = sample_plan.plan(device_kind="cpu", memory=machine)
  assert "which is not checked" in report.to_text(plan)


def test_says_when_jax_must_be_given_more_of_a_gpu():
  small, large = (
    report.to_text(sample_plan.plan(memory=sample_plan.memory(peak=n)))
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
    assert f"{text}\n" in report.to_text(plan)


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
    ({"usable": None}, "unknown", "unknown whether it fits; estimated"),
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
  assert sections.verdict(plan).startswith(text)


def test_says_what_came_from_the_cache():
  plan = sample_plan.plan(is_from_cache=True)
  text = report.to_text(plan)
  assert "from cache, compiled in 4.5 s on 2026" in text


def test_the_table_marks_the_best_that_fits():
  fast = sample_plan.plan(
    target="v4:4x4x4",
    num_chips=64,
    estimate=sample_plan.estimate(
      step=0.7, exposed={"fsdp": 0.08}, tokens_per_second=90_000.0, mfu=0.41
    ),
    training_cost=None,
  )
  # Without an estimate, and best in everything if it only did fit.
  full = sample_plan.plan(
    target="h200:1x1",
    num_chips=1,
    memory=sample_plan.memory(peak=120 * _GIB),
    fit="does not fit",
    estimate=None,
    training_cost=None,
  )
  here = sample_plan.plan(training_cost=None)
  failure = result.Failure(target="v5e:4x4", message="heads do not divide.")
  text = report.to_table([here, fast, full], [failure])
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
    training_cost=None,
  )
  line = report.to_table([cpu]).splitlines()[1]
  assert line.split() == [
    *("cpu:8", "8", "72.00", "GiB", "-", "unknown"),
    *("-", "-", "-", "-", "-", "-"),
  ]


def test_the_table_names_the_overrides_that_differ():
  plans = [
    sample_plan.plan(overrides=("--fdl.mesh=fsdp=8", f"--fdl.length={n}"))
    for n in (2048, 4096)
  ]
  assert report.labels(plans) == [
    "h200:1x8 length=2048",
    "h200:1x8 length=4096",
  ]


def test_changes_are_ready_to_paste():
  change = sample_plan.change(
    overrides=('--fdl.a=f(("x",))', "--fdl.mesh=fsdp=8"),
    words="do this",
    peak=100 * _GIB,
    estimate=None,
  )
  too_large = dataclasses.replace(
    change, fit="does not fit", overrides=("--fdl.b=2",), peak=None
  )
  plan = sample_plan.plan(
    memory=sample_plan.memory(peak=200 * _GIB),
    verified_changes=(change, too_large),
  )
  text = report.to_text(plan)
  for lines in (
    "It fits (compiled) if you do this. Add to the command:\n"
    "  '--fdl.a=f((\"x\",))' --fdl.mesh=fsdp=8\n"
    "  peak 200.00 GiB -> 100.00 GiB of 118.00 GiB; step time at least"
    " 522 ms -> 583 ms; 25 % of FLOPs are recomputed\n",
    "Smaller changes that were compiled but do not fit:\n"
    "  --fdl.b=2  peak 200.00 GiB of 118.00 GiB\n",
  ):
    assert lines in text
  guess = dataclasses.replace(change, compiled=False)
  text = report.to_text(sample_plan.plan(verified_changes=(guess,)))
  assert "It may fit (analytical estimate, not compiled) if you" in text
  assert "recomputed\n" not in text.partition("It may fit")[2]


def test_layouts_are_a_table():
  layouts = (
    sample_plan.change(reason="best"),
    sample_plan.change(overrides=(), estimate=None, reason="slower"),
    sample_plan.change(compiled=False, reason="not compiled"),
  )
  text = report.to_text(sample_plan.plan(search=layouts))
  table = text.partition("Layouts by step time, then memory: ")[2]
  assert _words(table)[:5] == [
    "2 compiled of 123 whose state fits (~ analytical estimate)",
    "step peak recomputed result add to the command",
    "950 ms 88.00 GiB 25 % best --fdl.num_microbatches=2",
    ">= 583 ms 88.00 GiB 25 % slower (nothing)",
    "~950 ms ~88.00 GiB - not compiled --fdl.num_microbatches=2",
  ]

"""Tests of tools/gpu_check on CPU devices."""

import json
import re

import numpy as np
import pytest

from paxon.runner import user_error
from paxon.runner.configuration import overrides, resolving
from paxon.runner.plan import hardware
from paxon.runner.plan.estimate import efficiency
from paxon.tasks.gpu_check import (
  correctness,
  isolation,
  main,
  plan_comparison,
  rates,
  speed,
)


def test_a_dry_run_does_everything_and_writes_what_it_finds(tmp_path, capsys):
  page = tmp_path / "page.md"
  begin, end = plan_comparison.BEGIN, plan_comparison.END
  page.write_text(f"before\n{begin}\nold\n{end}\nafter\n")
  # Each plan is a separate process: one of four is enough here.
  names = [
    check.name
    for check in main.make_checks()
    if not check.name.startswith("plan.") or check.name == "plan.gpt2"
  ]
  out = tmp_path / "out"
  status = main.main(
    [
      "--dry_run",
      f"--only={','.join(names)}",
      f"--out={out}",
      f"--page={page}",
      "--minutes=60",
    ]
  )
  printed = capsys.readouterr()
  assert status == 0, printed.out
  found = json.loads((out / main.RESULTS).read_text())
  checks = found["checks"]
  assert sorted(checks) == sorted(names)
  assert {one["status"] for one in checks.values()} == {"passed"}
  assert found["summary"]["fp8_over_bf16"] > 0
  assert checks["devices"]["count"] == 8
  assert checks["attention.packed"]["stand_in"]
  assert 0 < checks["attention.packed"]["error"] < 0.02
  assert len(checks["collectives"]["in_program"]) == 5
  assert checks["gpt2.speed"]["tokens_per_second"] > 0
  assert np.isfinite(checks["gpt2.speed"]["loss"])
  for name in ("gpt2.speed", "dense.bf16", "dense.fp8"):
    profile = checks[name]["profile"]
    assert profile["milliseconds_by_kind"]["matmul"] > 0
    assert (out / profile["file"]).exists()
  # The plan compiles what runs; its memory is that of the compiler.
  assert abs(checks["plan.gpt2"]["peak_error"]) < 0.03
  _check_page(page.read_text())
  assert f"{len(names)} passed" in printed.out


def _check_page(text):
  assert text.startswith("before\n")
  assert text.endswith("after\n")
  assert "old" not in text
  (row,) = re.findall(r"^\| tiny.*$", text, re.MULTILINE)
  cells = [cell.strip() for cell in row.strip("|").split("|")]
  # A CPU has no rates, so no bound, no estimate and no error of time.
  assert cells[4:6] == ["-", "-"]
  assert float(cells[6].removesuffix(" ms").replace(",", "")) > 0
  assert cells[7] == "-"


def test_without_an_accelerator_only_a_dry_run_starts(tmp_path, capsys):
  assert main.main([f"--out={tmp_path}", "--only=devices,attention"]) == 1
  printed = capsys.readouterr().out
  assert "JAX finds no accelerator; use --dry_run on CPUs" in printed
  checks = json.loads((tmp_path / main.RESULTS).read_text())["checks"]
  assert list(checks) == ["devices"]


def test_factors_are_in_the_form_that_plans_read(tmp_path, monkeypatch):
  h200 = hardware.find_kind("h200")
  monkeypatch.setattr(hardware, "find_by_device_kind", lambda kind: h200)
  found = {
    "matmul": 0.5 * 989.4e12,
    "matmul.float8": 0.25 * 1978.9e12,
    "attention": 0.4 * 989.4e12,
    "memory": 0.9 * 4800e9,
  }
  monkeypatch.setattr(rates, "measure", lambda size: found)
  settings = isolation.Settings(folder=tmp_path, is_dry=True)
  facts = rates.calibrate(settings)
  text = (tmp_path / facts["file"]).read_text()
  (value,) = re.findall(rf"^export {efficiency.VARIABLE}=(.*)$", text, re.M)
  chosen = efficiency.choose(h200, {efficiency.VARIABLE: value})
  assert chosen is not None
  assert (chosen.matmul, chosen.memory, chosen.attention) == (0.5, 0.9, 0.4)
  assert chosen.by_dtype == {"float8": 0.25}


def test_differences_fail_and_nan_too():
  ones = np.ones(4)
  facts = correctness.compare(ones + 1e-3, ones, limit=1e-2, facts={"a": 1})
  assert facts["a"] == 1
  assert facts["error"] == pytest.approx(1e-3)
  for wrong in (ones + 0.1, ones * np.nan, np.ones(3)):
    with pytest.raises(isolation.CheckError, match=r"error is .* above 0\.01"):
      correctness.compare([ones, wrong], [ones, ones], limit=1e-2, facts={})


@pytest.mark.parametrize(
  ("kernel", "kind"),
  [
    ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_NNT", "matmul"),
    ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop", "attention"),
    ("void cudnn::fusion::compute_dot_do_o_specialized<true, 64>", "attention"),
    ("input_convert_multiply_transpose_fusion_23", "copy"),
    ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", "collective"),
    ("MemcpyD2D", "copy"),
    ("loop_add_fusion_3", "loop"),
    ("wrapped_rng", "other"),
  ],
)
def test_kernels_have_kinds(kernel, kind):
  assert speed.find_kind(kernel) == kind


def test_wrong_arguments_and_pages_are_explained(tmp_path, capsys):
  for argument, message in (
    ("--plan", "unrecognized arguments: --plan"),
    ("--minutes=0", "argument --minutes: 0 must be a number above 0"),
    ("--minutes=x", "argument --minutes: x must be a number above 0"),
  ):
    with pytest.raises(SystemExit) as error:
      main.main([argument])
    assert error.value.code == 2
    assert message in capsys.readouterr().err
  assert main.main(["--only=fp9"]) == 2
  message = "there is no check 'fp9'; choose from attention, att"
  assert message in capsys.readouterr().err
  assert main.main(["--list", "--only=plan"]) == 0
  assert capsys.readouterr().out.splitlines()[0] == "plan.gpt2"
  page = tmp_path / "page.md"
  page.write_text("no marks")
  with pytest.raises(user_error.UserError, match="does not have"):
    plan_comparison.write_page(page, "table")


def test_the_dense_model_is_unrolled_and_saves_everything():
  knobs = [overrides.Override(*knob) for knob in speed.DENSE_KNOBS]
  stack = resolving.resolve(speed.DENSE, knobs).config.task.model.stack
  assert (stack.num_layers, stack.scan, stack.remat_policy) == (24, False, None)

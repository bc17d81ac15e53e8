"""Tests of tools/gpu_check on CPU devices."""

import re

import pytest

from paxon.runner.plan.estimate import efficiency
from paxon.tasks.plans import gpu_check


def test_a_dry_run_plans_and_runs(tmp_path, capsys, monkeypatch):
  # Each is planned by a separate process: one is enough here.
  cases = gpu_check.TINY_CASES[:1]
  monkeypatch.setattr(gpu_check, "TINY_CASES", cases)
  page = tmp_path / "page.md"
  page.write_text(f"before\n{gpu_check.BEGIN}\nold\n{gpu_check.END}\nafter\n")
  status = gpu_check.main(["--plan", "--dry_run", f"--page={page}"])
  printed = capsys.readouterr()
  assert status == 0, printed.err
  assert "matmul: " in printed.out
  assert "cuDNN attention: not available" in printed.out
  text = page.read_text()
  assert text.startswith("before\n")
  assert text.endswith("after\n")
  assert "old" not in text
  rows = re.findall(r"^\| tiny.*$", text, re.MULTILINE)
  assert len(rows) == len(cases)
  for row in rows:
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    # The plan compiles what runs; its memory is that of the compiler.
    assert abs(float(cells[3].removesuffix(" %"))) < 3.0
    # A CPU has no rates, so no bound, no estimate and no error of time.
    assert cells[4:6] == ["-", "-"]
    assert float(cells[6].removesuffix(" ms").replace(",", "")) > 0
    assert cells[7] == "-"


def test_factors_are_in_the_form_that_plans_read(capsys, monkeypatch):
  h200 = gpu_check.hardware.named("h200")
  monkeypatch.setattr(gpu_check.hardware, "for_device_kind", lambda kind: h200)
  rates = {
    "matmul": (0.5 * 989.4e12, "TFLOP/s"),
    "matmul.float8": (0.25 * 1978.9e12, "TFLOP/s"),
    "memory": (0.9 * 4800e9, "TB/s"),
  }
  monkeypatch.setattr(gpu_check, "_measure", lambda size: rates)
  gpu_check.check(size=8)
  line = capsys.readouterr().out.splitlines()[-1]
  text = line.partition(f"{efficiency.VARIABLE}=")[2]
  found = efficiency.choose(h200, {efficiency.VARIABLE: text})
  assert found is not None
  assert (found.matmul, found.memory) == (0.5, 0.9)
  assert found.by_dtype == {"float8": 0.25}


def test_wrong_arguments_and_pages_are_explained(tmp_path, capsys):
  assert gpu_check.main(["--plans"]) == 1
  assert "Unknown argument '--plans'" in capsys.readouterr().err
  page = tmp_path / "page.md"
  page.write_text("no marks")
  with pytest.raises(gpu_check.user_error.UserError, match="not have"):
    gpu_check.write(page, "table")
  # The page that is written by default has them.
  assert gpu_check.BEGIN in gpu_check.PAGE.read_text()

"""Tests of the page of convergence curves."""

import dataclasses
import json
import statistics
from xml.etree import ElementTree

from etils import epath
import pytest

from paxon.inputs.store_servers import memory_store
from paxon.runner.training import interactive, testing
from paxon.tools import curves_main

_EXP = "paxon.runner.training.testing.TinyLm"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  made = tmp_path_factory.mktemp("runs")
  experiment = testing.TinyLm(prompts=None, max_new_tokens=None)
  interactive.train(experiment, made / "TinyLm")
  return made


def _read_values(folder, split):
  lines = (folder / "TinyLm/metrics.jsonl").read_text().splitlines()
  found = map(json.loads, lines)
  return [each["log_pplx"] for each in found if each["split"] == split]


def test_the_page_has_what_the_run_stored(folder, tmp_path, capfd):
  page = tmp_path / "page.md"
  page.write_text(f"# My runs\n\n{curves_main._MARK}\nold\n")
  # In place of the training, which is over.
  flags = [f"--folder={folder}", f"--exp={_EXP}", "--launcher=echo on a pod:"]
  assert curves_main.main([str(page), *flags, "--fdl.seed=1"]) == 0
  words = capfd.readouterr().out.splitlines()[-1].split()
  assert words[:3] == ["on", "a", "pod:"]
  assert words[4:] == [
    *("-m", "paxon.runner.main", f"--exp={_EXP}", "--mode=train"),
    *(f"--job_log_dir={folder}/TinyLm", "--fdl.seed=1"),
  ]
  train, held_out = (_read_values(folder, s) for s in ("train", "validation"))
  # Embedding [264,16]; a layer has two norms, four kernels of attention and
  # three of width 32; a last norm.
  layers = 2 * (2 * 16 + 4 * 16 * 16 + 3 * 16 * 32) + 16
  row = f"| `TinyLm` | {264 * 16 + layers:,} | {layers:,} | 12 |"
  row += f" {12 * 8 * 16:,} | {statistics.fmean(train[-10:]):.4f} |"
  lines = page.read_text().splitlines()
  assert f"{row} {held_out[-1]:.4f} |" in lines
  assert lines[0] == "# My runs"
  assert "old" not in lines
  for split, values in (("train", train), ("validation", held_out)):
    name = f"page_{split}.svg"
    assert any(f"({name})" in line for line in lines)
    root = ElementTree.parse(tmp_path / name).getroot()
    titles = [each.text for each in root.iter() if each.tag.endswith("title")]
    assert len(titles) == len(values)
    assert titles[-1] == f"{split}, step 12: {values[-1]:.6g}"


def test_tokens_of_a_growing_batch(folder):
  curve = curves_main.read_curve(epath.Path(folder) / "TinyLm")
  config = {**curve.config, "batch_ramp": "((2, 4), (20, 6))"}
  # Two batches of 4 sequences, ten of 6, each of 16 tokens.
  ramped = dataclasses.replace(curve, config=config)
  assert ramped.count_tokens() == 16 * (2 * 4 + 10 * 6)


def test_a_run_in_a_store_is_read(folder, tmp_path):
  with memory_store.serve("s3"):
    place = epath.Path("s3://bucket/runs/TinyLm")
    for path in sorted((folder / "TinyLm").rglob("*")):
      if path.is_file():
        name = path.relative_to(folder / "TinyLm").as_posix()
        (place / name).write_bytes(path.read_bytes())
    flags = [f"--run={place}"]
    assert curves_main.main([str(tmp_path / "new.md"), *flags]) == 0
  found = (tmp_path / "new.md").read_text()
  assert found.startswith("# Convergence\n")
  assert f"{_read_values(folder, 'validation')[-1]:.4f} |" in found


@pytest.mark.parametrize(
  ("flags", "message"),
  [
    ([], "--exp is required, or --run"),
    (["--exp=a"], "--exp and --folder belong together"),
    (["--run=DIR/TinyLm", "--fdl.seed=1"], "--exp is required, or --run"),
    (["--run=DIR/TinyLm", "--seed=1"], "unknown argument --seed=1"),
    (["--run=DIR/TinyLm", "--run=DIR/TinyLm"], "two runs are called TinyLm"),
    (["--run=DIR"], "contains no checkpoint"),
    (
      ["--folder=DIR", f"--exp={_EXP}", "--launcher=false"],
      f"training of {_EXP} ended with status 1; run the command again",
    ),
    (["--folder=DIR", f"--exp={_EXP}", "--launcher=no-such"], "no-such"),
  ],
)
def test_wrong_use_is_one_line(folder, tmp_path, capsys, flags, message):
  flags = [each.replace("DIR", str(folder)) for each in flags]
  assert curves_main.main([str(tmp_path / "page.md"), *flags]) == 2
  (line,) = capsys.readouterr().err.splitlines()
  assert message in line
  assert not (tmp_path / "page.md").exists()

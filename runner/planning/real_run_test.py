"""The plan beside a real run of the same program on eight CPU devices.

The witnesses come from the run: XLA's own report of the executable's buffers,
XLA's own count of the FLOPs of the same step where no loop hides any, and the
profile of the steps, which shows each collective that was executed. None is
read by our code for plans.
"""

import gzip
import json
import math
import os
import pathlib
import re
import subprocess
import sys

import pytest

from paxon.runner.plan import child_process
from paxon.runner.plan import target as targets
from paxon.runner.planning import measure
from paxon.runner.training import testing

_DEVICES = 8
_CPU8 = targets.parse(f"cpu:{_DEVICES}")
# Wide enough that nearly all FLOPs are products: XLA counts the others too.
_KNOBS = {
  "mesh": "fsdp=4,tensor=2",
  "num_layers": 3,
  "embed_dim": 256,
  "global_batch_size": 32,
  "num_train_steps": 3,
  "eval_every_steps": 100,
  "checkpoint_every_steps": 100,
  "max_new_tokens": 1,
}
_PROFILED_STEPS = 2
_BYTES = {"f32": 4, "s32": 4, "u32": 4, "pred": 1, "bf16": 2}

# Trains in a loop over layers, and compiles the step without one, of which XLA
# counts all FLOPs.
_TRAIN = """
import json, sys
from etils import epath
from paxon.runner.monitoring import launch
from paxon.runner.training import testing, train
from paxon.runner.session import compiled_steps, session

folder, knobs = epath.Path(sys.argv[1]), json.loads(sys.argv[2])
job, config = testing.make(scan=True, **knobs)
(folder / "loop").mkdir()
profile = launch.parse_window("1:3")
train.run(job, config, folder / "loop", launch=launch.Launch(profile=profile))
job, _ = testing.make(scan=False, **knobs)
unrolled = compiled_steps.compile_train_step(session.open_session(job))
flops = unrolled.cost_analysis()["flops"]
(folder / "flops.json").write_text(json.dumps(flops))
"""


@pytest.fixture(scope="module", name="run")
def _run(tmp_path_factory):
  """The folder in which the program has trained."""
  folder = tmp_path_factory.mktemp("run")
  variables = child_process.environment(_CPU8, is_compiled=True)
  # With the flags of this process, which makes the plan.
  flags = variables.get("XLA_FLAGS", "")
  variables["XLA_FLAGS"] = (
    f"{flags} --xla_dump_to={folder / 'xla'} --xla_dump_hlo_as_text"
    " --xla_dump_hlo_module_re=jit_step"
  )
  done = subprocess.run(
    [sys.executable, "-c", _TRAIN, str(folder), json.dumps(_KNOBS)],
    env=variables,
    cwd=folder,
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == 0, done.stderr[-3000:]
  return folder


def _plan(**knobs):
  job, _ = testing.make(**_KNOBS, **knobs)
  return measure.measure(job, _CPU8, experiment="a.B")


@pytest.fixture(scope="module", name="plan")
def _plan_of_the_loop():
  return _plan(scan=True)


def _executable(run: pathlib.Path) -> pathlib.Path:
  """The dumped text of the first training step: it alone is given a state."""
  texts = (run / "xla").glob("*.jit_step.*after_optimizations.txt")
  return min(
    file for file in texts if "input_output_alias" in file.read_text()[:2000]
  )


def test_peak_memory(run, plan):
  text = _executable(run)
  report = text.with_name(text.stem + "-memory-usage-report.txt").read_text()
  used = int(re.search(r"^Total bytes: (\d+)", report, re.MULTILINE)[1])
  assert plan.memory.peak == pytest.approx(used, rel=0.05)
  # It is no small thing beside what is given.
  assert plan.memory.peak > 1.5 * plan.memory.arguments


def test_flops(run, plan):
  executed = _DEVICES * json.loads((run / "flops.json").read_text())
  assert plan.flops.hardware == pytest.approx(executed, rel=0.05)
  assert plan.compiled_flops == pytest.approx(executed, rel=0.05)
  # What else XLA counts is not negative.
  assert plan.compiled_flops <= executed


def _executed_collectives(run: pathlib.Path) -> dict[str, tuple[float, float]]:
  """(count, bytes) by kind, of one step and device."""
  sizes = {}
  for match in re.finditer(
    r"%((all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)"
    r"[\w.\-]*) = (.*?) \2\(",
    _executable(run).read_text(),
  ):
    name, kind, results = match.groups()
    arrays = re.findall(r"([a-z]\w+)\[([\d,]*)\]", results)
    sizes[name] = (
      kind,
      sum(
        _BYTES[dtype] * math.prod(int(n) for n in shape.split(",") if n)
        for dtype, shape in arrays
      ),
    )
  (trace,) = (run / "loop").glob("profile/**/*.trace.json.gz")
  events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
  found: dict[str, tuple[float, float]] = {}
  times = 1 / (_DEVICES * _PROFILED_STEPS)
  for event in events:
    if event.get("ph") == "X" and event["name"] in sizes:
      kind, size = sizes[event["name"]]
      count, total = found.get(kind, (0.0, 0.0))
      found[kind] = count + times, total + size * times
  return found


def test_collectives(run, plan):
  executed = _executed_collectives(run)
  planned: dict[str, tuple[float, float]] = {}
  for entry in plan.collectives:
    count, total = planned.get(entry.kind, (0, 0))
    planned[entry.kind] = count + entry.count, total + entry.payload_bytes
  assert set(planned) == set(executed) == {"all-gather", "all-reduce"}
  for kind, (count, total) in executed.items():
    assert planned[kind][0] == pytest.approx(count, rel=0.05), kind
    assert planned[kind][1] == pytest.approx(total, rel=0.05), kind
  # Every layer gathers its weights in both passes.
  assert executed["all-gather"][0] > 2 * _KNOBS["num_layers"] * 5


def test_the_run_had_eight_devices(run):
  text = _executable(run).read_text()
  assert "num_partitions=8" in text[:20000]
  assert os.path.getsize(run / "loop" / "metrics.jsonl") > 0

"""Tests of a plan against a train step that is written by hand in plain JAX."""

import dataclasses
import json
import subprocess
import sys

import pytest

from paxon.runner.configuration import overrides
from paxon.runner.plan import child_process, hardware, testing
from paxon.runner.plan.program_text import collectives, hlo
from paxon.runner.planning import child
from paxon.tasks.plans import hand_written

_DEVICES = 8
_SIZES = hand_written.Sizes(
  num_layers=4,
  embed_dim=1024,
  mlp_dim=2816,
  num_heads=8,
  head_dim=128,
  vocab_size=8192,
  global_batch_size=64,
  length=256,
)
_KNOBS = dataclasses.asdict(_SIZES) | {
  "num_kv_heads": _SIZES.num_heads,
  "loss_chunk_length": None,
  "attention_kernel": "layers.attention.kernels.plain",
  "mesh": f"fsdp={_DEVICES}",
}


@dataclasses.dataclass(frozen=True)
class _Compiled:
  """The plan, and the program that is written by hand.

  Attributes:
    plan: The plan.
    memory: XLA's figures of the other program.
    sent: Bytes sent by a device of the other program, by kind.
  """

  plan: object
  memory: dict[str, int]
  sent: dict[str, float]


@pytest.fixture(scope="module", name="both", params=["h200:1x8", "v5e:2x4"])
def _both(request, tmp_path_factory):
  target = testing.target(request.param)
  text = tmp_path_factory.mktemp("text") / "program.txt"
  done = subprocess.run(
    [
      *(sys.executable, "-m", hand_written.__name__, target.text),
      *(json.dumps(dataclasses.asdict(_SIZES)), str(text)),
    ],
    env=child_process.environment(target, is_compiled=True),
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == 0, done.stderr[-3000:]
  found = collectives.find(hlo.parse(text.read_text()), mesh={"fsdp": _DEVICES})
  assert found.notes == ()
  sent: dict[str, float] = {}
  for each in found.collectives:
    sent[each.kind] = sent.get(each.kind, 0) + each.count * each.wire_bytes
  plan = child.plan(
    "tasks.lm.params.llama.Llama2_7B",
    [overrides.Override(k, str(value)) for k, value in _KNOBS.items()],
    target,
    is_compiled=True,
    time_limit=600.0,
  )
  return _Compiled(plan, json.loads(done.stdout.splitlines()[-1]), sent)


def test_memory(both):
  memory = both.plan.memory
  assert memory.arguments == both.memory["arguments"]
  assert memory.peak == pytest.approx(both.memory["peak"], rel=0.03)
  assert memory.peak > 2 * memory.arguments


def test_flops(both):
  assert both.plan.flops.model == pytest.approx(_SIZES.flops, rel=1e-4)


def test_communication(both):
  planned: dict[str, float] = {}
  for each in both.plan.collectives:
    planned[each.kind] = planned.get(each.kind, 0) + each.wire_bytes
  # On TPUs the compiler writes a scatter of the head's gradient as permutes
  # next to its matmul in one of the programs.
  total = sum(both.sent.values())
  assert sum(planned.values()) == pytest.approx(total, rel=0.03)
  if _is_cuda(both.plan):
    # Sums of norms and losses are not the same.
    for kind in ("all-gather", "reduce-scatter"):
      assert planned[kind] == pytest.approx(both.sent[kind], rel=0.001), kind


def _is_cuda(plan):
  kind = hardware.find_kind(plan.device_kind)
  return kind.platform is hardware.Platform.CUDA


def test_bytes_of_fsdp(both):
  if not _is_cuda(both.plan):
    pytest.skip("compilers for TPUs write gathers as permutes next to matmuls")
  ends = _SIZES.embed_dim * _SIZES.vocab_size
  # bfloat16 weights of layers are gathered in both passes, the others once;
  # gradients of the head are float32.
  gathered = 2 * (2 * _SIZES.layer_weights + 2 * ends)
  scattered = 2 * (_SIZES.layer_weights + ends) + 4 * ends
  found: dict[str, int] = {}
  for each in both.plan.collectives:
    found[each.kind] = found.get(each.kind, 0) + each.payload_bytes
  assert found["all-gather"] == pytest.approx(gathered, rel=0.001)
  assert found["reduce-scatter"] == pytest.approx(scattered, rel=0.001)

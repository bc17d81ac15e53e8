"""A wrong experiment for each rule of the lint, as its user meets them."""

import re

import pytest

from paxon.runner import main
from paxon.runner.checkpoints import checkpointer
from paxon.runner.plan import sample_plan
from paxon.runner.planning import child

_WRONG = "--exp=runner.planning.lint_experiments.Wrong"

# What is given, and what the one line says: path, sizes, the change to make.
_ERRORS = {
  "heads": (
    ["--fdl.mesh=tensor=8"],
    r"attention/out: axis 'heads' of size 2 does not divide by tensor=8; make"
    r" num_heads a multiple of 8, such as 8, or the mesh smaller along tensor",
  ),
  "experts": (
    ["--fdl.mesh=expert=8", "--fdl.feed_forward=experts"],
    r"feed_forward/kernel: axis 'experts' of size 6 does not divide by"
    r" expert=8; make num_experts a multiple of 8, such as 8, or the mesh"
    r" smaller along expert, so that it divides 6",
  ),
  "an axis twice in a rule": (
    ["--fdl.mesh=data=8", "--fdl.rule=twice"],
    r"the rule of 'batch' names the mesh axis 'data' 2 times; name it once",
  ),
  "an axis that no mesh has": (
    ["--fdl.mesh=data=8", "--fdl.rule=unknown"],
    r"the rule of 'batch' names the mesh axis 'replica', but the mesh has"
    r" stage, data, .*; correct the rule",
  ),
  "a batch that does not cover the mesh": (
    ["--fdl.mesh=data=8", "--fdl.global_batch_size=3"],
    r"batches of 3 examples do not cover the 8 parts into which the mesh splits"
    r" them; make global_batch_size at least 8"
    r"|global_batch_size \(3\) of the split 'train' must be a multiple of 8",
  ),
}
_WARNINGS = {
  "a batch that is padded": (
    ["--fdl.mesh=data=8", "--fdl.global_batch_size=12"],
    r"batches of 12 examples are padded to 16, which the mesh splits into 8"
    r" parts: 25 % of the work is padding; global_batch_size=16 costs no more",
  ),
  "an axis that two dimensions want": (
    ["--fdl.mesh=fsdp=8", "--fdl.feed_forward=square"],
    r"feed_forward/kernel: the mesh axis 'fsdp' is asked for twice, by 'embed'"
    r" of size 16, which gets it, and by 'embed' of size 16, which is not split"
    r" by it; give one of them another rule",
  ),
  "a large tensor left replicated": (
    [
      *("--fdl.mesh=fsdp=8", "--fdl.rule=unsplit", "--fdl.embed_dim=64"),
      *("--fdl.feed_forward=experts", "--fdl.num_experts=4096"),
    ],
    r"feed_forward/kernel: 0.125 GiB of shape \(2, 4096, 64, 64\) are on every"
    r" device, though the mesh has fsdp=8; its axes are \('layers', 'experts',"
    r" 'embed', None\): name them, or give one a rule with a mesh axis in use",
  ),
  "work that is not shared": (
    ["--fdl.mesh=fsdp=8", "--fdl.rule=idle"],
    r"the mesh axis fsdp=8 splits neither the batch nor any other axis of"
    r" activations, so each of its 8 devices does the same work; add 'fsdp' to"
    r" the rule of 'batch', or take it out of the mesh",
  ),
  "stages of a model that has none": (
    ["--fdl.mesh=stage=8"],
    r"the mesh axis stage=8 splits neither the batch nor any other axis",
  ),
}
_PLAN = ["--mode=plan", "--target=cpu:8"]


def _call(*arguments):
  with pytest.raises(SystemExit) as ended:
    main.run(argv=["main", _WRONG, *arguments])
  return ended.value.code


def _never(*args, **kwargs):
  raise AssertionError("a process was started")


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  monkeypatch.setenv("PAXON_CACHE_DIR", "off")


@pytest.mark.nightly(keep=5)
@pytest.mark.parametrize("mode", [_PLAN, ["--mode=train"]], ids=lambda m: m[0])
@pytest.mark.parametrize(
  ("given", "message"), _ERRORS.values(), ids=list(_ERRORS)
)
def test_an_error_is_one_line(
  capsys, monkeypatch, tmp_path, mode, given, message
):
  monkeypatch.setattr(child, "plan", _never)
  assert _call(*mode, *given) == 2
  err = capsys.readouterr().err
  assert re.search(message, err), err
  assert err.count("\n") == 1
  # No folder of a run is left.
  assert not list((tmp_path / "runs").glob("*"))


class _StartedError(Exception):
  """Training would begin."""


def _start(*args, **kwargs):
  raise _StartedError


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize(
  ("given", "message"), _WARNINGS.values(), ids=list(_WARNINGS)
)
def test_a_warning_is_shown_by_train(capsys, monkeypatch, given, message):
  monkeypatch.setattr(checkpointer, "Checkpointer", _start)
  with pytest.raises(_StartedError):
    main.run(argv=["main", _WRONG, "--mode=train", *given])
  out = capsys.readouterr().out
  assert re.search(f"^warning: .*{message}", out, re.MULTILINE), out


@pytest.mark.parametrize(
  ("given", "message"), _WARNINGS.values(), ids=list(_WARNINGS)
)
def test_a_warning_is_part_of_the_plan(capsys, monkeypatch, given, message):
  monkeypatch.setattr(child, "plan", lambda *a, **k: sample_plan.plan())
  assert _call(*_PLAN, *given) == 0
  out = capsys.readouterr().out
  assert re.search(f"^warning: .*{message}", out, re.MULTILINE), out


def test_what_is_right_has_neither(capsys, monkeypatch):
  monkeypatch.setattr(child, "plan", lambda *a, **k: sample_plan.plan(notes=()))
  assert _call(*_PLAN, "--fdl.mesh=data=2,fsdp=2,tensor=2") == 0
  assert "splits neither" not in capsys.readouterr().out

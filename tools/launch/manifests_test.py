"""Tests of the manifests: schemas, flags, statuses, and their commands."""

import json
import os
import pathlib
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time

import pytest
import yaml

from paxon.runner import command_line, exit_status
from paxon.runner.configuration import resolving
from paxon.tools.launch import make_schemas

FOLDER = pathlib.Path(__file__).parent
KUBERNETES = sorted((FOLDER / "kubernetes").glob("*.yaml"))
SCRIPTS = sorted((FOLDER / "slurm").glob("*.sh"))
VERSION = "1.37"
# Replaced in a run of a command.
_REPLACED = (
  "--fdl.",
  "--exp=",
  "--job_log_dir=",
  "--coordinator_address=",
  "--num_processes=",
  "--metrics_port=",
  "--liveness_file=",
)
_PYTHON = """#!{python}
import json, os, sys
flags = json.loads(os.environ["TEST_FLAGS"])
kept = [each for each in sys.argv[1:] if not each.startswith({replaced!r})]
os.execv({python!r}, [{python!r}, *kept, *flags])
"""
_SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
for index in 0 1; do
  SLURM_STEP_NODELIST=localhost SLURM_NTASKS=2 SLURM_PROCID=$index \
    SLURM_LOCALID=$index "$@" &
  tasks+=($!)
done
trap 'kill -TERM "${tasks[@]}"' TERM
wait "${tasks[0]}"; wait "${tasks[0]}"; status=$?
wait "${tasks[1]}"
exit $status
"""


def _documents(path):
  return list(yaml.safe_load_all(path.read_text()))


def _jobs(path):
  """The specs of all Jobs of a file, also of those in a JobSet."""
  for document in _documents(path):
    if document["kind"] == "Job":
      yield document["spec"]
    elif document["kind"] == "JobSet":
      for job in document["spec"]["replicatedJobs"]:
        yield job["template"]["spec"]


def _containers():
  for path in KUBERNETES:
    for job in _jobs(path):
      for container in job["template"]["spec"]["containers"]:
        yield pytest.param(job, container, id=path.stem)


def _find_problems(document):
  """What the schemas reject in a document."""
  reason = "requires the Python package kubernetes-validate"
  validate = pytest.importorskip("kubernetes_validate", reason=reason)
  schemas = pytest.importorskip("jsonschema", reason=reason)
  problems = []
  if "k8s.io/" not in document["apiVersion"]:
    try:
      validate.validate(document, VERSION, strict=True)
    except validate.ValidationError as error:
      problems.append(error.message)
    return problems
  checker = schemas.Draft202012Validator(_find_schema(document["kind"]))
  problems += [error.message for error in checker.iter_errors(document)]
  for job in document["spec"].get("replicatedJobs", ()):
    made = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "a"}}
    problems += _find_problems({**made, "spec": job["template"]["spec"]})
  return problems


def _find_schema(kind):
  """The schema of a custom resource, from its definition."""
  folder = os.environ.get("PAXON_CUSTOM_RESOURCES")
  if folder is None:
    pytest.skip(
      "PAXON_CUSTOM_RESOURCES does not name a folder with the definitions of"
      " JobSet and Kueue (config/components/crd/bases of their releases)"
    )
  for path in sorted(pathlib.Path(folder).glob("*.yaml")):
    definition = yaml.safe_load(path.read_text())
    if definition["spec"]["names"]["kind"] == kind:
      return make_schemas.make_schema(definition)
  raise FileNotFoundError(f"{folder} has no definition of {kind}")


@pytest.mark.parametrize("path", KUBERNETES, ids=lambda path: path.stem)
def test_documents_fit_their_schemas(path):
  for document in _documents(path):
    assert _find_problems(document) == []


@pytest.mark.parametrize("path", KUBERNETES, ids=lambda path: path.stem)
def test_schemas_find_a_wrong_field(path):
  document = _documents(path)[-1]
  document["spec"]["completion"] = 4
  assert any("completion" in each for each in _find_problems(document))
  document = _documents(path)[-1]
  job, *_ = document["spec"].get("replicatedJobs", [None])
  spec = job["template"]["spec"] if job else document["spec"]
  spec["template"]["spec"]["terminationGracePeriodSeconds"] = "soon"
  assert any("soon" in each for each in _find_problems(document))


def test_schemas_are_strict_and_leave_out_pods():
  job = {"type": "object", "properties": {"podFailurePolicy": {}}}
  spec = {
    "type": "object",
    "description": "Text.",
    "properties": {
      "description": {"type": "string"},
      "port": {"type": "integer", "x-kubernetes-int-or-string": True},
      "job": job,
    },
  }
  whole = {"type": "object", "properties": {"spec": spec, "status": {}}}
  version = {"served": True, "schema": {"openAPIV3Schema": whole}}
  versions = [version | {"name": name} for name in ("v1beta2", "v1beta1")]
  names = {"kind": "Queue"}
  definition = {"spec": {"group": "a.b", "names": names, "versions": versions}}
  made = make_schemas.make_schema(definition)
  assert made["properties"] == {
    "apiVersion": {"const": "a.b/v1beta2"},
    "kind": {"const": "Queue"},
    "metadata": {"type": "object"},
    "spec": {
      "type": "object",
      "properties": {
        "description": {"type": "string"},
        "port": {},
        "job": {"type": "object"},
      },
      "additionalProperties": False,
    },
  }


def _check_command(arguments):
  """Parses and resolves a command line as `main` does."""
  assert arguments[:3] == ["python", "-m", "paxon.runner.main"]
  parsed = command_line.parse(["main", *arguments[3:]])
  resolving.resolve(parsed.flags.exp, parsed.overrides)
  command_line.check(parsed.flags, ("paxon.tasks",))
  return parsed.flags


def _expand(container, **environ):
  """The command of a container with its variables, as Kubernetes expands it."""
  return [
    re.sub(r"\$\((\w+)\)", lambda found: environ[found[1]], argument)
    for argument in container["command"]
  ]


@pytest.mark.parametrize(("job", "container"), [*_containers()])
def test_flags_and_knobs_of_a_container(job, container, monkeypatch):
  names = {each["name"] for each in container.get("env", ())}
  environ = dict.fromkeys(names, "0")
  flags = _check_command(_expand(container, **environ))
  assert flags.liveness_file == "/tmp/alive"
  if flags.num_processes not in (None, 1):
    assert flags.num_processes == job["completions"]
    port = container["ports"][0]["containerPort"]
    assert flags.metrics_port == port


@pytest.mark.parametrize(("job", "container"), [*_containers()])
def test_policies_follow_the_table_of_statuses(job, container):
  del container
  fail, *others = job["podFailurePolicy"]["rules"]
  assert fail["action"] == "FailJob"
  final = {each for each in exit_status.ExitStatus if each.value}
  final = {each for each in final if exit_status.is_final(each)}
  # A full store may be repaired while the job waits.
  wanted = final - {exit_status.ExitStatus.STORE}
  assert {*fail["onExitCodes"]["values"]} == wanted
  for rule in others:
    assert rule["action"] == "Ignore"
    stopped = rule.get("onExitCodes", {}).get("values", [])
    assert {*stopped} <= {129, 130, 143}


def test_skypilot_restarts_what_a_restart_may_cure():
  task = yaml.safe_load((FOLDER / "skypilot.yaml").read_text())
  codes = task["resources"]["job_recovery"]["recover_on_exit_codes"]
  assert not any(exit_status.is_final(code) for code in codes)


def test_scripts_are_clean():
  if shutil.which("shellcheck") is None:
    pytest.skip("requires the program shellcheck")
  subprocess.run(["shellcheck", *SCRIPTS], check=True)


def _write_program(path, text):
  path.write_text(text)
  path.chmod(path.stat().st_mode | stat.S_IXUSR)


def _free_port():
  with socket.socket() as listener:
    listener.bind(("localhost", 0))
    return listener.getsockname()[1]


@pytest.fixture(name="environ")
def _environ(tmp_path):
  """The environment of a command; `python` runs a small model instead."""
  programs = tmp_path / "programs"
  programs.mkdir()
  python = _PYTHON.format(python=sys.executable, replaced=_REPLACED)
  _write_program(programs / "python", python)
  _write_program(programs / "srun", _SRUN)
  log = f'#!/bin/sh\necho "$@" >> {tmp_path}/scontrol.log\n'
  _write_program(programs / "scontrol", log)
  return {
    **os.environ,
    "PATH": f"{programs}:{os.environ['PATH']}",
    "PYTHONPATH": ":".join(filter(None, sys.path)),
    "JAX_PLATFORMS": "cpu",
    "JAX_NUM_CPU_DEVICES": "1",
    "TEST_FLAGS": json.dumps(_flags(tmp_path)),
  }


def _flags(folder, *more, **knobs):
  knobs = {
    "num_train_steps": 4,
    "checkpoint_every_steps": None,
    "eval_every_steps": None,
    "max_new_tokens": 0,
    "mesh": "data=-1",
  } | knobs
  return [
    "--exp=runner.training.testing.TinyLm",
    f"--job_log_dir={folder}/run",
    *(f"--fdl.{name}={value}" for name, value in knobs.items()),
    *more,
  ]


def _run(command, environ, log):
  with log.open("w") as file:
    return subprocess.Popen(
      command, env=environ, stdout=file, stderr=subprocess.STDOUT
    )


@pytest.mark.nightly
def test_pods_of_an_indexed_job_train_together(environ, tmp_path):
  (job,) = _jobs(FOLDER / "kubernetes" / "indexed_job.yaml")
  (container,) = job["template"]["spec"]["containers"]
  address = f"--coordinator_address=localhost:{_free_port()}"
  pods, logs = [], [tmp_path / f"pod-{index}.log" for index in range(2)]
  for index, log in enumerate(logs):
    alive = tmp_path / f"alive-{index}"
    flags = _flags(
      tmp_path,
      address,
      "--num_processes=2",
      f"--metrics_port={_free_port()}",
      f"--liveness_file={alive}",
    )
    more = {
      "JOB_COMPLETION_INDEX": f"{index}",
      "TEST_FLAGS": json.dumps(flags),
    }
    pods.append(_run(_expand(container, **more), environ | more, log))
  assert [pod.wait(240) for pod in pods] == [0, 0], logs[0].read_text()
  assert "step 4/4" in logs[0].read_text()
  assert "metrics: http://localhost:" in logs[0].read_text()
  for index in range(2):
    for probe in ("startupProbe", "livenessProbe"):
      command = [
        part.replace("/tmp/alive", f"{tmp_path}/alive-{index}")
        for part in container[probe]["exec"]["command"]
      ]
      subprocess.run(command, check=True, capture_output=True)
  # An old file is not alive.
  old = time.time() - 16 * 60
  os.utime(tmp_path / "alive-1", (old, old))
  assert subprocess.run(command, capture_output=True).returncode == 1


@pytest.mark.nightly
def test_slurm_job_saves_before_the_time_limit_and_is_requeued(
  environ, tmp_path
):
  slurm = {
    "SLURM_JOB_ID": "42",
    "JAX_COORDINATOR_PORT": f"{_free_port()}",
    "TEST_FLAGS": json.dumps(_flags(tmp_path, num_train_steps=40, delay=0.2)),
  }
  log = tmp_path / "job.log"
  command = ["bash", FOLDER / "slurm" / "job.sh"]
  job = _run(command, environ | slurm, log)
  while "step 2/40" not in log.read_text():
    assert job.poll() is None, log.read_text()
    time.sleep(0.1)
  job.send_signal(signal.SIGUSR1)
  assert job.wait(240) == 128 + signal.SIGTERM, log.read_text()
  assert (tmp_path / "scontrol.log").read_text() == "requeue 42\n"
  assert re.search(r"stopped by SIG\w+ at step", log.read_text())
  # The job, requeued, resumes; finished, it is not requeued again.
  job = _run(command, environ | slurm, log)
  assert job.wait(240) == 0, log.read_text()
  assert "resuming from the checkpoint of step" in log.read_text()
  assert (tmp_path / "scontrol.log").read_text() == "requeue 42\n"


@pytest.mark.nightly
def test_slurm_array_and_skypilot_run_their_commands(environ, tmp_path):
  array = {"SLURM_ARRAY_TASK_ID": "2", "SLURM_JOB_ID": "42"}
  # One task for each element.
  _write_program(
    tmp_path / "programs" / "srun", '#!/bin/sh\necho "$@"\nexec "$@"\n'
  )
  flags = _flags(tmp_path, "--num_processes=1")
  more = environ | array | {"TEST_FLAGS": json.dumps(flags)}
  log = tmp_path / "array.log"
  job = _run(["bash", FOLDER / "slurm" / "array.sh"], more, log)
  assert job.wait(240) == 0, log.read_text()
  command = log.read_text().splitlines()[0].split()
  assert "--fdl.learning_rate=4e-4" in command
  assert _check_command(command).job_log_dir == "/shared/runs/rate-4e-4"

  task = yaml.safe_load((FOLDER / "skypilot.yaml").read_text())
  sky = {
    "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_NODE_RANK": "1",
  }
  _write_program(
    tmp_path / "programs" / "python", '#!/bin/sh\nprintf "%s\\n" "$@"\n'
  )
  command = ["bash", "-ec", task["run"]]
  shown = subprocess.run(
    command, env=environ | sky, capture_output=True, text=True, check=True
  )
  flags = _check_command(["python", *shown.stdout.split("\n")[:-1]])
  assert flags.coordinator_address == "10.0.0.1:8476"
  assert (flags.num_processes, flags.process_id) == (2, 1)

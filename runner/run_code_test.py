"""Tests for modules inside of run directories: none of them is executed."""

import importlib
import os
import subprocess
import sys
import textwrap
import zipfile

from etils import epath
import pytest

from paxon.inputs.streams import read_ahead
from paxon.runner import run_code, user_error
from paxon.runner.session import run_files

_EVIL = """
  import pathlib
  pathlib.Path({mark!r}).write_text("executed")
"""


def _import(name):
  return importlib.import_module(name)


def _write(folder, name, mark):
  path = folder / f"{name}.py"
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(textwrap.dedent(_EVIL.format(mark=os.fspath(mark))))
  return path


@pytest.fixture(name="finders")
def _finders(monkeypatch):
  monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
  monkeypatch.setattr(sys, "path", [*sys.path])
  before = {*sys.modules}
  yield
  for name in {*sys.modules} - before:
    del sys.modules[name]


def _direct(run, outside, mark):
  _write(run, "evil_a", mark)
  return "evil_a", run


def _nested(run, outside, mark):
  _write(run / "checkpoints/x", "evil_b", mark)
  return "evil_b", run / "checkpoints/x"


def _dots(run, outside, mark):
  _write(run, "evil_c", mark)
  return "evil_c", outside / ".." / run.name


def _link_to_the_run(run, outside, mark):
  _write(run, "evil_d", mark)
  (outside / "link").symlink_to(run)
  return "evil_d", outside / "link"


def _link_to_a_module(run, outside, mark):
  (outside / "evil_e.py").symlink_to(_write(run, "anything", mark))
  return "evil_e", outside


def _link_in_the_run(run, outside, mark):
  (run / "evil_f.py").symlink_to(_write(outside, "evil_f", mark))
  return "evil_f", run


def _package(run, outside, mark):
  _write(run / "evil_g", "__init__", mark)
  return "evil_g", run


def _namespace(run, outside, mark):
  _write(run / "evil_h", "inner", mark)
  return "evil_h.inner", run


def _archive(run, outside, mark):
  path = _write(outside, "evil_i", mark)
  with zipfile.ZipFile(run / "x.zip", "w") as archive:
    archive.write(path, "evil_i.py")
  path.unlink()
  return "evil_i", run / "x.zip"


def _linked_archive(run, outside, mark):
  _archive(run, outside, mark)
  (outside / "y.zip").symlink_to(run / "x.zip")
  return "evil_i", outside / "y.zip"


def _of_another_module(run, outside, mark):
  _write(run, "evil_j", mark)
  (outside / "fine.py").write_text(
    f"import sys\nsys.path.append({os.fspath(run)!r})\nimport evil_j"
  )
  return "fine", outside


_KINDS = (
  *(_direct, _nested, _dots, _link_to_the_run, _link_to_a_module),
  *(_link_in_the_run, _package, _namespace, _archive, _linked_archive),
  _of_another_module,
)


@pytest.mark.parametrize("kind", _KINDS, ids=lambda kind: kind.__name__)
def test_a_module_of_a_run_is_rejected_before_it_runs(kind, tmp_path, finders):
  run, outside, mark = tmp_path / "run", tmp_path / "out", tmp_path / "mark"
  run.mkdir()
  outside.mkdir()
  name, path = kind(run, outside, mark)
  sys.path.insert(0, os.fspath(path))
  run_code.reject(run)
  with pytest.raises(run_code.RunCodeError, match=r"evil.*--allow_run_code"):
    _import(name)
  assert not mark.exists()


_LAZY = "evil_lazy"


class _Importing:
  """Examples whose reading imports a module, such as an optional library."""

  def __len__(self):
    return 1

  def __getitem__(self, index, /):
    _import(_LAZY)
    return {}


def test_processes_that_read_examples_reject_it_too(tmp_path, finders):
  _write(tmp_path, _LAZY, tmp_path / "mark")
  sys.path.insert(0, os.fspath(tmp_path))
  run_code.reject(tmp_path)
  source = _Importing()
  workers = read_ahead.Workers(num_workers=1, processes=True, sources=[source])
  try:
    with pytest.raises(run_code.RunCodeError, match=r"evil_lazy .*--allow_run"):
      workers.read_ahead(source).get(0)
  finally:
    workers.close()
  assert not (tmp_path / "mark").exists()


def test_other_modules_are_imported(tmp_path, finders):
  run, mark = tmp_path / "run", tmp_path / "mark"
  for folder in (tmp_path / "run2", tmp_path / "runs", tmp_path):
    _write(folder, f"fine_{folder.name}", mark)
    sys.path.insert(0, os.fspath(folder))
  run_code.reject(run)
  run_code.reject("gs://bucket/run")
  for folder in (tmp_path / "run2", tmp_path / "runs", tmp_path):
    _import(f"fine_{folder.name}")


def test_a_study_is_rejected_with_its_trials_unless_allowed(tmp_path, finders):
  mark = tmp_path / "mark"
  for name in ("a", "b"):
    study = tmp_path / name
    _write(study, f"evil_of_{name}", mark)
    (study / run_code.STUDY).write_text("{}")
    sys.path.insert(0, os.fspath(study))
  run_code.reject(tmp_path / "a" / "trial_0000")
  with pytest.raises(run_code.RunCodeError):
    _import("evil_of_a")
  run_code.allow(tmp_path / "b" / "trial_0000")
  run_code.reject(tmp_path / "b" / "trial_0000")
  _import("evil_of_b")
  assert mark.exists()


def test_an_installation_in_the_folder_is_no_part_of_the_run(
  tmp_path, finders, monkeypatch
):
  _write(tmp_path / "venv/lib", "installed", tmp_path / "mark")
  sys.path.insert(0, os.fspath(tmp_path / "venv/lib"))
  monkeypatch.setattr(sys, "prefix", os.fspath(tmp_path / "venv"))
  run_code.reject(tmp_path)
  _import("installed")


def test_the_command_line_names_the_module(tmp_path):
  run, mark = tmp_path / "dl", tmp_path / "mark"
  _write(run, "evil", mark)
  settings = '{"experiment": "evil.C", "overrides": []}'
  (run / "settings.json").write_text(settings)
  command = [sys.executable, "-m", "paxon.runner.main", "--mode=decode"]
  path = os.pathsep.join([os.fspath(run), *sys.path])
  done = subprocess.run(
    [*command, f"--job_log_dir={run}"],
    env=os.environ | {"PYTHONPATH": path},
    capture_output=True,
    text=True,
  )
  assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
  assert f"would be imported from {run}/evil.py" in done.stderr
  assert not mark.exists()


def test_settings_name_no_module_of_python(tmp_path):
  settings = '{"experiment": "antigravity.C", "overrides": []}'
  (tmp_path / "settings.json").write_text(settings)
  with pytest.raises(user_error.UserError, match="of Python's own modules"):
    run_files.read_settings(epath.Path(tmp_path))

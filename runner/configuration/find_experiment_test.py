"""Tests for finding and listing experiments."""

import importlib
import inspect
import sys

import pytest

from paxon.runner import experiment, toy_experiment, user_error
from paxon.runner.configuration import find_experiment

_METHODS = """
  def task(self):
    return None

  def datasets(self):
    return {}
"""

_FILES = {
  "__init__.py": "",
  "good.py": f'''
"""A module."""
import abc
from paxon.runner import experiment
from paxon.runner.experiment import Experiment as Renamed
import paxon.runner.experiment as module


class Small(experiment.Experiment):
  """A small one.

  And more.
  """

  num_train_steps = 1
  global_batch_size = 1
{_METHODS}

class Large(Small):
  num_train_steps = 10


class Third(module.Experiment):
  num_train_steps = 1
  global_batch_size = 1
{_METHODS}

class Half(Renamed):
  def task(self):
    return None


class Still(Half):
  @abc.abstractmethod
  def datasets(self):
    return None


class _Hidden(Small):
  pass


class Mixin:
{_METHODS}

class Mixed(Mixin, Half):
  num_train_steps = 1
  global_batch_size = 1


class Other:
{_METHODS}

VALUE = 3
''',
  "good_test.py": "from shop.good import Small\nclass Tested(Small): pass\n",
  "deep/__init__.py": "",
  "deep/far.py": "from shop import good\nclass Far(good.Small):\n  '''F.'''\n",
  # No __init__.py above it, as in the runfiles of some repositories.
  "space/inner.py": "from shop import good\nclass Inner(good.Small): pass\n",
  "bad_import.py": "import not_there_at_all\nfrom shop.good import Small\n"
  "class Unusable(Small): pass\n",
  "bad_name.py": "x = 1\nundefined_name\n",
  "bad_syntax.py": "class (:\n",
  "bad_knob.py": "from shop import good\nclass Bad(good.Small):\n  sede = 1\n",
  "bad_package/__init__.py": "raise RuntimeError('no luck')\n",
  "bad_package/inner.py": "",
}


@pytest.fixture(autouse=True, scope="module")
def _shop(tmp_path_factory):
  """A package `shop` on the path, with experiments good and bad."""
  root = tmp_path_factory.mktemp("packages")
  for name, text in _FILES.items():
    path = root / "shop" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
  sys.path.insert(0, str(root))
  yield
  sys.path.remove(str(root))
  _forget()


def _forget():
  """Makes the packages of the shop as if nothing had been imported."""
  for name in [m for m in sys.modules if m.partition(".")[0] == "shop"]:
    del sys.modules[name]


def _find(name, packages=("shop",)):
  return find_experiment.find_experiment(name, packages=packages)


def test_short_and_full_names_find_the_same_class():
  for name in ("runner.toy_experiment.Toy", "paxon.runner.toy_experiment.Toy"):
    assert _find(name) is toy_experiment.Toy
  assert _find("shop.good.Large")().num_train_steps == 10


def test_a_module_of_the_current_directory_needs_the_path(
  tmp_path, monkeypatch
):
  (tmp_path / "mine").mkdir()
  (tmp_path / "mine/seven.py").write_text("")
  monkeypatch.chdir(tmp_path)
  with pytest.raises(
    user_error.UserError,
    match=r"^--exp=mine.seven.Small: mine/seven.py is in the .* PYTHONPATH=\.",
  ):
    _find("mine.seven.Small")


def test_import_path_finds_the_class_again():
  for cls in (toy_experiment.Toy, _find("shop.space.inner.Inner")):
    assert _find(cls.import_path()) is cls


@pytest.mark.parametrize(
  ("name", "message"),
  [
    pytest.param(
      "shop.goood.Small",
      r"^--exp=shop.goood.Small: there is no module 'shop.goood'; did you mean"
      r" 'shop.good.Small'\?$",
      id="module",
    ),
    pytest.param(
      "shpo.good.Small",
      r"no module 'shpo.good'.*'shop.good.Small'",
      id="package",
    ),
    pytest.param(
      "shop.good.small",
      r"module shop.good has no experiment 'small'; did you mean 'Small'\?$",
      id="class",
    ),
    pytest.param(
      "shop.good.Zzzzzz",
      r"has no experiment 'Zzzzzz'; known: Large, ",
      id="zz",
    ),
    pytest.param(
      "shop.good",
      r"^--exp=shop.good is a module; name a class in it; .*good\.L",
      id="only-module",
    ),
    pytest.param(
      "Small",
      r"it has no module; write it as a.b.C; did you mean 'shop.",
      id="bare",
    ),
    pytest.param(
      "shop.good.VALUE",
      r"is not an experiment, but a int of another kind",
      id="value",
    ),
    pytest.param(
      "shop.good.Other",
      r"is not an experiment, but a class of another",
      id="other",
    ),
    pytest.param(
      "shop.good.Half",
      r"is an abstract experiment: it lacks datasets",
      id="abstract",
    ),
    pytest.param(
      "shop.bad_import.Unusable",
      r"the module shop.bad_import failed to import because of"
      r" ModuleNotFoundError: No module named 'not_there_at_all'"
      r" \(bad_import.py:1\)",
      id="import-error",
    ),
    pytest.param(
      "shop.bad_name.X",
      r"NameError: name 'undefined_name' .*\(bad_name.py:2\)",
      id="name-error",
    ),
    pytest.param(
      "shop.bad_syntax.X",
      r"failed to import because of SyntaxError: .*"
      r" \(bad_syntax.py:1\)",
      id="syntax-error",
    ),
    pytest.param(
      "shop.bad_knob.Bad",
      r"KnobError: Bad.sede is assigned.*did you mean 'seed'",
      id="knob",
    ),
    pytest.param(
      "shop.bad_package.inner.X",
      r"shop.bad_package.inner failed to import because of RuntimeError: no l",
      id="package-fails",
    ),
    pytest.param("shop.good.", r"has no experiment ''", id="no-class"),
    pytest.param("..", r"there is no module '.'", id="dots"),
    pytest.param("a b.c", r"there is no module 'a b'", id="space"),
  ],
)
def test_wrong_name_says_what_is_wrong_and_what_is_closest(name, message):
  with pytest.raises(user_error.UserError, match=message) as caught:
    _find(name)
  assert "\n" not in user_error.one_line(caught.value)


def test_without_packages_nothing_is_proposed():
  with pytest.raises(user_error.UserError, match=r"no module 'shpo.good'\.$"):
    _find("shpo.good.Small", packages=())
  with pytest.raises(user_error.UserError, match=r"no module 'shpo.good'\.$"):
    _find("shpo.good.Small", packages=("not_there",))


def test_list_names_what_can_run_and_reads_its_docstring():
  _forget()
  listed = find_experiment.list_experiments(["shop"])
  assert {entry.name: entry.summary for entry in listed} == {
    "shop.good.Small": "A small one.",
    "shop.good.Large": "",
    "shop.good.Third": "",
    "shop.good.Mixed": "",
    "shop.deep.far.Far": "F.",
    "shop.space.inner.Inner": "",
    # Its imports are missing, which a list does not need to know.
    "shop.bad_import.Unusable": "",
    "shop.bad_knob.Bad": "",
  }


def test_list_omits_what_lacks_a_method_of_its_base(tmp_path, monkeypatch):
  (tmp_path / "unfinished.py").write_text(
    "import abc\n"
    "from paxon.runner import experiment\n"
    "class Base(experiment.Experiment):\n"
    "  def task(self): ...\n"
    "  def datasets(self): ...\n"
    "  @abc.abstractmethod\n"
    "  def model(self): ...\n"
    "class Ready(Base):\n"
    "  def model(self): ...\n"
    "class Unfinished(Base):\n"
    "  width: int = 3\n"
  )
  monkeypatch.syspath_prepend(tmp_path)
  (entry,) = find_experiment.list_experiments(["unfinished"])
  assert entry.name == "unfinished.Ready"
  with pytest.raises(user_error.UserError, match="it lacks model"):
    _find("unfinished.Unfinished")


def test_list_says_what_a_run_lacks(tmp_path, monkeypatch):
  (tmp_path / "lacking.py").write_text(
    "from paxon.runner import experiment\n"
    "class Base(experiment.Experiment):\n"
    "  run_requires = ('files', 'no_such_library')\n"
    "  files: str | None = None\n"
    "  mesh = 'fsdp=4,tensor=2'\n"
    "  def task(self): ...\n"
    "  def datasets(self): ...\n"
    "class Ready(Base):\n"
    "  run_requires = ('files', 'json')\n"
    "  files = '/a'\n"
    "  mesh = 'fsdp=-1'\n"
  )
  monkeypatch.syspath_prepend(tmp_path)
  base, ready = find_experiment.list_experiments(["lacking"])
  assert base.find_problem(1) == (
    "set --fdl.files; install no_such_library; 8 devices, here 1"
  )
  assert base.find_problem(8) == "set --fdl.files; install no_such_library"
  assert not ready.find_problem(1)
  assert "lacking" not in sys.modules


def test_list_does_not_import_what_it_lists():
  _forget()
  find_experiment.list_experiments(["shop"])
  assert not [name for name in sys.modules if name.startswith("shop")]


def test_list_of_a_missing_package_is_an_error():
  with pytest.raises(ModuleNotFoundError, match="not_there"):
    find_experiment.list_experiments(["not_there"])


def test_list_equals_what_importing_finds():
  listed = find_experiment.list_experiments(["shop.good", "shop.deep"])
  found = set()
  for name in ("shop.good", "shop.deep.far"):
    for value in vars(importlib.import_module(name)).values():
      if (
        getattr(value, "__module__", None) == name
        and isinstance(value, type)
        and issubclass(value, experiment.Experiment)
        and not inspect.isabstract(value)
        and not value.__name__.startswith("_")
      ):
        found.add(value.import_path())
  assert {entry.name for entry in listed} == found

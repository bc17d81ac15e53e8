"""Tests for `tools/migrate_pax`, its command line, and the page of results."""

import datetime
import pathlib
import pkgutil
import textwrap

import pytest

from paxon.tasks.lm import pax_lm
from paxon.tools.pax_migration import migrate_main, pax_sizes, results_page

_MODULE = '''"""Mine."""

from paxml import experiment_registry
from paxml.tasks.lm import model_params
from paxml.tasks.lm.params import lm_cloud


@experiment_registry.register
class Small(model_params.TransformerLmPmapAdam, lm_cloud.SyntheticDataset):
  """Two layers."""
  NUM_LAYERS = 2
  MODEL_DIMS = 64
  HIDDEN_DIMS = MODEL_DIMS * 4
  NUM_HEADS = 4
  VOCAB_SIZE = 512
  TYPO_OF_MINE = 3
'''


def _write(folder: pathlib.Path, text: str = _MODULE) -> pathlib.Path:
  path = folder / "mine.py"
  path.write_text(text)
  return path


def test_prints_the_module_and_the_report(tmp_path, capsys):
  path = _write(tmp_path)
  assert migrate_main.main([str(path)]) == 0
  out, err = capsys.readouterr()
  assert out.startswith('"""Mine."""\n\nfrom paxon.tasks.lm import pax_lm\n')
  assert "class Small(pax_lm.SyntheticDataset, pax_lm.TransformerLmPmap" in out
  line = 1 + _MODULE.splitlines().index("  TYPO_OF_MINE = 3")
  assert f"{path}:{line}: nothing reads TYPO_OF_MINE" in err
  assert "Left to do: 1\n" in err
  line = 1 + _MODULE.splitlines().index('  """Two layers."""') - 1
  assert f"{path}:{line}: --exp takes the path of the class" in err


def test_quiet_report_has_what_is_left_only(tmp_path, capsys):
  path = _write(tmp_path, _MODULE.replace("  TYPO_OF_MINE = 3\n", ""))
  assert migrate_main.main([str(path), "--quiet"]) == 0
  assert capsys.readouterr().err == "Left to do: nothing\n"


def test_output_is_never_overwritten_silently(tmp_path, capsys):
  path, output = _write(tmp_path), tmp_path / "new.py"
  arguments = [str(path), f"--output={output}"]
  assert migrate_main.main(arguments) == 0
  first = output.read_text()
  output.write_text("edited by hand")
  capsys.readouterr()
  assert migrate_main.main(arguments) == 2
  assert capsys.readouterr().err == (
    f"{output} exists; pass --force to overwrite it.\n"
  )
  assert output.read_text() == "edited by hand"
  assert migrate_main.main([*arguments, "--force"]) == 0
  assert output.read_text() == first
  assert path.read_text() == _MODULE
  assert migrate_main.main([str(path), f"--output={path}", "--force"]) == 2
  assert path.read_text() == _MODULE


def test_in_place_keeps_the_original(tmp_path, capsys):
  path = _write(tmp_path)
  assert migrate_main.main([str(path), "--in_place"]) == 0
  assert (tmp_path / "mine.py.pax").read_text() == _MODULE
  rewritten = path.read_text()
  assert "num_layers = 2" in rewritten
  # A second time there is nothing of Pax, and nothing changes.
  capsys.readouterr()
  assert migrate_main.main([str(path), "--in_place"]) == 2
  assert "mine.py.pax exists" in capsys.readouterr().err
  (tmp_path / "mine.py.pax").unlink()
  assert migrate_main.main([str(path), "--in_place"]) == 2
  assert "has no code of Pax" in capsys.readouterr().err
  assert path.read_text() == rewritten


def test_output_derives_from_our_base_classes(tmp_path, monkeypatch):
  monkeypatch.syspath_prepend(str(tmp_path))
  path, output = _write(tmp_path), tmp_path / "pax_output_of_test.py"
  assert migrate_main.main([str(path), f"--output={output}"]) == 0
  small = pkgutil.resolve_name("pax_output_of_test:Small")
  assert issubclass(small, pax_lm.TransformerLmPmapAdam)
  assert small().job().task.model.stack.num_layers == 2


def test_result_does_not_depend_on_the_run(tmp_path):
  path = _write(tmp_path)
  assert migrate_main.migrate([path])[0] == migrate_main.migrate([path])[0]


@pytest.mark.parametrize(
  ("content", "message"),
  [
    (b"def (", "mine.py:1: not Python: invalid syntax"),
    (b"x = 1\n", "has no code of Pax: it imports neither paxml nor praxis"),
    (b"", "has no code of Pax"),
    (b"\xff\xfe\x00", "is not a text file in UTF-8"),
    (b"import paxml\x00", "not Python: "),
    (
      b"import paxml\nclass A(A): pass\nclass B(A, A): NUM_LAYERS = 2\n",
      None,
    ),
    (
      b"from paxml.tasks.lm.params import c4\n"
      b"class A(c4.TransformerLmSpmdAdam): pass\n"
      b"class B(c4.TransformerLmSpmdAdam, A): pass\n",
      "mine.py:3: B: Cannot create a consistent method resolution",
    ),
  ],
)
def test_bad_module_is_one_line(tmp_path, capsys, content, message):
  path = tmp_path / "mine.py"
  path.write_bytes(content)
  status = migrate_main.main([str(path)])
  err = capsys.readouterr().err
  if message is None:
    assert status == 0
    return
  assert status == 2
  assert message in err
  assert err.count("\n") == 1


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    (["nope.py"], "nope.py: No such file or directory"),
    (["a.py", "b.py"], "Several modules need a folder: pass --output=FOLDER"),
    (["a.py", "--in_place", "--output=b.py"], "--in_place takes neither"),
    (["a.py", "--outptu=b.py"], "unrecognized arguments"),
    (["a/m.py", "b/m.py", "--output=c"], "Two modules have the same name"),
  ],
)
def test_wrong_use_is_one_line(arguments, message, capsys):
  assert migrate_main.main(arguments) == 2
  err = capsys.readouterr().err
  assert message in err
  assert err.count("\n") == 1


def _write_pax(root: pathlib.Path) -> None:
  """Writes a package with the layout of Pax and base classes in its style."""
  folder = root / "paxml" / "tasks" / "lm" / "params"
  folder.mkdir(parents=True)
  (folder.parent / "model_params.py").write_text(
    textwrap.dedent(
      """
      from paxml import base_experiment

      class TransformerLmPmapAdam(base_experiment.BaseExperiment):
        NUM_LAYERS = 32
        VOCAB_SIZE = 32000
        NUM_HEADS = 16
        MODEL_DIMS = 1024
        HIDDEN_DIMS = MODEL_DIMS * 4
      """
    )
  )
  (folder / "lm_cloud.py").write_text(
    _MODULE.replace("from paxml.tasks.lm.params import lm_cloud\n", "").replace(
      ", lm_cloud.SyntheticDataset", ", SyntheticDataset"
    )
    + textwrap.dedent(
      """
      @experiment_registry.register
      class NoData(model_params.TransformerLmPmapAdam):
        NUM_LAYERS = 1
      """
    )
  )


def test_results_of_registered_classes(tmp_path, monkeypatch):
  _write_pax(tmp_path)
  name = "paxml/tasks/lm/params/lm_cloud.py"
  source = tmp_path / name
  head, _, tail = source.read_text().partition("\n@experiment_registry")
  data = (
    "from paxml import base_experiment\n"
    "class SyntheticDataset(base_experiment.BaseExperiment):\n"
    "  PERCORE_BATCH_SIZE = 2\n"
    "  MAX_SEQ_LEN = 16\n"
    "  def datasets(self):\n"
    "    return [pax_fiddle.Config(x.SyntheticLmData, seq_len=16)]\n"
  )
  source.write_text(f"{head}\n{data}\n@experiment_registry{tail}")
  monkeypatch.setattr(results_page, "FILES", (name,))
  monkeypatch.setattr(results_page, "ALONE", ())
  small, no_data = results_page.measure(tmp_path)
  assert (small.name, small.problem, small.left) == ("Small", "", 1)
  # A table with a bias, two layers, a norm; each layer has four projections, a
  # scale per feature of a head, two matrices with biases and two norms.
  layer = 4 * 64**2 + 16 + 2 * 64 * 256 + 256 + 64 + 4 * 64
  assert small.parameters == 512 * 65 + 2 * layer + 2 * 64
  assert small.is_equal
  assert "lacks datasets" in no_data.problem or "abstract" in no_data.problem
  text = results_page.page([small, no_data], datetime.date(2026, 1, 2))
  assert "Measured on 2026-01-02" in text
  assert "1 of 2 registered classes plan after the rewrite (50%)" in text
  assert f"| `Small` | yes | {small.parameters:,} | equal | 1 |" in text


def test_formula_sees_a_difference(tmp_path):
  _write_pax(tmp_path)
  module = "paxml.tasks.lm.model_params"
  path = tmp_path / "paxml" / "tasks" / "lm" / "model_params.py"
  ((count,),) = (each.values() for each in _count(tmp_path, module))
  path.write_text(path.read_text().replace("HEADS = 16", "HEADS = 8"))
  ((other,),) = (each.values() for each in _count(tmp_path, module))
  # Heads are twice as wide, and so is the scale per feature.
  assert other == count + 32 * 64


def _count(root, module):
  return pax_sizes.count_all(root, [module]).values()

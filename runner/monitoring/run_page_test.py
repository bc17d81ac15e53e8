"""Tests for the page of a run."""

import base64
import hashlib
import html
import html.parser
import json
import math
import pathlib
import re
import shutil
import subprocess

import pytest

from paxon.runner.monitoring import goodput, metrics_file, run_page

_VOID = ("meta", "!doctype", "img", "input", "link")


def _records():
  records = [
    metrics_file.Record(
      step,
      "train",
      {
        "loss": 5.0 - step / 100,
        "bits_per_byte": 7.0 - step / 100,
        "learning_rate": 1e-3,
      },
    )
    for step in range(10, 301, 10)
  ]
  records += [
    metrics_file.Record(s, "validation", {"loss": y, "bits_per_byte": 2 * y})
    for s, y in ((100, 4.5), (300, 2.125))
  ]
  return [
    *records,
    metrics_file.Record(0, "baseline/xz", {"bits_per_byte": 4.75}),
    metrics_file.Record(0, "baseline/a<b", {"bits_per_byte": 6.0}),
  ]


def _write(folder, records):
  writer = metrics_file.MetricsFile(folder / "metrics.jsonl", resume_step=0)
  for record in records:
    writer.write(record.step, record.split, record.values)
  writer.close()


def _freeze(folder, records=()):
  if records:
    _write(folder, records)
  return run_page.make_frozen(folder, max_lines=1000)


class _Balance(html.parser.HTMLParser):
  """Checks that every element is closed in order; collects what is loaded."""

  def __init__(self):
    super().__init__()
    self.open, self.loaded, self.text, self.scripts = [], [], "", []

  def handle_starttag(self, tag, attrs):
    if tag not in _VOID:
      self.open.append(tag)
    self.loaded += [value for name, value in attrs if name in ("src", "href")]

  def handle_startendtag(self, tag, attrs):
    pass

  def handle_endtag(self, tag):
    assert self.open.pop() == tag

  def handle_data(self, data):
    if self.open and self.open[-1] == "script":
      self.scripts.append(data)
    elif self.open and self.open[-1] != "style":
      self.text += data


def _parsed(page):
  parser = _Balance()
  parser.feed(page)
  assert parser.open == []
  # The icon, which browsers ask for otherwise.
  assert parser.loaded[:1] == ["data:,"]
  del parser.loaded[0]
  return parser


def _data(page):
  return json.loads(_parsed(page).scripts[0])


def test_report_is_the_live_page_with_its_data(tmp_path):
  frozen, live = _freeze(tmp_path, _records()), run_page.make_live()
  # The data, the library, and the program.
  assert _parsed(frozen).scripts[1:] == _parsed(live).scripts[1:]
  assert len(_parsed(live).scripts) == 3
  assert _data(live) is None
  assert "uPlot=function" in live
  assert "{{" not in re.sub(r"<script>.*?</script>", "", live, flags=re.DOTALL)


def test_report_is_complete_and_loads_nothing(tmp_path):
  (tmp_path / "samples.txt").write_text("def f")
  (tmp_path / "config.txt").write_text("seed = 0\n")
  page = _freeze(tmp_path, _records())
  parsed = _parsed(page)
  assert parsed.loaded == []
  # The license of uPlot names its repository.
  assert set(re.findall(r"https?://[\w./-]+", page)) <= {
    "https://github.com/leeoniya/uPlot"
  }
  assert page.startswith("<!doctype html>")
  for word in ("Final metrics", "Samples", "def f", "seed = 0"):
    assert word in parsed.text


def test_title_is_the_experiment(tmp_path):
  folder = tmp_path / "run-7"
  folder.mkdir()
  assert "<title>run-7</title>" in _freeze(folder)
  settings = {"experiment": "paxon.tasks.lm.quick.Start<"}
  (folder / "settings.json").write_text(json.dumps(settings))
  page = _freeze(folder)
  assert "<title>Start&lt;</title>" in page
  assert "paxon.tasks.lm.quick.Start&lt; · run-7 · 0 steps" in page


def test_report_has_the_curves_of_every_split(tmp_path):
  data = _data(_freeze(tmp_path, _records()))
  (run,) = data["runs"]
  assert run["name"] == tmp_path.name
  found = data["curves"]
  assert found["metrics"] == ["bits_per_byte", "learning_rate", "loss"]
  curves = found["curves"]["bits_per_byte"][tmp_path.name]
  assert curves["train"][0] == [*range(10, 301, 10)]
  assert curves["validation"] == [[100, 300], [9.0, 4.25]]
  assert curves["baseline/a<b"] == [[0], [6.0]]


def test_report_with_many_metrics_is_small(tmp_path):
  values = {f"summaries/{i}": i / 3 for i in range(300)}
  records = [metrics_file.Record(s, "train", values) for s in range(1000)]
  page = _freeze(tmp_path, records)
  assert len(page) < 2_000_000
  curves = _data(page)["curves"]["curves"]
  assert len(curves) == 300
  steps = curves["summaries/7"][tmp_path.name]["train"][0]
  assert (steps[0], steps[-1]) == (0, 999)
  assert 50 < len(steps) < 210


def test_table_has_the_last_metrics(tmp_path):
  page = _freeze(tmp_path, _records())
  rows = [
    [
      re.sub("<.*?>", "", cell)
      for cell in re.findall(r"<t[hd].*?</t[hd]>", row)
    ]
    for row in re.findall(r"<tr>.*?</tr>", page)
  ]
  assert rows == [
    ["", "validation", "train", "a&lt;b (baseline)", "xz (baseline)"],
    ["step", "300", "300", "", ""],
    ["loss", "2.1250", "2.0000", "", ""],
    ["bits per byte", "4.2500", "4.0000", "6.0000", "4.7500"],
    ["learning rate", "", "1.000e-03", "", ""],
  ]


def test_metrics_of_submodules_are_collapsed(tmp_path):
  values = {"loss": 2.0, "grad_norm/stack": 1.0, "summaries/a/rms": 3.0}
  page = _freeze(tmp_path, [metrics_file.Record(1, "train", values)])
  folded = page[page.index("<details>") : page.index("</details>")]
  assert "Show 2 metrics" in folded
  assert "summaries/a/rms" in folded
  assert ">loss</th>" not in folded
  _parsed(page)


def test_metrics_have_units(tmp_path):
  values = {
    "goodput": 0.5,
    "mfu": 0.4321,
    "host_memory_peak_bytes": 3 * 2.0**20,
    "grad_norm": math.inf,
  }
  page = _freeze(tmp_path, [metrics_file.Record(1, "train", values)])
  assert ">goodput</th><td>50.0%</td></tr>" in page
  assert ">mfu</th><td>43.2%</td></tr>" in page
  assert ">host memory peak</th><td>3 MiB</td></tr>" in page
  assert ">grad norm</th><td>inf</td></tr>" in page


def _attempt(begin, end, first_step, last_step, **seconds):
  return goodput.Attempt(
    begin=begin,
    end=end,
    first_step=first_step,
    last_step=last_step,
    finished=False,
    seconds=seconds,
  )


def test_time_is_shown_by_cause(tmp_path):
  attempts = [
    _attempt(0.0, 60.0, 0, 10, productive=40.0, compile=20.0),
    _attempt(80.0, 120.0, 5, 20, productive=40.0),
  ]
  (tmp_path / "goodput.jsonl").write_text(goodput.to_text(attempts))
  page = _freeze(tmp_path)
  assert "Goodput 50.0% of 120.0 s in 2 attempts" in _parsed(page).text
  rows = re.findall(
    r"<th [^>]+>([\w -]+)</th><td>([\d.]+)</td><td>([\d.]+%)</td></tr>", page
  )
  assert rows == [
    ("productive", "60.0", "50.0%"),
    ("compile", "20.0", "16.7%"),
    ("repeated steps", "20.0", "16.7%"),
    ("idle", "20.0", "16.7%"),
  ]


def _spike(step, **fields):
  fields = {
    "metric": "grad_norm",
    "value": math.nan,
    "expected": 1.5,
    "limit": 2.0,
    "position_before": {"document": step},
    "position_after": {},
    **fields,
  }
  return json.dumps({"step": step, **fields})


def test_spikes_are_listed_with_their_data_position(tmp_path):
  lines = [_spike(3), _spike(1234, documents=[*range(20)])]
  (tmp_path / "spikes.jsonl").write_text("\n".join(lines))
  page = _freeze(tmp_path)
  text = re.sub("<.*?>", " ", page[page.index("<h2>Spikes") :])
  first, second = text.index("1,234"), text.index('{"document": 3}')
  assert "grad norm nan, expected 1.5000. Batch: documents 0, 1" in text
  assert '7, …; data position {"document": 1234}' in text[first:second]
  assert "The newest" not in text
  _parsed(page)
  lines = [_spike(step) for step in range(60)]
  (tmp_path / "spikes.jsonl").write_text("\n".join(lines))
  page = _freeze(tmp_path)
  assert "The newest 10 of 60. " in page
  assert 'document": 59' in page
  assert 'document": 9}' not in page


def test_samples_are_listed_by_step(tmp_path):
  lines = [{"step": s, "text": f"text {s}"} for s in (100, 2000)]
  (tmp_path / "samples.jsonl").write_text("\n".join(map(json.dumps, lines)))
  (tmp_path / "samples.txt").write_text("text 2000")
  page = _freeze(tmp_path)
  found = re.findall(
    r"<details( open)?.*?><summary>(.*?)</summary><pre>(.*?)</pre>", page
  )
  assert found == [
    (" open", "Step 2,000", "text 2000"),
    ("", "Step 100", "text 100"),
  ]


EVIL = "</pre></script><script>alert('x')</script><!--\x00\x1b&"


def test_texts_are_escaped(tmp_path):
  (tmp_path / "samples.txt").write_text(EVIL)
  (tmp_path / "config.txt").write_text(f"a = {EVIL}\n")
  settings = {"experiment": EVIL, "overrides": [EVIL]}
  (tmp_path / "settings.json").write_text(json.dumps(settings))
  records = [metrics_file.Record(1, EVIL, {EVIL: 1.0, "loss": 2.0})]
  page = _freeze(tmp_path, records)
  parsed = _parsed(page)
  # Those of the page itself.
  assert page.count("<script") == 3
  assert "<!--" not in page
  assert "\x00" not in parsed.text
  # In the sample, the configuration, the title, twice each and the table.
  assert parsed.text.count("<script>alert('x')</script><!--") >= 5
  (run,) = _data(page)["runs"]
  assert run["knobs"] == [EVIL]
  assert _data(page)["curves"]["curves"][EVIL]


def test_examples_are_images_and_sounds_with_captions(tmp_path):
  image, sound = "data:image/png;base64,AAAA", "data:audio/wav;base64,BBBB"
  examples = {
    "split": "test",
    "step": 3000,
    "examples": [
      {"caption": "label <3>", "image": image},
      {"caption": "yes", "audio": sound},
    ],
  }
  assert "Examples" not in _parsed(_freeze(tmp_path)).text
  (tmp_path / "examples.json").write_text(json.dumps(examples))
  parsed = _parsed(_freeze(tmp_path))
  assert parsed.loaded == [image, sound]
  assert "test, step 3,000" in parsed.text
  assert "label <3>" in parsed.text


def test_empty_run_has_a_report(tmp_path):
  page = _freeze(tmp_path)
  assert _data(page)["curves"] == {"metrics": [], "curves": {}}
  assert run_page.make_sections(tmp_path, list) == {}
  _parsed(page)


@pytest.mark.parametrize(
  ("name", "content"),
  [
    ("spikes.jsonl", "{damaged"),
    ("goodput.jsonl", "[]"),
    ("samples.jsonl", "{}"),
    ("examples.json", "[1]"),
    ("examples.json", '{"examples": [3], "split": "a", "step": 1}'),
  ],
)
def test_a_damaged_file_is_an_error_in_its_section(tmp_path, name, content):
  (tmp_path / name).write_text(content + "\n")
  (section,) = run_page.make_sections(tmp_path, list).values()
  assert section.startswith('<p class="bad">')
  assert name in section
  assert "Final metrics" in _freeze(tmp_path, _records())


def test_runs_are_described(tmp_path):
  nothing = {"name": "x", "experiment": "", "knobs": []}
  nothing |= {"finished": False, "problem": ""}
  assert run_page.describe("x", tmp_path) == nothing
  settings = {"experiment": "x.Y", "overrides": ["--fdl.num_layers=2"]}
  (tmp_path / "settings.json").write_text(json.dumps(settings))
  (tmp_path / "finished.json").touch()
  assert run_page.describe("x", tmp_path) == {
    "name": "x",
    "experiment": "x.Y",
    "knobs": ["num_layers=2"],
    "finished": True,
    "problem": "",
  }
  (tmp_path / "settings.json").write_text("[]")
  damaged = run_page.describe("x", tmp_path)
  assert damaged["experiment"] == ""
  assert "settings.json" in damaged["problem"]


def _run_script(name, expression):
  """Returns the JSON value of an expression after a function of the page."""
  path = pathlib.Path(run_page.__file__).with_suffix(".html")
  page = path.read_text()
  (pattern,) = re.findall(r"^const NOISY =\n.*?;\n", page, re.MULTILINE)
  (code,) = re.findall(
    rf"^function {name}\(.*?^}}\n", page, re.MULTILINE | re.DOTALL
  )
  code = f"{pattern}{code}console.log(JSON.stringify({expression}))"
  ran = subprocess.run(
    ["node", "-e", code], capture_output=True, text=True, check=True
  )
  return json.loads(ran.stdout)


@pytest.mark.skipif(shutil.which("node") is None, reason="node is missing")
def test_the_range_of_a_chart_has_the_first_loss_and_the_peaks():
  assert _run_script("range", "range({}, 2, 11)") == [
    pytest.approx(2 - 0.72),
    pytest.approx(11.72),
  ]
  flat, none = _run_script("range", "[range({}, 3, 3), range({}, null, null)]")
  assert flat == [pytest.approx(2.7), pytest.approx(3.3)]
  assert none == [0, 1]


def test_only_noisy_metrics_are_smoothed():
  page = pathlib.Path(run_page.__file__).with_suffix(".html").read_text()
  (pattern,) = re.findall(r"^const NOISY =\n  /(.*)/;\n", page, re.MULTILINE)
  assert "NOISY.test(name)" in page
  is_noisy = {
    name: bool(re.search(pattern, name))
    for name in (
      *("loss", "aux_loss", "moe/balance_loss", "grad_norm", "grad_norm/stack"),
      *("bits_per_byte", "accuracy", "log_pplx"),
      *("learning_rate", "learning_rate/embedding", "param_norm", "loss_scale"),
      *("loss_weight", "tokens_per_second", "step_memory_bytes", "sparsity"),
    )
  }
  assert [name for name, noisy in is_noisy.items() if not noisy] == [
    *("learning_rate", "learning_rate/embedding", "param_norm", "loss_scale"),
    *("loss_weight", "tokens_per_second", "step_memory_bytes", "sparsity"),
  ]


def _find_policy(page):
  (meta,) = re.findall(
    r'<meta http-equiv="Content-Security-Policy" content="([^"]*)">', page
  )
  return dict(each.split(" ", 1) for each in html.unescape(meta).split("; "))


@pytest.mark.parametrize("kind", ["live", "frozen"])
def test_the_policy_admits_the_scripts_of_the_page_alone(tmp_path, kind):
  page = run_page.make_live()
  if kind == "frozen":
    (tmp_path / "samples.txt").write_text("<script>alert(1)</script>")
    page = _freeze(tmp_path, _records())
  policy = _find_policy(page)
  assert policy["default-src"] == "'none'"
  assert policy["img-src"] == policy["media-src"] == "data:"
  scripts = re.findall(r"<script>(.*?)</script>", page, flags=re.DOTALL)
  digests = [hashlib.sha256(each.encode()).digest() for each in scripts]
  expected = [f"'sha256-{base64.b64encode(d).decode()}'" for d in digests]
  assert policy["script-src"].split() == expected
  # A handler in an attribute would not run.
  assert not re.search(
    r"<[a-z]+ [^>]*\bon[a-z]+=", page.partition("<script")[0]
  )
  assert page.index("Content-Security-Policy") < page.index("<style")


def test_a_page_shows_no_file_from_elsewhere(tmp_path):
  secret, run = tmp_path / "secret", tmp_path / "run"
  secret.write_text("hunter2")
  run.mkdir()
  for name in ("samples.txt", "config.txt", "spikes.jsonl", "examples.json"):
    (run / name).symlink_to(secret)
  page = _freeze(run, _records())
  assert "hunter2" not in page
  assert page.count("outside of the folder") == 4


def test_examples_are_no_remote_images(tmp_path):
  example = {"caption": "a", "image": "https://example.com/a.png"}
  content = {"split": "a", "step": 1, "examples": [example]}
  (tmp_path / "examples.json").write_text(json.dumps(content))
  (section,) = run_page.make_sections(tmp_path, list).values()
  assert section.startswith('<p class="bad">')

"""Tests for the page, by real parsers of XML and of HTML."""

import dataclasses
import html.parser
import json
import re
from xml.etree import ElementTree

import pytest

from paxon.runner import units
from paxon.runner.plan import result, sample_plan
from paxon.runner.plan.web_page import bars, page

_VOID = ("meta", "!doctype")
_GIB = 2**30
_FULL = sample_plan.plan(
  advice=("Halve it.",),
  verified_changes=(sample_plan.change(),),
  search=(sample_plan.change(compiled=False),),
)
_FAILURE = result.Failure(target="v5e:4x4", message="heads do not divide.")


class _Reader(html.parser.HTMLParser):
  """Checks that every element is closed in order; collects text and links."""

  def __init__(self):
    super().__init__()
    self.open, self.loaded, self.tags, self.text = [], [], set(), ""

  def handle_starttag(self, tag, attrs):
    self.tags.add(tag)
    if tag not in _VOID:
      self.open.append(tag)
    self.loaded += [v for k, v in attrs if k in ("src", "href", "style")]

  def handle_startendtag(self, tag, attrs):
    self.handle_starttag(tag, attrs)
    if tag not in _VOID:
      self.handle_endtag(tag)

  def handle_endtag(self, tag):
    assert self.open.pop() == tag

  def handle_data(self, data):
    self.text += data


def _read(text):
  reader = _Reader()
  reader.feed(text)
  reader.close()
  assert reader.open == []
  return reader


def _xml(text):
  first, _, rest = text.partition("\n")
  assert first == "<!doctype html>"
  return ElementTree.fromstring(rest)


def _numbers(value):
  """Yields the numbers of a JSON value."""
  if isinstance(value, dict):
    value = list(value.values())
  if isinstance(value, list):
    for item in value:
      yield from _numbers(item)
  elif isinstance(value, int | float) and not isinstance(value, bool):
    yield value


def test_every_figure_of_the_file_is_on_the_page():
  content = json.loads(result.to_json((_FULL,)))["plans"][0]
  # Factors; the page has what they lead to.
  low, high = content["estimate"].pop("band")
  step = content["estimate"]["step"]
  content["estimate"] |= {"from": low * step, "to": high * step}
  text = _read(page.to_html([_FULL])).text
  forms = (units.size, units.flops, units.seconds, units.share)
  numbers = list(_numbers(content))
  assert len(numbers) > 80
  for number in numbers:
    shown = {form(number) for form in forms} | {f"{number:,}", f"{number:,.0f}"}
    assert any(form in text for form in shown), (number, shown)


def test_every_sentence_of_the_file_is_on_the_page():
  text = _read(page.to_html([_FULL, _FULL], [_FAILURE])).text
  for part in (
    *("tasks.a.B", "--fdl.mesh=fsdp=8", "h200:1x8", "fsdp=8"),
    *("a table is left whole", "a loop is counted once"),
    *("gathers wait for each other", "Halve it.", "0123456789abcdef" * 4),
    *("jax 0.10.2", "2026-11-21T10:41:09Z", "--fdl.num_microbatches=2"),
    *(
      "xla_gpu_some_option",
      "__cudnn$fmhaSoftmax",
      "autotuned at run time",
    ),
    *("such a thing is not there", "weight gradient", "cublas fp8"),
    "35 % of the executed FLOPs are covered, 30 % run in low precision.",
    *("no plan: heads do not divide.", "h200.json, measured 2026-11-01"),
    *("all-to-all", "DecoderLm/stack/layers/blocks_0/norm"),
    "118.00 of 131.00 GiB are usable; the CUDA compiler enforces no limit",
  ):
    assert part in text


def test_the_page_is_well_formed_and_loads_nothing():
  text = page.to_html([_FULL, _FULL], [_FAILURE])
  _xml(text)
  reader = _read(text)
  assert reader.loaded == []
  assert not reader.tags & {"script", "link", "img", "iframe", "object"}
  assert "url(" not in text
  assert "@import" not in text


def test_pictures_have_names_and_bars_have_titles():
  root = _xml(page.to_html([_FULL, _FULL]))
  pictures = list(root.iter("svg"))
  assert len(pictures) == 2 + 2 * 3
  for picture in pictures:
    assert picture.get("role") == "img"
    assert picture.get("aria-label") == picture.findtext("title")
    assert all(r.findtext("title") for r in picture.iter("rect"))
    right = float(picture.get("viewBox").split()[2])
    for shape in picture.iter("rect"):
      assert float(shape.get("x")) + float(shape.get("width")) <= right + 2
  titles = [rect.findtext("title") for rect in pictures[2].iter("rect")]
  assert "parameters: 10.00 GiB" in titles
  assert "saved: layer inputs: 12.00 GiB" in titles
  # Cells of tables name their rows and columns.
  for table in root.iter("table"):
    assert {th.get("scope") for th in table.iter("th")} == {"row", "col"}


def test_bars_are_as_long_as_their_values():
  svg = ElementTree.fromstring(
    bars.draw(
      [
        bars.Row("a", (bars.Segment("x", 1, 0), bars.Segment("y", 3, 1))),
        bars.Row("b", (bars.Segment("z", 2, 2),), start=1),
      ],
      title="t",
      form=str,
      limits=[("most", 5)],
    )
  )
  x, y, z = svg.iter("rect")
  widths = [float(r.get("width")) for r in (x, y, z)]
  assert widths[1] == pytest.approx(3 * widths[0], abs=0.2)
  assert widths[2] == pytest.approx(2 * widths[0], abs=0.2)
  assert float(z.get("x")) == pytest.approx(float(y.get("x")), abs=0.2)
  (line,) = svg.iter("line")
  limit = float(line.get("x1")) - float(x.get("x"))
  assert limit == pytest.approx(5 * widths[0], abs=0.5)
  assert bars.draw([bars.Row("a", ())], title="t", form=str) == ""


_HOSTILE = '</style><script>alert("1")</script>&amp;\x00\x1b\ud800]]>\u202e'


def test_hostile_names_are_text():
  plan = dataclasses.replace(
    _FULL,
    experiment=f"a.{_HOSTILE}",
    overrides=(_HOSTILE,),
    target=_HOSTILE,
    mesh={_HOSTILE: 8},
    batch={_HOSTILE: (1,)},
    memory=sample_plan.memory(saved={_HOSTILE: _GIB}, compiler_error=_HOSTILE),
    flops=dataclasses.replace(_FULL.flops, by_module={_HOSTILE: 10**12}),
    kernels={_HOSTILE: 1},
    findings=(_HOSTILE,),
    versions={_HOSTILE: _HOSTILE},
    compiler_options={_HOSTILE: _HOSTILE},
    fingerprint=_HOSTILE,
    made_at=_HOSTILE,
    estimate=sample_plan.estimate(source=_HOSTILE, exposed={_HOSTILE: 1.0}),
    verified_changes=(sample_plan.change(overrides=(_HOSTILE,)),),
  )
  failure = result.Failure(target=_HOSTILE, message=_HOSTILE)
  text = page.to_html([plan, plan], [failure])
  text.encode()
  _xml(text)
  assert "script" not in _read(text).tags
  assert not re.search(r"[\x00-\x09\x0b-\x1f]", text)


@pytest.mark.parametrize(
  "fields",
  [
    pytest.param(
      {
        "compiled": False,
        "memory": sample_plan.memory(
          peak=None, arguments=None, temporaries=None, saved={}
        ),
        "estimate": None,
        "hbm_bytes": None,
        "compiled_flops": None,
        "fingerprint": None,
        "compile_seconds": None,
        "kernels": {},
        "kernel_choices": (),
        "collectives": (),
      },
      id="traced",
    ),
    pytest.param(
      {
        "device_kind": "cpu",
        "memory": sample_plan.memory(usable=None, capacity=None),
        "bound": None,
        "estimate": None,
        "mesh": {},
        "overrides": (),
      },
      id="cpu",
    ),
    pytest.param(
      {"memory": sample_plan.memory(peak=120 * _GIB), "fit": "does not fit"},
      id="too large",
    ),
    pytest.param(
      {"memory": sample_plan.memory(arguments=_GIB, peak=2 * _GIB, saved={})},
      id="small",
    ),
  ],
)
def test_what_is_not_known_is_left_out(fields):
  plan = sample_plan.plan(**fields)
  for text in (page.to_html([plan]), page.to_html([plan, _FULL])):
    _xml(text)
    words = _read(text).text
    assert "None" not in words
    assert "nan" not in words


def test_six_targets_of_many_parts_are_a_small_file():
  parts = {f"DecoderLm/stack/blocks_{i}/attention": 10**12 for i in range(60)}
  plan = dataclasses.replace(
    _FULL,
    flops=dataclasses.replace(_FULL.flops, by_module=parts),
    collectives=_FULL.collectives * 10,
    findings=_FULL.findings * 10,
  )
  assert len(page.to_html([plan] * 6).encode()) < 200_000

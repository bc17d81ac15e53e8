"""Tests for the page, by a parser of HTML."""

import dataclasses
import html.parser
import json
import re

import pytest

from paxon.runner import units
from paxon.runner.plan import plan_page, result, sample_plan

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
    self.open, self.loaded, self.tags, self.text = [], [], [], ""

  def handle_starttag(self, tag, attrs):
    self.tags.append((tag, dict(attrs)))
    if tag not in _VOID:
      self.open.append(tag)
    self.loaded += [v for k, v in attrs if k in ("src", "href")]

  def handle_endtag(self, tag):
    assert self.open.pop() == tag

  def handle_data(self, data):
    self.text += data

  def names(self):
    return {tag for tag, _ in self.tags}

  def attributes(self, **wanted):
    return [a for _, a in self.tags if wanted.items() <= a.items()]


def _read(text):
  reader = _Reader()
  reader.feed(text)
  reader.close()
  assert reader.open == []
  return reader


def _numbers(value):
  """Yields the numbers of a JSON value."""
  if isinstance(value, dict):
    value = list(value.values())
  if isinstance(value, list):
    for item in value:
      yield from _numbers(item)
  elif isinstance(value, int | float) and not isinstance(value, bool):
    yield value


def test_every_number_of_the_file_is_on_the_page():
  content = json.loads(result.to_json((_FULL,)))["plans"][0]
  # Factors; the page has what they lead to.
  low, high = content["estimate"].pop("band")
  step = content["estimate"]["step"]
  content["estimate"] |= {"from": low * step, "to": high * step}
  # Changes show the bound only if there is no estimate.
  for change in (*content["verified_changes"], *content["search"]):
    del change["bound"]
  text = _read(plan_page.to_html([_FULL])).text
  forms = (units.size, units.flops, units.seconds, units.share)
  numbers = list(_numbers(content))
  assert len(numbers) > 80
  for number in numbers:
    shown = {form(number) for form in forms} | {
      *(f"{number:,}", f"{number:,.0f}", f"{number}")
    }
    assert any(form in text for form in shown), (number, shown)


def test_every_sentence_of_the_file_is_on_the_page():
  text = _read(plan_page.to_html([_FULL, _FULL], [_FAILURE])).text
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
    "35 % of the executed FLOPs are covered by the recipe, 30 % run in low",
    *("no plan: heads do not divide.", "h200.json, measured 2026-11-01"),
    "The CUDA compiler enforces no limit",
  ):
    assert part in text


def test_the_page_loads_nothing():
  text = plan_page.to_html([_FULL, _FULL], [_FAILURE])
  reader = _read(text)
  assert reader.loaded == []
  assert not reader.names() & {"script", "link", "img", "iframe", "object"}
  assert "url(" not in text
  assert "@import" not in text


def test_charts_have_names_and_segments_have_titles():
  reader = _read(plan_page.to_html([_FULL, _FULL]))
  charts = reader.attributes(role="img")
  # Two comparisons; memory, modules, bound and estimate of either plan.
  assert len(charts) == 2 + 2 * 4
  assert all(a["aria-label"] for a in charts)
  titles = [a.get("title") for a in reader.attributes(**{"class": "c0"})]
  assert "parameters: 10.00 GiB" in titles
  assert {a["scope"] for tag, a in reader.tags if tag == "th"} == {"row", "col"}


def _boxes(text, kind):
  """Returns the left end and the width, in percent, of parts of bars."""
  return [
    tuple(float(n) for n in re.findall(r"([\d.]+)%", attributes["style"]))
    for attributes in _read(text).attributes(**{"class": kind})
    if "style" in attributes
  ]


def test_a_bar_is_as_long_as_its_value():
  text = plan_page.to_html([_FULL])
  # 10 of 131 GiB are parameters; they and 20 GiB of the optimizer come first.
  first, *_ = _boxes(text, "c0")
  assert first == pytest.approx((0.0, 100 * 10 / 131), abs=1e-2)
  second, *_ = _boxes(text, "c1")
  assert second == pytest.approx((100 * 10 / 131, 100 * 20 / 131), abs=1e-2)
  usable, capacity = _boxes(text, "limit")[:2]
  assert usable == pytest.approx((100 * 118 / 131, 0), abs=1e-2)
  assert capacity == pytest.approx((100, 0), abs=1e-2)


def test_the_memory_of_a_small_model_is_also_drawn_zoomed():
  mib = 2**20
  small = sample_plan.memory(
    parameters=100 * mib,
    optimizer=200 * mib,
    other_variables=0,
    batch=0,
    gradients=100 * mib,
    arguments=300 * mib,
    temporaries=100 * mib,
    peak=400 * mib,
    saved={},
  )
  text = plan_page.to_html([sample_plan.plan(memory=small)])
  parameters = _boxes(text, "c0")[:2]
  # The device has 131 GiB; zoomed, the whole width is the peak.
  assert parameters[0][1] == pytest.approx(100 * 100 / (131 * 1024), abs=1e-3)
  assert parameters[1][1] == pytest.approx(25.0)
  assert "Zoomed in 302 times" in _read(text).text
  assert "Zoomed" not in plan_page.to_html([_FULL])


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
  text = plan_page.to_html([plan, plan], [failure])
  text.encode()
  assert "script" not in _read(text).names()
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
  for text in (plan_page.to_html([plan]), plan_page.to_html([plan, _FULL])):
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
  assert len(plan_page.to_html([plan] * 6).encode()) < 200_000

"""Tests for element trees of HTML and SVG."""

from xml.etree import ElementTree

from paxon.runner import web_page


def _text(element):
  return ElementTree.tostring(element, encoding="unicode", method="html")


def test_text_and_attributes_are_escaped():
  made = web_page.element("p", "<b> & ", class_='"')
  assert _text(made) == '<p class="&quot;">&lt;b&gt; &amp; </p>'
  assert _text(web_page.element("p", "\x00\x1b\ud800\n")) == (
    "<p>\ufffd\ufffd\ufffd\n</p>"
  )


def test_content_keeps_its_order():
  inner = web_page.element("b", "2")
  made = web_page.element("p", "1", None, inner, "3", "4")
  assert _text(made) == "<p>1<b>2</b>34</p>"


def test_attributes_have_html_names_and_short_numbers():
  made = web_page.element("text", x=1 / 3, viewBox="0 0", text_anchor="end")
  assert _text(made) == (
    '<text x="0.3" viewBox="0 0" text-anchor="end"></text>'
  )


def test_tables_and_details_without_content_are_omitted():
  assert web_page.table(("a",), ()) is None
  assert web_page.details("a", None) is None
  table = web_page.table(("", "b"), [("c", "d")], kind="f")
  assert table is not None
  assert _text(table) == (
    '<div class="table"><table class="f"><thead><tr>'
    '<th scope="col"></th><th scope="col">b</th></tr></thead><tbody><tr>'
    '<th scope="row">c</th><td>d</td></tr></tbody></table></div>'
  )


def test_keeps_spaces_and_joiners_of_text():
  text = "a\u00a0b\u3000c \U0001f469\u200d\U0001f4bb"
  assert _text(web_page.element("p", text)) == f"<p>{text}</p>"

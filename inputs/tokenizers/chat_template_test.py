"""Tests for chat templates; expected texts are Jinja's and transformers'."""

import concurrent.futures
import json

import pytest

from paxon.inputs.tokenizers import chat_template, testing

_SOURCE = (
  "{% for m in messages %}\n"
  "  {% if m.role == 'user' %}\n"
  "U:{{ m.content }}\n"
  "  {% else %}\n"
  "A:{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}\n"
  "  {% endif %}\n"
  "{% endfor %}\n"
  "{% if add_generation_prompt %}A:{% endif %}"
)
_CHAT = [
  {"role": "user", "content": "1?"},
  {"role": "assistant", "content": "2"},
]


def _template(source=_SOURCE):
  return chat_template.ChatTemplate(
    source=source, special_tokens={"eos_token": "$"}
  )


def test_blocks_leave_no_lines():
  # trim_blocks removes the newline after a block; after `generation`, too.
  assert _template()(_CHAT[:1]) == "U:1?\nA:"
  assert _template()(_CHAT, add_generation_prompt=False) == "U:1?\nA:2$"


@pytest.mark.parametrize(
  ("source", "text"),
  [
    ("{{ messages | tojson }}", '[{"role": "user", "content": "<é>"}]'),
    ("{% for m in messages %}{% break %}{% endfor %}x", "x"),
    ("{{ tools is none }}{{ think }}", "True1"),
    ("{{ messages[0].content }}", "<é>"),
  ],
)
def test_sees_what_transformers_gives(source, text):
  messages = [{"role": "user", "content": "<é>"}]
  variables = {"think": 1} if "think" in source else {}
  assert _template(source)(messages, **variables) == text


def test_the_date_is_that_of_today():
  assert len(_template("{{ strftime_now('%Y-%m-%d') }}")([])) == 10


@pytest.mark.parametrize(
  ("source", "messages", "message"),
  [
    ("{{ raise_exception('No system.') }}", [], "chat template: No system."),
    ("{% if %}", [], "is not a Jinja program"),
    ("{{ messages.append(1) }}", [], "chat template: .*append"),
    ("{{ ''.__class__.mro() }}", [], "chat template: .*__class__"),
    ("x", [{"content": "a"}], "Message 0 .* must be an object with a string"),
    ("{{ 1 / 0 }}", _CHAT, "chat template: ZeroDivisionError: division by"),
    ("{{ 'a' + 1 }}", _CHAT, "chat template: TypeError: can only concatenate"),
    ("{{ strftime_now(3) }}", _CHAT, r"TypeError: strftime\(\) argument 1"),
    (
      "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
      _CHAT,
      "chat template: it recurses without end",
    ),
    ("{{ " + "(" * 999 + ")" * 999 + " }}", _CHAT, "Jinja program .*recurses"),
    ("{{ 'a' * 10**10 }}", _CHAT, "needs more than 1 GiB of memory"),
    ("{{ '{:>9999999999}'.format('') }}", _CHAT, "more than 1 GiB of memory"),
    ("{{ 'a' * 9999999 }}", _CHAT, "text has more than 1,0[0-9,]* characters"),
    ("{% for i in range(10**12) %}{% endfor %}", _CHAT, "Range too big"),
    ("", _CHAT, "returns no text for 2 messages"),
    (" \n", _CHAT, "returns no text for 2 messages"),
    ("{{ raise_exception('a\nb') }}", _CHAT, "template: a b.$"),
  ],
)
def test_rejects(source, messages, message):
  with pytest.raises(ValueError, match=message):
    _template(source)(messages)


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("in_thread", [False, True])
def test_a_loop_without_end_ends(in_thread):
  """Also off the main thread, and the next template is not concerned."""
  inner = "{% for j in range(99999) %}{% endfor %}"
  source = f"{{% for i in range(99999) %}}{inner}{{% endfor %}}"
  with concurrent.futures.ThreadPoolExecutor() as pool:
    run = pool.submit if in_thread else _call
    with pytest.raises(ValueError, match="takes too long"):
      run(_template(source), _CHAT).result()
    assert run(_template(), _CHAT[:1]).result() == "U:1?\nA:"


def _call(function, *arguments):
  found = concurrent.futures.Future()
  try:
    found.set_result(function(*arguments))
  except ValueError as error:
    found.set_exception(error)
  return found


def test_another_template_of_a_folder(tmp_path):
  (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
  path = tmp_path / "other.jinja"
  path.write_text("{{ eos_token }}?")
  assert chat_template.load(str(tmp_path), path=str(path))([]) == "</s>?"
  with pytest.raises(ValueError, match=r"none\.jinja is no file of text"):
    chat_template.load(str(tmp_path), path=str(tmp_path / "none.jinja"))


def test_a_template_that_changes_earlier_turns_is_rejected():
  forgets = "{{ messages[-1].content }}"
  with pytest.raises(ValueError, match="changes the text before message 1"):
    _template(forgets).tokenize(_CHAT, testing.Letters())


@pytest.mark.parametrize("name", ["chat_template.jinja", "other"])
def test_finds_the_template_of_a_folder(tmp_path, name):
  (tmp_path / name).write_text("{{ eos_token }}")
  config = {
    "eos_token": {"content": "</s>"},
    "chat_template": [{"name": "default", "template": "{{ eos_token }}!"}],
  }
  (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
  loaded = chat_template.load(str(tmp_path))
  assert loaded([]) == ("</s>" if name.endswith("jinja") else "</s>!")


def test_a_folder_without_a_template(tmp_path):
  with pytest.raises(ValueError, match="has no chat template"):
    chat_template.load(str(tmp_path))


@pytest.mark.parametrize(
  ("config", "message"),
  [
    ({"chat_template": 3}, "chat_template must be a text, or a list of"),
    ({"chat_template": ["x"]}, "none named 'default'"),
    (
      {"chat_template": [{"name": "default", "template": 3}]},
      "chat_template must be a text, or a list of",
    ),
  ],
)
def test_templates_of_another_type(config, message, tmp_path):
  (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
  with pytest.raises(ValueError, match=message):
    chat_template.load(str(tmp_path))


def test_special_tokens_without_a_text_have_no_name(tmp_path):
  config = {"chat_template": "{{ pad_token }}.", "pad_token": {"lstrip": True}}
  (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
  assert chat_template.load(str(tmp_path))([]) == "."

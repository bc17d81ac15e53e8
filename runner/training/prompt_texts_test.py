"""Tests for the prompts that the command line means."""

import pytest

from paxon.runner import user_error
from paxon.runner.training import prompt_texts


@pytest.mark.parametrize(
  ("given", "prompt"),
  [
    ("def ", "def "),
    ("", ""),
    ("a@b", "a@b"),
    ("@@home", "@home"),
    ("@@", "@"),
  ],
)
def test_a_text_is_one_prompt(given, prompt):
  assert prompt_texts.parse(given, {}) == [prompt]


@pytest.mark.parametrize(
  ("content", "prompts"),
  [
    ("one\ntwo\n", ["one", "two"]),
    ("one\r\n two ", ["one", " two "]),
    ("one\n\ntwo\n\n", ["one", "", "two", ""]),
    ("a\u2028b\x0cc\n", ["a\u2028b\x0cc"]),
    ("\n", [""]),
  ],
)
def test_a_file_has_one_prompt_a_line(tmp_path, content, prompts):
  path = tmp_path / "prompts.txt"
  path.write_bytes(content.encode())
  assert prompt_texts.parse(f"@{path}", {}) == prompts


def test_a_relative_file_is_where_the_user_stands(tmp_path):
  (tmp_path / "p.txt").write_text("x")
  environ = {"BUILD_WORKING_DIRECTORY": str(tmp_path)}
  assert prompt_texts.parse("@p.txt", environ) == ["x"]


@pytest.mark.parametrize(
  ("name", "message"),
  [
    ("", r"--prompt=@ names no file; write --prompt=@FILE, or --prompt=@@"),
    ("no.txt", r"no.txt cannot be read \(No such file or dir.*begins with @"),
    (".", r"cannot be read \(Is a directory\)"),
    ("empty.txt", r"empty.txt is empty; write one prompt a line"),
    ("bytes.txt", r"bytes.txt is no UTF-8 text \(byte 1\)"),
    ("az://a/b", r"az://a/b cannot be reached: Install adlfs"),
  ],
)
def test_a_file_that_gives_no_prompts(tmp_path, name, message):
  (tmp_path / "empty.txt").write_text("")
  (tmp_path / "bytes.txt").write_bytes(b"a\xff")
  with pytest.raises(user_error.UserError, match=message):
    prompt_texts.parse(f"@{name}", {"BUILD_WORKING_DIRECTORY": str(tmp_path)})

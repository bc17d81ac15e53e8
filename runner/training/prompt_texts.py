"""The prompts that `--prompt` means: a text, or a file of them.

--prompt="def "         this text
--prompt=@prompts.txt   the lines of that file, one prompt each
--prompt=@@home         the text `@home`
"""

from collections.abc import Mapping
import os

from paxon.runner import files, run_dir, user_error

_FILE = "@"


def parse(given: str, environ: Mapping[str, str]) -> list[str]:
  """Returns the prompts, one at least.

  Args:
    given: The text of the flag.
    environ: The environment, which says where a relative path starts.

  Raises:
    UserError: There is no such file, it is not UTF-8, or it has no line.
  """
  if not given.startswith(_FILE):
    return [given]
  name = given.removeprefix(_FILE)
  if name.startswith(_FILE):
    return [name]
  flag = f"--prompt={given}"
  if not name:
    raise user_error.UserError(
      f"{flag} names no file; write --prompt=@FILE, or --prompt=@@ for the text"
      " '@'."
    )
  path = run_dir.resolve(name, environ)
  files.check_store(path)
  try:
    text = path.read_text(encoding="utf-8")
  except UnicodeDecodeError as error:
    raise user_error.UserError(
      f"{flag}: {os.fspath(path)} is no UTF-8 text (byte {error.start})."
    ) from error
  except OSError as error:
    raise user_error.UserError(
      f"{flag}: {os.fspath(path)} cannot be read"
      f" ({error.strerror or type(error).__name__}); for a text that begins"
      " with @ write @@."
    ) from error
  if not text:
    raise user_error.UserError(
      f"{flag}: {os.fspath(path)} is empty; write one prompt a line."
    )
  # Not `splitlines`, which also splits at characters that a prompt may have.
  return [
    line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")
  ]

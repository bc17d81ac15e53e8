"""The error for a library that is needed and not installed."""


class MissingLibraryError(ImportError, ValueError):
  """A library that only some inputs need is not there.

  It is the user's to mend, as a wrong value is; the message says how.
  """

  def __init__(self, library: str, *, extra: str) -> None:
    """Names the library.

    Args:
      library: What is not installed.
      extra: The extra of `paxon`, and the setting of Bazel, that brings it.
    """
    super().__init__(
      f"{library} is not installed: start with `bazel run --config={extra}"
      f" ...`, or install paxon with its extra `{extra}`.",
      name=library,
    )

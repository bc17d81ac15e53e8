"""The error for a missing optional library."""


class MissingLibraryError(ImportError, ValueError):
  """An optional library is not installed.

  Also a ValueError, because the user can fix it; the message states how.
  """

  def __init__(self, library: str, *, extra: str) -> None:
    """Initializes the error.

    Args:
      library: The missing library.
      extra: The extra of `paxon`, and the Bazel config, that provides it.
    """
    super().__init__(
      f"{library} is not installed: start with `bazel run --config={extra}"
      f" ...`, or install paxon with its extra `{extra}`.",
      name=library,
    )

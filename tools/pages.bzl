"""Tests of pages of docs/ and of notebooks."""

load("//tools:py.bzl", "py_test")

def page_test(name, page, size, runtime_deps, **kwargs):
    """Runs the code of a page in order, in one folder.

    Args:
      name: The target's name.
      page: The label of the page, a Markdown file.
      size: Bazel's size, which is also the time limit.
      runtime_deps: What the code imports; it runs in separate processes.
      **kwargs: As for py_test.
    """
    py_test(
        name = name,
        size = size,
        srcs = ["//tools:run_page_examples.py"],
        data = [page],
        env = {"PAXON_PAGE": "$(rootpath %s)" % page},
        deps = [Label("//runner/hosts:warm_python")],
        runtime_deps = runtime_deps,
        **kwargs
    )

def notebooks_test(name, pages, size, runtime_deps, **kwargs):
    """Runs notebooks at toy size, each in one namespace.

    All are in one process, so that what one compiles serves the others.

    Args:
      name: The target's name.
      pages: The labels of the notebooks, Markdown files of one folder.
      size: Bazel's size, which is also the time limit.
      runtime_deps: What the cells import.
      **kwargs: As for py_test.
    """
    py_test(
        name = name,
        size = size,
        srcs = ["//tools:run_notebooks.py"],
        data = pages,
        devices = 4,
        env = {"PAXON_NOTEBOOK": "$(rootpath %s)" % pages[0]},
        keep_compilations = True,
        optimize = False,
        deps = [Label("//tools:notebook_cells")],
        runtime_deps = runtime_deps,
        **kwargs
    )

"""The switches that say which wheels programs and tests get."""

_PLAN = [
    Label("@pypi_plan_cuda//:jax_cuda13_pjrt"),
    Label("@pypi_plan_cuda//:jax_cuda13_plugin"),
    Label("@pypi_plan_cuda//:nvidia_cuda_nvcc"),
    Label("@pypi_plan_cuda//:nvidia_nvvm"),
    Label("@pypi_tpu//:libtpu"),
]

# fsspec finds them by the schemes of URLs.
_STORES = [
    Label("@pypi_stores//:adlfs"),
    Label("@pypi_stores//:gcsfs"),
    Label("@pypi_stores//:s3fs"),
]

# Setting -> the targets that it adds to every program and test. JAX finds
# these plugins by itself, so no module of ours imports them.
WHEELS = {
    "cuda": [
        Label("@pypi_cuda//:jax_cuda13_pjrt"),
        Label("@pypi_cuda//:jax_cuda13_plugin"),
    ],
    "plan": _PLAN,
    "plan_cudnn": _PLAN + [
        Label("@pypi_plan_cudnn//:nvidia_cuda_nvrtc"),
        Label("@pypi_plan_cudnn//:nvidia_cuda_runtime"),
        Label("@pypi_plan_cudnn//:nvidia_cudnn_cu13"),
    ],
    "tpu": [Label("@pypi_tpu//:libtpu")],
}

def _accelerator(ctx):
    values = ["none"] + WHEELS.keys()
    if ctx.build_setting_value not in values:
        fail("%s must be one of %s, got `%s`." %
             (ctx.label, ", ".join(values), ctx.build_setting_value))

_accelerator_flag = rule(
    implementation = _accelerator,
    build_setting = config.string(flag = True),
)

def accelerator(name):
    """A flag, `none` by default, and a config_setting for each other value."""
    _accelerator_flag(
        name = name,
        build_setting_default = "none",
        visibility = ["//visibility:public"],
    )
    for value in WHEELS:
        native.config_setting(
            name = value,
            flag_values = {":" + name: value},
            visibility = ["//visibility:public"],
        )

def _switch(ctx):
    # buildifier: disable=unused-variable
    _ = ctx

_switch_flag = rule(
    implementation = _switch,
    build_setting = config.bool(flag = True),
)

def switch(name):
    """A flag, off by default, and the config_setting `with_<name>`."""
    _switch_flag(
        name = name,
        build_setting_default = False,
        visibility = ["//visibility:public"],
    )
    native.config_setting(
        name = "with_" + name,
        flag_values = {":" + name: "True"},
        visibility = ["//visibility:public"],
    )

def full_label(label):
    """Returns the text of a label with its repository and package.

    Args:
      label: A Label, or a string as in the BUILD file that is loaded.

    Returns:
      A string, equal for equal targets.
    """
    if hasattr(native, "package_relative_label"):
        # Repositories have other names in each module (Bazel 7).
        return str(native.package_relative_label(label))
    text = str(label).lstrip("@")
    if text.startswith(":"):
        return "//%s%s" % (native.package_name(), text)
    return text

def accelerator_wheels(present):
    """The deps that the flags add to a program or a test.

    Args:
      present: The deps that it has anyway; none may be there twice.

    Returns:
      Selects of labels.
    """
    seen = {full_label(label): None for label in present}
    stores = {
        str(Label("//third_party/python:with_stores")): [
            wheel
            for wheel in _STORES
            if full_label(wheel) not in seen
        ],
        "//conditions:default": [],
    }
    branches = {
        str(Label("//third_party/python:" + value)): [
            wheel
            for wheel in wheels
            if full_label(wheel) not in seen
        ]
        for value, wheels in WHEELS.items()
    }
    return select(stores) + select(dict(branches, **{"//conditions:default": []}))

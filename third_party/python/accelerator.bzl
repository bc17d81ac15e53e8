"""The switches that say which wheels programs and tests get."""

_PLAN = [
    "@pypi_plan_cuda//:jax_cuda13_pjrt",
    "@pypi_plan_cuda//:jax_cuda13_plugin",
    "@pypi_plan_cuda//:nvidia_cuda_nvcc",
    "@pypi_plan_cuda//:nvidia_nvvm",
    "@pypi_tpu//:libtpu",
]

# Setting -> the targets that it adds to every program and test. JAX finds
# these plugins by itself, so no module of ours imports them.
WHEELS = {
    "cuda": [
        "@pypi_cuda//:jax_cuda13_pjrt",
        "@pypi_cuda//:jax_cuda13_plugin",
    ],
    "plan": _PLAN,
    "plan_cudnn": _PLAN + [
        "@pypi_plan_cudnn//:nvidia_cuda_nvrtc",
        "@pypi_plan_cudnn//:nvidia_cuda_runtime",
        "@pypi_plan_cudnn//:nvidia_cudnn_cu13",
    ],
    "tpu": ["@pypi_tpu//:libtpu"],
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

def accelerator_wheels(present):
    """The deps that the flag adds to a program or a test.

    Args:
      present: The deps that it has anyway; none may be there twice.

    Returns:
      A select of labels.
    """
    branches = {
        str(Label("//third_party/python:" + value)): [
            wheel
            for wheel in wheels
            if wheel not in present
        ]
        for value, wheels in WHEELS.items()
    }
    return select(dict(branches, **{"//conditions:default": []}))

"""Pipeline parallelism: the layers of a stack on several groups of devices."""

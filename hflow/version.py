"""The version of hflow: that of its distribution, which has it from the newest tag."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("hflow-rlhf")
except PackageNotFoundError:  # a checkout that nobody installed
    __version__ = "0+unknown"

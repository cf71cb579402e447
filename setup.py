"""Builds the native kernel library into the wheel when there is a compiler. Everything else is in pyproject.toml.

With the `ziglang` package (`make wheels` installs it) the library runs on any glibc since 2.17, and the wheel's name
says so. Without a compiler the wheel is made all the same: the worker then says that torch computes.
"""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py
from setuptools.dist import Distribution

sys.path.insert(0, str(Path(__file__).parent))

from kernels.build import LIBRARY, build_library, compile_library, wheel_compiler
from kernels.errors import KernelError


class BuildWithKernels(build_py):
    """Adds `kernels/lib/<library>`, or fills the user's cache for an editable install."""

    def run(self) -> None:
        """Copy the packages, then build."""
        super().run()
        try:
            if self.editable_mode:
                build_library()
                return
            target = Path(self.build_lib) / "kernels" / "lib" / LIBRARY
            target.parent.mkdir(parents=True, exist_ok=True)
            with TemporaryDirectory() as scratch:
                compile_library(wheel_compiler(), Path(scratch) / LIBRARY)
                target.write_bytes((Path(scratch) / LIBRARY).read_bytes())
        except KernelError as error:
            sys.stderr.write(f"native kernels are left out: {error}\n")


class PlatformWheel(bdist_wheel):
    """One wheel a platform, for every Python: the library uses no Python ABI."""

    def get_tag(self) -> tuple[str, str, str]:
        """Any Python 3, and the oldest platform that the library runs on."""
        try:
            platform = wheel_compiler().platform
        except KernelError:
            platform = None
        return ("py3", "none", platform or super().get_tag()[2])


class PlatformDistribution(Distribution):
    """Has a native part, though no extension module."""

    def has_ext_modules(self) -> bool:
        """Makes the wheel one of a platform."""
        return True


setup(cmdclass={"build_py": BuildWithKernels, "bdist_wheel": PlatformWheel}, distclass=PlatformDistribution)

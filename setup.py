"""Builds the native library (`backend/native/src`); everything else is in `pyproject.toml`.

It is a plain shared library loaded with ctypes, so one build serves every Python; instruction sets are chosen when it
runs, so it is built without a flag for any one machine. Without a C compiler the package installs all the same and runs
its CPU experts with torch.
"""

from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

SOURCES = Path("backend/native/src")


class BuildLibrary(build_ext):
    """An extension without a Python module in it: no `PyInit`, no version of Python in its name."""

    def get_ext_filename(self, fullname: str) -> str:
        """`.../_experts.so`."""
        return f"{fullname.replace('.', '/')}.so"


class AnyPython(bdist_wheel):
    """The wheel is for this platform and any Python 3."""

    def get_tag(self) -> tuple[str, str, str]:
        """`py3-none-<platform>`."""
        return "py3", "none", super().get_tag()[2]


setup(
    cmdclass={"build_ext": BuildLibrary, "bdist_wheel": AnyPython},
    ext_modules=[
        Extension(
            "foreload.backend.native._experts",
            sources=sorted(map(str, SOURCES.glob("*.c"))),
            depends=sorted(map(str, SOURCES.glob("*.h"))),
            extra_compile_args=["-std=c11", "-O3", "-g0", "-Wno-psabi", "-fvisibility=hidden"],
            libraries=["m", "pthread"],
            optional=True,
        )
    ],
)

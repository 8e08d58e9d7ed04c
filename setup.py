"""Builds the CPU kernels, where there is a C++ compiler; without one the package installs all the same, without them.

Everything else about the package stands in pyproject.toml.
"""

from __future__ import annotations

import platform
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

FOLDER = Path("kernels/cpu")
# No -ffast-math and no contraction: a result must not depend on how a compiler reorders a loop (decision 0011).
# g++ 12 takes its own vector header for reading what was never written.
FLAGS = [
    "-std=c++17",
    "-O3",
    "-fopenmp",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-g0",
    "-Wno-uninitialized",
    "-Wno-maybe-uninitialized",
]
WIDE = ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma"]
VARIANTS = {"baseline": []}  # name -> the compiler's options; the library chooses one on the machine where it runs
if platform.machine().lower() in ("x86_64", "amd64"):
    VARIANTS |= {"avx2": ["-mavx2", "-mfma"], "avx512": WIDE, "avx512_bf16": [*WIDE, "-mavx512bf16", "-mavx512vnni"]}


PER_VARIANT = ("attend.cpp", "multiply.cpp", "rows.cpp", "scan.cpp")
# who computes what, and the C interface
ONCE = ("attention.cpp", "linear.cpp", "sampling.cpp", "collectives.cpp")


class BuildKernels(build_ext):
    """Compiles PER_VARIANT once for each variant; setuptools itself knows one set of options per extension."""

    def build_extension(self, extension: Extension) -> None:
        for variant, options in VARIANTS.items():
            extension.extra_objects += self.compiler.compile(
                [str(FOLDER / name) for name in PER_VARIANT],
                output_dir=str(Path(self.build_temp) / variant),
                macros=[("VARIANT", variant)],
                extra_postargs=[*FLAGS, *options],
                depends=extension.depends,
            )
        super().build_extension(extension)


setup(
    cmdclass={"build_ext": BuildKernels},
    ext_modules=[
        Extension(
            "serve_llm.kernels.cpu.compiled",  # not a Python module: opened by ctypes
            [str(FOLDER / name) for name in ONCE],
            depends=[*(str(FOLDER / name) for name in PER_VARIANT), *map(str, sorted(FOLDER.glob("*.h")))],
            extra_compile_args=FLAGS,
            extra_link_args=["-fopenmp"],
            language="c++",
            optional=True,
        )
    ],
)

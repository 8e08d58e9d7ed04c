"""Build the CPU kernels if there is a C++ compiler; without one, the package is installed without them.

The environment variable CPU_KERNELS selects the processors: `all` (the default), or `native` for this machine's, which
takes a fifth of the time. Everything else about the package is in pyproject.toml.
"""

from __future__ import annotations

import os
import platform
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

FOLDER = Path("kernels/cpu")
# No -ffast-math and no contraction: a result must not depend on how a compiler reorders a loop (decision 0011).
# g++ 12 warns about its own vector header, claiming that it reads uninitialised values.
FLAGS = [
    "-std=c++17",
    "-O3",
    "-pthread",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-g0",
    "-Wno-uninitialized",
    "-Wno-maybe-uninitialized",
]
WIDE = ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma"]
VARIANTS = {"baseline": []}  # name -> compiler options; the library chooses one on the machine where it runs
if platform.machine().lower() in ("x86_64", "amd64"):
    VARIANTS |= {"avx2": ["-mavx2", "-mfma"], "avx512": WIDE, "avx512_bf16": [*WIDE, "-mavx512bf16", "-mavx512vnni"]}
WIDE_FLAGS = {"avx512f", "avx512bw", "avx512vl", "avx512dq"}
PROCESSOR_FLAGS = {  # Linux's names of the processor features that a variant needs
    "baseline": set(),
    "avx2": {"avx2", "fma"},
    "avx512": WIDE_FLAGS,
    "avx512_bf16": WIDE_FLAGS | {"avx512_bf16", "avx512_vnni"},
    "amx": WIDE_FLAGS | {"avx512_bf16", "avx512_vnni", "amx_tile", "amx_bf16", "amx_int8"},
}
PROCESSOR = Path("/proc/cpuinfo")
AMX = [*VARIANTS.get("avx512_bf16", []), "-mamx-tile", "-mamx-bf16", "-mamx-int8"]  # g++ 11 or newer, on Linux

KERNELS = os.environ.get("CPU_KERNELS") or "all"
if KERNELS not in ("all", "native"):
    raise SystemExit(f"CPU_KERNELS={KERNELS} is unknown: all, or native for this machine's processor alone")

# grouped.cpp takes longest, so it comes first: at the end, no core waits for it.
PER_VARIANT = (
    "grouped.cpp",
    "grouped_bytes.cpp",
    "attend.cpp",
    "rows.cpp",
    "multiply.cpp",
    "lora.cpp",
    "scan.cpp",
    "delta_rule.cpp",
)
WITH_TILES = ("attend.cpp", "grouped_tiles.cpp", "multiply.cpp")  # for AMX; the others are as for avx512_bf16
# division of work, and the C interface
ONCE = (
    "attention.cpp",
    "grouped_linear.cpp",
    "linear.cpp",
    "sampling.cpp",
    "tables.cpp",
    "collectives.cpp",
    "pool.cpp",
    "repeat.cpp",
)


class BuildKernels(build_ext):
    """Compiles PER_VARIANT once for each variant, and all files on all cores; setuptools itself does neither."""

    def build_extension(self, extension: Extension) -> None:
        variants = self._choose_variants()
        files = [(name, variant) for name in PER_VARIANT for variant in variants if variant != "amx"]
        files += [(name, "amx") for name in WITH_TILES if "amx" in variants]
        files += [(name, None) for name in ONCE]
        have = [(f"HAVE_{variant.upper()}", None) for variant in variants]

        def compile_one(name: str, variant: str | None) -> list[str]:
            return self.compiler.compile(
                [str(FOLDER / name)],
                output_dir=str(Path(self.build_temp) / (variant or "once")),
                macros=have if variant is None else [("VARIANT", variant), *have],
                extra_postargs=FLAGS if variant is None else [*FLAGS, *variants[variant]],
                depends=extension.depends,
            )

        with ThreadPoolExecutor(os.cpu_count()) as threads:
            for objects in threads.map(compile_one, *zip(*files, strict=True)):
                extension.extra_objects += objects
        extension.sources = []  # all that is left is to link
        self.force = True  # even if no file is newer: CPU_KERNELS may have changed
        super().build_extension(extension)

    def _choose_variants(self) -> dict[str, list[str]]:
        """Return all variants that the compiler supports or, with CPU_KERNELS=native, those needed for the fastest one
        here."""
        variants = VARIANTS | ({"amx": AMX} if self._knows_amx() else {})
        if KERNELS == "all" or not PROCESSOR.exists():
            return variants
        flags = set(PROCESSOR.read_text().split())
        fastest = [variant for variant in variants if PROCESSOR_FLAGS[variant] <= flags][-1]
        wanted = [fastest, "avx512_bf16"] if fastest == "amx" else [fastest]  # for what matrix units do not compute
        return {variant: options for variant, options in variants.items() if variant in wanted}

    def _knows_amx(self) -> bool:
        if "avx512_bf16" not in VARIANTS or not sys.platform.startswith("linux"):
            return False
        source = Path(self.build_temp) / "amx.cpp"
        source.parent.mkdir(parents=True, exist_ok=True)
        source.write_text("#include <immintrin.h>\nint main() { _tile_dpbf16ps(0, 1, 2); _tile_dpbusd(0, 1, 2); }\n")
        try:
            self.compiler.compile([str(source)], output_dir=self.build_temp, extra_postargs=AMX)
        except CompileError:
            return False
        return True


setup(
    cmdclass={"build_ext": BuildKernels},
    ext_modules=[
        Extension(
            "serve_llm.kernels.cpu.compiled",  # not a Python module: opened by ctypes
            [str(FOLDER / name) for name in ONCE],
            depends=sorted(str(path) for pattern in ("*.cpp", "*.h") for path in FOLDER.glob(pattern)),
            extra_link_args=["-pthread"],
            language="c++",
            optional=True,
        )
    ],
)

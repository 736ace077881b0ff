"""native/cmake/check_levels.cmake: what the build must refuse, on objects made to break each of its rules."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "native" / "cmake" / "check_levels.cmake"
TOOLS = {tool: shutil.which(tool) for tool in ("cmake", "g++", "nm", "objdump")}
pytestmark = [
    pytest.mark.skipif(not all(TOOLS.values()), reason=f"missing: {', '.join(tool for tool, path in TOOLS.items() if not path)}"),
    pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="AVX exists on x86 only"),
]

TABLE = "namespace octavo { struct Kernels { int (*f)(int); }; namespace { int f(int x) { return x; } }\n"
LEVEL = TABLE + "extern const Kernels kAvx2Kernels; const Kernels kAvx2Kernels = {f}; }"
PLAIN = "float twice(const float* x) { float sum = 0; for (int i = 0; i < 64; ++i) sum += x[i] * 2; return sum; }"
EVEX = 'void f() { asm volatile("vextractf32x4 $1, %zmm0, %xmm1"); }'


def compiled(folder: Path, name: str, source: str, *flags: str) -> Path:
    path = folder / f"{name}.cpp"
    path.write_text(source)
    subprocess.run(["g++", "-O2", "-c", str(path), "-o", str(folder / f"{name}.o"), *flags], check=True, timeout=120)
    return folder / f"{name}.o"


def check(levels: list[Path], others: list[Path], *more: str) -> subprocess.CompletedProcess[str]:
    lists = [f"-DOBJECTS={';'.join(map(str, levels))}", f"-DOTHERS={';'.join(map(str, others))}"]
    command = ["cmake", "-DNM=nm", "-DOBJDUMP=objdump", *lists, *more, "-P", str(SCRIPT)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_a_right_build_passes(tmp_path):
    result = check(
        [compiled(tmp_path, "level", LEVEL, "-mavx2")], [compiled(tmp_path, "plain", PLAIN), compiled(tmp_path, "more", "int x;")]
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    "source",
    [
        "namespace octavo { inline int shared(int x) { return x + 1; } int (*keep)(int) = shared; }",  # weak: the linker would merge it
        "namespace octavo { template <class T> T shared(T x) { return x; } template int shared<int>(int); }",
        "namespace octavo { int own(int x) { return x; } }",
    ],
)
def test_a_level_that_defines_more_than_its_table_is_refused(tmp_path, source):
    result = check([compiled(tmp_path, "level", source, "-mavx2")], [])
    assert result.returncode != 0 and "must have internal linkage" in " ".join(result.stderr.split())


def test_a_static_initialiser_in_a_level_is_refused(tmp_path):
    """It has internal linkage, and would still run wherever the module is loaded."""
    source = LEVEL + "\nextern int unknown(); namespace { struct Early { Early() { unknown(); } } early; }"
    result = check([compiled(tmp_path, "level", source, "-mavx2")], [])
    assert result.returncode != 0 and "when the module is loaded" in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("source", "flags"),
    [
        (PLAIN, ["-mavx"]),
        (PLAIN, ["-O3", "-mavx2", "-ffast-math"]),
        (EVEX, []),
        ('void f() { asm volatile("kmovw %k1, %eax"); }', []),
        ('void f() { asm volatile("vzeroupper"); }', []),
        ('void f() { asm volatile("tilerelease"); }', []),
    ],
)
def test_avx_outside_the_levels_is_refused_and_named(tmp_path, source, flags):
    good, bad = compiled(tmp_path, "good", PLAIN), compiled(tmp_path, "bad", source, *flags)
    result = check([], [good, bad])
    assert result.returncode != 0 and "only some levels" in " ".join(result.stderr.split()) and "bad.o" in result.stderr
    assert check([], [good, bad], "-DALLOW_AVX=ON").returncode == 0


def test_objects_that_cannot_be_read_are_an_error(tmp_path):
    assert check([], [tmp_path / "none.o"]).returncode != 0 and check([tmp_path / "none.o"], []).returncode != 0

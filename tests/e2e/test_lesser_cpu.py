"""The module on a processor without AVX, emulated: it imports, chooses the portable level, and generates the same tokens.

An environment variable that forces a level proves nothing: here an AVX instruction, wherever it is, ends the process.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny_models import write_tiny

_native = pytest.importorskip("octavo._native", reason="the native module is not built")
QEMU = shutil.which("qemu-x86_64")
#: SSE4.2 and nothing of AVX: the least that the NumPy of today runs on.
LESSER = "Nehalem"
pytestmark = [
    pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="levels beyond portable exist on x86 only"),
    pytest.mark.skipif(QEMU is None, reason="qemu-x86_64 is not installed (apt install qemu-user)"),
]

GENERATE = """
import hashlib, json, sys
import numpy as np
from octavo import LLM, SamplingParams, _native
from octavo.ops.api import PackedTensor
try:
    _native.Context(1, "avx2")
    refused = "no"
except ValueError as error:
    refused = str(error)
llm = LLM(sys.argv[1], kv_cache_memory="8MiB", threads=2)
params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
out = llm.generate(["hello", "a longer prompt, of several blocks, so that pages are crossed"], params)
tokens = [result.outputs[0].token_ids for result in out]
rng, ops = np.random.default_rng(0), llm.executor.ops
scale = (rng.random((64, 4)) * 0.01).astype(np.float16)
weight = ops.pack_linear([PackedTensor("q4_b32", (64, 128), rng.integers(0, 256, (64, 64), dtype=np.uint8), scale, scale)])
ops.begin_step(5)
product = ops.linear(rng.standard_normal((5, 128), dtype=np.float32), weight, 2)
norm = ops.rms_norm(product, np.ones(64, np.float32), 1e-5)
bits = [hashlib.sha256(array.tobytes()).hexdigest() for array in (product, norm)]
isa = llm.executor.ops.describe()["isa"]
print(json.dumps({"levels": _native.isa_levels(), "isa": isa, "refused": refused, "tokens": tokens, "bits": bits}))
"""


def run(command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(Path(p)) for p in sys.path if p])
    env = {**os.environ, "PYTHONPATH": paths, "OPENBLAS_NUM_THREADS": "1", **environment}
    return subprocess.run(command, capture_output=True, text=True, timeout=400, env=env, check=False)


def test_generation_on_a_processor_without_avx(tmp_path):
    tiny = write_tiny(tmp_path / "m", fmt="gguf", seed=3, quant={"": "Q4_1", "output.weight": "Q8_0"})
    arguments = [sys.executable, "-c", GENERATE, str(tiny.path)]
    there = run([str(QEMU), "-cpu", LESSER, *arguments])
    assert there.returncode == 0, there.stderr
    found = json.loads(there.stdout.splitlines()[-1])
    assert found["levels"] == ["portable"] and found["isa"] == "portable"
    assert "avx2 cannot run on this machine; choose one of: portable" in found["refused"]
    here = run(arguments, OCTAVO_CPU_ISA="portable")
    assert here.returncode == 0, here.stderr
    same = json.loads(here.stdout.splitlines()[-1])
    assert same["bits"] == found["bits"] and same["tokens"] == found["tokens"]  # whoever computes them


def test_the_emulated_processor_refuses_avx(tmp_path):
    """Else the test above would prove nothing."""
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    source, program = tmp_path / "avx.cpp", tmp_path / "avx"
    source.write_text('int main() { asm volatile("vpxor %ymm0, %ymm0, %ymm0"); }')
    subprocess.run([compiler, str(source), "-o", str(program)], check=True, timeout=120)
    assert run([str(QEMU), "-cpu", LESSER, str(program)]).returncode != 0
    assert run([str(QEMU), "-cpu", "max", str(program)]).returncode == 0

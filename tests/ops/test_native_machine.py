"""Threads and instruction sets: counts from affinity and control groups, forced levels, forks, callers on several threads."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from octavo.errors import ConfigError
from tests.ops.op_oracle import random_packed

_native = pytest.importorskip("octavo._native", reason="the native module is not built")
CpuOps = pytest.importorskip("octavo.ops.cpu").CpuOps
SRC = Path(__file__).resolve().parents[2] / "src"
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="affinity and /proc are Linux's")


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter with the module this one uses, and `native` and `CpuOps` at hand."""
    load = (
        "import sys, importlib.util, octavo\n"
        f"spec = importlib.util.spec_from_file_location('octavo._native', {_native.__file__!r})\n"
        "native = importlib.util.module_from_spec(spec); sys.modules['octavo._native'] = octavo._native = native\n"
        "spec.loader.exec_module(native)\nfrom octavo.ops.cpu import CpuOps\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SRC), os.environ.get("PYTHONPATH", "")]), **environment}
    return subprocess.run([sys.executable, "-c", load + code], capture_output=True, text=True, timeout=120, env=env, check=False)


# -- instruction sets --------------------------------------------------------------------------------------------------


def test_levels_are_ordered_and_usable():
    levels = _native.isa_levels()
    assert levels[0] == "portable" and set(levels) <= set(_native.known_isa_levels())
    for isa in levels:
        assert CpuOps(8, threads=1, isa=isa).describe()["isa"] == isa


@linux_only
def test_levels_are_those_of_the_cpu():
    """Independently of CPUID: the flags the kernel lists."""
    if not Path("/proc/cpuinfo").exists() or "flags" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("the kernel lists no CPU flags here")
    flags = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")).split()
    assert ("avx2" in _native.isa_levels()) == ({"avx2", "fma", "f16c"} <= set(flags))
    if {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni"} <= set(flags):
        assert "avx512vnni" in _native.isa_levels()
        assert "amx" not in _native.isa_levels() or {"amx_tile", "amx_bf16"} <= set(flags)


@pytest.mark.parametrize("isa", _native.isa_levels())
def test_the_environment_forces_a_level(isa):
    code = "isa = lambda ops: ops.describe()['isa']; print(native.isa(), isa(CpuOps(8)), isa(CpuOps(8, isa='portable')))"
    result = python(code, OCTAVO_CPU_ISA=isa)
    assert result.stdout.split() == [isa, isa, "portable"], result.stderr


def test_a_level_this_machine_lacks_is_an_error():
    with pytest.raises(ConfigError, match="choose one of: portable"):
        CpuOps(8, threads=1, isa="sse9")
    for isa in {*_native.known_isa_levels(), "sse9"} - set(_native.isa_levels()):
        result = python("CpuOps(8, threads=1)", OCTAVO_CPU_ISA=isa)
        assert result.returncode == 1 and f"OCTAVO_CPU_ISA={isa} cannot run on this machine" in result.stderr


# -- threads -----------------------------------------------------------------------------------------------------------


def test_thread_counts():
    available = _native.available_threads()
    assert 1 <= available <= _native.affinity_cpus()
    assert CpuOps(8).describe()["threads"] == available
    assert CpuOps(8, threads=1).describe()["threads"] == 1
    assert CpuOps(8, threads=available + 3).describe()["threads"] == available
    assert CpuOps(8, threads=available + 3, oversubscribe=True).describe()["threads"] == available + 3
    with pytest.raises(ConfigError, match="threads"):
        CpuOps(8, threads=-1)
    json.dumps(CpuOps(8, threads=1).describe())


@linux_only
def test_threads_follow_the_affinity_mask():
    code = "import os; os.sched_setaffinity(0, [min(os.sched_getaffinity(0))]); print(native.affinity_cpus(), native.available_threads())"
    result = python(code)
    assert result.stdout.split() == ["1", "1"], result.stderr


@linux_only
def test_one_thread_makes_no_workers_and_workers_end_with_their_pool():
    code = (
        "import os, gc\ncount = lambda: len(os.listdir('/proc/self/task'))\nbefore = count()\n"
        "one = CpuOps(8, threads=1); print(count() - before)\nfour = CpuOps(8, threads=4, oversubscribe=True); print(count() - before)\n"
        "del four; gc.collect(); print(count() - before)\n"
    )
    result = python(code)
    assert result.stdout.split() == ["0", "3", "0"], result.stderr


def cgroup_tree(tmp_path: Path, groups: str, files: dict[str, str]) -> int:
    (tmp_path / "groups").write_text(groups)
    for name, text in files.items():
        path = tmp_path / "fs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return _native.cgroup_cpus(str(tmp_path / "groups"), str(tmp_path / "fs"))


@pytest.mark.parametrize(
    "groups,files,expected",
    [
        ("0::/\n", {"cpu.max": "200000 100000\n"}, 2),
        ("0::/\n", {"cpu.max": "max 100000\n"}, 0),
        ("0::/\n", {"cpu.max": "250000 100000\n"}, 2),
        ("0::/\n", {"cpu.max": "50000 100000\n"}, 1),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "300000 100000\n"}, 3),
        ("0::/a/b\n", {"a/b/cpu.max": "400000 100000\n", "a/cpu.max": "800000 100000\n", "cpu.max": "900000 100000\n"}, 4),
        ("0::/outside/this/namespace\n", {"cpu.max": "500000 100000\n"}, 5),
        ("5:cpu,cpuacct:/x\n", {"cpu/x/cpu.cfs_quota_us": "300000\n", "cpu/x/cpu.cfs_period_us": "100000\n"}, 3),
        ("5:cpuacct,cpu:/x\n", {"cpu/cpu.cfs_quota_us": "200000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 2),
        ("5:cpu:/x\n", {"cpu/x/cpu.cfs_quota_us": "-1\n", "cpu/x/cpu.cfs_period_us": "100000\n"}, 0),
        ("4:cpuset:/x\n", {"cpu/x/cpu.cfs_quota_us": "100000\n", "cpu/x/cpu.cfs_period_us": "100000\n"}, 0),
        ("nonsense\n::\n0::\n", {"cpu.max": "garbage\n"}, 0),
        ("0::/\n", {"cpu.max": "100000 0\n"}, 0),
        ("", {}, 0),
    ],
)
def test_control_group_quotas(tmp_path, groups, files, expected):
    """Versions 1 and 2, fractions rounded down but never to zero, the tightest limit on the way up, broken files ignored."""
    assert cgroup_tree(tmp_path, groups, files) == expected


def test_missing_control_groups(tmp_path):
    assert _native.cgroup_cpus(str(tmp_path / "none"), str(tmp_path)) == 0


# -- several callers ---------------------------------------------------------------------------------------------------


def test_python_threads_may_share_one_context():
    """Operations run one at a time on a context; results are those of a single caller."""
    rng = np.random.default_rng(0)
    packed, _ = random_packed(rng, "q4_b32", 200, 256, offset=True)
    ops = CpuOps(64, threads=3, oversubscribe=True)
    weight, context = ops.pack_linear([packed]), ops._context
    inputs = [rng.standard_normal((1 + 7 * i, 256)).astype(np.float32) for i in range(4)]
    expected = [np.empty((len(x), 200), np.float32) for x in inputs]
    for x, out in zip(inputs, expected, strict=True):
        context.linear(x, weight, 0, out)
    wrong = []

    def work(x: np.ndarray, right: np.ndarray) -> None:
        out = np.empty_like(right)
        for _ in range(200):
            out[:] = 0
            context.linear(x, weight, 0, out)
            if not np.array_equal(out, right):
                wrong.append(len(x))

    threads = [threading.Thread(target=work, args=pair) for pair in zip(inputs, expected, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_workers_wake_after_a_pause():
    """Parked workers must neither miss a job nor be waited for."""
    rng = np.random.default_rng(0)
    packed, _ = random_packed(rng, "q8_b32", 300, 320)
    ops = CpuOps(8, threads=3, oversubscribe=True)
    weight, x = ops.pack_linear([packed]), rng.standard_normal((8, 320)).astype(np.float32)
    ops.begin_step(8)
    first = ops.linear(x, weight, 0).copy()
    pause = threading.Event()
    for i in range(60):
        pause.wait(0.002 if i % 3 else 0.0)
        ops.begin_step(8)
        assert np.array_equal(ops.linear(x, weight, 0), first)


FORKING = (
    "import os, signal, numpy as np\nfrom octavo.ops.api import PackedTensor\n"
    "count = lambda: len(os.listdir('/proc/self/task'))\n"
    "ops = CpuOps(8, threads=3, oversubscribe=True)\n"
    "w = ops.pack_linear([PackedTensor('f32', (500, 64), np.ones((500, 64), np.float32))])\n"
    "x = np.ones((8, 64), np.float32)\nops.begin_step(8); a = ops.linear(x, w, 0).copy()\n"
    "def work():\n    out = np.empty((8, 500), np.float32); ops._context.linear(x, w, 0, out); return np.array_equal(out, a)\n"
)


@linux_only
def test_a_forked_child_has_workers_of_its_own():
    """Three threads again, right results, and a clean end of both; a child of the child too."""
    code = FORKING + (
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    signal.alarm(60); before, same = count(), work(); mine = count()\n"
        "    grandchild = os.fork()\n"
        "    if grandchild == 0:\n        signal.alarm(60); ok = work() and count() == 3; del ops, w; os._exit(0 if ok else 5)\n"
        "    last = os.waitstatus_to_exitcode(os.waitpid(grandchild, 0)[1])\n"
        "    ok = (before, same, mine, last) == (1, True, 3, 0) and work(); del ops, w; os._exit(0 if ok and count() == 1 else 3)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), work())\n"
    )
    result = python(code)
    assert result.stdout.split() == ["0", "True"], result.stderr


@linux_only
def test_forks_while_another_thread_computes():
    """The child must find neither a locked context nor half a job: many forks, each in the middle of somebody's operation."""
    code = FORKING + (
        "import threading\nstop, wrong, rounds = threading.Event(), [], [0]\n"
        "def busy():\n    while not stop.is_set():\n        rounds[0] += 1\n        if not work(): wrong.append(1)\n"
        "threads = [threading.Thread(target=busy) for _ in range(2)]\nfor t in threads: t.start()\n"
        "codes = []\n"
        "for i in range(20):\n"
        "    pid = os.fork()\n"
        "    if pid == 0:\n        signal.alarm(60); os._exit(0 if work() else 3)\n"
        "    codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n"
        "stop.set()\nfor t in threads: t.join()\n"
        "print(set(codes), wrong, rounds[0] > 20)\n"
    )
    result = python(code)
    assert result.stdout.split() == ["{0}", "[]", "True"], (result.stdout, result.stderr)


@linux_only
def test_idle_workers_take_no_processor_time():
    """Workers spin inside a step and park after it: a second of rest costs next to nothing, where spinning would cost three."""
    code = FORKING + (
        "import time\nwork(); time.sleep(0.1)\nbefore = time.process_time(); time.sleep(1)\n"
        "print(time.process_time() - before, count(), work())\n"
    )
    spent, threads, right = python(code).stdout.split()
    assert float(spent) < 0.1 and threads == "3" and right == "True"


def test_other_python_threads_run_during_an_operation():
    """Marks that another thread makes in the middle of one long product: with the lock of the interpreter held there are none."""
    packed, _ = random_packed(np.random.default_rng(0), "q8_b32", 2048, 1024)
    ops = CpuOps(8, threads=1, isa="portable")
    weight, x = ops.pack_linear([packed]), np.ones((192, 1024), np.float32)
    out, marks, stop = np.empty((192, 2048), np.float32), [], threading.Event()

    def mark() -> None:
        while not stop.wait(0.001):
            marks.append(time.perf_counter())

    other = threading.Thread(target=mark)
    other.start()
    begin = time.perf_counter()
    ops._context.linear(x, weight, 0, out)
    end = time.perf_counter()
    stop.set()
    other.join()
    quarter = (end - begin) / 4
    assert [at for at in marks if begin + quarter < at < end - quarter], f"the product took {end - begin:.3f} s, {len(marks)} marks"


@linux_only
@pytest.mark.skipif(shutil.which("taskset") is None, reason="taskset is not installed (util-linux)")
def test_doctor_under_taskset_counts_what_it_was_given():
    allowed = min(os.sched_getaffinity(0))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SRC), os.environ.get("PYTHONPATH", "")])}
    command = ["taskset", "-c", str(allowed), sys.executable, "-m", "octavo.cli.main", "doctor", "--json"]
    report = json.loads(subprocess.run(command, capture_output=True, text=True, timeout=120, env=env, check=False).stdout)
    assert report["cores"]["affinity"] == report["cores"]["usable"] == 1


def test_the_interpreter_exits_cleanly_with_workers_alive():
    result = python("keep = CpuOps(8, threads=4, oversubscribe=True); sys.keep = keep; print('done')")
    assert (result.returncode, result.stdout.strip(), result.stderr) == (0, "done", "")

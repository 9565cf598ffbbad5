"""Limits are read as Linux writes them, in both versions of cgroups; budgets follow the rules."""

import os
import subprocess
import sys

import pytest

from stages.core.memory import limits
from stages.core.memory.budget import budget

GB = 10**9


def write(folder, **texts):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / name.replace("__", ".")).write_text(text)


@pytest.fixture
def version_2(tmp_path):
    (tmp_path / "cgroup").write_text("0::/user/job\n")
    mount = tmp_path / "fs"
    write(mount, memory__events="oom_kill 9\n")
    write(mount / "user", memory__max="max\n", memory__current="7000000000\n")
    write(
        mount / "user" / "job",
        memory__max="8000000000\n",
        memory__current="3000000000\n",
        memory__stat="anon 1\ninactive_file 500000000\n",
        memory__events="low 0\noom 4\noom_kill 2\n",
    )
    return tmp_path / "cgroup", mount


@pytest.fixture
def version_1(tmp_path):
    (tmp_path / "cgroup").write_text("8:pids:/x\n4:memory:/box\n0::/\n")
    mount = tmp_path / "fs"
    write(mount / "memory", memory__limit_in_bytes="9223372036854771712\n")
    write(
        mount / "memory" / "box",
        memory__limit_in_bytes="2000000000\n",
        memory__usage_in_bytes="500000000\n",
        memory__stat="total_inactive_file 100000000\n",
        memory__oom_control="oom_kill_disable 0\nunder_oom 0\noom_kill 3\n",
    )
    return tmp_path / "cgroup", mount


def test_version_2(version_2):
    assert limits.cgroup_free(*version_2) == 5_500_000_000
    assert limits.oom_kills(*version_2) == 9


def test_version_1(version_1):
    assert limits.cgroup_free(*version_1) == 1_600_000_000
    assert limits.oom_kills(*version_1) == 3


def test_no_cgroup(tmp_path):
    assert limits.cgroup_free(tmp_path / "none", tmp_path) is None
    assert limits.oom_kills(tmp_path / "none", tmp_path) == 0


def test_no_limit(tmp_path):
    (tmp_path / "cgroup").write_text("0::/\n")
    write(tmp_path / "fs", memory__max="max\n", memory__current="1\n")
    assert limits.cgroup_free(tmp_path / "cgroup", tmp_path / "fs") is None


def test_this_machine():
    assert 0 < limits.available() <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    used, most = limits.headroom()
    assert 0 < used < most


@pytest.mark.skipif(sys.platform != "linux", reason="address-space limits work on Linux only")
def test_an_address_space_limit_is_the_nearest():
    code = (
        "import resource, psutil\n"
        "from stages.core.memory import limits\n"
        "used = psutil.Process().memory_info().vms\n"
        "assert limits.address_space() is None\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), used + (64 << 20)))\n"
        "inside, limit = limits.headroom()\n"
        "print(limit - inside <= 64 << 20, limit == used + (64 << 20))\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert ended.stdout.split() == ["True", "True"]


def test_a_budget_that_is_set():
    assert budget(24, "metal").bytes == 24 * GB
    assert budget("0.5", "cpu").bytes == GB // 2


def test_automatic_budgets(monkeypatch):
    monkeypatch.setattr(limits, "available", lambda: 10 * GB)
    assert budget("auto", "cpu").bytes == 6 * GB
    assert budget("auto", "cuda", {"free_memory": 100 * GB}).bytes == 90 * GB
    metal = {"max_recommended_working_set_size": 11 * GB}
    assert budget("auto", "metal", metal).bytes == int(0.8 * 11 * GB)
    metal = {"max_recommended_working_set_size": 16 * GB}
    assert budget("auto", "metal", metal).bytes == 10 * GB
    assert "10.0 GB" in budget("auto", "metal", metal).reason

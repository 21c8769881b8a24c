"""Limits of memory that control groups set."""

from mpispeed.base.cgroups import Limit, machine_limits


def write_tree(root, files):
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def test_limits_of_this_machine():
    limits = {limit.source: limit.bytes for limit in machine_limits()}
    available = limits["MemAvailable of /proc/meminfo"]
    assert 0 < available < 1 << 50


def test_limits_of_version_2_groups(tmp_path):
    groups = tmp_path / "sys/fs/cgroup"
    write_tree(
        tmp_path,
        {
            "proc/meminfo": "MemTotal: 900 kB\nMemAvailable: 800 kB\n",
            "proc/self/cgroup": "0::/job/step\n",
            "proc/self/mountinfo": f"30 20 0:30 / {groups} rw shared:1 - cgroup2 cgroup2 rw\n",
            "sys/fs/cgroup/job/step/memory.max": "max\n",
            "sys/fs/cgroup/job/step/memory.current": "5\n",
            "sys/fs/cgroup/job/memory.max": "500000\n",
            "sys/fs/cgroup/job/memory.current": "100000\n",
            "sys/fs/cgroup/job/memory.stat": "anon 1\ninactive_file 30000\n",
        },
    )
    assert machine_limits(tmp_path / "proc") == [
        Limit("MemAvailable of /proc/meminfo", 800 * 1024),
        Limit(f"{groups}/job/memory.max", 430000),
    ]


def test_limits_of_version_1_groups(tmp_path):
    groups = tmp_path / "sys/fs/cgroup/memory"
    write_tree(
        tmp_path,
        {
            "proc/self/cgroup": "4:cpu:/a\n3:memory:/a/b\n0::/\n",
            "proc/self/mountinfo": f"30 20 0:30 / {groups} rw shared:1 - cgroup cgroup rw,memory\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/memory/a/b/memory.limit_in_bytes": "7000\n",
            "sys/fs/cgroup/memory/a/b/memory.usage_in_bytes": "9000\n",
            "sys/fs/cgroup/memory/a/b/memory.stat": "total_inactive_file 4000\n",
        },
    )
    assert machine_limits(tmp_path / "proc") == [Limit(f"{groups}/a/b/memory.limit_in_bytes", 2000)]

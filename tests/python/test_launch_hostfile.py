"""Hostfiles, filters, layouts, core lists and env files: what is read, and what is refused how."""

from __future__ import annotations

import os
import re

import pytest

from penstock.launch import cores, exports, hostfile, layout

GRAMMAR = "allowed are `NAME slots=N` with N from 1 to 65535, empty lines, and comments after #"


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(text: str, name: str = "hosts") -> str:
        (tmp_path / name).write_text(text, encoding="utf-8")
        return name

    return write


def slots(nodes):
    return {node.name: node.slots for node in nodes}


def test_a_hostfile_keeps_its_order(write):
    text = (
        "# all\nworker-2 slots=4\n\n  w1.example.com\tslots=16 # big\nubuntu@10.0.0.7   slots=1\n"
    )
    hosts = hostfile.read_hostfile(write(text))
    assert [(host.name, host.slots, host.where) for host in hosts] == [
        ("worker-2", 4, "hosts:2"),
        ("w1.example.com", 16, "hosts:4"),
        ("ubuntu@10.0.0.7", 1, "hosts:5"),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", f"hosts has no host; {GRAMMAR}"),
        ("# nobody\n\n", f"hosts has no host; {GRAMMAR}"),
        ("a slots=2\nb\n", f"hosts:2: 'b' is not an entry; {GRAMMAR}"),
        ("a slots=two\n", f"hosts:1: 'a slots=two' is not an entry; {GRAMMAR}"),
        ("a slots=0\n", f"hosts:1: 'a slots=0' is not an entry; {GRAMMAR}"),
        ("a slots=-1\n", f"hosts:1: 'a slots=-1' is not an entry; {GRAMMAR}"),
        ("a slots=65536\n", f"hosts:1: 'a slots=65536' is not an entry; {GRAMMAR}"),
        ("a slots=" + "9" * 5000, f"hosts:1: 'a slots={'9' * 5000}' is not an entry; {GRAMMAR}"),
        ("a slots=1\x0cb slots=1\n", "hosts:1: 'a slots=1\\x0cb slots=1' is not an entry; "),
        ("a slots=2 max_slots=4\n", "hosts:1: 'a slots=2 max_slots=4' is not an entry; " + GRAMMAR),
        (
            "a slots=2\nb slots=1\na slots=1\n",
            "hosts:3: a was already listed in hosts:1; name each",
        ),
        ("-oProxyCommand=x slots=1\n", "hosts:1: '-oProxyCommand=x' is not a host name; allowed"),
        ("a;b slots=1\n", "hosts:1: 'a;b' is not a host name; allowed are letters, digits and"),
    ],
)
def test_a_wrong_hostfile_is_refused(text, message, write):
    with pytest.raises(ValueError, match="^" + re.escape("[launch::hostfile] " + message)):
        hostfile.read_hostfile(write(text))


def test_a_hostfile_that_is_not_there(tmp_path):
    with pytest.raises(ValueError, match=r"^\[launch::hostfile\] cannot read the hostfile .*/none"):
        hostfile.read_hostfile(str(tmp_path / "none"))


ALLOWED = "allowed are 0 to 1 (hosts:2)"
EMPTY = f"the list of slots of b is empty; {ALLOWED}, or b without a colon for all"
HOSTS = [
    hostfile.Host("a", 4, "hosts:1"),
    hostfile.Host("b", 2, "hosts:2"),
    hostfile.Host("me@c", 2, "hosts:3"),
]


@pytest.mark.parametrize(
    ("include", "exclude", "expected"),
    [
        ("", "", {"a": (0, 1, 2, 3), "b": (0, 1), "me@c": (0, 1)}),
        ("b", "", {"b": (0, 1)}),
        ("b@a:2,0", "", {"a": (0, 2), "b": (0, 1)}),
        ("a:1@a:0,1", "", {"a": (0, 1)}),
        ("me@c:1@a:3", "", {"a": (3,), "me@c": (1,)}),
        ("me@c", "", {"me@c": (0, 1)}),
        ("me@c@me@c", "", {"me@c": (0, 1)}),
        ("b:01", "", {"b": (1,)}),
        ("", "a@b:1", {"b": (0,), "me@c": (0, 1)}),
        ("", "a:0,1,2,3", {"b": (0, 1), "me@c": (0, 1)}),
    ],
)
def test_filters(include, exclude, expected):
    nodes = hostfile.select(HOSTS, include, exclude)
    assert slots(nodes) == expected
    assert [node.name for node in nodes] == list(expected)


@pytest.mark.parametrize(
    ("include", "exclude", "message"),
    [
        ("a", "b", "--include and --exclude are both given: give only one"),
        ("d", "", "--include d: there is no host 'd'; allowed are a, b, me@c"),
        ("d:0", "", "--include d:0: there is no host 'd'; allowed are a, b, me@c"),
        ("", "a@d", "--exclude a@d: there is no host 'd'; allowed are a, b, me@c"),
        ("b:2", "", "--include b:2: no slot '2' on b; allowed are 0 to 1 (hosts:2)"),
        ("b:x", "", "--include b:x: no slot 'x' on b; allowed are 0 to 1 (hosts:2)"),
        ("b:0,", "", "--include b:0,: no slot '' on b; allowed are 0 to 1 (hosts:2)"),
        ("", "a:4", "--exclude a:4: no slot '4' on a; allowed are 0 to 3 (hosts:1)"),
        ("", "a@b@me@c", "--exclude a@b@me@c leaves no slot of any host; exclude fewer slots"),
        ("b:", "", "--include b:: " + EMPTY),
        ("a:1@b:", "", "--include a:1@b:: " + EMPTY),
        ("", "b:", "--exclude b:: " + EMPTY),
        ("", "b:@a", "--exclude b:@a: " + EMPTY),
        ("b: 1", "", "--include b: 1: no slot ' 1' on b; allowed are 0 to 1 (hosts:2)"),
        ("b:,1", "", "--include b:,1: no slot '' on b; allowed are 0 to 1 (hosts:2)"),
        (
            "b:" + "9" * 5000,
            "",
            f"--include b:{'9' * 5000}: no slot '{'9' * 5000}' on b; {ALLOWED}",
        ),
        (
            "b@b:1",
            "",
            "--include b@b:1: b is given both with and without slots; give the host "
            "alone for all its slots, or only the slots",
        ),
        (
            "",
            "b:1@b",
            "--exclude b:1@b: b is given both with and without slots; give the host "
            "alone for all its slots, or only the slots",
        ),
        ("a@", "", "--include a@: there is no host ''; allowed are a, b, me@c"),
        (":0", "", "--include :0: there is no host ''; allowed are a, b, me@c"),
        (" ", "", "--include  : there is no host ' '; allowed are a, b, me@c"),
    ],
)
def test_a_wrong_filter_is_refused(include, exclude, message):
    with pytest.raises(ValueError, match="^" + re.escape("[launch::select] " + message) + "$"):
        hostfile.select(HOSTS, include, exclude)


def test_a_filter_with_two_meanings_is_refused():
    hosts = [hostfile.Host("a", 4, "hosts:1"), hostfile.Host("a:1", 2, "hosts:2")]
    message = (
        "--include a:1: 'a:1' can mean a host or slots of the host a; rename one of the two hosts "
        "in hosts:2"
    )
    with pytest.raises(ValueError, match="^" + re.escape("[launch::select] " + message) + "$"):
        hostfile.select(hosts, "a:1", "")
    assert slots(hostfile.select(hosts, "a:2@a:1:0", "")) == {"a": (2,), "a:1": (0,)}


def test_the_first_hosts_and_slots():
    assert slots(hostfile.first(HOSTS, 2, 1)) == {"a": (0,), "b": (0,)}
    with pytest.raises(ValueError, match=r"--num-nodes 4: there are only 3 hosts \(a, b, me@c\)"):
        hostfile.first(HOSTS, 4, 0)
    with pytest.raises(ValueError, match=r"--num-gpus 3: b has only slots=2 \(hosts:2\)"):
        hostfile.first(HOSTS, 0, 3)


def test_layouts_and_numbers():
    for text, numbers in {"0-3": (0, 1, 2, 3), "0-1,5": (0, 1, 5), "7": (7,)}.items():
        assert layout.parse_numbers(text, "x") == numbers
        assert layout.format_numbers(numbers) == text
    assert layout.parse_layout("0-1@3@0,2") == ((0, 1), (3,), (0, 2))
    assert layout.format_layout([(0, 1), (3,), (0, 2)]) == "0-1@3@0,2"
    for wrong in ("", "a", "1-", "-1", "1 2", "0@", "0-65536", "0-" + "9" * 5000):
        with pytest.raises(
            ValueError, match=r"^\[launch::layout\] --layout: .* is not a list like"
        ):
            layout.parse_layout(wrong)
    for wrong in ("1,1", "3-1", "4,2", "0-3,2"):
        with pytest.raises(ValueError, match="is not in ascending order"):
            layout.parse_layout(wrong)


def test_cores_are_shared_out(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3, 8, 9})
    monkeypatch.setattr(
        cores, "_siblings", lambda core: {core, (core + 2) % 4} if core < 4 else {core}
    )
    assert cores.usable_cores() == (0, 1, 8, 9)
    assert cores.cores_of_ranks(2, "") == [(0, 1), (8, 9)]
    assert cores.cores_of_ranks(2, "0-3,8") == [(0, 1), (2, 3)]
    with pytest.raises(
        ValueError, match=r"--bind-core-list 0-4: this process may use only cores 0-3,8-9$"
    ):
        cores.cores_of_ranks(1, "0-4")
    with pytest.raises(ValueError, match=r"5 ranks cannot be bound to 4 cores \(0-1,8-9\)"):
        cores.cores_of_ranks(5, "")


def test_env_files(write):
    text = "# ours\n\nA=1\nexport B = two words \nC='x; $y'\nD=\"\"\nE=a=b\n"
    assert exports.read_env_file(write(text, "env")) == {
        "A": "1",
        "B": "two words",
        "C": "x; $y",
        "D": "",
        "E": "a=b",
    }


@pytest.mark.parametrize("line", ["A", "=1", "1A=2", "A B=1"])
def test_a_wrong_env_file_is_refused(line, write):
    message = f"[launch::env_file] env:2: {line!r} sets no variable; allowed are NAME=VALUE"
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        exports.read_env_file(write(f"OK=1\n{line}\n", "env"))


def test_default_env_files(write, tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    write("A=1\n", ".deepspeed_env")
    write("A=2\n", "other")
    (home / ".deepspeed_env").write_text("A=0\n", encoding="utf-8")
    os.environ["HOME"], before = str(home), os.environ.get("HOME", "")
    try:
        here = str(tmp_path / ".deepspeed_env")
        assert exports.default_env_files({}) == [str(home / ".deepspeed_env"), here]
        assert exports.default_env_files({"DS_ENV_FILE": "other"}) == [str(tmp_path / "other")]
        path = str(tmp_path / "other")
        assert exports.default_env_files({"DS_ENV_FILE": path}) == [path]
    finally:
        os.environ["HOME"] = before


def test_variables_are_carried_by_prefix(monkeypatch):
    environ = {
        "NCCL_DEBUG": "INFO",
        "PYTHONPATH": "/mine",
        "PENSTOCK_X": "a b",
        "GLOO_SOCKET_IFNAME": "eth1",
        "UCX_TLS": "tcp",
        "MLFLOW_RUN_ID": "1",
        "MV2_X": "1",
        "PENSTOCK_RESUME": "never",  # an option of the nodes' launchers
        "HOME": "/root",
        "MY_NCCL": "1",
        "BASH_FUNC_x%%": "() { :; }",
    }
    carried = exports.carried(environ)
    assert carried.pop("PYTHONPATH") == f"{os.getcwd()}:/mine"
    assert set(carried) == {
        *("NCCL_DEBUG", "PENSTOCK_X", "GLOO_SOCKET_IFNAME", "UCX_TLS", "MLFLOW_RUN_ID", "MV2_X")
    }

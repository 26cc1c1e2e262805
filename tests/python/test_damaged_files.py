"""Files that are damaged anywhere: an error names the file, or an older checkpoint is loaded."""

from __future__ import annotations

import json
import os
import random
import shutil

import pytest
import torch
import torch.distributed as dist
from torch import nn

FLIPS, FLIPS_FULL = 200, 20_000
FILES = ("checkpoint.json", "rank-00000.safetensors", "rank-00001.safetensors")


def new_engine(config=None):
    import penstock  # noqa: PLC0415

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    optimizer = {"type": "AdamW", "lr": 0.5}
    return penstock.initialize(model, {"strategy": "zero3", **(config or {})}, optimizer=optimizer)


def save_two(folder):
    """Saves step-1 and step-2, on two ranks, and returns the weights of both."""
    engine = new_engine()
    weights = []
    for step in (1, 2):
        engine.backward(engine(torch.ones(2, 5) * (dist.get_rank() + step)).pow(2).sum())
        engine.step()
        engine.save(folder, client_state=step)
        weights.append({k: v.clone() for k, v in engine.state_dict().items()})
    engine.close()
    return weights


class Run:
    """Two checkpoints in a folder, one engine that loads them, and how files are damaged."""

    def __init__(self, folder, weights):
        self.root, self.newest = folder, folder / "step-2"
        self.weights = dict(enumerate(weights, start=1))
        self.good = {name: (self.newest / name).read_bytes() for name in FILES}
        self.good["latest"] = (folder / "latest").read_bytes()
        self.engine = new_engine()

    def path(self, name):
        return self.root / name if name == "latest" else self.newest / name

    def put(self, name, data):
        self.path(name).write_bytes(data)

    def repair(self):
        for name, data in self.good.items():
            path = self.path(name)
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif not path.is_file() or path.is_symlink():
                path.unlink(missing_ok=True)
            path.write_bytes(data)

    def holds(self, step):
        now = self.engine.state_dict()
        return all(now[name].equal(value) for name, value in self.weights[step].items())

    def refuses(self, name):
        """The checkpoint's reader names the file; a load does so, too, or has the right values."""
        import penstock  # noqa: PLC0415
        from penstock._native import _penstock  # noqa: PLC0415

        with pytest.raises(penstock.RuntimeFault) as verified:
            _penstock.CheckpointReader(str(self.newest)).verify()
        assert str(self.path(name)) in str(verified.value)
        try:
            state = self.engine.load(self.root, "step-2")
        except penstock.RuntimeFault as error:
            assert str(self.path(name)) in str(error)
        else:  # bytes of the header or of padding, which a load does not read
            assert state == 2 and self.holds(2)

    def falls_back(self, name, stderr):
        state = self.engine.load(self.root)
        said = stderr().err
        assert self.holds(state)
        if state == 1 and self.path(name).exists():
            assert f'{self.newest}" is skipped' in said
            assert str(self.path(name)) in said
        elif state == 1:  # without a manifest it is no checkpoint, but `latest` names it
            unused = f'"{self.root / "latest"}" is not usable, so the newest checkpoint is used: '
            assert f'{unused}it names "step-2"' in said or str(self.path(name)) in said


@pytest.fixture(scope="module")
def run(pools, tmp_path_factory):
    folder = tmp_path_factory.mktemp("damaged") / "run"
    made = Run(folder, pools(2).run(save_two, str(folder))[0])
    yield made
    made.engine.close()


@pytest.fixture(autouse=True)
def repaired(request):
    yield
    if "run" in request.fixturenames:
        request.getfixturevalue("run").repair()


def flips(full):
    draw = random.Random(7)
    for _ in range(FLIPS_FULL if full else FLIPS):
        yield draw.choice(FILES), draw.random(), draw.choice((*(1 << bit for bit in range(8)), 255))


def test_no_byte_of_a_checkpoint_is_taken_damaged(run, request, capfd):
    for i, (name, place, mask) in enumerate(flips(request.config.getoption("full"))):
        data = bytearray(run.good[name])
        data[int(place * len(data))] ^= mask
        run.put(name, data)
        run.refuses(name)
        if i % 10 == 0:
            capfd.readouterr()
            run.falls_back(name, capfd.readouterr)
        run.put(name, run.good[name])


# ---- whole files


def other_of(name):
    return {FILES[1]: FILES[2], FILES[2]: FILES[1]}.get(name, FILES[1])


def replaced_by(make):
    """Damage that puts something else where the file was."""

    def damage(run, name):
        run.path(name).unlink()
        make(run, run.path(name))

    return damage


def cut(share):
    return lambda run, name: run.put(name, run.good[name][: int(share * len(run.good[name]))])


def zero_page(share):
    def damage(run, name):
        data = bytearray(run.good[name])
        first = int(share * len(data)) // 4096 * 4096
        data[first : first + 4096] = bytes(len(data[first : first + 4096]))
        run.put(name, data)

    return damage


def huge(run, path):
    """A terabyte without blocks on disk: nobody may read all of it."""
    with path.open("wb") as file:
        file.truncate(1 << 40)


DAMAGES = {
    "empty": cut(0),
    "one byte": cut(0.00001),
    "a third": cut(0.33),
    "almost all": cut(0.999),
    "first page zero": zero_page(0),
    "middle page zero": zero_page(0.5),
    "last page zero": zero_page(0.9999),
    "longer": lambda run, name: run.put(name, run.good[name] + b"\0"),
    "another file": lambda run, name: run.put(name, run.good[other_of(name)]),
    "of another step": lambda run, name: run.put(name, (run.root / "step-1" / name).read_bytes()),
    "no text": lambda run, name: run.put(name, b"\xff\xfe\0" * 3000),
    "deep": lambda run, name: run.put(name, b'{"a":' * 100_000),
    "huge": replaced_by(huge),
    "missing": replaced_by(lambda run, path: None),
    "folder": replaced_by(lambda run, path: path.mkdir()),
    "pipe": replaced_by(lambda run, path: os.mkfifo(path)),
    "link to nothing": replaced_by(lambda run, path: path.symlink_to("nowhere")),
    "link to itself": replaced_by(lambda run, path: path.symlink_to(path.name)),
}
UNSEEN = {("of another step", "checkpoint.json")}  # a whole manifest: its files do not fit to it


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_file_is_named(kind, name, run, capfd):
    DAMAGES[kind](run, name)
    wrong = FILES[1] if (kind, name) in UNSEEN else name
    run.refuses(wrong)
    capfd.readouterr()
    run.falls_back(wrong, capfd.readouterr)


@pytest.mark.parametrize("kind", sorted(DAMAGES.keys() - {"of another step"}))
def test_a_damaged_pointer_is_said(kind, run, capfd):
    """The newest checkpoint is loaded, and a line names the file `latest`."""
    DAMAGES[kind](run, "latest")
    capfd.readouterr()
    assert run.engine.load(run.root) == 2
    # "almost all" lacks only the line's end, which nobody needs.
    silent = kind in ("missing", "link to nothing", "link to itself", "almost all")
    assert (str(run.root / "latest") in capfd.readouterr().err) is not silent
    assert run.holds(2)


def test_two_swapped_files_are_no_checkpoint(run):
    """Both are whole, and of equal size."""
    run.put(FILES[1], run.good[FILES[2]])
    run.put(FILES[2], run.good[FILES[1]])
    run.refuses(FILES[1])


# ---- the commands


@pytest.mark.parametrize("name", [*FILES, "latest"])
@pytest.mark.parametrize("kind", sorted(DAMAGES.keys() - {"pipe"}))
def test_inspect_names_the_damage(kind, name, run, capsys):
    from penstock.cli import main  # noqa: PLC0415

    if (kind, name) == ("of another step", "latest"):
        pytest.skip("there is one file `latest`")
    DAMAGES[kind](run, name)
    code = main(["inspect", str(run.root)])
    said = capsys.readouterr().out
    silent = {"missing", "link to nothing", "link to itself"}
    if name == "latest" and kind in silent | {"almost all"}:
        assert code == 0
        return
    assert code == 1
    if name == FILES[0] and kind in silent:  # no checkpoint, but `latest` names it
        assert "latest: step-2 (there is no such checkpoint)" in said
    elif name == "latest":
        assert "latest: " in said
    else:
        wrong = FILES[1] if (kind, name) in UNSEEN else name
        assert str(run.newest / wrong) in said


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kind", DAMAGES)
def test_convert_refuses_damage(kind, name, run, tmp_path):
    """Of files of the checkpoint that convert reads at all: it does not read the header."""
    import penstock  # noqa: PLC0415
    from penstock.conversion.convert import state_dict  # noqa: PLC0415

    DAMAGES[kind](run, name)
    try:
        read = state_dict(run.newest)
    except (penstock.RuntimeFault, penstock.ConfigError) as error:
        assert str(run.newest) in str(error)
    else:
        assert all(read[n].equal(v) for n, v in run.weights[2].items() if n in read)


def test_no_byte_of_a_torch_file_is_taken_damaged(request, tmp_path):
    import penstock  # noqa: PLC0415
    from penstock.conversion.convert import state_dict  # noqa: PLC0415

    path = tmp_path / "model.pt"
    weights = {f"layer{i}.weight": torch.randn(16, 16) for i in range(3)}
    torch.save(weights, path)
    good, draw = path.read_bytes(), random.Random(3)
    for _ in range(FLIPS_FULL // 10 if request.config.getoption("full") else FLIPS // 2):
        data = bytearray(good)
        data[draw.randrange(len(data))] ^= draw.choice((1, 4, 32, 128, 255))
        path.write_bytes(data)
        try:
            read = state_dict(path)
        except (penstock.RuntimeFault, penstock.ConfigError) as error:
            assert str(path) in str(error)
        else:  # a date, or padding
            assert read.keys() == weights.keys()
            assert all(read[name].equal(value) for name, value in weights.items())


# ---- configs


CONFIG = b'{"strategy": "zero1", "clip": 1.0}'
DEEPSPEED = b'{"train_batch_size": 4, "zero_optimization": {"stage": 1}}'
MACHINE = b'{"flops": 1e12, "overlap": 0.5}'
TEXTS = {
    "a wrong first byte": lambda text: b"\xff" + text,
    "a wrong byte": lambda text: text.replace(b'"', b'"\xc3', 1),
    "UTF-16": lambda text: text.decode().encode("utf-16"),
    "NULs behind": lambda text: text + b"\0" * 10,
    "a NUL": lambda text: text.replace(b" ", b"\0", 1),
    "zeros": lambda text: bytes(4096),
    "empty": lambda text: b"",
    "cut": lambda text: text[:-4],
    "nested objects": lambda text: b'{"a":' * 100_000,
    "nested lists": lambda text: b'{"a":' + b"[" * 100_000,
    "a long number": lambda text: text[:-1] + b', "flops": ' + b"1" * 10_000 + b"}",
    "a list": lambda text: b"[]",
    "half a surrogate": lambda text: b'{"\\ud800": 1}',
}


def read_as(what, path):
    from penstock._native import _penstock  # noqa: PLC0415
    from penstock.bench import machine_file  # noqa: PLC0415
    from penstock.front import config_file  # noqa: PLC0415

    if what == "machine":
        return machine_file.load(path)
    return _penstock.Config(json.dumps(config_file.config_dict(path)))


@pytest.mark.parametrize("what", ["config", "deepspeed", "machine"])
@pytest.mark.parametrize("kind", TEXTS)
def test_a_text_that_is_no_config_is_a_config_error(kind, what, tmp_path):
    import penstock  # noqa: PLC0415

    path = tmp_path / "file.json"
    path.write_bytes(
        TEXTS[kind]({"config": CONFIG, "deepspeed": DEEPSPEED, "machine": MACHINE}[what])
    )
    with pytest.raises(penstock.ConfigError) as caught:
        read_as(what, path)
    assert str(path) in str(caught.value) or kind == "half a surrogate"


@pytest.mark.parametrize("what", ["config", "deepspeed", "machine"])
def test_a_byte_order_mark_is_no_damage(what, tmp_path):
    path = tmp_path / "file.json"
    text = {"config": CONFIG, "deepspeed": DEEPSPEED, "machine": MACHINE}[what]
    path.write_bytes(b"\xef\xbb\xbf" + text)
    assert read_as(what, path) is not None


@pytest.mark.parametrize("kind", [*TEXTS, "architectures", "another type"])
def test_a_model_config_is_refused_by_name(kind, tmp_path):
    pytest.importorskip("transformers")
    from penstock.cli import model_build  # noqa: PLC0415

    path = tmp_path / "config.json"
    odd = {
        "architectures": b'{"model_type": "gpt2", "architectures": 7}',
        "another type": b'{"model_type": "gpt2", "n_layer": "many"}',
    }
    text = b'{"model_type": "gpt2"}'
    path.write_bytes(odd[kind] if kind in odd else TEXTS[kind](text))
    with pytest.raises(ValueError, match="--model") as caught:
        model_build._hugging_face(path)
    assert str(path) in str(caught.value)

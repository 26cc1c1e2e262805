"""penstock convert: DeepSpeed's checkpoints of ranks that compute one model together.

tests/foreign/deepspeed_ranks was written by DeepSpeed (tests/foreign/write_deepspeed_ranks.py).
"""

from __future__ import annotations

import json
import pathlib
import re
import shutil

import pytest
import torch
import trained_ranks
from test_api import initialize
from test_convert import changed, remove

import penstock
from penstock._native import _penstock
from penstock.cli import main
from penstock.conversion import Options, convert, cuts, rank_merge
from penstock.conversion.foreign import Foreign
from penstock.parallel.pipeline_layers import LayerSpec, PipelineLayers, TiedLayerSpec

FOREIGN = pathlib.Path(trained_ranks.__file__).parent / "deepspeed_ranks"
CASES = sorted(path.name for path in FOREIGN.iterdir())


def rules_of(case):
    ranks = trained_ranks.CASES[case]
    if ranks["model"] == 1 or ranks["info"]:
        return {}
    rules = dict(trained_ranks.RULES)
    if ranks["pipe"] > 1:
        del rules["*embed.weight"]
    return rules


def foreign(case, folder):
    """A copy of DeepSpeed's checkpoint, to be changed."""
    return pathlib.Path(shutil.copytree(FOREIGN / case, folder / case))


def ours(name):
    """Our name of one of DeepSpeed's."""
    return name.replace("tied_modules.tokens.", "0.")


@pytest.mark.parametrize("case", CASES)
def test_weights_and_moments_are_deepspeeds(case, tmp_path):
    made = convert(FOREIGN / case, tmp_path, Options(rules=rules_of(case)))
    reader = _penstock.CheckpointReader(made, "")
    found = {(one.role, one.name): reader.read(i) for i, one in enumerate(reader.tensors)}
    wanted = torch.load(FOREIGN / case / "whole.pt", weights_only=True)
    padded = trained_ranks.CASES[case]["info"]
    for name, kept in wanted.items():
        for role, value in kept.items():
            whole = value[: trained_ranks.WORDS] if padded and name == "embed.weight" else value
            assert torch.equal(found.pop((role, ours(name))), whole), (name, role)
    others = {name for _, name in found}
    assert others == ({"3.scale", "3.shift"} if "pipe" in case else {"scale"})
    updates = json.loads(reader.state)["updates"]
    assert updates == {ours(name): trained_ranks.BEFORE for name in wanted}
    groups = json.loads(reader.front)["optimizer"]["groups"]
    assert [group["params"] for group in groups] == [sorted(map(ours, wanted))]
    assert groups[0]["options"]["weight_decay"] == 0.1


def whole_model(case):
    if trained_ranks.CASES[case]["pipe"] > 1:
        return PipelineLayers(trained_ranks.layers(LayerSpec, TiedLayerSpec), 1)
    model = trained_ranks.Model()
    if not trained_ranks.CASES[case]["info"]:  # whose rows nothing says to be padding
        model.embed = torch.nn.Embedding(trained_ranks.PADDED, trained_ranks.SIZE)
    return model


def loss_of(engine, case, tokens):
    if trained_ranks.CASES[case]["pipe"] > 1:
        return trained_ranks.loss_of(engine(tokens[:, :-1]), tokens[:, 1:])
    return engine(tokens)


@pytest.mark.parametrize("case", CASES)
def test_deepspeeds_next_losses(case, tmp_path):
    rules = tmp_path / "rules.json"
    rules.write_text(json.dumps(rules_of(case)))
    named = ["--rules", str(rules)] if rules_of(case) else []
    assert main(["convert", str(FOREIGN / case), str(tmp_path / "out"), *named]) == 0
    torch.manual_seed(5)  # other weights than the checkpoint's
    model = whole_model(case)
    trained = [param for param in model.parameters() if param.requires_grad]
    data, micro = trained_ranks.CASES[case]["data"], trained_ranks.MICRO
    config = {"precision": case.split("-")[-1], "batch": {"accumulate": data * micro}}
    engine = initialize(model, config, optimizer=torch.optim.AdamW(trained, **trained_ranks.ADAM))
    assert engine.load(tmp_path / "out") == {"epoch": 1}
    losses = []
    for step in range(trained_ranks.BEFORE, trained_ranks.BEFORE + trained_ranks.AFTER):
        found = []
        for rank in range(data):
            for i in range(micro):
                loss = loss_of(engine, case, trained_ranks.batch(step, i, rank))
                engine.backward(loss)
                engine.step()
                found.append(loss.item())
        losses.append(sum(found) / len(found))
    engine.close()
    wanted = json.loads((FOREIGN / case / "next.json").read_text())["losses"]
    near = 1e-6 if case.endswith("fp32") else 2e-3
    assert torch.allclose(torch.tensor(losses), torch.tensor(wanted), rtol=near), (losses, wanted)


# ---- what is said of a cut


def refused(case, folder, rules, change=None):
    source = foreign(case, folder)
    if change is not None:
        change(source)
    with pytest.raises((penstock.ConfigError, penstock.RuntimeFault)) as error:
        convert(source, folder / "out", Options(rules=rules))
    assert not (folder / "out").exists() or not list((folder / "out").iterdir())
    return str(error.value)


def test_an_unknown_cut_is_an_error_that_lists_it(tmp_path):
    said = refused("tensor2-zero1-fp32", tmp_path, {})
    for listed in (
        "embed.weight (6, 6) (6, 6)",
        "block.gate_up.weight (8, 6) (8, 6)",
        "block.gate_up.bias (8,) (8,)",
        "block.down.weight (6, 4) (6, 4)",
    ):
        assert listed in said
    assert "norm" not in said.partition("(shapes")[0]
    assert "head" not in said
    assert "block.down.bias" not in said


def without_info(key):
    def change(held):
        held["universal_checkpoint_info"].pop(key)

    return changed("*model_states.pt", change)


def with_info(**info):
    return changed("*model_states.pt", lambda held: held["universal_checkpoint_info"].update(info))


def sizes(**model):
    return changed("*model_states.pt", lambda held: held.update(model))


def other_embedding(held):
    shapes = held["param_shapes"][0]
    shapes["other.weight"] = shapes.pop("embed.weight")


def all_ones(held):
    """Every rank has the same of a norm, which says nothing."""
    state = held["optimizer_state_dict"]
    flat = state["single_partition_of_fp32_groups"]
    kept = state["base_optimizer_state"]["state"]
    state["single_partition_of_fp32_groups"] = [torch.ones_like(one) for one in flat]
    for one in kept.values():
        one.update({key: torch.ones_like(one[key]) for key in ("exp_avg", "exp_avg_sq")})


RULES = trained_ranks.RULES
INFO = "tensor2-zero2-bf16"
TENSOR = "tensor2-zero1-fp32"
PIPE = "pipe2-zero1-fp32"
BOTH = "pipe2-tensor2-zero1-fp32"
ERRORS = [
    (TENSOR, RULES, remove("mp_rank_01_model*"), "no file of model states for mp_rank_01"),
    (TENSOR, RULES, remove("*mp_rank_01_*"), "mp_rank_00 records a run with 2"),
    (TENSOR, RULES, remove("*rank_1_mp_rank_01*"), r"1 rank.s., but the run had 2 .mp_rank_01"),
    (TENSOR, RULES, remove("*rank_0_mp_rank_01*"), "mp_rank_01: the files of .0. are missing"),
    (TENSOR, RULES, remove("*rank_?_mp_rank_01*"), "only some of the 2 model ranks"),
    (TENSOR, RULES, changed("mp_rank_01_model*", other_embedding), "other.weight"),
    (TENSOR, RULES, changed("mp_rank_01_m*", lambda held: held.update(skipped_steps=1)), "times"),
    (TENSOR, RULES, changed("*optim_states.pt", all_ones), "not known .* norm.weight"),
    (TENSOR, RULES | {"*haed": "whole"}, None, "haed.* match no parameter"),
    (TENSOR, RULES | {"head": "whole", "norm": "column:0"}, None, "column:0"),
    (TENSOR, {"*gate_up": "whole"}, None, "is whole on every model rank .* its values differ"),
    (TENSOR, RULES | {"*gate_up": "column:3"}, None, "does not fit its shapes"),
    (TENSOR, RULES | {"*gate_up": "column:9,6"}, None, "does not fit its shapes"),
    (TENSOR, RULES | {"*embed.weight": 2}, None, "does not fit its shapes"),
    (INFO, {}, with_info(universal_checkpoint_version=9), "has version 9"),
    (INFO, {}, with_info(original_vocab_size=99), "does not fit its shapes"),
    (INFO, {}, without_info("original_vocab_size"), "give its number of rows"),
    (INFO, {}, without_info("tp_replicated_parameter_patterns"), "have the same values"),
    (INFO, {}, with_info(parameter_to_average_patterns=["norm"]), "several kinds"),
    (INFO, {}, with_info(affine_map={"params": {"block.gate_up": {}}}), "not known .* block.gate"),
    (INFO, {}, with_info(parameter_with_sub_params=[{"patterns": ["embed"]}]), "not known .* emb"),
    (PIPE, {"*": 0}, None, "rules have no effect"),
    (PIPE, {}, remove("layer_0[13]*"), "layers .1, 3. are missing"),
    (PIPE, {}, remove("layer_00*"), "no layer file has .* tied_modules.tokens.weight"),
    (PIPE, {}, remove("layer_*"), "no sets of layer files"),
    (PIPE, {}, remove("*mp_rank_01_*"), "mp_rank_00 records a run with 2"),
    (PIPE, {}, changed("*mp_rank_01_optim*", all_ones), "on several stages"),
    (PIPE, {}, sizes(param_shapes=None), "pipeline without ZeRO"),
    (BOTH, {"*gate_up": "column:2", "*down": "row"}, remove("*_03-model_01*"), "layers .3."),
    (BOTH, {}, remove("layer_*-model_00-*"), "layer files for the tensor ranks .1."),
    (BOTH, {}, None, r"1.gate_up.weight .8, 6. .8, 6."),
]


@pytest.mark.parametrize(("case", "rules", "change", "says"), ERRORS)
def test_what_cannot_be_joined_is_said(case, rules, change, says, tmp_path):
    said = refused(case, tmp_path, rules, change)
    assert re.search(says, said), said


def test_rules_come_before_what_the_checkpoint_says(tmp_path):
    made = convert(FOREIGN / INFO, tmp_path, Options(rules={"embed": "vocab"}))
    found = {one.name: list(one.shape) for one in _penstock.CheckpointReader(made, "").tensors}
    assert found["embed.weight"] == [trained_ranks.PADDED, trained_ranks.SIZE]


def test_averages(tmp_path):
    source = foreign(INFO, tmp_path)
    patterns = [r"norm\..*", r"block\.down\.bias"]
    with_info(parameter_to_average_patterns=["head"], tp_replicated_parameter_patterns=patterns)(
        source
    )
    made = convert(source, tmp_path / "out")
    reader = _penstock.CheckpointReader(made, "")
    wanted = torch.load(FOREIGN / INFO / "whole.pt", weights_only=True)
    found = {(one.role, one.name): reader.read(i) for i, one in enumerate(reader.tensors)}
    assert torch.equal(found["param", "head.weight"], wanted["head.weight"]["param"])


def test_joining():
    whole = torch.arange(48.0).reshape(12, 4)
    q, k, v = whole.split([8, 2, 2])
    parts = [torch.cat([one.chunk(2)[rank] for one in (q, k, v)]) for rank in range(2)]
    _, cut = cuts.of_rules({"*.qkv": "column:8,2,2"}, "block.qkv.weight", 2)
    assert cut.shape([(6, 4), (6, 4)]) == (12, 4)
    assert torch.equal(cut.join(parts), whole)
    _, uneven = cuts.of_rules({"*": 1}, "a.weight", 2)
    assert uneven.shape([(2, 3), (2, 4)]) == (2, 7)
    assert uneven.shape([(2, 3), (3, 3)]) is None
    assert cuts.Cut(-1, average=True).join([torch.zeros(2), torch.ones(2)]).tolist() == [0.5, 0.5]


def test_rules_of_tokens_between_layers():
    rules = cuts.checked({"blocks": "tokens", "*.mlp": "gather_tokens", "*.down": "row_tokens"})
    assert list(rules) == ["*.down"]
    assert cuts.of_rules(rules, "mlp.down.weight", 2)[1].dim == 1
    assert cuts.of_rules(rules, "mlp.down.bias", 1)[1] == cuts.WHOLE


def test_a_file_of_rules_that_is_none(tmp_path, capsys):
    path = tmp_path / "rules.json"
    for text in ("{", "[1]"):
        path.write_text(text)
        source, out = str(FOREIGN / TENSOR), str(tmp_path / "out")
        assert main(["convert", source, out, "--rules", str(path)]) == 2
        assert "[convert::rules]" in capsys.readouterr().err


def test_groups_of_stages():
    def of(*stages):
        made = [Foreign("DeepSpeed") for _ in stages]
        for stage, groups in zip(made, stages, strict=True):
            for decay, names in groups:
                stage.add_options({"weight_decay": decay}, names)
        whole = rank_merge.of_stages(made)
        groups = whole.groups and [
            (one["options"]["weight_decay"], one["params"]) for one in whole.groups
        ]
        return groups, whole.notes

    alike = of([(0.1, ["a"]), (0.1, ["b"])], [(0.1, ["d"]), (0.1, ["c"])])
    assert alike == ([(0.1, ["a", "d"]), (0.1, ["b", "c"])], [])
    fewer = of([(0.1, ["a"])], [(0.1, ["b"]), (0.0, ["c"])])
    assert fewer == ([(0.1, ["a", "b"]), (0.0, ["c"])], [])
    groups, notes = of([(0.1, ["a"]), (0.1, ["b"])], [(0.1, ["c"])])
    assert groups is None
    assert "options" in notes[0]

"""What ranks that compute one model together owe each other, left out or done twice."""

from __future__ import annotations

from planted import Mutation, Pytest, gtest

GRADIENTS, VALUES, WHOLES = (
    "src/exec/gradients.cpp",
    "src/exec/gathered_values.cpp",
    "src/engine/mesh/whole_params.cpp",
)
PLACEMENT = "src/place/model_placement.cpp"
OPERATORS, RULES = "src/parallel/tensor_operators.cpp", "src/parallel/tensor_rules.cpp"


def life(story: str) -> Pytest:
    return Pytest(("tests/parity/test_tensor_life.py", "-k", story))


MESH = Pytest(("tests/parity/test_tensor.py", "-k", "world2 and fp32 and zero"))
WITH_REPLICAS = Pytest(("tests/parity/test_tensor.py", "-k", "world4 and tensor2 and fp32"))
ON_DISK = Pytest(("tests/parity/test_tensor.py", "-k", "tiers and zero2"))
CHECKPOINTS = Pytest(("tests/python/test_checkpoint_tensor.py",))


def around(test: str) -> Pytest:
    return Pytest(("tests/parity/test_mesh_idioms.py", "-k", test))


TOKENS = Pytest(("tests/parity/test_token_parts.py",))
RING = gtest("src/parallel/parallel_test", "RingAttention.*")


def checked(test: str) -> Pytest:
    return Pytest(("tests/parity/test_rule_check.py", "-k", test))


OVER_TENSOR_RANKS = [
    Mutation(
        "addends of a gradient are not added up over tensor ranks",
        GRADIENTS,
        "      add_up(flat, copy->one(), axis, planned.label);\n",
        "",
        MESH,
    ),
    Mutation(
        "the norm is that of gradients before they were added up",
        GRADIENTS,
        "  flat.uncount();\n  if (sum.data().device == nullptr)",
        "  if (sum.data().device == nullptr)",
        WITH_REPLICAS,
    ),
    Mutation(
        "the norm counts what tensor ranks have alike once a rank",
        PLACEMENT,
        "    return is_sharded(axis) || mesh",
        "    return axis == Axis::kTensor || is_sharded(axis) || mesh",
        MESH,
    ),
    Mutation(
        "gradients that are read lack the other ranks' addends",
        VALUES,
        "    if (!sum.defined() || !flat.placement.is_partial(axis)) continue;\n",
        "    if (axis != Axis::kPipeline || !flat.placement.is_partial(axis)) continue;\n",
        WITH_REPLICAS,
    ),
    Mutation(
        "gradients that were set are added up once more",
        GRADIENTS,
        "  const bool open = made || !rank_.cells.grads_on_disk;\n",
        "  const bool open = made && !made;\n",
        life("changes_gradients"),
    ),
    Mutation(
        "a late addend is not added up",
        GRADIENTS,
        "    if (flat.placement.is_partial(axis)) add_up(flat, sum, axis, label);\n",
        "",
        life("twice"),
    ),
    Mutation(
        "what was added up for an update that did not come is added up again",
        "src/engine/step/core_state.cpp",
        "    executor->gradients().reopen();\n",
        "",
        life("window_open"),
    ),
    Mutation(
        "gradients on disk are added up each time with those before",
        GRADIENTS,
        "rank_.cells.grads_on_disk ? &sum_of(flat) : held(flat)",
        "held(flat)",
        ON_DISK,
    ),
    Mutation(
        "a column's input is taken for a value that all ranks use alike",
        OPERATORS,
        "  at::Tensor made = replicate(whole, peers);\n",
        "  at::Tensor made = peers->size() > 9 ? replicate(whole, peers) : whole.view_as(whole);\n",
        MESH,
    ),
    Mutation(
        "the gradient of a sum is added up again",
        OPERATORS,
        "return way(partial, Transfer::kSum, Transfer::kNothing, 0, peers);",
        "return way(partial, Transfer::kSum, Transfer::kSum, 0, peers);",
        MESH,
    ),
    Mutation(
        "what no rule is about is whole where tokens are cut",
        "python/penstock/parallel/token_parts.py",
        '            made[name] = "partial"\n',
        "            pass\n",
        TOKENS,
    ),
    Mutation(
        "tokens that stay cut are not seen",
        "python/penstock/parallel/token_parts.py",
        "        if self._parts and not self._pipeline:\n",
        "        if self._parts and self._pipeline:\n",
        TOKENS,
    ),
    Mutation(
        "changes of logits that are not there are lost",
        "python/penstock/parallel/lazy_logits.py",
        "        _refuse_writes(func, args, kwargs)\n",
        "",
        Pytest(("tests/parity/test_tensor_hf.py", "-k", "change_in_no_place")),
    ),
    Mutation(
        "a row's bias is added once a rank",
        OPERATORS,
        "  return with_bias(sum(at::linear(input, weight), peers), bias);\n",
        "  return sum(at::linear(input, weight, bias), peers);\n",
        MESH,
    ),
    Mutation(
        "layers that read one value sum its gradient each",
        OPERATORS,
        "    if (auto backward = backward_.lock()) {\n",
        "    if (auto backward = backward_.lock(); backward && version_ < 0) {\n",
        gtest("src/parallel/parallel_test", "*SumItsGradientOnce*"),
    ),
    Mutation(
        "what layers exchange in backward is planned for forward",
        "src/engine/step/layer_exchanges.cpp",
        "    model.units[unit].in_backward = passes_[1].by_unit[unit];\n",
        "    model.units[unit].in_backward = passes_[0].by_unit[unit];\n",
        gtest("src/engine/engine_test", "LayerExchanges*"),
    ),
    Mutation(
        "forwards that share a backward are planned as the last one",
        "src/engine/step/layer_exchanges.cpp",
        "  if (std::exchange(went_back_, false) || in_stages_) ",
        "  if (std::exchange(went_back_, true) || in_stages_) ",
        gtest("src/engine/engine_test", "LayerExchanges*"),
    ),
    Mutation(
        "checks of rules are planned as the model's layers",
        "src/engine/step/layer_exchanges.cpp",
        "  if (ignores_) return;\n",
        "",
        gtest("src/engine/engine_test", "LayerExchanges*"),
    ),
    Mutation(
        "a sum of layers counts as one way",
        "src/parallel/peer_exchange.cpp",
        "label, 2 * sent, addend.is_cpu()",
        "label, sent, addend.is_cpu()",
        Pytest(("tests/parity/test_layer_exchanges.py", "-k", "those_sent and gpt2 and zero1")),
    ),
    Mutation(
        "a value that was written to since stands for what it is now",
        OPERATORS,
        "whole.unsafeGetTensorImpl() && version_ == whole._version();",
        "whole.unsafeGetTensorImpl();",
        gtest("src/parallel/parallel_test", "*Replicated*"),
    ),
    Mutation(
        "fused layers are cut as if they were one",
        RULES,
        "      parts.assign(static_cast<size_t>(number), size / number);\n",
        "      parts = {size};\n",
        MESH,
    ),
    Mutation(
        "ranks begin with weights of their own",
        "src/engine/model/adoption.cpp",
        '  broadcast(concat(label, " ", slot.name), whole);\n',
        "  static_cast<void>(label);\n",
        life("evaluates"),
    ),
    Mutation(
        "every rank keeps what it wrote into gathered parameters",
        WHOLES,
        """      executor_.broadcast(concat("written ", slot.name), whole.data_ptr(),
                          static_cast<int64_t>(whole.nbytes()));
""",
        "",
        life("writes_gathered"),
    ),
    Mutation(
        "parameters stay whole after gathered()",
        WHOLES,
        "    look_at(slot.param, slot.window, slot.sizes);\n",
        "",
        life("reads_gathered"),
    ),
    Mutation(
        "tensor ranks share the work of writing what only one of them has",
        "src/ckpt/inventory.cpp",
        "    if (!placement.is_alike(mesh, rank, other)) continue;\n",
        "",
        CHECKPOINTS,
    ),
    Mutation(
        "ranks that compute together are seeded apart",
        "python/penstock/front/engine.py",
        "            own = ranks.rank() // mesh.tensor % (mesh.data * mesh.sequence)\n",
        "            own = ranks.rank()\n",
        life("dropout"),
    ),
    Mutation(
        "a copy of the model keeps divided numbers",
        "python/penstock/parallel/tensor_parallel.py",
        "                one.make_whole()\n",
        "                pass\n",
        life("reads_gathered"),
    ),
    Mutation(
        "an export has the shapes of this rank's parts",
        "src/engine/model/values.cpp",
        "shapes.emplace_back(slot.name, slot.whole);",
        "shapes.emplace_back(slot.name, slot.sizes);",
        around("export"),
    ),
    Mutation(
        "a token that sees nothing sees everything",
        "python/penstock/parallel/sequence_parallel.py",
        "        return mask & torch.ones(padded, padded, dtype=torch.bool, device=first.device)"
        ".tril()\n",
        "        mask = mask & torch.ones(padded, padded, dtype=torch.bool).tril()\n"
        "        return mask | ~mask.any(-1, keepdim=True)\n",
        around("padding"),
    ),
    Mutation(
        "gradients of keys and values stop one rank before their own",
        "src/parallel/ring_attention.cpp",
        "      travelling_grad = peers.shift(travelling_grad, ring.peers.label);\n",
        "      if (hops + 1 < peers.size()) {\n"
        "        travelling_grad = peers.shift(travelling_grad, ring.peers.label);\n"
        "      }\n",
        RING,
    ),
    Mutation(
        "keys that a mask hides are partly those of another rank",
        "src/parallel/ring_attention.cpp",
        "at::cat({attended[0][owner], attended[1][owner]}, 1);",
        "at::cat({attended[0][owner], attended[1][(owner + 1) % peers->size()]}, 1);",
        RING,
    ),
    Mutation(
        "tokens of a ring are in the order of heads",
        "python/penstock/parallel/sequence_parallel.py",
        "begins = group * num, (2 * self._num_groups - 1 - group) * num",
        "begins = 2 * group * num, (2 * group + 1) * num",
        Pytest(("tests/parity/test_sequence.py", "-k", "parallel and gpt2")),
    ),
    Mutation(
        "neighbours get the tokens of their group in turn",
        "python/penstock/parallel/sequence_parallel.py",
        "return shared[2 * place : 2 * place + 2]",
        "return shared[place::num]",
        Pytest(("tests/parity/test_sequence.py", "-k", "parallel and llama-zero1-8")),
    ),
    Mutation(
        "torch's fast path computes with a part of a layer",
        "python/penstock/parallel/tensor_parallel.py",
        "        module.activation_relu_or_gelu = 0\n",
        "",
        around("fast_path"),
    ),
    Mutation(
        "a known model's queries, keys and values are cut as if they were one block",
        "python/penstock/parallel/parallel_plans.py",
        '        "*.attn.c_attn": "column:3",  # [Q|K|V]\n',
        '        "*.attn.c_attn": "column",\n',
        checked("known_models and gpt2-zero1"),
    ),
    Mutation(
        "a wrong rule shows only if it changes outputs",
        "python/penstock/parallel/probe.py",
        "        if worst is None and not region.gathers:\n",
        "        if worst is None and region.gathers:\n",
        checked("test_wrong_rules and zero"),
    ),
]

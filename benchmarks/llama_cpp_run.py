"""llama.cpp's part of inference.py. Needs llama-cpp-python and gguf, not torch and not Penstock:

    python -m venv llama && llama/bin/pip install llama-cpp-python==0.3.36 gguf==0.19.0
    python benchmarks/inference.py --llama-python llama/bin/python

`--run write` makes a GGUF file without a vocabulary from the safetensors files of a Llama. All
sequences of a batch get tokens of their own and are decoded in one llama_decode() per token.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import pathlib
import time
from typing import Any

GGUF = "model.gguf"
NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "post_attention_layernorm": "ffn_norm",
    "input_layernorm": "attn_norm",
}


# ---- the file


def tensors_of(folder: pathlib.Path) -> Any:
    """Yields names and bf16 values (as uint16) of the safetensors files."""
    import numpy  # noqa: PLC0415

    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            head = json.loads(file.read(int.from_bytes(file.read(8), "little")))
            start = file.tell()
            for name, about in head.items():
                if name == "__metadata__":
                    continue
                file.seek(start + about["data_offsets"][0])
                values = numpy.fromfile(file, numpy.uint16, _numel(about["shape"]))
                yield name, values.reshape(about["shape"])


def _numel(shape: list[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def in_pairs(values: Any, heads: int) -> Any:
    """Reorders the rows of a projection.

    llama.cpp rotates neighbouring rows of a head, transformers rows that are half a head apart.
    """
    rows, width = values.shape
    return values.reshape(heads, 2, rows // heads // 2, width).swapaxes(1, 2).reshape(rows, width)


def write(folder: pathlib.Path) -> None:
    import gguf  # noqa: PLC0415
    import numpy  # noqa: PLC0415

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(str(folder / GGUF), "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(groups)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(config["hidden_size"] // heads)
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_tokenizer_model("no_vocab")
    for name, values in tensors_of(folder):
        new = name.replace("model.layers.", "blk.")
        for theirs, ours in NAMES.items():
            new = new.replace(theirs, ours)
        if "attn_q" in new or "attn_k" in new:
            values = in_pairs(values, heads if "attn_q" in new else groups)
        if values.ndim == 1:  # llama.cpp needs norms in fp32
            writer.add_tensor(new, (values.astype(numpy.uint32) << 16).view(numpy.float32))
        else:
            kind = gguf.GGMLQuantizationType.BF16
            writer.add_tensor(new, values.view(numpy.uint8), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# ---- a try


class Sequences:
    """A context of `count` sequences."""

    def __init__(self, model: Any, count: int, length: int) -> None:
        import llama_cpp  # noqa: PLC0415

        self._lib, self._count, self._model = llama_cpp, count, model
        options = llama_cpp.llama_context_default_params()
        options.n_ctx = count * (length + 16)
        options.n_batch = options.n_ubatch = count * length
        options.n_seq_max = count
        options.n_threads = options.n_threads_batch = len(os.sched_getaffinity(0))
        options.kv_unified = True
        self._context = llama_cpp.llama_init_from_model(model, options)
        if not self._context:
            raise RuntimeError("llama.cpp made no context")
        self._vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))

    def decode(self, tokens: list[list[int]], begin: int) -> list[int]:
        """Appends a list of tokens to each sequence. Returns the most likely next tokens."""
        lib = self._lib
        batch = lib.llama_batch_init(self._count * len(tokens[0]), 0, 1)
        last = []
        for number, own in enumerate(tokens):
            for position, token in enumerate(own):
                at = batch.n_tokens
                batch.token[at], batch.pos[at] = token, begin + position
                batch.n_seq_id[at], batch.seq_id[at][0] = 1, number
                batch.logits[at] = position == len(own) - 1
                batch.n_tokens += 1
            last.append(batch.n_tokens - 1)
        if lib.llama_decode(self._context, batch) != 0:
            raise RuntimeError("llama_decode failed")
        lib.llama_batch_free(batch)
        return [self._best(at) for at in last]

    def _best(self, at: int) -> int:
        import numpy  # noqa: PLC0415

        logits = self._lib.llama_get_logits_ith(self._context, at)
        array = numpy.ctypeslib.as_array(ctypes.cast(logits, ctypes.POINTER(ctypes.c_float)),
                                         (self._vocab,))  # fmt: skip
        return int(array.argmax())

    def clear(self) -> None:
        self._lib.llama_memory_clear(self._lib.llama_get_memory(self._context), True)

    def close(self) -> None:
        self._lib.llama_free(self._context)


def generate(sequences: Sequences, prompts: list[list[int]], new: int) -> list[list[int]]:
    sequences.clear()
    made = [sequences.decode(prompts, 0)]
    begin = len(prompts[0])
    for position in range(begin, begin + new - 1):
        made.append(sequences.decode([[one] for one in made[-1]], position))
    return [list(one) for one in zip(*made, strict=True)]


def bytes_read() -> int:
    lines = pathlib.Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    return int(dict(line.split(": ") for line in lines)["read_bytes"])


def run_try(options: argparse.Namespace) -> None:
    import llama_cpp  # noqa: PLC0415

    pathlib.Path(options.cgroup, "cgroup.procs").write_text(str(os.getpid()), encoding="ascii")
    begin = time.perf_counter()
    settings = llama_cpp.llama_model_default_params()
    settings.use_mmap, settings.n_gpu_layers = True, 0
    path = str(pathlib.Path(options.model) / GGUF).encode()
    model = llama_cpp.llama_model_load_from_file(path, settings)
    if not model:
        raise RuntimeError("llama.cpp could not load the model")
    told: dict[str, Any] = {"load_s": time.perf_counter() - begin, "batches": {}}
    prompts = json.loads(pathlib.Path(options.prompts).read_text(encoding="ascii"))
    for batch in options.batches:
        given = prompts[str(batch)]
        sequences = Sequences(model, batch, len(given[0]) + options.new)
        generate(sequences, given, 1)
        begin, before = time.perf_counter(), bytes_read()
        made = generate(sequences, given, options.new)
        seconds = time.perf_counter() - begin
        sequences.close()
        told["batches"][str(batch)] = {
            "pass_s": seconds / options.new,
            "tokens_per_s": batch * options.new / seconds,
            "read_gb_per_pass": (bytes_read() - before) / options.new / 1e9,
            "first": made[0],
        }
    pathlib.Path(options.result).write_text(json.dumps(told), encoding="ascii")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", default="")
    parser.add_argument("--model", default="")
    parser.add_argument("--result", default="")
    parser.add_argument("--prompts", default="")
    parser.add_argument("--cgroup", default="")
    parser.add_argument("--path", default="")
    parser.add_argument("--new", type=int, default=8)
    parser.add_argument("--prefetch-mib", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--keep-mib", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--batches", type=int, nargs="+", default=[1])
    options = parser.parse_args()
    write(pathlib.Path(options.model)) if options.run == "write" else run_try(options)


if __name__ == "__main__":
    main()

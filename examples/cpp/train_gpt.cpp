// Trains a byte-level GPT on real text from a native program, without Python. Ranks are threads, or
// the processes that torchrun, mpirun or srun started (torchrun --no-python --nproc-per-node 2
// train_gpt).
//
//   train_gpt [--ranks 2] [--steps 100] [--width 128] [--layers 4] [--strategy zero3] [--data FILE]
//             [--tensor 1]            number of ranks that compute each layer together
//             [--pipeline 1]          number of ranks that compute the layers one after the other
//             [--micro-batches 1]     per step; a pipeline needs a few times its number of ranks
//             [--digits 4]            of printed losses
//             [--checkpoint DIR]      resumes from it if it has a checkpoint, and saves at the end
#include <penstock/checkpoint.h>
#include <penstock/engine.h>
#include <penstock/error.h>
#include <torch/nn.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iostream>
#include <mutex>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

namespace {

struct Options {
  int ranks = 2, steps = 100, layers = 4, rows = 8;
  int tensor = 1, pipeline = 1, micro_batches = 1, digits = 4;
  int64_t width = 128, context = 64;
  std::string strategy = "zero3";
  std::string checkpoint;
  std::string data = "/usr/include/stdlib.h";  // text that comes with every compiler
};

struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(int64_t width) {
    norm1 = register_module("norm1", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})));
    norm2 = register_module("norm2", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})));
    qkv = register_module("qkv", torch::nn::Linear(width, 3 * width));
    out = register_module("out", torch::nn::Linear(width, width));
    up = register_module("up", torch::nn::Linear(width, 4 * width));
    down = register_module("down", torch::nn::Linear(4 * width, width));
  }

  torch::Tensor attend(const torch::Tensor& x) {
    const int64_t rows = x.size(0), time = x.size(1), size = x.size(2) / 4;  // four heads
    const auto all = penstock::linear(*qkv, x);  // with several tensor ranks: some of the heads
    const auto parts = all.view({rows, time, 3, -1, size}).permute({2, 0, 3, 1, 4});
    const auto y = at::scaled_dot_product_attention(parts[0], parts[1], parts[2], {}, 0.0, true);
    return penstock::linear(*out, y.transpose(1, 2).reshape({rows, time, -1}));
  }

  torch::Tensor forward(const torch::Tensor& x) {
    const auto y = x + attend(norm1(x));
    return y + penstock::linear(*down, torch::gelu(penstock::linear(*up, norm2(y))));
  }

  torch::nn::LayerNorm norm1{nullptr}, norm2{nullptr};
  torch::nn::Linear qkv{nullptr}, out{nullptr}, up{nullptr}, down{nullptr};
};
TORCH_MODULE(Block);

// Bytes [rows, context] -> [rows, context, width].
struct EmbedImpl : torch::nn::Module {
  explicit EmbedImpl(const Options& options) {
    bytes = register_module("bytes", torch::nn::Embedding(256, options.width));
    places = register_module("places", torch::nn::Embedding(options.context, options.width));
    torch::nn::init::normal_(bytes->weight, 0.0, 0.02);
    torch::nn::init::normal_(places->weight, 0.0, 0.02);
  }
  torch::Tensor forward(const torch::Tensor& x) {
    return bytes(x) + places(torch::arange(x.size(1)));
  }
  torch::nn::Embedding bytes{nullptr}, places{nullptr};
};
TORCH_MODULE(Embed);

// Logits, computed with the embedding's weight.
struct HeadImpl : torch::nn::Module {
  HeadImpl(int64_t width, const torch::Tensor& tied) {
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})));
    weight = register_parameter("weight", tied);
  }
  torch::Tensor forward(const torch::Tensor& h) { return norm(h).matmul(weight.t()); }
  torch::nn::LayerNorm norm{nullptr};
  torch::Tensor weight;
};
TORCH_MODULE(Head);

struct GptImpl : torch::nn::Module {
  explicit GptImpl(const Options& options) {
    embed = register_module("embed", Embed(options));
    blocks = register_module("blocks", torch::nn::ModuleList());
    for (int i = 0; i < options.layers; ++i) blocks->push_back(Block(options.width));
    head = register_module("head", Head(options.width, embed->bytes->weight));
  }

  // x, y: [rows, context] int64. Returns the mean cross-entropy in nats per byte. A unit's inputs
  // go through penstock::unit(), because they may come from another stage of a pipeline.
  torch::Tensor forward(const torch::Tensor& x, const torch::Tensor& y) {
    auto h = penstock::unit(*embed, {x}, [&](const auto& in) { return embed(in[0]); });
    for (const auto& one : *blocks) {
      auto& block = *one->as<Block>();
      h = penstock::unit(block, {h}, [&](const auto& in) { return block.forward(in[0]); });
    }
    const auto logits = penstock::unit(*head, {h}, [&](const auto& in) { return head(in[0]); });
    return torch::nn::functional::cross_entropy(logits.view({-1, 256}), y.reshape({-1}));
  }

  Embed embed{nullptr};
  torch::nn::ModuleList blocks{nullptr};
  Head head{nullptr};
};
TORCH_MODULE(Gpt);

Options parse(int argc, char** argv) {
  Options options;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string key = argv[i], value = argv[i + 1];
    if (key == "--ranks")
      options.ranks = std::stoi(value);
    else if (key == "--steps")
      options.steps = std::stoi(value);
    else if (key == "--width")
      options.width = std::stoll(value);
    else if (key == "--layers")
      options.layers = std::stoi(value);
    else if (key == "--strategy")
      options.strategy = value;
    else if (key == "--tensor")
      options.tensor = std::stoi(value);
    else if (key == "--pipeline")
      options.pipeline = std::stoi(value);
    else if (key == "--micro-batches")
      options.micro_batches = std::stoi(value);
    else if (key == "--digits")
      options.digits = std::stoi(value);
    else if (key == "--checkpoint")
      options.checkpoint = value;
    else if (key == "--data")
      options.data = value;
    else
      throw penstock::ConfigError("unknown option " + key);
  }
  return options;
}

torch::Tensor read_bytes(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw penstock::RuntimeFault("cannot read " + path);
  std::stringstream text;
  text << file.rdbuf();
  const std::string all = text.str();
  auto data = torch::empty({static_cast<int64_t>(all.size())}, torch::kByte);
  std::memcpy(data.data_ptr(), all.data(), all.size());
  return data.to(torch::kLong);
}

// Builds the same weights in every run. Ranks that are threads share one generator, so they take
// turns.
Gpt build(const Options& options) {
  static std::mutex turn;
  const std::lock_guard lock(turn);
  torch::manual_seed(1);
  return Gpt(options);
}

void train(const Options& options, int rank, const std::shared_ptr<penstock::Group>& group) {
  const auto data = read_bytes(options.data);
  const auto config = penstock::Config::parse(
      R"({"strategy": ")" + options.strategy + R"(", "precision": "fp32", "clip": 1.0,
          "optimizer": {"type": "AdamW", "lr": 0.003},
          "schedule": {"type": "cosine", "warmup_steps": 5, "total_steps": )" +
      std::to_string(std::max(6, options.steps)) +
      R"(}, "units": {"modules": ["Embed", "Block", "Head"]}, "mesh": {"tensor": )" +
      std::to_string(options.tensor) + R"(, "pipeline": )" + std::to_string(options.pipeline) +
      R"(}, "batch": {"accumulate": )" + std::to_string(options.micro_batches) + R"(},
          "parallel": {"rules": {"*.qkv": "column:3", "*.up": "column",
                                 "*.out": "row", "*.down": "row"}}})");
  Gpt model = build(options);
  penstock::Engine engine(model.ptr(), config, group);
  // Ranks that compute one model together must get the same rows.
  auto generator = at::detail::createCPUGenerator(100 + engine.data_rank());
  const bool saves = !options.checkpoint.empty();
  const bool resumes = saves && penstock::Checkpoints::any(options.checkpoint);
  if (resumes) {
    const std::string state = engine.load(options.checkpoint);
    if (rank == 0) std::printf("going on from a checkpoint of %s\n", state.c_str());
  }
  double first = 0.0, last = 0.0;
  for (int step = 0; step < options.steps; ++step) {
    const auto starts =
        torch::randint(data.size(0) - options.context - 1, {options.rows}, generator);
    const auto index = starts.unsqueeze(1) + torch::arange(options.context + 1).unsqueeze(0);
    const auto rows = data.index({index});
    const auto x = rows.narrow(1, 0, options.context), y = rows.narrow(1, 1, options.context);
    const auto xs = x.tensor_split(options.micro_batches),
               ys = y.tensor_split(options.micro_batches);
    last = engine.train_batch([&](int micro) { return model->forward(xs[micro], ys[micro]); });
    if (step == 0) first = last;
    if (rank == 0 && (step % 10 == 0 || step + 1 == options.steps)) {
      std::printf("step %4d  loss %.*f  grad norm %.3f  lr %.5f\n", step + 1, options.digits, last,
                  engine.grad_norm(), engine.lr());
    }
  }
  if (rank == 0) {
    const auto ledger = engine.ledger();
    std::printf("%s on %d ranks: predicted %.2f MiB per rank, measured %.2f MiB\n",
                options.strategy.c_str(), group->size(),
                static_cast<double>(ledger.predicted.at(options.strategy).total) / 1048576.0,
                static_cast<double>(ledger.measured.total) / 1048576.0);
  }
  if (saves) engine.save(options.checkpoint, "", R"({"saved_by": "examples/cpp"})");
  engine.close();
  if (!resumes && last >= first) throw penstock::RuntimeFault("the loss did not fall");
}

// Returns whether a launcher started this process.
bool are_processes() {
  for (const char* name : {"RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"}) {
    if (std::getenv(name) != nullptr) return true;
  }
  return false;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const Options options = parse(argc, argv);
    if (are_processes()) {
      const auto group = penstock::Group::from_environment();
      train(options, group->rank(), group);
      return 0;
    }
    const auto groups = penstock::Group::threads(options.ranks);
    std::vector<std::thread> threads;
    std::vector<std::string> errors(options.ranks);
    for (int rank = 0; rank < options.ranks; ++rank) {
      threads.emplace_back([&, rank] {
        try {
          train(options, rank, groups[rank]);
        } catch (const std::exception& error) {
          errors[rank] = error.what();
          groups[rank]->close();
        }
      });
    }
    for (auto& thread : threads) thread.join();
    int failed = 0;
    for (int rank = 0; rank < options.ranks; ++rank) {
      if (errors[rank].empty()) continue;
      std::cerr << "rank " << rank << ": " << errors[rank] << "\n";
      failed = 1;
    }
    return failed;
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 2;
  }
}

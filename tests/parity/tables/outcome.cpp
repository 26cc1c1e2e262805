#include "tests/parity/tables/outcome.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>
#include <regex>
#include <utility>

#include "penstock/error.h"
#include "src/base/text.h"
#include "tests/parity/tables/training.h"
#include "tests/ranks/thread_ranks.h"

namespace penstock::tables {

namespace {

constexpr std::chrono::seconds kPeerTimeout{20};

using Deviations = std::map<std::string, double>;

// Allowed deviations from plain torch in fp32, as in tests/parity: the relative L2 norm for
// gradients, the largest difference for the others.
const Deviations kLimits = {{"gradients", 1e-6}, {"weights", 1e-5}, {"reads", 1e-5},
                            {"own", 1e-5},       {"losses", 1e-5},  {"norms", 1e-5}};
// With a narrower dtype, twice the deviation of a bf16 run of plain torch is allowed. There are so
// few losses and norms that this run may be close by luck, so one bf16 rounding step is added.
constexpr double kNarrowRatio = 2.0;
const Deviations kSlack = {{"gradients", 1e-6}, {"weights", 1e-6},  {"reads", 1e-6},
                           {"own", 1e-6},       {"losses", 0x1p-8}, {"norms", 0x1p-8}};

// Raises `most` to `value`. NaN counts as larger than every number.
void raise_to(double& most, double value) {
  if (!(value <= most) && !std::isnan(most)) most = value;
}

double norm(const Tensors& tensors) {
  double sum = 0;
  for (const auto& [name, tensor] : tensors)
    sum += tensor.to(torch::kDouble).square().sum().item<double>();
  return std::sqrt(sum);
}

double largest(const Tensors& tensors) {
  double most = 0;
  for (const auto& [name, tensor] : tensors) raise_to(most, tensor.abs().max().item<double>());
  return most;
}

// A missing tensor counts as zeros, because a parameter without a gradient has none or zeros.
Tensors difference(const Tensors& ours, const Tensors& theirs) {
  Tensors apart = ours;
  for (const auto& [name, tensor] : theirs) {
    const auto found = apart.find(name);
    apart[name] = found == apart.end() ? tensor : found->second - tensor;
  }
  return apart;
}

double relative(const std::vector<double>& ours, const std::vector<double>& theirs) {
  if (ours.size() != theirs.size()) return HUGE_VAL;
  double most = 0;
  for (size_t i = 0; i < ours.size(); ++i)
    raise_to(most, std::abs(ours[i] - theirs[i]) / std::abs(theirs[i]));
  return most;
}

struct Yardstick {
  Trace plain;    // fp32
  Tensors start;  // weights before training
  bool narrow;

  double of_weights(const Tensors& ours, const Tensors& theirs) const {
    const Tensors apart = difference(ours, theirs);
    if (!narrow) return largest(apart);
    Tensors before;
    for (const auto& [name, tensor] : theirs) before[name] = start.at(name);
    return norm(apart) / norm(difference(theirs, before));
  }

  Deviations of(const Trace& ours) const {
    Deviations off = {{"losses", relative(ours.losses, plain.losses)},
                      {"norms", relative(ours.norms, plain.norms)},
                      {"weights", of_weights(ours.weights, plain.weights)},
                      {"own", of_weights(ours.own, plain.own)}};
    for (size_t i = 0; i < plain.gradients.size(); ++i)
      raise_to(off["gradients"], norm(difference(ours.gradients.at(i), plain.gradients[i])) /
                                     norm(plain.gradients[i]));
    for (size_t i = 0; i < plain.reads.size(); ++i)
      raise_to(off["reads"], of_weights(ours.reads.at(i), plain.reads[i]));
    return off;
  }
};

std::vector<double> mean_losses(const std::vector<Trace>& traces) {
  std::vector<double> mean = traces[0].losses;
  for (size_t i = 0; i < mean.size(); ++i) {
    for (size_t rank = 1; rank < traces.size(); ++rank) mean[i] += traces[rank].losses.at(i);
    mean[i] /= static_cast<double>(traces.size());
  }
  return mean;
}

// Returns the error of the lowest rank; prefers errors that are not the echo of another rank's.
std::optional<std::string> first_error(const std::vector<std::string>& errors) {
  std::optional<std::string> first;
  for (size_t rank = 0; rank < errors.size(); ++rank) {
    if (errors[rank].empty()) continue;
    const std::string line = errors[rank].substr(0, errors[rank].find('\n'));  // no stack traces
    const bool echo = line.find("peer is gone") != std::string::npos;
    if (!echo) return concat("rank ", rank, ": ", line);
    if (!first) first = concat("rank ", rank, ": ", line);
  }
  return first;
}

Outcome judge_refusal(const Draw& draw, const std::vector<std::string>& refusals) {
  for (const std::string& refusal : refusals) {
    if (refusal.empty())
      return {Kind::kBroken, concat("only some ranks refused: ", join(refusals, " | "))};
    const bool named = std::any_of(draw.cells.begin(), draw.cells.end(), [&](const Cell& cell) {
      return refusal.find(cell.name()) != std::string::npos;
    });
    if (!named) return {Kind::kBroken, concat("the refusal names no changed cell: ", refusal)};
  }
  return {Kind::kRefused, refusals.front()};
}

}  // namespace

const char* kind_name(Kind kind) {
  switch (kind) {
    case Kind::kExact:
      return "exact";
    case Kind::kRefused:
      return "refused";
    case Kind::kBroken:
      break;
  }
  return "broken";
}

std::string what_is_off(const Draw& draw, std::vector<Trace> traces) {
  const bool narrow = draw.narrow();
  const Yardstick yardstick{train_plainly(draw, Dtype::kFp32), start_weights(), narrow};
  Deviations limits = kLimits;
  if (narrow) {
    limits = yardstick.of(train_plainly(draw, Dtype::kBf16));
    for (auto& [what, limit] : limits) limit = kNarrowRatio * limit + kSlack.at(what);
  }
  const std::vector<double> losses = mean_losses(traces);
  std::vector<std::string> beyond;
  for (size_t rank = 0; rank < traces.size() && beyond.empty(); ++rank) {
    traces[rank].losses = losses;
    for (const auto& [what, off] : yardstick.of(traces[rank])) {
      if (!(off <= limits.at(what)))
        beyond.push_back(
            concat(what, " ", off, " on rank ", rank, " (limit ", limits.at(what), ")"));
    }
  }
  return join(beyond, ", ");
}

Outcome run(const Draw& draw) {
  at::set_num_threads(1);
  std::vector<std::shared_ptr<ranks::NetImpl>> nets;
  for (int rank = 0; rank < draw.world; ++rank) nets.push_back(ranks::build(place_of(rank)));
  std::vector<Trace> traces(draw.world);
  std::vector<std::string> refusals(draw.world);
  const std::vector<std::string> errors =
      ranks::run_ranks(draw.world, kPeerTimeout, [&](int rank, const auto& group) {
        std::unique_ptr<Trainer> trainer;
        try {
          trainer = start_engine(draw, nets[rank], group);
        } catch (const ConfigError& error) {
          refusals[rank] = error.what();
          group->close();
          return;
        }
        traces[rank] = train(draw.loop, *trainer);
      });
  if (const auto error = first_error(errors)) return {Kind::kBroken, *error};
  const bool refused = std::any_of(refusals.begin(), refusals.end(),
                                   [](const std::string& refusal) { return !refusal.empty(); });
  if (refused) return judge_refusal(draw, refusals);
  const std::string off = what_is_off(draw, std::move(traces));
  if (!off.empty()) return {Kind::kBroken, concat("not exact: ", off)};
  return {Kind::kExact, ""};
}

std::string principle_of(const std::string& refusal) {
  static const std::regex kForm(
      R"re(^\[plan::check\] table\.[a-z]+\.[a-z]+ is "[^"]*": ([^:]+): )re");
  std::smatch found;
  return std::regex_search(refusal, found, kForm) ? found[1].str() : "";
}

bool is_documented(const std::string& principle, const std::string& document) {
  bool inside = false;
  for (const std::string& line : split(document, '\n')) {
    if (line.starts_with("#")) inside = line.find("What is refused") != std::string::npos;
    const size_t begin = line.find_first_not_of("-*|_` ");
    if (!inside || begin == 0 || begin == std::string::npos) continue;
    if (!principle.empty() && line.substr(begin).starts_with(principle)) return true;
  }
  return false;
}

std::string group_of(const Outcome& outcome) {
  const std::string principle = principle_of(outcome.why);
  if (!principle.empty()) return principle;
  static const std::vector<std::pair<std::regex, std::string>> kDetails = {
      {std::regex(R"(^rank \d+: )"), ""},
      {std::regex(R"("[^"]*"|'[^']*')"), "..."},
      {std::regex(R"([RSP]{2}@[a-z]+:[a-z]+\d+)"), "..."},
      {std::regex(R"(0x[0-9a-f]+)"), "#"},
      {std::regex(R"(-?\d[-+.e\d]*)"), "#"}};
  std::string group = outcome.why.substr(0, outcome.why.find('\n'));
  for (const auto& [detail, instead] : kDetails) group = std::regex_replace(group, detail, instead);
  constexpr size_t kMost = 90;
  return group.substr(0, kMost);
}

}  // namespace penstock::tables

#include "src/plan/plan.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <utility>

#include "penstock/error.h"
#include "src/base/text.h"

namespace penstock {

namespace {

// The text form must not change, because golden files contain it and checkpoint manifests contain
// its hash.
constexpr std::array<const char*, 11> kOpNames = {"micro",   "move", "forward", "backward",
                                                  "drop",    "sum",  "norm",    "update",
                                                  "publish", "send", "recv"};
constexpr std::array<const char*, 7> kMarkNames = {"",         "begin",  "end",    "use",
                                                   "gradient", "inputs", "weights"};

// Each function returns whether a line with this operation has that part.
bool hops_on(Op op) { return op == Op::kSend || op == Op::kReceive; }
bool has_role(Op op) {
  return op == Op::kMove || op == Op::kDrop || op == Op::kSum || op == Op::kPublish || hops_on(op);
}
bool has_moves(Op op) { return op == Op::kMove || op == Op::kSum || op == Op::kPublish; }
bool has_units(Op op) { return op != Op::kMicro && op != Op::kNorm; }

std::string units_text(const std::vector<int>& units) {
  std::vector<std::string> names;
  for (const int unit : units) names.push_back(concat("u", unit));
  return join(names, "+");
}

std::string moves_text(const std::vector<Move>& moves) {
  std::vector<std::string> texts;
  for (const Move& move : moves) texts.push_back(move.text());
  return join(texts, "; ");
}

std::string chunk_text(const Chunk& chunk) {
  return chunk.count == 1 ? "" : concat("[", chunk.index, "/", chunk.count, "]");
}

// Reads one step word by word. Every error names the whole line.
class StepReader {
 public:
  explicit StepReader(std::string_view line) : line_(line), rest_(trim(line)) {}

  Step read() {
    Step step;
    step.op = op();
    if (step.op == Op::kMicro) {
      step.micro = number(word());
    } else {
      step.micro = micro();
    }
    if (has_units(step.op)) {
      std::string_view units = word();
      if (const size_t bracket = units.find('['); bracket != std::string_view::npos) {
        step.chunk = chunk(units.substr(bracket));
        units = units.substr(0, bracket);
      }
      for (const std::string& name : split(units, '+')) {
        if (name.empty() || name[0] != 'u') fail(concat("'", name, "' is not a unit such as u3"));
        step.units.push_back(number(std::string_view(name).substr(1)));
      }
    }
    if (has_role(step.op)) step.role = role();
    if (has_moves(step.op))
      for (const std::string& text : split(std::exchange(rest_, {}), ';'))
        step.moves.push_back(move(text));
    if (hops_on(step.op)) step.hop = hop();
    if (step.is_compute() && !rest_.empty()) step.mark = mark();
    if (!rest_.empty()) fail(concat("'", rest_, "' is not expected here"));
    return step;
  }

 private:
  [[noreturn]] void fail(const std::string& why) const {
    throw ConfigError(concat("[plan::parse_step] line '", line_, "': ", why));
  }

  std::string_view word() {
    const size_t end = std::min(rest_.find(' '), rest_.size());
    const std::string_view word = rest_.substr(0, end);
    rest_ = trim(rest_.substr(end));
    return word;
  }

  int number(std::string_view text) const {
    int value = -1;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error != std::errc() || end != text.data() + text.size() || value < 0)
      fail(concat("'", text, "' is not a whole number >= 0"));
    return value;
  }

  // Reads " #2" at the end of the line.
  int micro() {
    const size_t sign = rest_.find('#');
    if (sign == std::string_view::npos) return kNoMicro;
    const int value = number(rest_.substr(sign + 1));
    rest_ = trim(rest_.substr(0, sign));
    return value;
  }

  // Only neighbours in the pipeline's ring exchange data, so a hop is +1 or -1.
  int hop() {
    const std::string_view text = word();
    if (text == "pipeline(+1)") return 1;
    if (text != "pipeline(-1)") fail(concat("'", text, "' is not pipeline(+1) or pipeline(-1)"));
    return -1;
  }

  Chunk chunk(std::string_view text) const {
    const size_t slash = text.find('/');
    if (slash == std::string_view::npos || text.back() != ']')
      fail(concat("'", text, "' is not a chunk such as [0/4]"));
    const Chunk chunk{number(text.substr(1, slash - 1)),
                      number(text.substr(slash + 1, text.size() - slash - 2))};
    if (chunk.index >= chunk.count) fail(concat("'", text, "' is not a chunk such as [0/4]"));
    return chunk;
  }

  Op op() {
    const std::string_view name = word();
    const auto found = std::find(kOpNames.begin(), kOpNames.end(), name);
    if (found == kOpNames.end()) fail(concat("'", name, "' is not a step"));
    return static_cast<Op>(found - kOpNames.begin());
  }

  Role role() {
    const std::string_view name = word();
    for (int i = 0; i < kNumRoles; ++i)
      if (name == role_name(static_cast<Role>(i))) return static_cast<Role>(i);
    fail(concat("'", name, "' is not a role"));
  }

  Mark mark() {
    const std::string_view name = word();
    const auto found = std::find(kMarkNames.begin(), kMarkNames.end(), name);
    if (name.empty() || found == kMarkNames.end()) fail(concat("'", name, "' is not a mark"));
    return static_cast<Mark>(found - kMarkNames.begin());
  }

  Move move(std::string_view text) const {
    try {
      return parse_move(text);
    } catch (const ConfigError& error) {
      fail(error.what());
    }
  }

  std::string_view line_, rest_;
};

}  // namespace

std::string mark_text(Mark mark) {
  return mark == Mark::kWhole ? "" : concat(" ", kMarkNames[static_cast<size_t>(mark)]);
}

std::string Step::text() const {
  std::string out = kOpNames[static_cast<size_t>(op)];
  if (op == Op::kMicro) out += concat(" ", micro);
  if (has_units(op)) out += concat(" ", units_text(units), chunk_text(chunk));
  if (has_role(op)) out += concat(" ", role_name(role));
  if (has_moves(op)) out += concat(" ", moves_text(moves));
  if (hops_on(op)) out += hop > 0 ? " pipeline(+1)" : " pipeline(-1)";
  if (is_compute()) out += mark_text(mark);
  if (op != Op::kMicro && micro != kNoMicro) out += concat(" #", micro);
  return out;
}

Step parse_step(std::string_view line) { return StepReader(line).read(); }

std::string Plan::text() const {
  std::string out;
  for (const Step& step : steps) out += step.text() + "\n";
  return out;
}

uint64_t Plan::hash() const { return hash_text(text()); }

Plan parse_plan(std::string_view text) {
  Plan plan;
  for (const std::string& line : split(text, '\n')) {
    const std::string_view content = trim(line);
    if (!content.empty() && content.front() != '#') plan.steps.push_back(parse_step(content));
  }
  return plan;
}

}  // namespace penstock

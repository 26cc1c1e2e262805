#include "src/engine/step/accumulation_window.h"

#include <algorithm>
#include <array>
#include <set>
#include <utility>

#include "penstock/error.h"

namespace penstock::engine {

namespace {

// Facts about a window. kSeen and kComplete follow from the number of backwards.
constexpr uint8_t kForwarded = 1, kScaled = 2, kArmed = 4, kSeen = 8, kComplete = 16;
constexpr uint8_t kNone = 0;

enum class Count : uint8_t { kKeep, kAdd, kClear };

struct CallRule {
  Call call;
  uint8_t needs;     // at least one of these facts must hold, unless it is kNone
  uint8_t excludes;  // none of these facts may hold
  uint8_t adds;
  uint8_t removes;
  Count seen;
  const char* refusal;
};

// Indexed by Call. An update keeps kScaled, because the next loss may have been scaled already. A
// drop keeps kForwarded, because the loss still exists and a backward from it is legal.
constexpr std::array<CallRule, 9> kRules = {{
    {Call::kForward, kNone, kNone, kForwarded, kNone, Count::kKeep, ""},
    {Call::kBackward, kForwarded, kNone, kScaled, kNone, Count::kKeep,
     "[engine::backward] backward() was called without a forward since the last step. Call the "
     "engine on a batch first, with gradients enabled"},
    {Call::kBackwardBegin, kScaled, kNone, kArmed, kNone, Count::kKeep,
     "[engine::backward] Loss scaling is required with fp16, but loss.backward() was called and "
     "the loss is not scaled. Call engine.backward(loss) or engine.scale(loss).backward() instead"},
    {Call::kBackwardEnd, kNone, kNone, kNone, kArmed | kScaled, Count::kAdd, ""},
    {Call::kFullGrads, kSeen, kNone, kNone, kNone, Count::kKeep,
     "[engine::full_grads] there are no gradients. Call full_grads() after backward() and before "
     "step()"},
    {Call::kSetGrads, kComplete, kNone, kNone, kNone, Count::kKeep,
     "[engine::set_grads] the gradients of the window are not complete. Call set_grads() after the "
     "window's last backward() and before step(). set_grads() replaces the gradients of backward() "
     "calls, so it does not work in a loop that calls only torch.autograd.grad()"},
    {Call::kStep, kSeen | kArmed, kNone, kNone, kNone, Count::kKeep,
     "[engine::step] step() was called, but since the last step no backward has reached a "
     "parameter of the model. Call engine.backward(loss) first; it counts even if the loss is not "
     "connected to the model. Or add 0 * output.sum() to such a loss"},
    {Call::kUpdate, kNone, kArmed, kNone, kForwarded, Count::kClear,
     "[engine::step] the last backward ended with an error, so its window was dropped. Run the "
     "window again"},
    {Call::kDrop, kNone, kNone, kNone, kArmed | kScaled, Count::kClear, ""},
}};

constexpr bool in_order() {
  for (size_t i = 0; i < kRules.size(); ++i) {
    if (kRules[i].call != static_cast<Call>(i)) return false;
  }
  return true;
}
static_assert(in_order());

const CallRule& rule_of(Call call) { return kRules[static_cast<size_t>(call)]; }

}  // namespace

AccumulationWindow::AccumulationWindow(int64_t accumulate, bool scales_loss, bool sees_forwards,
                                       int64_t per_micro)
    : accumulate_(accumulate),
      standing_(static_cast<uint8_t>((scales_loss ? kNone : kScaled) |
                                     (sees_forwards ? kNone : kForwarded))),
      facts_(standing_),
      per_micro_(per_micro) {}

uint8_t AccumulationWindow::facts() const {
  return facts_ | (seen() > 0 ? kSeen : kNone) | (complete() ? kComplete : kNone);
}

const char* AccumulationWindow::refusal(Call call) const {
  const CallRule& rule = rule_of(call);
  const bool has = rule.needs == kNone || (facts() & rule.needs) != 0;
  const bool legal = has && (facts() & rule.excludes) == 0;
  return legal ? nullptr : rule.refusal;
}

void AccumulationWindow::check(Call call) const {
  if (const char* why = refusal(call)) throw RuntimeFault(why);
}

void AccumulationWindow::on(Call call) {
  check(call);
  const CallRule& rule = rule_of(call);
  facts_ = static_cast<uint8_t>((facts_ & ~rule.removes) | rule.adds | standing_);
  if (call == Call::kBackwardBegin) reduces_ = seen() + 1 >= accumulate_;
  if (call == Call::kDrop) blamed_.clear();
  if (rule.seen == Count::kKeep) return;
  if (rule.seen == Count::kAdd) {
    gave_ += contributed_ ? '1' : '0';
    micros_.push_back(next_micro_++);
  }
  if (rule.seen == Count::kClear) {
    gave_.clear();
    micros_.clear();
    next_micro_ = 0;
  }
  contributed_ = false;
}

bool AccumulationWindow::armed() const { return (facts_ & kArmed) != 0; }

bool AccumulationWindow::complete() const { return seen() >= accumulate_; }

int64_t AccumulationWindow::seen() const { return static_cast<int64_t>(gave_.size()); }

int64_t AccumulationWindow::num_averaged() const { return std::min(seen(), accumulate_); }

void AccumulationWindow::set_micro(int64_t micro) { micros_.back() = micro; }

std::string AccumulationWindow::said() const {
  std::string said;
  for (const int64_t micro : std::set<int64_t>(micros_.begin(), micros_.end())) {
    size_t ended = 0;
    bool gave = false;
    for (size_t i = 0; i < micros_.size(); ++i) {
      if (micros_[i] != micro) continue;
      ++ended;
      gave = gave || gave_[i] == '1';
    }
    said.append(ended, gave ? '1' : '0');
    said.append(static_cast<size_t>(per_micro_) - ended, '.');
  }
  said.resize(static_cast<size_t>(accumulate_), '.');
  return said;
}

bool AccumulationWindow::keep(const std::string& gave_anywhere) {
  const size_t before = gave_.size();
  size_t at = 0;
  for (const int64_t micro : std::set<int64_t>(micros_.begin(), micros_.end())) {
    const bool kept = at >= gave_anywhere.size() || gave_anywhere[at] != '0';
    at += static_cast<size_t>(per_micro_);
    for (size_t i = micros_.size(); i-- > 0 && !kept;) {
      if (micros_[i] != micro) continue;
      gave_.erase(i, 1);
      micros_.erase(micros_.begin() + static_cast<ptrdiff_t>(i));
    }
  }
  return gave_.size() != before;
}

void AccumulationWindow::blame(const std::string& contribution) {
  if (blamed_.empty()) blamed_ = contribution;
}

std::string AccumulationWindow::take_blamed() { return std::exchange(blamed_, ""); }

}  // namespace penstock::engine

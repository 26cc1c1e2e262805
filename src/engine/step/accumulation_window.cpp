#include "src/engine/step/accumulation_window.h"

#include <algorithm>
#include <array>
#include <utility>

#include "penstock/error.h"

namespace penstock::engine {

namespace {

// Facts about a window; the last two follow from its count of backwards.
constexpr uint8_t kForwarded = 1, kScaled = 2, kArmed = 4, kSeen = 8, kComplete = 16;
constexpr uint8_t kNone = 0;

enum class Count : uint8_t { kKeep, kAdd, kClear };

struct CallRule {
  Call call;
  uint8_t needs;     // one of these, if any
  uint8_t excludes;  // all of these
  uint8_t adds;
  uint8_t removes;
  Count seen;
  const char* refusal;
};

// By call. An update leaves kScaled: the loss of the next backward may have been scaled already.
// What is dropped keeps kForwarded: the loss is still there to go backward from.
constexpr std::array<CallRule, 9> kRules = {{
    {Call::kForward, kNone, kNone, kForwarded, kNone, Count::kKeep, ""},
    {Call::kBackward, kForwarded, kNone, kScaled, kNone, Count::kKeep,
     "[engine::backward] backward() without a forward since the last step: call the engine on a "
     "batch first, with gradients enabled"},
    {Call::kBackwardBegin, kScaled, kNone, kArmed, kNone, Count::kKeep,
     "[engine::backward] loss.backward() with fp16: the loss is not scaled. Call "
     "engine.backward(loss)"},
    {Call::kBackwardEnd, kNone, kNone, kNone, kArmed | kScaled, Count::kAdd, ""},
    {Call::kFullGrads, kSeen, kNone, kNone, kNone, Count::kKeep,
     "[engine::full_grads] there are no gradients: call it after backward() and before step()"},
    {Call::kSetGrads, kComplete, kNone, kNone, kNone, Count::kKeep,
     "[engine::set_grads] gradients are complete only after the window's last backward() and "
     "before step()"},
    {Call::kStep, kSeen | kArmed, kNone, kNone, kNone, Count::kKeep,
     "[engine::step] step() without a backward since the last step: call engine.backward(loss) "
     "first"},
    {Call::kUpdate, kNone, kArmed, kNone, kForwarded, Count::kClear,
     "[engine::step] the last backward did not end: its window was dropped"},
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

AccumulationWindow::AccumulationWindow(int64_t accumulate, bool scales_loss, bool sees_forwards)
    : accumulate_(accumulate),
      standing_(static_cast<uint8_t>((scales_loss ? kNone : kScaled) |
                                     (sees_forwards ? kNone : kForwarded))),
      facts_(standing_) {}

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
  if (rule.seen == Count::kAdd) gave_ += contributed_ ? '1' : '0';
  if (rule.seen == Count::kClear) gave_.clear();
  contributed_ = false;
}

bool AccumulationWindow::armed() const { return (facts_ & kArmed) != 0; }

bool AccumulationWindow::complete() const { return seen() >= accumulate_; }

int64_t AccumulationWindow::seen() const { return static_cast<int64_t>(gave_.size()); }

int64_t AccumulationWindow::num_averaged() const { return std::min(seen(), accumulate_); }

bool AccumulationWindow::keep(const std::string& gave_anywhere) {
  const size_t before = gave_.size();
  for (size_t i = std::min(before, gave_anywhere.size()); i-- > 0;) {
    if (gave_anywhere[i] == '1') continue;
    gave_.erase(i, 1);
  }
  return gave_.size() != before;
}

void AccumulationWindow::blame(const std::string& contribution) {
  if (blamed_.empty()) blamed_ = contribution;
}

std::string AccumulationWindow::take_blamed() { return std::exchange(blamed_, ""); }

}  // namespace penstock::engine

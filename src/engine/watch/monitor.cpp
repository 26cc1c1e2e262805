#include "src/engine/watch/monitor.h"

#include <chrono>
#include <cstdio>
#include <filesystem>
#include <utility>

namespace penstock::engine {

namespace {

double seconds_since_1970() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

}  // namespace

Monitor::Monitor(const Config& config, std::shared_ptr<trace::Recorder> recorder, int rank,
                 int size)
    : started(seconds_since_1970()),
      recorder_(std::move(recorder)),
      update_row_(recorder_->row("update")),
      size_(size),
      copies_(config.mesh.tensor * config.mesh.pipeline * config.mesh.sequence),
      every_(config.monitor.every) {
  const MonitorConfig& monitor = config.monitor;
  if (monitor.path.empty()) return;
  if (rank == 0) files_.emplace(monitor.path, monitor.formats);
  if (monitor.trace_first > 0) {
    const int64_t first = monitor.trace_first;
    ask({monitor.path + "/trace.json", first, first + monitor.trace_steps - 1, {}, true});
  }
}

// A loss on a device stays there until the norm reads it, so that the host does not wait.
void Monitor::saw(const at::Tensor& loss) {
  ++counted_.told.losses;
  const at::Tensor value = loss.detach().reshape({});
  if (value.device().is_cpu()) {
    counted_.told.loss += value.item().toDouble();
    return;
  }
  const at::Tensor wide = value.to(at::kDouble);  // like all scalars that the norm reads
  counted_.loss_there = counted_.loss_there.defined() ? counted_.loss_there + wide : wide;
}

void Monitor::count(int64_t samples, int64_t tokens) {
  counted_.told.samples += static_cast<double>(samples);
  counted_.told.tokens += static_cast<double>(tokens);
}

void Monitor::drop() { counted_ = exec::Counted(); }

void Monitor::ask(TraceWish wish) {
  if (wish_ && wish_->by_config && !wish.by_config && recorder_->about.rank == 0) {
    std::fprintf(stderr, "penstock: the trace of \"monitor.trace_first\" is replaced by %s\n",
                 wish.path.c_str());
  }
  wish.path = std::filesystem::absolute(wish.path);
  wish_ = std::move(wish);
  records_ = applied_ + 1 >= wish_->first;
  if (records_) recorder_->record();
}

std::optional<TraceWish> Monitor::take_finished() {
  if (!wish_) return std::nullopt;
  // The trace was requested before its first step, so recording starts now.
  if (!records_ && applied_ + 1 >= wish_->first) ask(std::move(*wish_));
  if (!records_ || applied_ < wish_->last) return std::nullopt;
  records_ = false;
  return std::exchange(wish_, std::nullopt);
}

void Monitor::hear(std::vector<std::string>& all) {
  without_.clear();
  for (size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank].back() != '1') without_.push_back(static_cast<int>(rank));
    all[rank].pop_back();
  }
}

std::optional<TraceWish> Monitor::end() {
  files_.reset();
  return std::exchange(wish_, std::nullopt);
}

void Monitor::begins() {
  if (before_.at_ns == 0) before_ = recorded();
}

// Communication time excludes waits for the update lane and for the disk.
SoFar Monitor::recorded() const {
  SoFar sums;
  sums.at_ns = trace::now_ns();
  const trace::EventSum waits = recorder_->sum(trace::Recorder::kModel, trace::Kind::kWait);
  const trace::EventSum meets = recorder_->sum(trace::Recorder::kModel, trace::Kind::kExchange);
  sums.waits_ns = waits.ns + meets.ns;
  sums.comm_ns = waits.ns + meets.ns - recorder_->waited_for(update_row_).ns -
                 recorder_->waited_for(trace::Recorder::kDisk).ns;
  sums.comm_bytes = recorder_->sum(trace::Kind::kExchange).bytes;
  return sums;
}

void Monitor::end_step(StepMetrics made, const exec::Told& all, SoFar now) {
  made.time = seconds_since_1970();
  if (before_.at_ns == 0) before_ = now;
  made.step_s = static_cast<double>(now.at_ns - before_.at_ns) * 1e-9;
  if (all.losses > 0.0) made.loss = all.loss / all.losses;
  // Ranks that compute one model together counted the same samples.
  made.samples = static_cast<int64_t>(all.samples) / copies_;
  made.tokens = static_cast<int64_t>(all.tokens) / copies_;
  made.flops = flops_per_sample * static_cast<double>(made.samples);
  made.peak_flops = rank_peak * size_;
  made.exposed_s = static_cast<double>(now.waits_ns - before_.waits_ns) * 1e-9;
  made.exposed_comm_s = static_cast<double>(now.comm_ns - before_.comm_ns) * 1e-9;
  made.comm_bytes = now.comm_bytes - before_.comm_bytes;
  made.disk_read_bytes = now.disk_read - before_.disk_read;
  made.disk_written_bytes = now.disk_written - before_.disk_written;
  made.disk_busy_s = now.disk_busy_s - before_.disk_busy_s;
  static const auto kStepText = std::make_shared<const std::string>("step");
  recorder_->add(
      {before_.at_ns, now.at_ns, 0, 0, 0, kStepText, trace::Recorder::kModel, trace::Kind::kStep});
  before_ = now;
  last_ = made;
  ++applied_;
  drop();
  if (files_ && made.step % every_ == 0) files_->add(last_);
}

}  // namespace penstock::engine

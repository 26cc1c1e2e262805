#include "penstock/metrics.h"

#include <unistd.h>

#include <array>
#include <fstream>

#include <torch/version.h>

#include <nlohmann/json.hpp>

#include "penstock/error.h"
#include "penstock/report.h"
#include "src/base/text.h"
#include "src/engine/monitor.h"
#include "src/engine/state.h"
#include "src/plan/strategy.h"
#include "src/trace/chrome.h"

namespace penstock {

namespace {

double of(int64_t value) { return static_cast<double>(value); }

std::string host_name() {
  std::array<char, 256> name{};
  return gethostname(name.data(), name.size() - 1) == 0 ? name.data() : "";
}

void write_file(const std::string& path, const std::string& text) {
  std::ofstream file(path);
  file << text;
  file.close();
  if (!file) throw RuntimeFault(concat("[engine::trace] ", path, " cannot be written"));
}

}  // namespace

std::vector<std::pair<std::string, double>> StepMetrics::values() const {
  const auto counted = [](int64_t value) { return value > 0 ? of(value) : kNotKnown; };
  return {{"step", of(step)},
          {"time", time},
          {"step_s", step_s},
          {"loss", loss},
          {"grad_norm", grad_norm},
          {"lr", lr},
          {"loss_scale", loss_scale},
          {"skipped_steps", of(skipped_steps)},
          {"samples", counted(samples)},
          {"tokens", counted(tokens)},
          {"samples_per_s", samples_per_s()},
          {"tokens_per_s", tokens_per_s()},
          {"mfu", mfu()},
          {"exposed_s", exposed_s},
          {"exposed_comm_s", exposed_comm_s},
          {"comm_bytes", of(comm_bytes)},
          {"disk_read_bytes", of(disk_read_bytes)},
          {"disk_written_bytes", of(disk_written_bytes)},
          {"disk_gb_per_s", disk_gb_per_s()},
          {"param_bytes", of(param_bytes)},
          {"grad_bytes", of(grad_bytes)},
          {"optim_bytes", of(optim_bytes)},
          {"buffer_bytes", of(buffer_bytes)},
          {"device_peak_bytes", of(device_peak_bytes)},
          {"host_peak_bytes", of(host_peak_bytes)},
          {"disk_bytes", of(disk_bytes)}};
}

// What stays as it is: written when the run begins, and when the plans of its order are made.
void Core::State::describe_run() {
  engine::RunFiles* const files = monitor->files();
  if (files == nullptr) return;
  const Report report(shared_from_this());
  const LedgerReport ledger = report.ledger();
  nlohmann::ordered_json out;
  out["version"] = PENSTOCK_VERSION;
  out["torch"] = TORCH_VERSION;
  out["host"] = host_name();
  out["pid"] = getpid();
  out["ranks"] = group->size();
  out["transport"] = group->transport();
  out["started"] = started;
  out["strategy"] = config.strategy;
  out["config"] = nlohmann::ordered_json::parse(config.json());
  const LedgerEntry& predicted = ledger.predicted.at(config.strategy);
  out["predicted"] = {{"param", predicted.param},        {"grad", predicted.grad},
                      {"optim", predicted.optim},        {"buffers", predicted.buffers},
                      {"total", predicted.total},        {"device", predicted.device},
                      {"host", predicted.host},          {"disk", predicted.disk},
                      {"exchanges", predicted.exchanges}};
  for (const Section section : kSections) {
    out["plan"][section_name(section)] = driver->plan(section).text();
  }
  out["explain"] = report.explain();
  files->replace("run.json", out.dump(1) + "\n");
}

void Core::State::end_step(const std::vector<OptimizerConfig>& groups) {
  StepMetrics made;
  made.step = steps;
  made.grad_norm = executor->updates().grad_norm();
  made.lr = groups.empty() ? kNotKnown : groups.front().lr;
  made.loss_scale = loss_scale.value();
  made.skipped_steps = skipped;
  const mem::Usage device = tiers.device.usage(), host = tiers.host.usage();
  const auto now = [&](mem::Account account) {
    return device.now[static_cast<size_t>(account)] + host.now[static_cast<size_t>(account)];
  };
  made.param_bytes = now(mem::Account::kParam);
  made.grad_bytes = now(mem::Account::kGrad);
  made.optim_bytes = now(mem::Account::kOptim);
  made.buffer_bytes = now(mem::Account::kBuffers);
  made.device_peak_bytes = device.total_peak;
  made.host_peak_bytes = host.total_peak;
  engine::SoFar so_far = monitor->recorded();
  made.disk_bytes = executor->activations().disk_bytes();
  if (tiers.disk) {
    made.disk_bytes += tiers.disk->reserved();
    so_far.disk_read = tiers.disk->bytes_read();
    so_far.disk_written = tiers.disk->bytes_written();
    so_far.disk_busy_s = tiers.disk->busy_s();
  }
  monitor->end_step(made, executor->updates().told(), so_far);
  if (steps == 1) describe_run();
  if (const auto wish = monitor->take_finished()) write_trace(*wish);
}

// Every rank comes to it after the same step.
void Core::State::write_trace(const engine::TraceWish& wish) {
  const std::vector<std::string> parts =
      executor->collect("trace", events_of(monitor->recorder().end_record()));
  if (group->rank() != 0) return;
  write_file(wish.path, trace::chrome_trace(parts, "{}"));
  if (wish.written) wish.written(wish.path);
}

std::string Core::State::events_of(const std::vector<trace::Event>& events) {
  return trace::chrome_events(
      {group->rank(), host_name(), clock_offset_ns, monitor->recorder().rows()}, events);
}

void Metrics::count(int64_t samples, int64_t tokens) { state_->monitor->count(samples, tokens); }

void Metrics::set_flops(double per_sample, double rank_peak) {
  state_->monitor->flops_per_sample = per_sample;
  state_->monitor->rank_peak = rank_peak;
}

const StepMetrics& Metrics::last() const { return state_->monitor->last(); }

void Metrics::write_last(const std::string& path) const {
  const std::vector<trace::Event> events = state_->monitor->recorder().last();
  write_file(path, trace::chrome_trace({state_->events_of(events)}, "{}"));
}

void Metrics::flush() {
  if (engine::RunFiles* const files = state_->monitor->files()) files->flush();
}

std::vector<RowSum> Metrics::sums() const {
  const trace::Recorder& recorder = state_->monitor->recorder();
  const std::vector<std::string> rows = recorder.rows();
  std::vector<RowSum> sums;
  for (size_t row = 0; row < rows.size(); ++row) {
    for (int kind = 0; kind < trace::kNumKinds; ++kind) {
      const trace::Sum sum =
          recorder.sum(static_cast<int16_t>(row), static_cast<trace::Kind>(kind));
      if (sum.count == 0) continue;
      sums.push_back({rows[row], trace::name_of(static_cast<trace::Kind>(kind)), sum.count,
                      sum.bytes, sum.seconds()});
    }
  }
  return sums;
}

void Metrics::trace(const std::string& path, int64_t steps,
                    std::function<void(const std::string&)> written) {
  state_->check_open("trace");
  if (!state_->monitor->recorder().on()) {
    throw ConfigError("[engine::trace] \"monitor.events\" is 0: nothing of this run is recorded");
  }
  state_->monitor->ask({path, state_->steps + 1, state_->steps + steps, std::move(written)});
}

}  // namespace penstock

#include "penstock/metrics.h"

#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <utility>

#include <torch/version.h>

#include <nlohmann/json.hpp>

#include "penstock/error.h"
#include "penstock/report.h"
#include "src/base/board.h"
#include "src/base/text.h"
#include "src/engine/step/planning.h"
#include "src/engine/watch/clock_offset.h"
#include "src/engine/watch/observer.h"
#include "src/plan/strategy.h"
#include "src/trace/chrome.h"

namespace penstock {

namespace {

double of(int64_t value) { return static_cast<double>(value); }

void check_on(const trace::Recorder& recorder) {
  if (recorder.on()) return;
  throw ConfigError("[engine::trace] \"monitor.events\" is 0, so this run records no events");
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

void Core::State::Observer::say(const std::string& what) const {
  std::fprintf(stderr, "penstock: rank %d, %s\n", state.group->rank(), what.c_str());
}

void Core::State::Observer::begin() {
  state.model_ranks.record(state.tiers.recorder);
  if (state.tiers.disk) state.tiers.disk->show_on(state.group->board());
  trace::About& about = state.tiers.recorder->about;
  about.rank = state.group->rank();
  about.host = host_name();
  const std::string& reports = state.config.comm.report_dir;
  about.folder = reports.empty() ? state.config.monitor.path : reports;
  if (!about.folder.empty()) {
    std::error_code later;  // ignored, because the write reports the error
    about.folder = std::filesystem::absolute(about.folder);
    std::filesystem::create_directories(about.folder, later);
  }
  state.monitor.emplace(state.config, state.tiers.recorder, state.group->rank(),
                        state.group->size());
  const std::string& measured = state.config.monitor.machine;
  if (!measured.empty()) {
    const bool on_host = state.tiers.computes.is_host();
    state.monitor->machine = read_machine(measured, on_host ? Machine::cpu() : Machine());
  }
  if (state.group->size() == 1) return;
  about.offset_ns =
      engine::clock_offset([this](const std::string& label, const std::string& payload) {
        return state.executor->share(label, payload);
      });
}

void Core::State::Observer::describe() {
  engine::RunFiles* const files = state.monitor->files();
  if (files == nullptr) return;
  const Report report(state.shared_from_this());
  const LedgerReport ledger = report.ledger();
  const Config& config = state.config;
  nlohmann::ordered_json out;
  out["version"] = PENSTOCK_VERSION;
  out["torch"] = TORCH_VERSION;
  out["host"] = host_name();
  out["pid"] = getpid();
  out["ranks"] = state.group->size();
  out["transport"] = state.group->transport();
  out["started"] = state.monitor->started;
  out["strategy"] = config.strategy;
  out["config"] = nlohmann::ordered_json::parse(config.json());
  const LedgerEntry& predicted = ledger.predicted.at(config.strategy);
  out["predicted"] = {{"param", predicted.param},        {"grad", predicted.grad},
                      {"optim", predicted.optim},        {"buffers", predicted.buffers},
                      {"total", predicted.total},        {"device", predicted.device},
                      {"host", predicted.host},          {"disk", predicted.disk},
                      {"exchanges", predicted.exchanges}};
  for (const Section section : kSections) {
    if (state.model_ranks.window && is_pass(section)) continue;
    out["plan"][section_name(section)] = Planning{state}.plan(section).text();
  }
  if (state.model_ranks.window) out["plan"]["window"] = Planning{state}.window_text();
  if (const auto seconds = predict()) {
    out["predicted"]["step_s"] = seconds->step_s;
    out["machine"] = state.config.monitor.machine;
  }
  out["explain"] = report.explain();
  files->replace("run.json", out.dump(1) + "\n");
}

void Core::State::Observer::end_step(const std::vector<OptimizerConfig>& groups) {
  StepMetrics made;
  made.step = state.steps;
  made.grad_norm = state.executor->updates().seen().grad_norm;
  made.lr = groups.empty() ? state.monitor->own_lr : groups.front().lr;
  made.loss_scale = state.loss_scale.value();
  made.skipped_steps = state.skipped;
  const mem::Usage device = state.tiers.device.usage(), host = state.tiers.host.usage();
  const auto now = [&](mem::Account account) {
    return device.now[static_cast<size_t>(account)] + host.now[static_cast<size_t>(account)];
  };
  made.param_bytes = now(mem::Account::kParam);
  made.grad_bytes = now(mem::Account::kGrad);
  made.optim_bytes = now(mem::Account::kOptim);
  made.buffer_bytes = now(mem::Account::kBuffers);
  made.device_peak_bytes = device.total_peak;
  made.host_peak_bytes = host.total_peak;
  engine::SoFar so_far = state.monitor->recorded();
  made.disk_bytes = state.executor->activations().shelf().disk_bytes() +
                    state.executor->caches().shelf().disk_bytes();
  if (state.tiers.disk) {
    made.disk_bytes += state.tiers.disk->held();
    so_far.disk_read = state.tiers.disk->bytes_read();
    so_far.disk_written = state.tiers.disk->bytes_written();
    so_far.disk_busy_s = state.tiers.disk->busy_s();
  }
  state.monitor->end_step(made, state.executor->updates().seen().told, so_far);
  if (Board* const board = state.group->board()) {
    const StepMetrics& last = state.monitor->last();
    board->applied({of(last.step), last.step_s, last.loss, last.grad_norm, last.lr,
                    last.samples_per_s(), last.tokens_per_s(), last.mfu(), last.exposed_s,
                    of(device.total_now), of(host.total_now), of(last.disk_bytes)});
  }
  if (state.monitor->applied() == 1) {
    share_times();
    describe();
  }
  const auto wish = state.monitor->take_finished();
  if (wish && state.monitor->without().empty()) {
    write_trace(*wish);
  } else if (wish) {
    const int rank = state.group->rank(), other = state.monitor->without().front();
    const std::string path = rank == 0 ? wish->path : concat(wish->path, ".rank", rank);
    write_own(path, state.monitor->recorder().end_record());
    say(concat("rank ", other, " did not request a trace of these steps, so ", path,
               " covers only this rank. Call trace() with the same arguments on all ranks"));
  }
  state.executor->set_step(state.steps + 1);
  state.model_ranks.set_step(state.steps + 1);
}

void Core::State::Observer::write_trace(const engine::TraceWish& wish) {
  std::string own = events_of(state.monitor->recorder().end_record());
  if (wish.more) {
    try {
      const std::string more = wish.more(state.tiers.recorder->about.offset_ns);
      own += (own.empty() || more.empty() ? "" : ",\n") + more;
    } catch (const std::exception& error) {  // not thrown, only reported, because other ranks wait
                                             // in collect()
      say(concat("the trace has only the lanes' events: ", reason(error)));
    }
  }
  if (const int64_t dropped = state.monitor->recorder().dropped()) {
    say(concat("the trace lacks ", dropped, " events, because at most ",
               trace::Recorder::kMostRecorded, " are kept"));
  }
  const std::vector<std::string> parts = state.executor->collect("trace", std::move(own));
  if (state.group->rank() != 0) return;
  try {
    write_file(wish.path, trace::chrome_trace(parts, "{}"));
  } catch (const RuntimeFault& error) {  // not thrown, only reported, because the step was applied
    say(error.what());
  }
}

void Core::State::Observer::write_own(const std::string& path,
                                      const std::vector<trace::Event>& events) {
  try {
    write_file(path, trace::chrome_trace({events_of(events)}, "{}"));
  } catch (const RuntimeFault& error) {
    say(error.what());
  }
}

std::string Core::State::Observer::events_of(const std::vector<trace::Event>& events) {
  const auto predicted = predict();
  return trace::chrome_events(state.monitor->recorder(), events,
                              predicted ? predicted->lines : trace::Predicted());
}

void Core::State::Observer::dump(const std::string& call) {
  if (!state.monitor->dumped.insert(call).second) return;
  const std::string where = trace::dump(*state.tiers.recorder);
  if (where.empty() || state.trouble.find(where) != std::string::npos) return;
  if (!std::exchange(state.monitor->said_dump, true)) say(state.trouble + where);
}

void Core::State::Observer::end() {
  if (!state.monitor) return;
  const auto wish = state.monitor->end();
  if (!wish || !wish->by_config || state.group->rank() != 0 || state.monitor->applied() == 0)
    return;
  write_own(wish->path, state.monitor->recorder().last());
  say(concat("the run ended after step ", state.monitor->applied(),
             ", so the trace from \"monitor.trace_first\" ", wish->first,
             " is incomplete: ", wish->path, " has only the last events of this rank"));
}

void Metrics::count(int64_t samples, int64_t tokens) { state_->monitor->count(samples, tokens); }

void Metrics::set_flops(double per_sample, double rank_peak) {
  state_->monitor->flops_per_sample = per_sample;
  state_->monitor->rank_peak = rank_peak;
}

void Metrics::set_lr(double lr) { state_->monitor->own_lr = lr; }

void Metrics::set_work(std::vector<double> forward_flops) {
  state_->monitor->forward_flops = std::move(forward_flops);
}

int Metrics::unit() const { return state_->driver->computing(); }

const StepMetrics& Metrics::last() const { return state_->monitor->last(); }

void Metrics::write_last(const std::string& path) const {
  check_on(state_->monitor->recorder());
  const std::vector<trace::Event> events = state_->monitor->recorder().last();
  write_file(path, trace::chrome_trace({Core::State::Observer{*state_}.events_of(events)}, "{}"));
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
      const trace::EventSum sum =
          recorder.sum(static_cast<int16_t>(row), static_cast<trace::Kind>(kind));
      if (sum.count == 0) continue;
      sums.push_back({rows[row], trace::name_of(static_cast<trace::Kind>(kind)), sum.count,
                      sum.bytes, sum.seconds()});
    }
  }
  return sums;
}

void Metrics::trace(const std::string& path, int64_t steps,
                    std::function<std::string(int64_t)> more) {
  state_->check_open("trace");
  check_on(state_->monitor->recorder());
  const std::filesystem::path folder = std::filesystem::absolute(path).parent_path();
  if (state_->group->rank() == 0 && access(folder.c_str(), W_OK) != 0) {
    throw RuntimeFault(concat("[engine::trace] ", path, ": ", folder.string(),
                              " does not exist or cannot be written to"));
  }
  const int64_t before = state_->monitor->applied();
  state_->monitor->ask({path, before + 1, before + steps, std::move(more)});
}

}  // namespace penstock

// Writes a config as JSON, with every value including defaults. config.cpp reads it.
#include <set>
#include <string>
#include <utility>
#include <variant>
#include <nlohmann/json.hpp>

#include "penstock/config.h"
#include "penstock/optimizer_kinds.h"
#include "src/base/text.h"

namespace penstock {

namespace {

using Json = nlohmann::ordered_json;  // the order of `dtypes` rules is kept

nlohmann::json checkpoint_json(int64_t every) {
  if (every > 1) return every;
  return every == 1 ? "unit" : "none";
}

Json or_null(int64_t value, int64_t not_set) {
  return value == not_set ? Json(nullptr) : Json(value);
}

nlohmann::json optimizer_json(const OptimizerConfig& optimizer) {
  const OptimizerKind& kind = kind_of(optimizer.type);
  nlohmann::json out = {{"type", kind.name}};
  for (const std::string& key : kind.keys)
    std::visit([&](auto field) { out[key] = optimizer.*field; }, optimizer_key(key).field);
  return out;
}

}  // namespace

std::string Config::lines() const {
  static const std::set<std::string> kOfTheMachine = {
      "/offload/path", "/comm/report_dir", "/checkpoint/path", "/monitor/path", "/monitor/machine"};
  std::string text;
  const nlohmann::json flat = nlohmann::json::parse(json()).flatten();  // outlives items()
  for (const auto& [path, value] : flat.items()) {
    if (kOfTheMachine.contains(path)) continue;
    text += concat("config ", path, " = ", value.dump(), "\n");
  }
  return text;
}

namespace {

nlohmann::json json_of(const MonitorConfig& monitor) {
  return {{"path", monitor.path},
          {"formats", monitor.formats},
          {"every", monitor.every},
          {"console", monitor.console},
          {"events", monitor.events},
          {"trace_first", monitor.trace_first},
          {"trace_steps", monitor.trace_steps},
          {"machine", monitor.machine}};
}

nlohmann::json json_of(const CommConfig& comm) {
  return {{"backend", comm.backend},
          {"codec", comm.codec},
          {"exact_first", comm.exact_first},
          {"exact_every", comm.exact_every},
          {"outer_every", comm.outer_every},
          {"outer_lr", comm.outer_lr},
          {"outer_momentum", comm.outer_momentum},
          {"outer_wire", comm.outer_wire},
          {"reduce_dtype", comm.reduce_dtype},
          {"bucket_bytes", comm.bucket_bytes},
          {"timeout_s", comm.timeout_s},
          {"warn_s", comm.warn_s},
          {"report_dir", comm.report_dir}};
}

nlohmann::json json_of(const OffloadConfig& offload) {
  return {{"optimizer", offload.optimizer},
          {"params", offload.params},
          {"activations", offload.activations},
          {"gradients", offload.gradients},
          {"path", offload.path},
          {"window_bytes", offload.window_bytes},
          {"keep_bytes", offload.keep_bytes},
          {"cache", offload.cache},
          {"late_update", offload.late_update},
          {"checksums", offload.checksums},
          {"timeout_s", offload.timeout_s}};
}

Json json_of(const ParallelConfig& parallel) {
  Json styles = Json::object();
  for (const auto& [pattern, style] : parallel.rules) styles[pattern] = style;
  return {{"rules", styles},
          {"stages", parallel.stages},
          {"schedule", parallel.schedule},
          {"virtual_stages", parallel.virtual_stages},
          {"cut_logits", parallel.cut_logits},
          {"norms", parallel.norms},
          {"sequence", parallel.sequence},
          {"verify", parallel.verify}};
}

}  // namespace

std::string Config::json(int indent) const {
  nlohmann::json out = {{"strategy", strategy},
                        {"table", table},
                        {"precision", precision ? nlohmann::json(*precision) : nullptr},
                        {"clip", clip},
                        {"nonfinite", nonfinite},
                        {"inference", inference},
                        {"prefetch_bytes", prefetch_bytes},
                        {"seed", or_null(seed, -1)},
                        {"dtypes", nullptr}};  // reserves its place in the order
  out["checkpoint"] = {
      {"path", checkpoint.path}, {"keep", checkpoint.keep}, {"signals", checkpoint.signals}};
  out["monitor"] = json_of(monitor);
  out["optimizer"] = optimizer ? optimizer_json(*optimizer) : nlohmann::json(nullptr);
  out["schedule"] = {{"type", schedule.type},
                     {"warmup_steps", schedule.warmup_steps},
                     {"total_steps", schedule.total_steps},
                     {"min_ratio", schedule.min_ratio}};
  out["mesh"] = {{"data", or_null(mesh.data, 0)}, {"tensor", mesh.tensor},
                 {"pipeline", mesh.pipeline},     {"sequence", mesh.sequence},
                 {"expert", mesh.expert},         {"node", mesh.node}};
  out["offload"] = json_of(offload);
  out["memory"] = {{"device_bytes", or_null(memory.device_bytes, -1)},
                   {"host_bytes", or_null(memory.host_bytes, -1)}};
  out["quantize"] = {
      {"dtype", quantize.dtype}, {"params", quantize.params}, {"cache", quantize.cache}};
  out["activations"] = {{"checkpoint", checkpoint_json(activations.checkpoint)}};
  out["loss_scale"] = {{"initial", loss_scale.initial},
                       {"window", loss_scale.window},
                       {"min", loss_scale.min},
                       {"settle", loss_scale.settle},
                       {"hysteresis", loss_scale.hysteresis},
                       {"refill", loss_scale.refill}};
  out["batch"] = {{"micro", or_null(batch.micro, 0)},
                  {"accumulate", or_null(batch.accumulate, 0)},
                  {"global", or_null(batch.global, 0)},
                  {"reduction", batch.reduction}};
  out["units"] = {{"modules", units.modules},
                  {"max_bytes", units.max_bytes},
                  {"layer_bytes", units.layer_bytes}};
  out["tiling"] = {{"max_bytes", tiling.max_bytes},
                   {"modules", tiling.modules},
                   {"loss_tokens", tiling.loss_tokens},
                   {"head", tiling.head}};
  out["comm"] = json_of(comm);
  Json ordered = out;
  Json rules = Json::object();
  for (const auto& [pattern, dtype] : dtypes) rules[pattern] = dtype;
  ordered["dtypes"] = rules;
  ordered["parallel"] = json_of(parallel);
  return ordered.dump(indent);
}

}  // namespace penstock

#include "penstock/config.h"

#include <pybind11/stl.h>

#include "penstock/deepspeed_config.h"

#include "python/src/module.h"
#include "src/plan/strategy.h"

namespace py = pybind11;

namespace penstock::python {

namespace {

// Converts a dict to JSON with Python's json.dumps, so a dict and its JSON text mean the same.
Config config_of(const py::object& given) {
  if (py::isinstance<py::str>(given)) return Config::parse(given.cast<std::string>());
  const py::object text = py::module_::import("json").attr("dumps")(given);
  return Config::parse(text.cast<std::string>());
}

void bind_mesh_sections(py::module_& module) {
  py::class_<MeshConfig>(module, "MeshConfig")
      .def_readonly("data", &MeshConfig::data)
      .def_readonly("tensor", &MeshConfig::tensor)
      .def_readonly("pipeline", &MeshConfig::pipeline)
      .def_readonly("sequence", &MeshConfig::sequence)
      .def_readonly("expert", &MeshConfig::expert)
      .def_readonly("node", &MeshConfig::node)
      .def("data_rank", &data_rank);
  py::class_<ParallelConfig>(module, "ParallelConfig")
      .def_property_readonly("rules",
                             [](const ParallelConfig& parallel) {
                               py::dict rules;
                               for (const auto& [pattern, style] : parallel.rules)
                                 rules[py::str(pattern)] = style;
                               return rules;
                             })
      .def_readonly("stages", &ParallelConfig::stages)
      .def_readonly("schedule", &ParallelConfig::schedule)
      .def_readonly("virtual_stages", &ParallelConfig::virtual_stages)
      .def_readonly("cut_logits", &ParallelConfig::cut_logits)
      .def_readonly("norms", &ParallelConfig::norms)
      .def_readonly("sequence", &ParallelConfig::sequence)
      .def_readonly("verify", &ParallelConfig::verify);
}

void bind_state_sections(py::module_& module) {
  py::class_<OffloadConfig>(module, "OffloadConfig")
      .def_readonly("optimizer", &OffloadConfig::optimizer)
      .def_readonly("params", &OffloadConfig::params)
      .def_readonly("activations", &OffloadConfig::activations)
      .def_readonly("gradients", &OffloadConfig::gradients)
      .def_readonly("path", &OffloadConfig::path)
      .def_readonly("window_bytes", &OffloadConfig::window_bytes)
      .def_readonly("keep_bytes", &OffloadConfig::keep_bytes)
      .def_readonly("cache", &OffloadConfig::cache)
      .def_readonly("late_update", &OffloadConfig::late_update)
      .def_readonly("checksums", &OffloadConfig::checksums)
      .def_readonly("timeout_s", &OffloadConfig::timeout_s);
  py::class_<MemoryConfig>(module, "MemoryConfig")
      .def_readonly("device_bytes", &MemoryConfig::device_bytes)
      .def_readonly("host_bytes", &MemoryConfig::host_bytes);
  py::class_<QuantizeConfig>(module, "QuantizeConfig")
      .def_readonly("dtype", &QuantizeConfig::dtype)
      .def_readonly("params", &QuantizeConfig::params)
      .def_readonly("cache", &QuantizeConfig::cache);
  py::class_<ActivationsConfig>(module, "ActivationsConfig")
      .def_readonly("checkpoint", &ActivationsConfig::checkpoint);
  py::class_<CheckpointConfig>(module, "CheckpointConfig")
      .def_readonly("path", &CheckpointConfig::path)
      .def_readonly("keep", &CheckpointConfig::keep)
      .def_readonly("signals", &CheckpointConfig::signals);
  py::class_<MonitorConfig>(module, "MonitorConfig")
      .def_readonly("path", &MonitorConfig::path)
      .def_readonly("formats", &MonitorConfig::formats)
      .def_readonly("every", &MonitorConfig::every)
      .def_readonly("console", &MonitorConfig::console)
      .def_readonly("events", &MonitorConfig::events)
      .def_readonly("trace_first", &MonitorConfig::trace_first)
      .def_readonly("trace_steps", &MonitorConfig::trace_steps)
      .def_readonly("machine", &MonitorConfig::machine);
  py::class_<UnitsConfig>(module, "UnitsConfig")
      .def_readonly("modules", &UnitsConfig::modules)
      .def_readonly("max_bytes", &UnitsConfig::max_bytes)
      .def_readonly("layer_bytes", &UnitsConfig::layer_bytes);
  py::class_<TilingConfig>(module, "TilingConfig")
      .def_readonly("max_bytes", &TilingConfig::max_bytes)
      .def_readonly("modules", &TilingConfig::modules)
      .def_readonly("loss_tokens", &TilingConfig::loss_tokens)
      .def_readonly("head", &TilingConfig::head);
}

// The "optimizer" section is in optimizer_kinds.cpp.
void bind_step_sections(py::module_& module) {
  py::class_<ScheduleConfig>(module, "ScheduleConfig")
      .def_readonly("type", &ScheduleConfig::type)
      .def_readonly("warmup_steps", &ScheduleConfig::warmup_steps)
      .def_readonly("total_steps", &ScheduleConfig::total_steps)
      .def_readonly("min_ratio", &ScheduleConfig::min_ratio)
      .def("lr_factor", &lr_factor, py::arg("step"));
  py::class_<BatchConfig>(module, "BatchConfig")
      .def_readonly("micro", &BatchConfig::micro)
      .def_readonly("accumulate", &BatchConfig::accumulate)
      .def_readonly("global_", &BatchConfig::global)  // "global" is a keyword of Python
      .def_readonly("reduction", &BatchConfig::reduction);
  py::class_<LossScaleConfig>(module, "LossScaleConfig")
      .def_readonly("initial", &LossScaleConfig::initial)
      .def_readonly("window", &LossScaleConfig::window)
      .def_readonly("min", &LossScaleConfig::min)
      .def_readonly("settle", &LossScaleConfig::settle)
      .def_readonly("hysteresis", &LossScaleConfig::hysteresis)
      .def_readonly("refill", &LossScaleConfig::refill);
  py::class_<CommConfig>(module, "CommConfig")
      .def_readonly("backend", &CommConfig::backend)
      .def_readonly("codec", &CommConfig::codec)
      .def_readonly("exact_first", &CommConfig::exact_first)
      .def_readonly("exact_every", &CommConfig::exact_every)
      .def_readonly("outer_every", &CommConfig::outer_every)
      .def_readonly("outer_lr", &CommConfig::outer_lr)
      .def_readonly("outer_momentum", &CommConfig::outer_momentum)
      .def_readonly("outer_wire", &CommConfig::outer_wire)
      .def_readonly("reduce_dtype", &CommConfig::reduce_dtype)
      .def_readonly("bucket_bytes", &CommConfig::bucket_bytes)
      .def_readonly("timeout_s", &CommConfig::timeout_s)
      .def_readonly("warn_s", &CommConfig::warn_s)
      .def_readonly("report_dir", &CommConfig::report_dir);
}

const char* text_of(KeyFate fate) {
  return fate == KeyFate::kTaken ? "taken" : fate == KeyFate::kNoEffect ? "no effect" : "refused";
}

void bind_deepspeed(py::module_& module) {
  py::class_<GivenKey>(module, "GivenKey")
      .def_readonly("key", &GivenKey::key)
      .def_readonly("value", &GivenKey::value)
      .def_property_readonly("fate", [](const GivenKey& self) { return text_of(self.fate); })
      .def_readonly("note", &GivenKey::note);
  py::class_<TranslatedConfig>(module, "TranslatedConfig")
      .def_readonly("native", &TranslatedConfig::native)
      .def_readonly("values", &TranslatedConfig::values)
      .def_readonly("scheduler", &TranslatedConfig::scheduler)
      .def_readonly("given", &TranslatedConfig::given)
      .def_readonly("left_over", &TranslatedConfig::left_over)
      .def_property_readonly("warning", &TranslatedConfig::warning);
  py::class_<DeepSpeedSchedule>(module, "DeepSpeedSchedule")
      .def(py::init(&DeepSpeedSchedule::make), py::arg("type"), py::arg("params"))
      .def_static("all", &DeepSpeedSchedule::all)
      .def("lr", &DeepSpeedSchedule::lr, py::arg("iteration"))
      .def("momentum", &DeepSpeedSchedule::momentum, py::arg("iteration"));
  module.def("plain_json", &plain_json, py::arg("json_text"));
  module.def("is_deepspeed_config", &is_deepspeed_config, py::arg("json_text"));
  module.def("translate_deepspeed_config", &translate_deepspeed_config, py::arg("json_text"),
             py::arg("world"));
  // Rows of (key, fate, note).
  module.def("deepspeed_keys", [] {
    std::vector<std::array<std::string, 3>> rows;
    for (const DeepSpeedKey& row : deepspeed_keys()) {
      rows.push_back({row.key, text_of(row.fate), row.note});
    }
    return rows;
  });
}

}  // namespace

void bind_config(py::module_& module) {
  bind_deepspeed(module);
  bind_mesh_sections(module);
  bind_state_sections(module);
  bind_step_sections(module);
  py::class_<Config>(module, "Config")
      .def(py::init(&config_of), py::arg("config"))
      .def_readonly("strategy", &Config::strategy)
      .def_readonly("table", &Config::table)
      .def_readonly("mesh", &Config::mesh)
      .def_readonly("precision", &Config::precision)
      .def_readonly("parallel", &Config::parallel)
      .def_readonly("dtypes", &Config::dtypes)
      .def_readonly("offload", &Config::offload)
      .def_readonly("memory", &Config::memory)
      .def_readonly("quantize", &Config::quantize)
      .def_readonly("activations", &Config::activations)
      .def_readonly("checkpoint", &Config::checkpoint)
      .def_readonly("monitor", &Config::monitor)
      .def_readonly("optimizer", &Config::optimizer)
      .def_readonly("schedule", &Config::schedule)
      .def_readonly("batch", &Config::batch)
      .def_readonly("loss_scale", &Config::loss_scale)
      .def_readonly("clip", &Config::clip)
      .def_readonly("nonfinite", &Config::nonfinite)
      .def_readonly("inference", &Config::inference)
      .def_readonly("units", &Config::units)
      .def_readonly("tiling", &Config::tiling)
      .def_readonly("prefetch_bytes", &Config::prefetch_bytes)
      .def_readonly("comm", &Config::comm)
      .def_readonly("seed", &Config::seed)
      .def("json", &Config::json, py::arg("indent") = -1)
      // These return a changed copy.
      .def(
          "resolved",
          [](Config config, int world_size) {
            config.resolve(world_size);
            return config;
          },
          py::arg("world_size"))
      .def(
          "with_rules",
          [](Config config, std::vector<std::pair<std::string, std::string>> rules,
             std::string verify) {
            config.parallel.rules = std::move(rules);
            config.parallel.verify = std::move(verify);
            return config;
          },
          py::arg("rules"), py::arg("verify"))
      .def(
          "with_head",
          [](Config config, std::string module_name) {
            config.tiling.head = std::move(module_name);
            return config;
          },
          py::arg("module_name"));
}

}  // namespace penstock::python

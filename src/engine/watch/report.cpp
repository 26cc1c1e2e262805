#include "penstock/report.h"

#include "penstock/error.h"
#include "src/base/text.h"
#include "src/engine/step/core_state.h"
#include "src/engine/step/planning.h"
#include "src/mem/process_memory.h"
#include "src/plan/strategy.h"

namespace penstock {

namespace {

// Copies the simulator's ledger. Accounts are summed over device and host memory.
LedgerEntry entry_of(const Ledger& ledger) {
  LedgerEntry entry;
  entry.disk = ledger.tier[static_cast<size_t>(Tier::kDisk)].total;
  entry.device = ledger.tier[static_cast<size_t>(Tier::kDevice)].total;
  entry.host = ledger.tier[static_cast<size_t>(Tier::kHost)].total;
  for (const Tier in_memory : {Tier::kDevice, Tier::kHost}) {
    const MemoryPeak& tier = ledger.tier[static_cast<size_t>(in_memory)];
    entry.param += tier.param;
    entry.grad += tier.grad;
    entry.optim += tier.optim;
    entry.buffers += tier.buffers;
    entry.total += tier.total;
  }
  entry.memory = ledger.in_memory;
  entry.activations = ledger.tensors.own;
  if (entry.activations > 0) {
    entry.step_device = ledger.tensors.device;
    entry.step_memory = ledger.tensors.in_memory;
  }
  entry.exchanges = ledger.exchanges;
  return entry;
}

}  // namespace

double Report::grad_norm() const { return state_->executor->updates().seen().grad_norm; }
double Report::loss_scale() const { return state_->loss_scale.value(); }
int64_t Report::skipped_steps() const { return state_->skipped; }
std::string Report::overflow() const { return state_->overflow; }

LedgerReport Report::ledger() const {
  LedgerReport report;
  report.strategy = state_->config.strategy;
  const Core::State::Planning planning{*state_};
  PlanOf plan_of;
  if (state_->model_ranks.window) {
    plan_of = [&](const Table& table, const ModelDesc& model) {
      try {
        return planning.window(table, model);
      } catch (const ConfigError&) {  // no schedule for `batch.accumulate`: train_batch() throws it
        return window_plan(state_->config, table, model);
      }
    };
  }
  // `penstock plan` uses the same simulator for its predictions (src/plan/cost).
  for (const std::string& name : preset_names()) {
    const Config config = adapted(state_->config, name, state_->config.offload.optimizer);
    report.predicted[name] = entry_of(predict(config, state_->model, false, plan_of));
  }
  const mem::Usage device = state_->tiers.device.usage(), host = state_->tiers.host.usage();
  const auto peak = [&](mem::Account account) {
    return device.peak[static_cast<size_t>(account)] + host.peak[static_cast<size_t>(account)];
  };
  report.measured = {peak(mem::Account::kParam),
                     peak(mem::Account::kGrad),
                     peak(mem::Account::kOptim),
                     peak(mem::Account::kBuffers),
                     device.total_peak + host.total_peak,
                     state_->tiers.disk ? state_->tiers.disk->held() : 0,
                     device.total_peak,
                     host.total_peak,
                     state_->tiers.peak()};
  if (state_->tiers.disk) {
    report.disk_read = state_->tiers.disk->bytes_read();
    report.disk_written = state_->tiers.disk->bytes_written();
  }
  const mem::ProcessMemory resident = mem::process_memory();
  report.resident = {resident.process,   state_->tiers.host.usage().held,
                     resident.libraries, resident.shared,
                     resident.heap,      resident.heap_free};
  const activations::Shelf& activations = state_->executor->activations().shelf();
  const activations::Shelf& caches = state_->executor->caches().shelf();
  report.measured.act = activations.peak_bytes();
  report.measured.cache = caches.peak_bytes();
  report.measured.activations = state_->activation_memory->peak();
  // What is moved to the host there takes as much with any strategy.
  for (auto& [name, entry] : report.predicted) {
    if (entry.activations > 0) entry.step_memory += report.measured.act;
  }
  report.measured.exchanges = state_->executor->exchanges();
  report.measured.disk += activations.disk_bytes() + caches.disk_bytes();
  return report;
}

std::string Report::explain() const {
  std::string out = concat("config ", state_->config.json(), "\n", state_->choice, "mesh ",
                           state_->executor->mesh().text(), "\nranks exchange through ",
                           state_->group->transport(), "\ntable\n",
                           state_->executor->table().text(), "\nunits\n");
  const Placement& rest = state_->executor->table().at(Role::kParam, Phase::kRest);
  for (size_t unit = 0; unit < state_->model.units.size(); ++unit) {
    out += concat("u", unit, " ", state_->unit_names[unit],
                  state_->model.units[unit].kept && state_->moves_params ? " (kept)" : "");
    const std::vector<exec::Flat>& here = state_->executor->units()[unit].flats;
    const std::vector<FlatDesc>& flats = state_->model.units[unit].flats;
    for (size_t at = 0; at < flats.size(); ++at) {
      const FlatDesc& flat = flats[at];
      const bool in_files = at < here.size() && !here[at].params.empty() &&
                            mem::Disk::is_read_only(here[at].rest().one().offset);
      out += concat(" ", flat.numel, " ", dtype_name(flat.dtype), flat.trainable ? "" : " frozen",
                    flat.quantized ? concat(" as ", dtype_name(rest.dtype)) : "",
                    in_files ? " in the files of init()" : "");
      const std::string place = flat.placement.text();
      if (!place.empty()) out += concat(" (", place, ")");
    }
    out += "\n";
  }
  out += concat("units read outside their module: ", state_->order->spanning().size(),
                "\nevents off plan so far: ", state_->driver->off_plan_events(), "\n");
  if (state_->exchanges) out += state_->exchanges->text();
  if (state_->model.boundary_bytes > 0) {
    out += concat("messages to other stages, mean of the last step: ", state_->model.boundary_bytes,
                  " bytes\n");
  }
  if (state_->outer) out += state_->outer->text();
  if (has_exact_steps(state_->config.comm)) {
    out += "exact steps (comm.exact_first, comm.exact_every) have plain wires in this plan\n";
  }
  const Core::State::Planning planning{*state_};
  if (state_->model_ranks.window) out += concat("plan window\n", planning.window_text());
  for (const Section section : kSections) {
    if (state_->model_ranks.window && is_pass(section)) continue;
    out += concat("plan ", section_name(section), "\n", planning.plan(section).text());
  }
  return out;
}

}  // namespace penstock

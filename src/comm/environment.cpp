// Group::from_environment: makes the group of ranks that a launcher started as processes.
#include <array>
#include <charconv>
#include <cstdlib>
#include <functional>
#include <string>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "penstock/error.h"
#include "penstock/group.h"
#include "src/base/text.h"
#include "src/comm/shm/one_host.h"

namespace penstock {
namespace {

constexpr int kDefaultPort = 29500;
// These ports are below the range from which the kernel picks ports.
constexpr int kFirstPort = 15000, kNumPorts = 15000;

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

int number(const char* name, int least) {
  const std::string text = variable(name);
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < least) {
    throw ConfigError(concat("[comm::from_environment] ", name, " is \"", text,
                             "\"; allowed: a whole number >= ", least));
  }
  return value;
}

// Names of a launcher's variables. `job` has the same value on all ranks of a job and differs
// between jobs, so its value determines the port.
struct Launcher {
  const char *rank, *size, *job;
};
constexpr std::array<Launcher, 4> kLaunchers = {{
    {"RANK", "WORLD_SIZE", nullptr},  // torchrun, penstock run
    {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_MCA_ess_base_jobid"},
    {"PMI_RANK", "PMI_SIZE", "PMI_JOBID"},
    {"SLURM_PROCID", "SLURM_NTASKS", "SLURM_JOB_ID"},
}};

const Launcher* launcher() {
  for (const Launcher& one : kLaunchers) {
    const bool rank = !variable(one.rank).empty(), size = !variable(one.size).empty();
    if (rank && size) return &one;
    // RANK without WORLD_SIZE is an error. An incomplete pair of MPI's or Slurm's variables is
    // ignored.
    if (rank && one.job == nullptr) {
      throw ConfigError(concat("[comm::from_environment] ", one.rank, " is set and ", one.size,
                               " is not. A launcher must set both"));
    }
  }
  return nullptr;
}

uint16_t port_of(const Launcher& from) {
  if (!variable("MASTER_PORT").empty()) return static_cast<uint16_t>(number("MASTER_PORT", 1));
  const std::string job = from.job == nullptr ? "" : variable(from.job);
  if (job.empty()) return kDefaultPort;
  return static_cast<uint16_t>(kFirstPort + std::hash<std::string>()(job) % kNumPorts);
}

c10::intrusive_ptr<c10d::Store> store_of(const Launcher& from, int rank, int size,
                                         std::chrono::milliseconds timeout) {
  std::string host = variable("MASTER_ADDR");
  if (host.empty()) host = "127.0.0.1";
  c10d::TCPStoreOptions options;
  options.port = port_of(from);
  // torchrun and `penstock run` already serve a store at that address.
  options.isServer = rank == 0 && variable("TORCHELASTIC_USE_AGENT_STORE") != "True";
  options.numWorkers = size;
  options.waitWorkers = false;
  options.timeout = timeout;
  try {
    return c10::make_intrusive<c10d::TCPStore>(host, options);
  } catch (const std::exception& error) {
    throw RuntimeFault(concat("[comm::from_environment] rank ", rank, " of ", size,
                              " cannot reach the store at ", host, " port ", options.port,
                              " (MASTER_ADDR, MASTER_PORT): ", reason(error)));
  }
}

}  // namespace

std::shared_ptr<Group> Group::from_environment(std::chrono::milliseconds timeout,
                                               const WatchOptions& watch) {
  const Launcher* from = launcher();
  if (from == nullptr) return alone();
  const int size = number(from->size, 1), rank = number(from->rank, 0);
  if (rank >= size) {
    throw ConfigError(concat("[comm::from_environment] ", from->rank, " is ", rank, " and ",
                             from->size, " is ", size, ". Ranks must be 0 to ", size - 1));
  }
  if (size == 1) return alone();
  // A launcher that restarts ranks keeps the store, so each start uses its own keys.
  const std::string name = concat("penstock/native/", variable("TORCHELASTIC_RUN_ID"), "/",
                                  variable("TORCHELASTIC_RESTART_COUNT"));
  const auto store =
      c10::make_intrusive<c10d::PrefixStore>(name, store_of(*from, rank, size, timeout));
  std::string why_not;
  auto group = group_on_one_host(store, rank, size, timeout, watch, &why_not);
  if (group) return group;
  throw RuntimeFault(concat(
      "[comm::from_environment] rank ", rank, " of ", size, ": ",
      why_not.empty()
          ? std::string("the ranks are on several hosts. Connect them with a torch process group "
                        "(Group::from_process_group)")
          : concat("the ranks of this host cannot share memory: ", why_not)));
}

}  // namespace penstock

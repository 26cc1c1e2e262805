#include "src/plan/cost/step_time.h"

#include <map>

#include "src/base/text.h"

namespace penstock {

namespace {

struct LaneTime {
  std::string name;
  double seconds = 0;
};

LaneTime longest_of(const std::map<std::string, double>& lanes) {
  LaneTime longest{"compute", 0};
  for (const auto& [name, seconds] : lanes) {
    if (seconds > longest.seconds) longest = {name, seconds};
  }
  return longest;
}

}  // namespace

StepTime step_time(const Work& work, const Ledger& ledger, const Machine& machine) {
  const std::map<std::string, double> links = {{"local", machine.local},
                                               {"node", machine.node},
                                               {"pipeline", machine.node},
                                               {"device-host", machine.device_host},
                                               {"host-disk", machine.host_disk}};
  const auto flops = static_cast<double>(work.params) * 2 * work.tokens;
  const auto trained = static_cast<double>(work.trained_params) * 2 * work.tokens;
  const double memory = work.updates_on_host ? machine.host_memory : machine.device_memory;
  std::map<std::string, std::map<std::string, double>> lanes;  // phase -> lane -> seconds
  for (const auto& [phase, sent] : ledger.sent) {
    // Sets the seconds of each lane; a phase takes as long as its longest lane.
    for (const auto& [link, bytes] : sent) {
      lanes[phase][link + " link"] = static_cast<double>(bytes) / links.at(link);
    }
  }
  for (const auto& [phase, values] : ledger.coded) {
    std::map<std::string, double>& lane = lanes[phase];
    lane[lane.contains("node link") ? "node link" : "local link"] +=
        static_cast<double>(values) * kCodecBytes / machine.device_memory;
  }
  lanes["forward"]["compute"] = flops / machine.flops;
  StepTime time;
  time.again = static_cast<double>(work.again_params) * 2 * work.tokens / machine.flops;
  lanes["backward"]["compute"] = (flops + trained) / machine.flops + time.again;
  for (const auto& [phase, waited] : ledger.waited) {
    for (const auto& [link, bytes] : waited) {
      const double seconds = static_cast<double>(bytes) / links.at(link);
      lanes[phase]["compute"] += seconds;
      time.layers += seconds;
    }
  }
  lanes["update"]["optimizer"] = static_cast<double>(work.updated_params) * kUpdateBytes / memory;
  LaneTime most;
  const auto take = [&](const char* phase) {
    const LaneTime lane = longest_of(lanes[phase]);
    if (lane.seconds > most.seconds) most = {concat(phase, ", ", lane.name), lane.seconds};
    return lane.seconds;
  };
  time.forward = take("forward");
  time.backward = take("backward");
  time.update = take("update");
  time.longest = most.name;
  return time;
}

}  // namespace penstock

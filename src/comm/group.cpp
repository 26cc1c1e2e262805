#include "penstock/group.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "penstock/error.h"
#include "src/base/text.h"
#include "src/comm/device_backends.h"

namespace penstock {

Position Position::of(std::string text) {
  Position position;
  position.what = std::make_shared<const std::string>(std::move(text));
  return position;
}

std::string Position::text() const {
  const std::string name = what ? *what : "";
  if (!lane) return name;
  return concat("step ", step, ", collective ", sequence, " of lane ", *lane, ", `", name, "`");
}

Group::Group() : back_ends_(std::make_unique<comm::DeviceBackends>()) {}

// If close() was not called, this rank's device collectives may still wait for peers.
Group::~Group() { back_ends_->abort("the group was destroyed without close()"); }

// Peers are watched before this rank connects, so the wait ends if a peer's process ends.
std::shared_ptr<comm::DeviceCollectives> Group::connect_on_device(const std::vector<int>& ranks,
                                                                  c10::Device device) {
  auto made = back_ends_->add(device_groups_(ranks));
  watch_peers();
  try {
    made->connect(device, time_to_connect());
  } catch (const std::exception& error) {
    std::string names;
    for (const int rank : ranks) names += concat(names.empty() ? "" : ", ", rank);
    throw RuntimeFault(concat("[comm::connect_on_device] ranks ", names, " did not connect on ",
                              device.str(), ": ", roll_call(reason(error))));
  }
  return made;
}

std::string Group::cut_off_on_device() { return back_ends_->cut_off(); }

}  // namespace penstock

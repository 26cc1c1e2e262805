#pragma once

#include <chrono>

namespace penstock::comm {

// Timeout of a wait that only an event ends.
inline constexpr std::chrono::milliseconds kForever = std::chrono::hours(24 * 365);
// Least timeout of the first exchange: ranks arrive at different times, after their imports and
// connections.
inline constexpr std::chrono::milliseconds kArrival = std::chrono::seconds(60);
// Time that a failed rank waits: by then messages in flight have arrived, and exchanges whose peers
// all take part have finished.
inline constexpr std::chrono::milliseconds kInFlight = std::chrono::seconds(1);

}  // namespace penstock::comm

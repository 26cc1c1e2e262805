#pragma once

#include <chrono>

namespace penstock::comm {

// Timeout for a wait that only an event ends. It never expires in practice.
inline constexpr std::chrono::milliseconds kForever = std::chrono::hours(24 * 365);
// Minimum timeout of the first exchange. Ranks arrive at different times, because imports and
// connections do not take equally long on all of them.
inline constexpr std::chrono::milliseconds kArrival = std::chrono::seconds(60);
// How long a failed rank waits before it ends exchanges. By then, messages in flight have arrived,
// and exchanges in which all peers take part have finished.
inline constexpr std::chrono::milliseconds kInFlight = std::chrono::seconds(1);

}  // namespace penstock::comm

#pragma once

#include <chrono>

namespace penstock::comm {

// Timeout for a wait that only an event should end. In practice the timeout never expires.
inline constexpr std::chrono::milliseconds kForever = std::chrono::hours(24 * 365);
// Minimum timeout of the first exchange. Ranks arrive at different times, because imports and
// connecting take longer on some ranks than on others.
inline constexpr std::chrono::milliseconds kArrival = std::chrono::seconds(60);
// The time that a failed rank waits before it ends exchanges. During this time, messages in flight
// can arrive, and exchanges can finish if all their peers take part.
inline constexpr std::chrono::milliseconds kInFlight = std::chrono::seconds(1);

}  // namespace penstock::comm

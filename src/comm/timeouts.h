#pragma once

#include <chrono>

namespace penstock::comm {

// Timeout for a wait that should end only by an event. In practice the timeout never expires.
inline constexpr std::chrono::milliseconds kForever = std::chrono::hours(24 * 365);
// Minimum timeout of the first exchange. Ranks arrive at different times, because imports and
// connections do not take equally long on all of them.
inline constexpr std::chrono::milliseconds kArrival = std::chrono::seconds(60);
// The time that a failed rank waits before it ends exchanges. Meanwhile, messages in flight arrive,
// and exchanges finish if all their peers take part.
inline constexpr std::chrono::milliseconds kInFlight = std::chrono::seconds(1);

}  // namespace penstock::comm

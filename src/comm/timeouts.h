#pragma once

#include <chrono>

namespace penstock::comm {

// How long to wait where nothing ends the wait but an event.
inline constexpr std::chrono::milliseconds kForever = std::chrono::hours(24 * 365);
// The first exchange waits longer: until then ranks arrive at their own pace, each with its imports
// and connections.
inline constexpr std::chrono::milliseconds kArrival = std::chrono::seconds(60);
// After a rank has failed: by then, messages that were under way have arrived, and exchanges whose
// peers are all there have ended.
inline constexpr std::chrono::milliseconds kInFlight = std::chrono::seconds(1);

}  // namespace penstock::comm

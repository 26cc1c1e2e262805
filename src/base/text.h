#pragma once
// Text functions for messages, plan lines and config keys.
#include <cstdint>
#include <exception>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

namespace penstock {

template <typename... Parts>
std::string concat(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

std::vector<std::string> split(std::string_view text, char separator);
std::string_view trim(std::string_view text);
std::string join(const std::vector<std::string>& parts, std::string_view separator);

// Returns the candidate with the smallest edit distance to `word`. Returns "" if `word` is not a
// likely misspelling of any candidate.
std::string nearest(std::string_view word, const std::vector<std::string>& candidates);

// Returns the text of an error without the C++ stack trace that torch appends.
std::string reason(const std::exception& error);

// Returns the name of this machine; "" if the system does not give one.
std::string host_name();

// Returns the 64-bit FNV-1a hash. It is the same on every machine, so ranks may compare hashes.
uint64_t hash_text(std::string_view text, uint64_t seed = 0xcbf29ce484222325ULL);

// "1.50 GiB"
std::string format_bytes(double bytes);

// Parses "4GiB", "1.5 TiB", "80GB" (10^9), "512" into whole bytes >= 0. Returns nothing for any
// other text.
std::optional<int64_t> parse_bytes(std::string_view text);

}  // namespace penstock

#pragma once
// Small text tools: everything a message, a plan line or a config key needs.
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

// The candidate with the smallest edit distance to `word`; empty when none is near enough to be
// a likely misspelling.
std::string nearest(std::string_view word, const std::vector<std::string>& candidates);

// What an error says, without the C++ stack that torch adds.
std::string reason(const std::exception& error);

// FNV-1a, 64 bit: the same on every machine, so ranks may compare it.
uint64_t hash_text(std::string_view text, uint64_t seed = 0xcbf29ce484222325ULL);

// "1.50 GiB"
std::string format_bytes(double bytes);

// "4GiB", "1.5 TiB", "80GB" (10^9), "512": whole bytes >= 0, else nothing.
std::optional<int64_t> parse_bytes(std::string_view text);

}  // namespace penstock

#pragma once
// XXH3 of 64 bits, which finds damage on the way to and from a disk; no defence against an
// attacker.
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace penstock::ckpt {

uint64_t checksum(const void* data, int64_t bytes);

std::string hex(uint64_t value);                           // 16 digits
std::optional<uint64_t> parse_hex(std::string_view text);  // of 16 digits, lower case

}  // namespace penstock::ckpt

#include "src/place/wire.h"

#include <algorithm>
#include <charconv>
#include <utility>
#include <vector>

#include "penstock/error.h"
#include "src/base/text.h"

namespace penstock {

namespace {

constexpr std::array<const char*, 5> kCodeNames = {"plain", "int8", "int4", "sign", "fp8"};
constexpr std::array<const char*, 2> kRoundingNames = {"nearest", "stochastic"};
constexpr std::array kBlocks = {32, 64, 128};
constexpr const char* kDelta = "delta";

[[noreturn]] void refuse(std::string_view text, const std::string& why) {
  throw ConfigError(concat("[place::parse_wire] wire '", text, "' is not valid: ", why,
                           ". Write plain, int8, int4, fp8 or sign, then /32, /64 or /128 (values "
                           "per scale), then /nearest or /stochastic (only for int8 and int4), as "
                           "in 'int8/128'"));
}

template <size_t N>
int index_of(std::string_view name, const std::array<const char*, N>& names) {
  const auto found = std::find(names.begin(), names.end(), name);
  return found == names.end() ? -1 : static_cast<int>(found - names.begin());
}

// Returns -1 if the text is not one of the block sizes.
int block_of(std::string_view text) {
  int block = -1;
  std::from_chars(text.data(), text.data() + text.size(), block);
  const bool known = std::find(kBlocks.begin(), kBlocks.end(), block) != kBlocks.end();
  return known && text == std::to_string(block) ? block : -1;
}

}  // namespace

int64_t Wire::encoded_bytes(int64_t numel) const {
  return (scale_bytes(numel) + value_bytes(numel) + 15) / 16 * 16;
}

std::string Wire::text(Rounding assumed) const {
  if (!lossy()) return kCodeNames[0];
  const std::string how = concat("/", kRoundingNames[static_cast<size_t>(rounding)]);
  const bool usual = rounding == assumed || !takes_noise();
  return concat(kCodeNames[static_cast<size_t>(code)], "/", block, usual ? "" : how,
                delta ? concat("/", kDelta) : "");
}

Wire Wire::parse(std::string_view text, Rounding rounding) {
  std::vector<std::string> words = split(text, '/');
  const int code = index_of(words[0], kCodeNames);
  if (code < 0) refuse(text, concat("'", words[0], "' is unknown"));
  Wire wire{.code = static_cast<Code>(code)};
  if (!wire.lossy()) {
    if (words.size() > 1) refuse(text, "plain has no blocks and no rounding");
    return wire;
  }
  wire.rounding = wire.takes_noise() ? rounding : Rounding::kNearest;
  wire.delta = words.back() == kDelta;
  if (wire.delta) words.pop_back();
  for (size_t i = 1; i < words.size(); ++i) {
    const int block = block_of(words[i]), how = index_of(words[i], kRoundingNames);
    if (i == 1 && block > 0) {
      wire.block = block;
    } else if (i + 1 == words.size() && how >= 0 && wire.takes_noise()) {
      wire.rounding = static_cast<Rounding>(how);
    } else {
      refuse(text, concat("'", words[i], "' is unknown"));
    }
  }
  return wire;
}

bool Wires::has(Code code) const {
  return std::any_of(axes.begin(), axes.end(), [&](const Wire& wire) { return wire.code == code; });
}

bool Wires::lossy() const {
  return std::any_of(axes.begin(), axes.end(), [](const Wire& wire) { return wire.lossy(); });
}

Wires Wires::on(const Mesh& mesh) const {
  Wires seen = *this;
  if (mesh.size(Axis::kNode) == 1) seen.on(Axis::kNode) = on(Axis::kLocal);
  if (mesh.size(Axis::kLocal) == 1) seen.on(Axis::kLocal) = on(Axis::kNode);
  return seen;
}

std::string Wires::text(Rounding rounding) const {
  if (on(Axis::kNode) == on(Axis::kLocal)) return on(Axis::kNode).text(rounding);
  std::vector<std::string> parts;
  for (const Axis axis : kDataAxes) {
    if (on(axis).lossy()) parts.push_back(concat(axis_name(axis), ":", on(axis).text(rounding)));
  }
  return join(parts, ",");
}

Wires Wires::parse(std::string_view text, Rounding rounding) {
  Wires wires;
  if (text.find(':') == std::string_view::npos) {
    for (const Axis axis : kDataAxes) wires.on(axis) = Wire::parse(text, rounding);
    return wires;
  }
  std::vector<Axis> given;
  for (const std::string& part : split(text, ',')) {
    const size_t colon = std::min(part.find(':'), part.size());
    const auto axis = std::find_if(kDataAxes.begin(), kDataAxes.end(), [&](Axis one) {
      return part.substr(0, colon) == axis_name(one);
    });
    if (axis == kDataAxes.end() || colon == part.size()) {
      refuse(text, concat("'", part, "' does not begin with 'node:' or 'local:'"));
    }
    if (std::find(given.begin(), given.end(), *axis) != given.end()) {
      refuse(text, concat("it names ", axis_name(*axis), " twice"));
    }
    given.push_back(*axis);
    wires.on(*axis) = Wire::parse(part.substr(colon + 1), rounding);
  }
  return wires;
}

}  // namespace penstock

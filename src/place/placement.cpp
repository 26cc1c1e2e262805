#include "src/place/placement.h"

#include <algorithm>

#include "penstock/error.h"
#include "src/base/text.h"

namespace penstock {

namespace {

constexpr std::array<const char*, 5> kDtypeNames = {"fp32", "bf16", "fp16", "int8/128", "int4/64"};
constexpr std::array<const char*, 3> kTierNames = {"device", "host", "disk"};
constexpr std::array<const char*, 8> kMoveNames = {
    "all_gather", "reduce_scatter", "all_reduce", "slice", "copy", "cast", "all_to_all", "shift"};
constexpr std::string_view kLayoutLetters = "RSP";

template <typename Enum, size_t N>
Enum parse_name(const char* what, std::string_view text, const std::array<const char*, N>& names) {
  const auto found = std::find(names.begin(), names.end(), text);
  if (found != names.end()) return static_cast<Enum>(found - names.begin());
  const std::vector<std::string> allowed(names.begin(), names.end());
  const std::string near = nearest(text, allowed);
  throw ConfigError(concat("[place::parse] ", what, " '", text, "' is unknown: allowed are ",
                           join(allowed, ", "),
                           near.empty() ? "" : concat("; did you mean '", near, "'?")));
}

Axis parse_axis(std::string_view text) {
  std::array<const char*, kNumAxes> names{};
  for (const AxisRow& row : kAxes) names[static_cast<size_t>(row.axis)] = row.name;
  return parse_name<Axis>("axis", text, names);
}

template <class Axes>
bool has(const Axes& axes, Axis axis) {
  return std::find(axes.begin(), axes.end(), axis) != axes.end();
}

[[noreturn]] void refuse_placement(std::string_view text) {
  throw ConfigError(concat("[place::parse] placement '", text,
                           "' is not valid: write R, S or P for each of the axes node and local, "
                           "then @tier:dtype, as in 'SS@device:bf16'. Name any other axis after "
                           "the letters, as in 'SS,tensor=P@device:bf16'"));
}

Layout parse_letter(char letter, std::string_view placement) {
  const size_t index = kLayoutLetters.find(letter);
  if (index == std::string_view::npos) refuse_placement(placement);
  return static_cast<Layout>(index);
}

// Parses "tensor=P". Each axis may be named at most once; node and local may not be named.
void parse_layout(std::string_view text, std::string_view placement, Placement& place) {
  const size_t equals = text.find('=');
  if (equals == std::string_view::npos || equals + 2 != text.size()) refuse_placement(placement);
  const Axis axis = parse_axis(text.substr(0, equals));
  if (has(kDataAxes, axis) || place.on(axis) != Layout::kReplicated) refuse_placement(placement);
  place.on(axis) = parse_letter(text.back(), placement);
  if (place.on(axis) == Layout::kSharded && !kAxes[static_cast<size_t>(axis)].shards_state)
    throw ConfigError(concat("[place::parse] placement '", placement, "' shards axis ",
                             axis_name(axis),
                             ", whose ranks hold different state: write R or P for it"));
}

// Returns "data" for node and local together, then the other names, separated by commas.
std::string axes_text(const std::vector<Axis>& axes) {
  const bool data = has(axes, Axis::kNode) && has(axes, Axis::kLocal);
  std::vector<std::string> names;
  for (const Axis axis : axes) {
    if (data && axis == Axis::kLocal) continue;
    names.emplace_back(data && axis == Axis::kNode ? "data" : axis_name(axis));
  }
  return join(names, ",");
}

std::vector<Axis> parse_axes(std::string_view text) {
  std::vector<Axis> axes;
  for (const std::string& name : split(text, ',')) {
    if (name == "data") {
      axes.insert(axes.end(), kDataAxes.begin(), kDataAxes.end());
    } else {
      axes.push_back(parse_axis(name));
    }
  }
  std::sort(axes.begin(), axes.end());
  if (std::adjacent_find(axes.begin(), axes.end()) != axes.end())
    throw ConfigError(concat("[place::parse_move] '", text, "' names an axis twice"));
  return axes;
}

}  // namespace

int64_t dtype_bytes(Dtype dtype) {
  PENSTOCK_ASSERT(!is_quantized(dtype), "[place::dtype_bytes] one value has no bytes of its own");
  return dtype == Dtype::kFp32 ? 4 : 2;
}

bool is_quantized(Dtype dtype) { return dtype == Dtype::kInt8 || dtype == Dtype::kInt4; }

Wire code_of(Dtype dtype) {
  PENSTOCK_ASSERT(is_quantized(dtype), "[place::code_of] the dtype is not quantized");
  return Wire::parse(dtype_name(dtype));
}

int64_t buffer_bytes(Dtype dtype, int64_t numel) {
  constexpr int64_t kBlock = 512;
  if (!is_quantized(dtype)) return numel * dtype_bytes(dtype);
  return (code_of(dtype).encoded_bytes(numel) + kBlock - 1) / kBlock * kBlock;
}

const char* dtype_name(Dtype dtype) { return kDtypeNames[static_cast<size_t>(dtype)]; }
const char* tier_name(Tier tier) { return kTierNames[static_cast<size_t>(tier)]; }
const char* move_kind_name(MoveKind kind) { return kMoveNames[static_cast<size_t>(kind)]; }
Dtype parse_dtype(std::string_view text) { return parse_name<Dtype>("dtype", text, kDtypeNames); }
Tier parse_tier(std::string_view text) { return parse_name<Tier>("tier", text, kTierNames); }

bool Placement::sharded() const {
  return std::find(layout.begin(), layout.end(), Layout::kSharded) != layout.end();
}

bool Placement::partial() const {
  return std::find(layout.begin(), layout.end(), Layout::kPartial) != layout.end();
}

std::string Placement::text() const {
  std::string letters, others;
  for (const AxisRow& row : kAxes) {
    const char letter = kLayoutLetters[static_cast<size_t>(on(row.axis))];
    if (has(kDataAxes, row.axis)) {
      letters += letter;
    } else if (on(row.axis) != Layout::kReplicated) {
      others += concat(",", row.name, "=", letter);
    }
  }
  return concat(letters, others, "@", tier_name(tier), ":", dtype_name(dtype));
}

Placement Placement::parse(std::string_view text) {
  const size_t at = text.find('@');
  const size_t colon = text.find(':');
  if (at == std::string_view::npos || colon == std::string_view::npos || colon < at)
    refuse_placement(text);
  Placement place;
  const std::vector<std::string> layouts = split(text.substr(0, at), ',');
  if (layouts[0].size() != kDataAxes.size()) refuse_placement(text);
  for (size_t i = 0; i < kDataAxes.size(); ++i)
    place.on(kDataAxes[i]) = parse_letter(layouts[0][i], text);
  for (size_t i = 1; i < layouts.size(); ++i) parse_layout(layouts[i], text, place);
  place.tier = parse_tier(text.substr(at + 1, colon - at - 1));
  place.dtype = parse_dtype(text.substr(colon + 1));
  return place;
}

std::string Move::text() const {
  std::string argument;
  if (kind == MoveKind::kCopy) {
    argument = concat(tier_name(from), ",", tier_name(to));
  } else if (kind == MoveKind::kCast) {
    argument = dtype_name(dtype);
  } else {
    argument = concat(axes_text(axes), wire.lossy() ? concat(":", wire.text()) : "");
  }
  return concat(move_kind_name(kind), "(", argument, ")");
}

bool Move::is_collective() const {
  return kind == MoveKind::kAllGather || kind == MoveKind::kReduceScatter ||
         kind == MoveKind::kAllReduce;
}

Move parse_move(std::string_view text) {
  text = trim(text);
  const size_t open = text.find('(');
  if (open == std::string_view::npos || text.back() != ')')
    throw ConfigError(concat("[place::parse_move] move '", text,
                             "' is unknown: write it as in 'all_gather(data)', "
                             "'copy(device,host)' or 'cast(bf16)'"));
  Move move;
  move.kind = parse_name<MoveKind>("move", text.substr(0, open), kMoveNames);
  const std::string_view argument = text.substr(open + 1, text.size() - open - 2);
  if (move.kind == MoveKind::kCast) {
    move.dtype = parse_dtype(argument);
  } else if (move.kind == MoveKind::kCopy) {
    const size_t comma = std::min(argument.find(','), argument.size());
    move.from = parse_tier(argument.substr(0, comma));
    move.to = parse_tier(argument.substr(std::min(comma + 1, argument.size())));
  } else {
    const size_t colon = std::min(argument.find(':'), argument.size());
    move.axes = parse_axes(argument.substr(0, colon));
    if (colon < argument.size() && move.is_collective()) {
      move.wire = Wire::parse(argument.substr(colon + 1));
    } else if (colon < argument.size()) {
      throw ConfigError(
          concat("[place::parse_move] '", text, "' is not a collective, so it cannot have a wire"));
    }
  }
  return move;
}

int num_shards(const Placement& place, const Mesh& mesh) {
  int shards = 1;
  for (const AxisRow& row : kAxes)
    if (place.on(row.axis) == Layout::kSharded) shards *= mesh.size(row.axis);
  return shards;
}

int shard_index(const Placement& place, const Mesh& mesh, int rank) {
  int index = 0;
  for (const Axis axis : kShardOrder)
    if (place.on(axis) == Layout::kSharded)
      index = index * mesh.size(axis) + mesh.coordinate(rank, axis);
  return index;
}

// [Note: Equal layouts] hops() and the tables compare normalized placements, so a strategy has the
// same plan on meshes that differ only in axes of size one.
Placement normalize(Placement place, const Mesh& mesh) {
  for (const AxisRow& row : kAxes) {
    const int size = has(kDataAxes, row.axis) ? mesh.data() : mesh.size(row.axis);
    if (size == 1) place.on(row.axis) = Layout::kReplicated;
  }
  if (mesh.size(Axis::kNode) == 1) place.on(Axis::kNode) = place.on(Axis::kLocal);
  if (mesh.size(Axis::kLocal) == 1) place.on(Axis::kLocal) = place.on(Axis::kNode);
  return place;
}

}  // namespace penstock

#include "src/place/placement.h"

#include <algorithm>
#include <cstdlib>
#include <optional>

#include "penstock/error.h"
#include "src/base/text.h"

namespace penstock {

namespace {

constexpr std::array<const char*, 3> kDtypeNames = {"fp32", "bf16", "fp16"};
constexpr std::array<const char*, 3> kTierNames = {"device", "host", "disk"};
constexpr std::array<const char*, 6> kMoveNames = {"all_gather", "reduce_scatter", "all_reduce",
                                                   "slice",      "copy",           "cast"};
constexpr std::array<const char*, kNumAxes> kAxisNames = {"node", "local", "tensor"};
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

constexpr std::array<Axis, kNumDataAxes> kDataAxes = {Axis::kNode, Axis::kLocal};

bool has(const std::vector<Axis>& axes, Axis axis) {
  return std::find(axes.begin(), axes.end(), axis) != axes.end();
}

// The layout that a kind of move needs on its axes, and the one it leaves there.
struct Change {
  MoveKind kind;
  Layout from, to;
};
constexpr std::array<Change, 4> kChanges = {{
    {MoveKind::kAllGather, Layout::kSharded, Layout::kReplicated},
    {MoveKind::kReduceScatter, Layout::kPartial, Layout::kSharded},
    {MoveKind::kAllReduce, Layout::kPartial, Layout::kReplicated},
    {MoveKind::kSlice, Layout::kReplicated, Layout::kSharded},
}};

const Change* change_of(MoveKind kind) {
  for (const Change& change : kChanges)
    if (change.kind == kind) return &change;
  return nullptr;
}

// Adds the move to the list; the same kind on the other axis widens the last move instead.
void push(std::vector<Move>& moves, MoveKind kind, Axis axis) {
  if (!moves.empty() && moves.back().kind == kind) {
    auto& axes = moves.back().axes;
    axes.push_back(axis);
    std::sort(axes.begin(), axes.end());
  } else {
    moves.push_back({.kind = kind, .axes = {axis}});
  }
}

// Gathers run from the inner axis out and cuts from the outer axis in, so shards stay contiguous;
// what remains to be summed is summed last, when it is smallest.
std::vector<Move> layout_moves(const Placement& from, const Placement& to) {
  std::vector<Move> moves;
  const auto wants = [&](Axis axis, MoveKind kind) {
    const Change* change = change_of(kind);
    return from.on(axis) == change->from && to.on(axis) == change->to;
  };
  for (const Axis axis : {Axis::kLocal, Axis::kNode})
    if (wants(axis, MoveKind::kAllGather)) push(moves, MoveKind::kAllGather, axis);
  for (const Axis axis : kDataAxes)
    for (const MoveKind kind : {MoveKind::kReduceScatter, MoveKind::kSlice})
      if (wants(axis, kind)) push(moves, kind, axis);
  for (const Axis axis : kDataAxes)
    if (wants(axis, MoveKind::kAllReduce)) push(moves, MoveKind::kAllReduce, axis);
  return moves;
}

void climb(std::vector<Move>& moves, Tier from, Tier to) {
  int at = static_cast<int>(from);
  const int end = static_cast<int>(to);
  while (at != end) {
    const int next = at + (end > at ? 1 : -1);
    moves.push_back(
        {.kind = MoveKind::kCopy, .from = static_cast<Tier>(at), .to = static_cast<Tier>(next)});
    at = next;
  }
}

}  // namespace

int64_t dtype_bytes(Dtype dtype) { return dtype == Dtype::kFp32 ? 4 : 2; }
const char* dtype_name(Dtype dtype) { return kDtypeNames[static_cast<size_t>(dtype)]; }
const char* tier_name(Tier tier) { return kTierNames[static_cast<size_t>(tier)]; }
const char* move_kind_name(MoveKind kind) { return kMoveNames[static_cast<size_t>(kind)]; }
Dtype parse_dtype(std::string_view text) { return parse_name<Dtype>("dtype", text, kDtypeNames); }
Tier parse_tier(std::string_view text) { return parse_name<Tier>("tier", text, kTierNames); }

bool Placement::sharded() const {
  return std::find(layout.begin(), layout.end(), Layout::kSharded) != layout.end();
}

std::string Placement::text() const {
  std::string letters;
  for (const Layout l : layout) letters += kLayoutLetters[static_cast<size_t>(l)];
  return concat(letters, "@", tier_name(tier), ":", dtype_name(dtype));
}

Placement Placement::parse(std::string_view text) {
  const size_t at = text.find('@');
  const size_t colon = text.find(':');
  Placement place;
  bool ok = at == kNumDataAxes && colon != std::string_view::npos && colon > at;
  for (size_t i = 0; ok && i < kNumDataAxes; ++i) {
    const size_t letter = kLayoutLetters.find(text[i]);
    ok = letter != std::string_view::npos;
    if (ok) place.layout[i] = static_cast<Layout>(letter);
  }
  if (!ok)
    throw ConfigError(concat("[place::parse] placement '", text,
                             "' is unknown: write one of R S P for each of the axes node and "
                             "local, then tier and dtype, as in 'SS@device:bf16'"));
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
  } else if (axes == std::vector<Axis>{Axis::kNode, Axis::kLocal}) {
    argument = "data";
  } else {
    std::vector<std::string> names;
    for (const Axis axis : axes) names.emplace_back(axis_name(axis));
    argument = join(names, ",");
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
  } else if (argument == "data") {
    move.axes = {Axis::kNode, Axis::kLocal};
  } else {
    move.axes = {parse_name<Axis>("axis", argument, kAxisNames)};
  }
  return move;
}

int num_shards(const Placement& place, const Mesh& mesh) {
  int shards = 1;
  for (const Axis axis : kDataAxes)
    if (place.on(axis) == Layout::kSharded) shards *= mesh.size(axis);
  return shards;
}

int shard_index(const Placement& place, const Mesh& mesh, int rank) {
  int index = 0;
  for (const Axis axis : kDataAxes)
    if (place.on(axis) == Layout::kSharded)
      index = index * mesh.size(axis) + mesh.coordinate(rank, axis);
  return index;
}

Placement normalize(Placement place, const Mesh& mesh) {
  if (mesh.data() == 1) place.layout.fill(Layout::kReplicated);
  return place;
}

bool applies(const Placement& place, const Move& move) {
  if (move.kind == MoveKind::kCast) return true;
  if (move.kind == MoveKind::kCopy) return place.tier == move.from;
  if (has(move.axes, Axis::kTensor) || move.axes.empty()) return false;
  if (move.is_collective() && place.tier != Tier::kDevice) return false;
  const Change& change = *change_of(move.kind);
  for (const Axis axis : move.axes)
    if (place.on(axis) != change.from) return false;
  const bool cuts = change.from == Layout::kSharded || change.to == Layout::kSharded;
  const bool inner_stays_cut =
      !has(move.axes, Axis::kLocal) && place.on(Axis::kLocal) == Layout::kSharded;
  return !(cuts && has(move.axes, Axis::kNode) && inner_stays_cut);
}

Placement apply(const Placement& place, const Move& move) {
  if (!applies(place, move))
    throw ConfigError(concat("[place::apply] ", move.text(), " cannot start from ", place.text()));
  Placement after = place;
  if (move.kind == MoveKind::kCast) {
    after.dtype = move.dtype;
  } else if (move.kind == MoveKind::kCopy) {
    after.tier = move.to;
  } else {
    for (const Axis axis : move.axes)
      after.layout[static_cast<size_t>(axis)] = change_of(move.kind)->to;
  }
  return after;
}

std::vector<Move> hops(const Placement& from, const Placement& to) {
  const Move cast{.kind = MoveKind::kCast, .dtype = to.dtype};
  const bool widens = dtype_bytes(to.dtype) > dtype_bytes(from.dtype);
  std::vector<Move> moves;
  if (to.dtype != from.dtype && !widens) moves.push_back(cast);
  const std::vector<Move> relayout = layout_moves(from, to);
  const bool needs_device = std::any_of(relayout.begin(), relayout.end(),
                                        [](const Move& move) { return move.is_collective(); });
  const Tier tier = needs_device ? Tier::kDevice : from.tier;
  climb(moves, from.tier, tier);
  moves.insert(moves.end(), relayout.begin(), relayout.end());
  climb(moves, tier, to.tier);
  if (widens) moves.push_back(cast);

  std::optional<Placement> at = from;
  for (const Move& move : moves)
    at = at && applies(*at, move) ? std::optional(apply(*at, move)) : std::nullopt;
  if (at != to)
    throw ConfigError(concat("[place::hops] no move takes ", from.text(), " to ", to.text(),
                             ": a sum is not undone (R or S to P), and an outer axis is not "
                             "gathered or cut while an inner one stays sharded"));
  return moves;
}

}  // namespace penstock

#include "src/place/placement.h"

#include <algorithm>

#include "penstock/error.h"
#include "src/base/text.h"

namespace penstock {

namespace {

constexpr std::array<const char*, 3> kDtypeNames = {"fp32", "bf16", "fp16"};
constexpr std::array<const char*, 3> kTierNames = {"device", "host", "disk"};
constexpr std::array<const char*, 6> kMoveNames = {"all_gather", "reduce_scatter", "all_reduce",
                                                   "slice",      "copy",           "cast"};
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

// The layout that a kind of move needs on its axes, and the layout it leaves there.
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

bool cuts(const Change& change) {
  return change.from == Layout::kSharded || change.to == Layout::kSharded;
}

// Appends the move; if the last move has the same kind, adds the axis to that move instead.
void push(std::vector<Move>& moves, MoveKind kind, Axis axis) {
  if (!moves.empty() && moves.back().kind == kind) {
    auto& axes = moves.back().axes;
    axes.push_back(axis);
    std::sort(axes.begin(), axes.end());
  } else {
    moves.push_back({.kind = kind, .axes = {axis}});
  }
}

// Axes that stay sharded inside an axis that changes. They must be gathered first and sliced again,
// because otherwise shards would not be contiguous.
std::vector<Axis> reopened_axes(const Placement& from, const Placement& to) {
  std::vector<Axis> reopened;
  bool outer_changes = false;
  for (const AxisRow& row : kAxes) {
    const bool was = from.on(row.axis) == Layout::kSharded;
    const bool is = to.on(row.axis) == Layout::kSharded;
    if (outer_changes && was && is) reopened.push_back(row.axis);
    outer_changes = outer_changes || was != is;
  }
  return reopened;
}

// Gathers run from the inner axis outwards and cuts from the outer axis inwards, so shards stay
// contiguous. Sums that are left run last, when they are smallest.
std::vector<Move> layout_moves(const Placement& from, const Placement& to) {
  const std::vector<Axis> reopened = reopened_axes(from, to);
  std::vector<Move> moves;
  const auto add = [&](Axis axis, MoveKind kind) {
    const Change& change = *change_of(kind);
    const bool wanted = from.on(axis) == change.from && to.on(axis) == change.to;
    const bool reopens = kind == MoveKind::kAllGather || kind == MoveKind::kSlice;
    if (wanted || (reopens && has(reopened, axis))) push(moves, kind, axis);
  };
  for (auto row = kAxes.rbegin(); row != kAxes.rend(); ++row) add(row->axis, MoveKind::kAllGather);
  for (const AxisRow& row : kAxes)
    for (const MoveKind kind : {MoveKind::kReduceScatter, MoveKind::kSlice}) add(row.axis, kind);
  for (const AxisRow& row : kAxes) add(row.axis, MoveKind::kAllReduce);
  return moves;
}

[[noreturn]] void refuse_placement(std::string_view text) {
  throw ConfigError(concat("[place::parse] placement '", text,
                           "' is unknown: write one of R S P for each of the axes node and local, "
                           "then tier and dtype, as in 'SS@device:bf16'; other axes follow by "
                           "name, as in 'SS,tensor=P@device:bf16'"));
}

Layout parse_letter(char letter, std::string_view placement) {
  const size_t index = kLayoutLetters.find(letter);
  if (index == std::string_view::npos) refuse_placement(placement);
  return static_cast<Layout>(index);
}

// Parses "tensor=P". An axis may be named once; node and local may not be named.
void parse_layout(std::string_view text, std::string_view placement, Placement& place) {
  const size_t equals = text.find('=');
  if (equals == std::string_view::npos || equals + 2 != text.size()) refuse_placement(placement);
  const Axis axis = parse_axis(text.substr(0, equals));
  if (has(kDataAxes, axis) || place.on(axis) != Layout::kReplicated) refuse_placement(placement);
  place.on(axis) = parse_letter(text.back(), placement);
  if (place.on(axis) == Layout::kSharded && !kAxes[static_cast<size_t>(axis)].shards_state)
    throw ConfigError(concat("[place::parse] placement '", placement, "': the ranks of axis ",
                             axis_name(axis), " hold different state: write R or P for it"));
}

// "data" for node and local together, then the other names, separated by commas.
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

// Appends copies from tier to neighbouring tier.
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
    argument = axes_text(axes);
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
    move.axes = parse_axes(argument);
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
  for (const AxisRow& row : kAxes)
    if (place.on(row.axis) == Layout::kSharded)
      index = index * mesh.size(row.axis) + mesh.coordinate(rank, row.axis);
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

bool applies(const Placement& place, const Move& move) {
  if (move.kind == MoveKind::kCast) return true;
  if (move.kind == MoveKind::kCopy) return place.tier == move.from;
  if (move.axes.empty() || (move.is_collective() && place.tier != Tier::kDevice)) return false;
  const Change& change = *change_of(move.kind);
  for (const Axis axis : move.axes)
    if (place.on(axis) != change.from) return false;
  // Shards of an axis inside the gathered or cut axes would not stay contiguous.
  const Axis outermost = *std::min_element(move.axes.begin(), move.axes.end());
  return !cuts(change) || std::all_of(kAxes.begin(), kAxes.end(), [&](const AxisRow& row) {
    return row.axis < outermost || has(move.axes, row.axis) ||
           place.on(row.axis) != Layout::kSharded;
  });
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
    for (const Axis axis : move.axes) after.on(axis) = change_of(move.kind)->to;
  }
  return after;
}

std::vector<Move> hops(const Placement& from, const Placement& to) {
  for (const AxisRow& row : kAxes)
    if (to.on(row.axis) == Layout::kPartial && from.on(row.axis) != Layout::kPartial)
      throw ConfigError(concat("[place::hops] no move takes ", from.text(), " to ", to.text(),
                               ": a copy that is whole or sharded over ", row.name,
                               " cannot become a partial sum"));
  // Collectives need the device tier. A narrowing cast before them and a widening cast after them
  // saves bytes.
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
  return moves;
}

}  // namespace penstock

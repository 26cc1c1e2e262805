#include "src/place/model_placement.h"

#include <algorithm>

#include "src/base/text.h"

namespace penstock {

bool ModelPlacement::is_sharded() const {
  return std::any_of(kModelAxes.begin(), kModelAxes.end(),
                     [&](Axis axis) { return is_sharded(axis); });
}

void ModelPlacement::divide_experts(int count) {
  on(Axis::kExpert).layout = Layout::kSharded;
  num_experts_ = count;
}

Mesh ModelPlacement::mesh(const Mesh& run) const {
  Mesh own = run;
  own.sizes[static_cast<size_t>(Axis::kLocal)] /= num_experts_;
  own.sizes[static_cast<size_t>(Axis::kExpert)] *= num_experts_;
  return own;
}

int ModelPlacement::num_holders(Axis axis, const Mesh& mesh) const {
  const std::vector<int>& some = on(axis).holders;
  return some.empty() ? mesh.size(axis) : static_cast<int>(some.size());
}

int ModelPlacement::num_addends(const Mesh& mesh) const {
  int addends = 1;
  for (const Axis axis : kModelAxes) {
    if (is_partial(axis)) addends *= num_holders(axis, mesh);
  }
  return addends;
}

bool ModelPlacement::is_held_by(Axis axis, int coordinate) const {
  const std::vector<int>& some = on(axis).holders;
  return some.empty() || std::binary_search(some.begin(), some.end(), coordinate);
}

bool ModelPlacement::is_counted_by(const Mesh& mesh, int rank) const {
  return std::all_of(kModelAxes.begin(), kModelAxes.end(), [&](Axis axis) {
    const std::vector<int>& some = on(axis).holders;
    const int first = some.empty() ? 0 : some.front();
    return is_sharded(axis) || mesh.coordinate(rank, axis) == first;
  });
}

bool ModelPlacement::is_first(const Mesh& run, int rank) const {
  const Mesh own = mesh(run);
  return own.coordinate(rank, Axis::kNode) == 0 && own.coordinate(rank, Axis::kLocal) == 0;
}

bool ModelPlacement::is_alike(const Mesh& run, int rank, int other) const {
  const Mesh mesh = this->mesh(run);
  return std::all_of(kModelAxes.begin(), kModelAxes.end(), [&](Axis axis) {
    const int one = mesh.coordinate(rank, axis), two = mesh.coordinate(other, axis);
    return one == two || (!is_sharded(axis) && is_held_by(axis, one) && is_held_by(axis, two));
  });
}

std::string ModelPlacement::text() const {
  constexpr std::string_view kLetters = "RSP";
  std::vector<std::string> axes;
  for (const AxisRow& row : kAxes) {
    const auto& [layout, some] = on(row.axis);
    if (layout == Layout::kReplicated && some.empty()) continue;
    std::string text = concat(row.name, "=");
    if (!some.empty()) {
      std::vector<std::string> coordinates;
      for (const int one : some) coordinates.push_back(concat(one));
      text += concat("{", join(coordinates, ","), "}");
    }
    axes.push_back(text + kLetters[static_cast<size_t>(layout)]);
  }
  return join(axes, ",");
}

Members holders(const ModelPlacement& place, Axis axis, const Mesh& mesh, int rank) {
  Members found{{}, -1};
  const std::vector<int> along = mesh.group(rank, {axis});
  for (size_t coordinate = 0; coordinate < along.size(); ++coordinate) {
    if (!place.is_held_by(axis, static_cast<int>(coordinate))) continue;
    if (along[coordinate] == rank) found.index = found.size();
    found.ranks.push_back(along[coordinate]);
  }
  return found;
}

}  // namespace penstock

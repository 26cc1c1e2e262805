#include "src/place/mesh.h"

#include <algorithm>
#include <cstdlib>

#include "penstock/error.h"
#include "src/base/text.h"

namespace penstock {

const char* axis_name(Axis axis) { return kAxes[static_cast<size_t>(axis)].name; }

Mesh Mesh::of(std::initializer_list<std::pair<Axis, int>> sizes) {
  Mesh mesh;
  for (const auto& [axis, size] : sizes) {
    PENSTOCK_ASSERT(size >= 1, concat("axis ", axis_name(axis), " of size ", size));
    mesh.sizes[static_cast<size_t>(axis)] = size;
  }
  return mesh;
}

int Mesh::world() const {
  int ranks = 1;
  for (const int size : sizes) ranks *= size;
  return ranks;
}

// Returns the product of the sizes of the inner axes.
int Mesh::stride(Axis axis) const {
  int ranks = 1;
  for (size_t inner = static_cast<size_t>(axis) + 1; inner < kNumAxes; ++inner)
    ranks *= sizes[inner];
  return ranks;
}

int Mesh::ranks_along(const std::vector<Axis>& axes) const {
  int ranks = 1;
  for (const Axis axis : axes) ranks *= size(axis);
  return ranks;
}

int Mesh::coordinate(int rank, Axis axis) const {
  PENSTOCK_ASSERT(rank >= 0 && rank < world(), concat("rank ", rank, " outside ", text()));
  return rank / stride(axis) % size(axis);
}

std::vector<int> Mesh::group(int rank, const std::vector<Axis>& axes) const {
  std::vector<int> ranks = {rank};
  // Axes are visited from the outermost, and each axis multiplies the members so far.
  for (const Axis axis : kShardOrder) {
    if (std::find(axes.begin(), axes.end(), axis) == axes.end()) continue;
    const int own = coordinate(rank, axis);
    std::vector<int> wider;
    for (const int member : ranks)
      for (int i = 0; i < size(axis); ++i) wider.push_back(member + (i - own) * stride(axis));
    ranks = std::move(wider);
  }
  return ranks;
}

std::string Mesh::text() const {
  std::vector<std::string> parts;
  for (const AxisRow& row : kAxes) {
    const bool always = std::find(kDataAxes.begin(), kDataAxes.end(), row.axis) != kDataAxes.end();
    if (always || size(row.axis) > 1) parts.push_back(concat(row.name, "=", size(row.axis)));
  }
  return join(parts, " ");
}

Mesh Mesh::parse(const std::string& text) {
  Mesh mesh;
  for (const std::string& part : split(text, ' ')) {
    for (const AxisRow& row : kAxes) {
      const std::string begin = concat(row.name, "=");
      if (part.starts_with(begin))
        mesh.sizes[static_cast<size_t>(row.axis)] = std::atoi(part.c_str() + begin.size());
    }
  }
  const bool positive = *std::min_element(mesh.sizes.begin(), mesh.sizes.end()) >= 1;
  // Only the canonical text is accepted, without unknown axes and in the order of text().
  if (positive && mesh.text() == text) return mesh;
  throw ConfigError(concat("[place::Mesh::parse] mesh '", text,
                           "' is invalid: write node and local, then the other axes "
                           "with more than one rank, as in 'node=2 local=4 tensor=2'"));
}

}  // namespace penstock
